"""An SGLang plugin that lets LFM2 run on a CPU: with this folder on PYTHONPATH, its short
convolutions are plain torch instead of kernels for a GPU. Everything else is SGLang's own: states
are where it keeps them, and it says when they are read and written."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    from sglang.srt.models import lfm2  # not before SGLang has chosen its device

    lfm2.causal_conv1d_fn = _prefill
    lfm2.causal_conv1d_update = _decode


def _convolve(state: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> Any:
    """Continue a state ``[channels, width - 1]`` with ``x`` ``[channels, tokens]``; return the
    result and the state after it."""
    both = torch.cat([state, x], 1)
    out = torch.nn.functional.conv1d(both[None], weight[:, None], bias, groups=len(weight))[0]
    return out, both[:, -state.shape[1] :]


def _prefill(x: torch.Tensor, weight: torch.Tensor, bias: Any, **more: Any) -> torch.Tensor:
    """Requests lie side by side in ``x`` ``[channels, tokens]``."""
    out, states = torch.empty_like(x), more["conv_states"]
    ends = more["query_start_loc"].tolist()
    for number, slot in enumerate(more["cache_indices"].tolist()):
        own = slice(ends[number], ends[number + 1])
        if own.start == own.stop:
            continue
        state = states[slot] * bool(more["has_initial_state"][number])
        out[:, own], states[slot] = _convolve(state, x[:, own], weight, bias)
    return out


def _decode(
    x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, bias: Any, **more: Any
) -> torch.Tensor:
    """One token of each request: ``x`` is ``[requests, channels]``."""
    out = torch.empty_like(x)
    for number, slot in enumerate(more["conv_state_indices"].tolist()):
        if slot >= 0:
            one, states[slot] = _convolve(states[slot], x[number, :, None], weight, bias)
            out[number] = one[:, 0]
    return out
