"""A model whose KV says which token of which prompt it is, and which checks all that it reads.

A token's key and value in one layer and head hold the token, its position, the layer, the head and
a sum of the prompt up to it. Before a forward writes, it reads the whole context of each request
back from the pool: each entry must be that of its position, layer and head, and its sum must follow
from the entry before. The next token follows from the last sum, so that output is known beforehand
and a page of another prompt, which agrees with itself, gives other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCAB = 4096
LAYERS = 4
HEADS = 4
WIDTH = 8
_FIRST_TOKEN = 16  # less are no output
_MODULUS = 16_777_213  # a prime that float32 holds exactly
_FACTOR = 8_191
_NAME = "FingerprintForCausalLM"


def grow(total: int, token: int) -> int:
    """Return the sum of a prompt with one more token."""
    return (total * _FACTOR + token + 1) % _MODULUS


def next_token(total: int) -> int:
    """Return what follows a prompt with this sum."""
    return _FIRST_TOKEN + total % (VOCAB - _FIRST_TOKEN)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` tokens that follow a prompt."""
    total = 0
    for token in prompt:
        total = grow(total, token)
    found: list[int] = []
    for _ in range(count):
        found.append(next_token(total))
        total = grow(total, found[-1])
    return found


def write(folder: Path) -> Path:
    """Write a checkpoint of this model: its configuration, and one tensor that nobody uses."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [_NAME],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HEADS * WIDTH,
        "intermediate_size": HEADS * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"unused": torch.arange(8.0)}, folder / "model.safetensors", {"format": "pt"})
    return folder


faults: list[str] = []
"""What forwards of this process found wrong."""


class FingerprintForCausalLM(nn.Module):
    """One rank's layers and heads of the model."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        from sglang.srt.distributed.utils import get_pp_indices
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        self.last_stage = parallel.pp_rank == parallel.pp_size - 1
        self.start_layer, self.end_layer = get_pp_indices(
            config.num_hidden_layers, parallel.pp_rank, parallel.pp_size
        )
        self.heads = HEADS // parallel.attn_tp_size
        self.first_head = parallel.attn_tp_rank * self.heads
        self.attention = nn.ModuleDict(
            {
                str(layer): RadixAttention(self.heads, WIDTH, 1.0, self.heads, layer)
                for layer in range(self.start_layer, self.end_layer)
            }
        )
        self.unused = nn.Parameter(torch.zeros(8), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.unused.data.copy_(tensor)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        tokens = input_ids.tolist()
        lengths = forward_batch.seq_lens.tolist()
        extends = forward_batch.forward_mode.is_extend()
        fresh = forward_batch.extend_seq_lens.tolist() if extends else [1] * len(lengths)
        sums: list[int] = []
        last: list[int] = []
        start = 0
        for row, (length, count) in enumerate(zip(lengths, fresh, strict=True)):
            total = self._context(forward_batch, row, length - count)
            for token in tokens[start : start + count]:
                total = grow(total, token)
                sums.append(total)
            last.append(total)
            start += count
        hidden = torch.zeros(len(tokens), HEADS * WIDTH)
        for layer in range(self.start_layer, self.end_layer):
            self._attend(layer, input_ids, positions, torch.tensor(sums), forward_batch)
        if not self.last_stage:
            return PPProxyTensors({"hidden_states": hidden, "residual": hidden})
        logits = torch.zeros(len(last), VOCAB)
        logits[torch.arange(len(last)), [next_token(total) for total in last]] = 1.0
        return LogitsProcessorOutput(next_token_logits=logits)

    def _attend(
        self,
        layer: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sums: torch.Tensor,
        forward_batch: Any,
    ) -> None:
        key = torch.empty(len(input_ids), self.heads, WIDTH)
        key[..., 0] = input_ids[:, None]
        key[..., 1] = positions[:, None]
        key[..., 2] = layer
        key[..., 3] = torch.arange(self.first_head, self.first_head + self.heads)
        key[..., 4] = sums[:, None]
        key[..., 5:] = 1.0
        self.attention[str(layer)](torch.zeros_like(key).flatten(1), key, -key, forward_batch)

    def _context(self, forward_batch: Any, row: int, length: int) -> int:
        """Check the KV of the first ``length`` tokens of a request; return their sum."""
        if not length:
            return 0
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
        pool = backend.token_to_kv_pool
        request = int(forward_batch.req_pool_indices[row])
        slots = backend.req_to_token_pool.req_to_token[request, :length].long()
        total = 0
        for layer in range(self.start_layer, self.end_layer):
            key, value = pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots]
            total = self._check(layer, key, value, f"row {request}")
        return total

    def _check(self, layer: int, key: torch.Tensor, value: torch.Tensor, what: str) -> int:
        want = torch.ones_like(key)
        want[..., 0] = key[:, :1, 0]
        want[..., 1] = torch.arange(len(key))[:, None]
        want[..., 2] = layer
        want[..., 3] = torch.arange(self.first_head, self.first_head + self.heads)
        total, sums = 0, []
        for token in key[:, 0, 0].tolist():
            total = grow(total, int(token))
            sums.append(total)
        want[..., 4] = torch.tensor(sums)[:, None]
        wrong = ((key != want) | (value != -want)).flatten(1).any(1).nonzero().flatten().tolist()
        if wrong:
            at = wrong[0]
            faults.append(
                f"{what}, layer {layer}: {len(wrong)} of {len(key)} tokens are wrong, the first at "
                f"{at}: {key[at].tolist()} where {want[at].tolist()} should be"
            )
        return total


def register() -> None:
    """Make SGLang know the model."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models[_NAME] = FingerprintForCausalLM
