"""Which prefixes each target has cached, as its engine's KV events tell. Pure.

Engines name blocks by hashes of their own making, so a block gets a name here that follows from
its tokens and those before it: equal in all engines whose blocks have the same size. A block is
kept while any tier of its target holds it. Blocks of adapters, images and salted prompts are left
out: what distinguishes them is not in a request's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvconnect.router.policy.loads import Target


class CacheTier(IntEnum):
    """Where a copy lies, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


TIER_WORTH = (1.0, 0.9, 0.6, 0.4)
"""Of a cached token, by tier: the share of computing it that is saved. Loading is not free."""

TIER_OF_MEDIUM: Mapping[str | None, CacheTier] = {
    None: CacheTier.DEVICE,
    "GPU": CacheTier.DEVICE,
    "CPU": CacheTier.HOST,
    "CPU_PINNED": CacheTier.HOST,
    "STORAGE": CacheTier.DISK,
    "DISK": CacheTier.DISK,
    "EXTERNAL": CacheTier.REMOTE,
}
"""What vLLM and SGLang call tiers in events."""

MOST_BLOCKS = 1_000_000  # of one target: some 400 MB
MOST_SIZES = 4  # of blocks of one target

BlockName = int
EngineHash = int | bytes


class CacheHit(NamedTuple):
    """What a target has of a prompt: tokens, and their worth in tokens computed."""

    tokens: int = 0
    worth: float = 0.0


@dataclass
class TargetBlocks:
    """Blocks of one target: the engine's hash to the name, and the tiers that hold it (a bit
    for each); and the sizes of blocks that it ever told of."""

    names: dict[EngineHash, BlockName] = field(default_factory=dict)
    tiers: dict[EngineHash, int] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)


class StoredBlocks(NamedTuple):
    """Blocks that follow one another in a prompt are now in ``tier``.

    ``tokens`` are those of all ``hashes`` together; empty where an engine moves blocks between
    tiers and does not repeat them. ``parent`` is the block before, None at a prompt's start.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: Sequence[int]
    block_size: int
    tier: CacheTier


class PrefixIndex:
    """All targets' cached blocks. Not thread-safe.

    Of one target it keeps at most ``most`` blocks, of ``MOST_SIZES`` sizes: further ones are left
    out, until others are gone. An engine that tells of more costs no more.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._blocks: dict[Target, TargetBlocks] = {}
        self._where: dict[BlockName, dict[Target, int]] = {}
        self._sizes: dict[int, int] = {}  # tokens of a block -> targets that have such

    def __len__(self) -> int:
        return len(self._where)

    def targets(self) -> frozenset[Target]:
        """Return those of which anything is known."""
        return frozenset(self._blocks)

    def stored(self, target: Target, event: StoredBlocks) -> None:
        """``target`` has more blocks. Blocks whose beginning is unknown are left out."""
        blocks = self._blocks.setdefault(target, TargetBlocks())
        if not event.tokens:
            for name in event.hashes:
                self._add(target, blocks, name, event.tier)
            return
        size = event.block_size
        if size <= 0 or len(event.tokens) != size * len(event.hashes):
            return
        if size not in blocks.sizes and len(blocks.sizes) >= MOST_SIZES:
            return
        if event.parent is None:
            before = size  # so that equal tokens in blocks of other sizes have other names
        elif event.parent in blocks.names:
            before = blocks.names[event.parent]
        else:
            return
        if size not in blocks.sizes:
            blocks.sizes.add(size)
            self._sizes[size] = self._sizes.get(size, 0) + 1
        for index, block in enumerate(event.hashes):
            before = _block_name(before, event.tokens[index * size : (index + 1) * size])
            if self._rename(target, blocks, block, before):
                self._add(target, blocks, block, event.tier)

    def removed(self, target: Target, hashes: Iterable[EngineHash], tier: CacheTier) -> None:
        """``tier`` of ``target`` lost blocks."""
        blocks = self._blocks.get(target)
        if blocks is None:
            return
        for block in hashes:
            if block not in blocks.names:
                continue
            left = blocks.tiers[block] & ~(1 << tier)
            blocks.tiers[block] = left
            self._set_tiers(blocks.names[block], target, left)
            if not left:
                del blocks.names[block], blocks.tiers[block]

    def cleared(self, target: Target) -> None:
        """``target`` has nothing any more, or what it has is not known."""
        blocks = self._blocks.pop(target, None)
        if blocks is None:
            return
        for name in blocks.names.values():
            self._set_tiers(name, target, 0)
        for size in blocks.sizes:
            self._sizes[size] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def match(self, tokens: Sequence[int]) -> dict[Target, CacheHit]:
        """Return what each target has of a prompt's beginning, if anything.

        Time: blocks that any target has, times the targets that have them.
        """
        found: dict[Target, CacheHit] = {}
        for size in self._sizes:
            for target, hit in self._match(tokens, size).items():
                if hit.tokens > found.get(target, CacheHit()).tokens:
                    found[target] = hit
        return found

    def _match(self, tokens: Sequence[int], size: int) -> dict[Target, CacheHit]:
        ended: dict[Target, CacheHit] = {}
        going: dict[Target, float] | None = None  # worth so far, of those that have all blocks
        before, start = size, 0
        while start + size <= len(tokens):
            before = _block_name(before, tokens[start : start + size])
            here = self._where.get(before)
            if not here:
                break
            if going is None:
                going = dict.fromkeys(here, 0.0)
            for target in [target for target in going if target not in here]:
                ended[target] = CacheHit(start, going.pop(target))
            if not going:
                break
            for target in going:
                going[target] += size * _worth(here[target])
            start += size
        for target, worth in (going or {}).items():
            ended[target] = CacheHit(start, worth)
        return ended

    def _rename(
        self, target: Target, blocks: TargetBlocks, block: EngineHash, name: BlockName
    ) -> bool:
        """The engine calls ``name`` by ``block``; return False if that is one block too many."""
        old = blocks.names.get(block)
        if old is None and len(blocks.names) >= self._most:
            return False
        if old is not None and old != name:  # it lied, or uses a hash again
            self._set_tiers(old, target, 0)
            blocks.tiers.pop(block, None)
        blocks.names[block] = name
        return True

    def _add(
        self, target: Target, blocks: TargetBlocks, block: EngineHash, tier: CacheTier
    ) -> None:
        name = blocks.names.get(block)
        if name is not None:
            blocks.tiers[block] = blocks.tiers.get(block, 0) | 1 << tier
            self._set_tiers(name, target, blocks.tiers[block])

    def _set_tiers(self, name: BlockName, target: Target, tiers: int) -> None:
        if tiers:
            self._where.setdefault(name, {})[target] = tiers
            return
        here = self._where.get(name)
        if here is not None:
            here.pop(target, None)
            if not here:
                del self._where[name]


def _block_name(before: BlockName, tokens: Sequence[int]) -> BlockName:
    """Integers, so the same in every process. A collision costs a wrong guess, nothing more."""
    return hash((before, *tokens))


_WORTH_OF = tuple(
    max((TIER_WORTH[tier] for tier in CacheTier if tiers >> tier & 1), default=0.0)
    for tiers in range(1 << len(CacheTier))
)


def _worth(tiers: int) -> float:
    return _WORTH_OF[tiers]
