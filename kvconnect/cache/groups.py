"""KV-cache groups, and the longest prefix that a tier can restore.

Layers of one group share a block table. Full attention needs every block of a prefix, a sliding
window only the blocks that it reaches, chunked attention those since the last chunk boundary. A
recurrent layer (Mamba, linear attention, short convolution) needs the state at the prefix's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class Lookup(Protocol):
    """Finds blocks in the host tier (:class:`~kvconnect.offload.index.HostIndex`) or more tiers."""

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return one number per stored block, up to the first that is missing."""

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        """Return a number for a stored block; None if it is missing."""


@dataclass(frozen=True)
class CacheGroup:
    """One KV-cache group: tokens per block and the reach of its attention.

    ``window`` is the number of tokens a query sees, itself included. ``chunk`` is the number of
    tokens per attention chunk. ``states``: a block holds the state after its last token; with
    ``"some"``, the engine keeps states of some blocks only, and names them. At most one of the
    three is set; without any, attention is full.
    """

    block_tokens: int
    window: int | None = None
    chunk: int | None = None
    states: Literal["every", "some"] | None = None

    @property
    def is_full(self) -> bool:
        """Whether attention is full: every block of a prefix is needed."""
        return self.window is None and self.chunk is None and self.states is None

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that the token at position ``num_tokens`` can still see."""
        first_token = 0
        if self.states is not None:
            first_token = max(0, num_tokens - 1)
        elif self.window is not None:
            first_token = max(0, num_tokens - self.window + 1)
        elif self.chunk is not None:
            first_token = num_tokens // self.chunk * self.chunk
        return first_token // self.block_tokens


def keeps_prefix(groups: Sequence[CacheGroup]) -> bool:
    """Return whether the blocks before one that failed to load can be used: only with one group of
    full attention. A window may reach into blocks that the load was to bring; of several groups, it
    is unknown which blocks the others have."""
    return len(groups) == 1 and groups[0].is_full


def leading_group(groups: Sequence[CacheGroup]) -> int:
    """Return the index of the first group with full attention, whose blocks cover every token of a
    prefix; 0 if there is none."""
    return next((number for number, group in enumerate(groups) if group.is_full), 0)


def alignment(groups: Sequence[CacheGroup]) -> int:
    """Return the tokens of which a restorable prefix is a multiple: whole blocks in every group."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_prefix(
    index: Lookup,
    groups: Sequence[CacheGroup],
    hashes: Sequence[Sequence[bytes]],
    local_tokens: int,
    max_tokens: int,
) -> int:
    """Return the number of leading tokens that can be restored, at least ``local_tokens``.

    Args:
        hashes: per group, the chained hash of each full block of the request.
        local_tokens: leading tokens that the device already has; aligned.
        max_tokens: upper limit.
    """
    unit = alignment(groups)
    total = max(local_tokens, max_tokens // unit * unit)
    for number, group in enumerate(groups):
        if group.is_full:
            first = local_tokens // group.block_tokens
            wanted = hashes[number][first : total // group.block_tokens]
            found = len(index.ready_slots(number, wanted))
            total = (local_tokens + found * group.block_tokens) // unit * unit
    windowed = [(number, group) for number, group in enumerate(groups) if not group.is_full]
    while total > local_tokens:
        gap = _last_gap(index, windowed, hashes, local_tokens, total)
        if gap is None:
            break
        total = max(local_tokens, gap // unit * unit)
    return total


def _last_gap(
    index: Lookup,
    windowed: Sequence[tuple[int, CacheGroup]],
    hashes: Sequence[Sequence[bytes]],
    local_tokens: int,
    total: int,
) -> int | None:
    """Return the first token of a missing block that a prefix of ``total`` tokens needs: the last
    such block of the first group that misses any. None if nothing is missing."""
    for number, group in windowed:
        end = total // group.block_tokens
        start = max(group.first_block(total), local_tokens // group.block_tokens)
        if end > len(hashes[number]):
            return len(hashes[number]) * group.block_tokens
        for block in range(end - 1, start - 1, -1):
            if index.slot_of(number, hashes[number][block]) is None:
                return block * group.block_tokens
    return None
