"""What a hand-off leaves of a block is zero, where vLLM wants new blocks to be."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvconnect.disaggregation.messages import Receive
from kvconnect.engines.vllm.received_blocks import ReceivedBlocks
from kvconnect.types import JobId, Span, TransferId

BLOCKS, TOKENS = 8, 4
OLD = float("nan")  # bytes of a former owner


def caches(rows: int, mixed: bool) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Full attention, and a window of another precision if ``mixed``."""
    sizes: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 2}
    full = FullAttentionSpec(**sizes, dtype=torch.float32)
    dtype = torch.float16 if mixed else torch.float32
    window = SlidingWindowSpec(**sizes, dtype=dtype, sliding_window=6)
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["window"], window)]
    shape = BLOCKS * rows, TOKENS // rows, 4
    views = {
        "full": torch.full(shape, OLD, dtype=torch.float32),
        "window": torch.full(shape, OLD, dtype=dtype),
    }
    return KVCacheConfig(BLOCKS, [], groups), views


def receive(*parts: tuple[Span, tuple[int, int]]) -> Receive:
    spans, tokens = zip(*parts, strict=True)
    return Receive(JobId(1), "r", TransferId(b"t" * 16), None, spans, tokens, False, 1.0)


def zeroed(views: dict[str, torch.Tensor], name: str, rows: int) -> list[int]:
    """Return the blocks of a layer that are zero; the others are as they were."""
    found = []
    for block in range(BLOCKS):
        part = views[name][block * rows : (block + 1) * rows]
        assert part.isnan().all() or not part.any()
        if not part.isnan().any():
            found.append(block)
    return found


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mixed", [True, False])
def test_blocks_that_a_hand_off_fills_in_part_are_zeroed_where_they_must_be(
    mixed: bool, rows: int
) -> None:
    """Control: blocks that it fills are not touched, nor any of a cache that needs no zeroing."""
    cache, views = caches(rows, mixed)
    received = ReceivedBlocks(cache, views)
    whole = receive((Span(0, 0, array("q", [1, 2])), (0, 8)))
    received.zero([whole])
    assert zeroed(views, "full", rows) == []
    tail = receive(
        (Span(0, 0, array("q", [1, 2, 3])), (0, 11)),  # the last token of block 3 is not sent
        (Span(1, 1, array("q", [5, 6])), (6, 11)),  # and the window begins inside of block 5
    )
    received.zero([tail])
    assert zeroed(views, "full", rows) == ([3] if mixed else [])
    assert zeroed(views, "window", rows) == ([5, 6] if mixed else [])
