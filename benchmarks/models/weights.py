"""Random weights, drawn inside the engine: any architecture of vLLM's, without a checkpoint.

The engine builds its model from ``config.json`` alone and asks this loader for the weights. They
are drawn from a fixed seed in the order of the model's own parameters, so every engine of one
architecture has the same ones. They are drawn wide enough that attention is sharp: with the usual
narrow start, a wrong page would change no token and no comparison could fail.
"""

from __future__ import annotations

import math
from typing import Any

import torch

LOAD_FORMAT = "kvconnect_random"
_SEED = 20


def register(gain: float, embedding_gain: float) -> None:
    """Make ``load_format="kvconnect_random"`` known to the vLLM of this process.

    Args:
        gain: each weight matrix is drawn with standard deviation gain / sqrt(its input width).
        embedding_gain: the same for embedding tables.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomWeights(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ARG002
            draw(model, gain, embedding_gain)

    register_model_loader(LOAD_FORMAT)(RandomWeights)


def draw(model: torch.nn.Module, gain: float, embedding_gain: float) -> None:
    """Fill all parameters of a model in place."""
    rng = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = _drawn(name, parameter, (gain, embedding_gain), rng)
            if drawn is not None:
                parameter.copy_(drawn)


def _drawn(
    name: str, parameter: torch.Tensor, gains: tuple[float, float], rng: torch.Generator
) -> torch.Tensor | None:
    """Return new values; None for those that stay as the model's code set them."""
    shape, last = parameter.shape, name.rpartition(".")[2]
    uniform = torch.rand(shape, generator=rng)
    if last in ("A_log", "A"):  # how fast a state forgets, in its logarithm or as a negative rate
        rate = 0.02 + 0.3 * uniform
        return torch.log(rate) if last == "A_log" else -rate
    if last == "D":
        return torch.ones(shape)
    if parameter.dim() < 2:
        if "norm" in name.lower() or "ln_" in name or ".ln" in name:
            return _norm(last, parameter)
        return 0.2 * (uniform - 0.5)  # biases, sinks, time steps
    normal = torch.randn(shape, generator=rng)
    embedding = "embed" in name or "wte" in name or "wpe" in name
    return normal * gains[embedding] / math.sqrt(shape[-1])


def _norm(last: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """A norm's scale stays where its class starts it: 1, or 0 where the class adds 1 itself."""
    if last == "bias":
        return torch.zeros(parameter.shape)
    untouched = bool((parameter == parameter.flatten()[0]).all()) and parameter.flatten()[0] in (
        0.0,
        1.0,
    )
    return None if untouched else torch.ones(parameter.shape)
