"""KV-cache groups, and the longest prefix that a tier can restore.

Layers of one group share a block table. A full-attention group needs every block of a prefix; a
sliding-window group needs only the blocks its window still reaches, a chunked group those since
the last chunk boundary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Lookup(Protocol):
    """Finds blocks: :class:`~kvconnect.offload.index.HostIndex`, or one that looks further."""

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return one number for each of the leading blocks that are there."""

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        """Return a number for a block that is there, else None."""


@dataclass(frozen=True)
class CacheGroup:
    """One KV-cache group: tokens per block, and how far back its attention reaches.

    At most one of ``window`` (tokens a query sees, itself included) and ``chunk`` (tokens per
    attention chunk) is set; neither means full attention.
    """

    block_tokens: int
    window: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether every block of a prefix is needed."""
        return self.window is None and self.chunk is None

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that the token at position ``num_tokens`` can still see."""
        first_token = 0
        if self.window is not None:
            first_token = max(0, num_tokens - self.window + 1)
        elif self.chunk is not None:
            first_token = num_tokens // self.chunk * self.chunk
        return first_token // self.block_tokens


def keeps_prefix(groups: Sequence[CacheGroup]) -> bool:
    """Whether the blocks before one that could not be loaded are of use: not if a window
    reaches into blocks that the load was to bring, or another group's part is unknown."""
    return len(groups) == 1 and groups[0].is_full


def leading_group(groups: Sequence[CacheGroup]) -> int:
    """Return the number of a group whose blocks stand for all tokens of a prefix, if there is one:
    the first with full attention, else the first."""
    return next((number for number, group in enumerate(groups) if group.is_full), 0)


def alignment(groups: Sequence[CacheGroup]) -> int:
    """Tokens to which a restorable prefix is aligned: every group has whole blocks of it."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_prefix(
    index: Lookup,
    groups: Sequence[CacheGroup],
    hashes: Sequence[Sequence[bytes]],
    local_tokens: int,
    max_tokens: int,
) -> int:
    """Return how many leading tokens are restorable, at least ``local_tokens``.

    Args:
        hashes: per group, the chained hash of each of the request's full blocks.
        local_tokens: leading tokens the device has already, aligned.
        max_tokens: do not go beyond this many.
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
    """Return the token position of a block that a prefix of ``total`` tokens needs and the tier
    lacks, the last such block of its group; None if nothing is missing."""
    for number, group in windowed:
        end = total // group.block_tokens
        start = max(group.first_block(total), local_tokens // group.block_tokens)
        if end > len(hashes[number]):
            return len(hashes[number]) * group.block_tokens
        for block in range(end - 1, start - 1, -1):
            if index.slot_of(number, hashes[number][block]) is None:
                return block * group.block_tokens
    return None
