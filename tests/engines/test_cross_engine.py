"""Blocks that vLLM's own CPU kernel wrote, as SGLang's pages, and pages as blocks it reads."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from tests.unit.cache.engine_layouts import (
    HEADS,
    LAYERS,
    WIDTH,
    arena_for,
    cut_for_planes,
    sequence,
    sglang,
    vllm_cpu,
)

BLOCK = 32  # the smallest block of vLLM's CPU kernels


def write(area: torch.Tensor, table: list[int], model: torch.Tensor) -> None:
    """Have vLLM's kernel store K and V [layer and part, head, token, value] in its cache."""
    isa = _get_attn_isa(torch.float32, BLOCK, WIDTH)
    slots = torch.cat([torch.arange(block * BLOCK, (block + 1) * BLOCK) for block in table])
    for layer in range(LAYERS):
        key, value = (model[2 * layer + i].transpose(0, 1).contiguous() for i in (0, 1))
        cache = area[layer].view(area.shape[1], HEADS, 2 * BLOCK, WIDTH)
        k, v = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, k, v, slots, isa)


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_what_vllms_kernel_stores_is_in_planes(page_tokens: int) -> None:
    model = sequence()
    theirs, ours = vllm_cpu(BLOCK), sglang(page_tokens)
    write(theirs.area, theirs.table, model)
    assert theirs.holds(model), "control of the layout itself, without a conversion"
    cut_for_planes(ours)
    arena, tokens = arena_for(HEADS), min(BLOCK, page_tokens)
    theirs.move("gather", arena, (0, HEADS), tokens)
    ours.move("scatter", arena, (0, HEADS), tokens)
    assert ours.holds(model)

    other = model.flip(2)
    ours.put(other)
    ours.move("gather", arena, (0, HEADS), tokens)
    theirs.move("scatter", arena, (0, HEADS), tokens)
    native = vllm_cpu(BLOCK)
    write(native.area, native.table, other)
    assert torch.equal(theirs.area, native.area)
    write(native.area, native.table, model)
    assert not torch.equal(theirs.area, native.area)
