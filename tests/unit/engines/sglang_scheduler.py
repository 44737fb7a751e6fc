"""SGLang's scheduler, its allocator and its requests, as far as layer-wise push reads them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.unit.engines.sglang_ranks import ROOM, TOKENS


class Allocator:
    """SGLang's, as far as layer-wise push and prefix caches call it. ``freed``: pages, in order."""

    page_size = TOKENS

    def __init__(self) -> None:
        self.freed: list[int] = []

    def translate_kv_indices_for_transfer(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos == 0
        self.freed += [slot // TOKENS for slot in slots[::TOKENS].tolist()]


def slots_of(pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor([page * TOKENS + token for page in pages for token in range(TOKENS)])


class Scheduler:
    """What layer-wise push reads of SGLang's scheduler, with one request's row and state."""

    def __init__(self, pages: Sequence[int], state: int = 3) -> None:
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=slots_of(pages).unsqueeze(0),
            req_index_to_mamba_index_mapping=torch.tensor([state]),
            translate_mamba_indices=lambda slot: slot,
        )
        self.token_to_kv_pool_allocator = Allocator()

    def checkpoint(self, dup: int, tree: Sequence[int], start: int = 0) -> None:
        """Enter the request: pages ``start`` to ``dup`` are freed, its row points at the tree's."""
        row = self.req_to_token_pool.req_to_token[0]
        own = row[start * TOKENS : dup * TOKENS]
        self.token_to_kv_pool_allocator.free_segment(own, start_pos=0)
        row[: len(tree) * TOKENS] = slots_of(tree)


def request_of(tokens: int, end: int) -> Any:
    return SimpleNamespace(
        pending_bootstrap=False,
        kv=SimpleNamespace(req_pool_idx=0, cache_protected_len=0),
        disagg_kv_sender=SimpleNamespace(owns_room=True),
        bootstrap_room=ROOM,
        extend_end=end,
        origin_input_ids=range(tokens),
    )


def batch_of(*requests: Any) -> Any:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), reqs=requests)
