"""Tiny configurations of the architectures that ``make models`` goes through.

Each is what a checkpoint's ``config.json`` says, with small numbers. The sizes are the least that
vLLM's CPU attention takes (heads of 32, blocks of 32 tokens) and enough that layers of every kind
of the architecture occur twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LLAMA: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
ABSENT = object()
"""Stands for a field that a configuration does not have."""


@dataclass(frozen=True)
class Architecture:
    """One architecture and how the engine must be told to run its tiny model.

    Attributes:
        name: vLLM's name of the class.
        config: ``config.json`` without ``architectures``.
        block: tokens per block asked for.
        gain: width of the weights (:mod:`benchmarks.models.weights`).
        embedding_gain: width of the embeddings.
        dtype: of weights and KV.
        variant: distinguishes several models of one architecture.
        remote: its checkpoints bring their own configuration class.
        args: more arguments for the engine.
        env: environment of the engine.
        torchvision: its code imports that package, which nothing of text needs.
    note: what the reader of the page should know.
    """

    name: str
    config: dict[str, Any]
    block: int = 32
    gain: float = 2.0
    embedding_gain: float = 2.0
    dtype: str = "float32"
    variant: str = ""
    remote: bool = False
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    torchvision: bool = False
    note: str = ""

    @property
    def key(self) -> str:
        """Its name in results: the architecture and, where there are several, the variant."""
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def written(self) -> dict[str, Any]:
        """Return what ``config.json`` says."""
        found = {"architectures": [self.name], "torch_dtype": self.dtype, **self.config}
        if self.remote:
            found["auto_map"] = {"AutoConfig": "configuration_tiny.TinyConfig"}
        return found


def like_llama(name: str, model_type: str, /, **changes: Any) -> Architecture:
    """An architecture whose configuration has Llama's fields; ``ABSENT`` removes one."""
    options = {
        key: changes.pop(key)
        for key in (
            "block",
            "gain",
            "embedding_gain",
            "dtype",
            "variant",
            "remote",
            "args",
            "env",
            "torchvision",
            "note",
        )
        if key in changes
    }
    fields = {**LLAMA, **changes, "model_type": model_type}
    return Architecture(name, {k: v for k, v in fields.items() if v is not ABSENT}, **options)


EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
