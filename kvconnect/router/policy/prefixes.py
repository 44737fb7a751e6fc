"""Which prefixes each target has cached, by KV events. Pure.

Engines hash blocks in different ways, so the index names a block by its tokens and those before
it: equal in all engines with the same block size. A block is kept while any tier of its target
holds it. Blocks of salted prompts have names of their own. Those of adapters and images are left
out, because a request's tokens do not identify them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvconnect.router.policy.fleet_view import Role, Target


class CacheTier(IntEnum):
    """Tier that holds a copy, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


TIER_WORTH = (1.0, 0.9, 0.6, 0.4)
"""Worth of a cached token by tier: the saved share of computing it. Loading is not free."""

TIER_OF_MEDIUM: Mapping[str | None, CacheTier] = {
    None: CacheTier.DEVICE,
    "GPU": CacheTier.DEVICE,
    "CPU": CacheTier.HOST,
    "CPU_PINNED": CacheTier.HOST,
    "STORAGE": CacheTier.DISK,
    "DISK": CacheTier.DISK,
    "EXTERNAL": CacheTier.REMOTE,
}
"""Tier names in the KV events of vLLM and SGLang."""

MOST_BLOCKS = 1_000_000  # limit of blocks of one target: about 500 MB
MOST_OF_ALL = 2_000_000  # blocks of all targets from which on each one is held to its share
MOST_SIZES = 4  # limit of block sizes of one target

CHUNK_TOKENS = 64
"""Tokens of one chunk of a :class:`PromptPrefix`."""

BlockName = int
EngineHash = int | bytes


class CacheHit(NamedTuple):
    """Cached tokens of a prompt, their worth in computed tokens, and how many of the first ones
    other engines can read."""

    tokens: int = 0
    worth: float = 0.0
    readable: int = 0

    def within(self, tokens: int) -> CacheHit:
        """Return what a prompt of ``tokens`` tokens can have of it."""
        if self.tokens <= tokens:
            return self
        return CacheHit(tokens, min(self.worth, tokens), min(self.readable, tokens))


CacheHits = Mapping[Role, Mapping[Target, CacheHit]]
"""Cached tokens of a prompt by role and target; a role without information is missing."""


class PromptPrefix(NamedTuple):
    """Keys of a prompt for cache lookups.

    Attributes:
        token_ids: 64-bit token ids of the only prompt; empty if it is text, or nothing is known
            by ids.
        chunk_hashes: one hash per whole chunk; equal chunks with equal model, salt and adapter have
            equal hashes.
        plain: the body has neither salt nor adapter, so the ids alone identify blocks.
    """

    token_ids: array[int]
    chunk_hashes: list[int]
    plain: bool


@dataclass
class TargetBlocks:
    """Blocks of one target.

    Attributes:
        names: the engine's hash -> the index's name.
        tiers: the engine's hash -> tiers that hold the block, a bit each.
        sizes: block sizes seen in its events.
    """

    names: dict[EngineHash, BlockName] = field(default_factory=dict)
    tiers: dict[EngineHash, int] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)


class StoredBlocks(NamedTuple):
    """Consecutive blocks of a prompt are now in ``tier``.

    Attributes:
        parent: hash of the preceding block; None at a prompt's start.
        tokens: of all blocks together; empty when an engine only moves blocks between tiers.
        salt: of the prompt; "" without one.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: Sequence[int]
    block_size: int
    tier: CacheTier
    salt: str = ""


class HeldTokens(NamedTuple):
    """First tokens of a prompt that a target has, and how many of them each of its tiers has."""

    tokens: int
    tiers: Mapping[CacheTier, int]


class PrefixIndex:
    """The cached blocks of all targets. Not thread-safe.

    Memory is bounded: at most ``most`` blocks of ``MOST_SIZES`` sizes are kept per target, and once
    there are ``most_of_all``, a target gets more only while it has less than its share of these.
    Further blocks are ignored until others are removed.
    """

    def __init__(self, most: int = MOST_BLOCKS, most_of_all: int = MOST_OF_ALL) -> None:
        self._most, self._most_of_all = most, most_of_all
        self._held = 0  # blocks of all targets
        self._blocks: dict[Target, TargetBlocks] = {}
        self._where: dict[BlockName, dict[Target, int]] = {}
        self._sizes: dict[int, int] = {}  # block size -> number of targets with it
        self._whole: set[Target] = set()

    def __len__(self) -> int:
        return len(self._where)

    @property
    def whole(self) -> Set[Target]:
        """Targets of which all blocks are known, since they had none; see :meth:`began`."""
        return self._whole

    def began(self, target: Target) -> None:
        """Note that ``target`` has no blocks. What it stores from now on is reported."""
        self.cleared(target)
        self._whole.add(target)

    def stored(self, target: Target, event: StoredBlocks) -> None:
        """Add blocks of ``target``. Blocks with an unknown parent are ignored."""
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
            before = _root(size, event.salt)
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
        """Remove blocks of ``target`` from ``tier``."""
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
                self._held -= 1

    def cleared(self, target: Target) -> None:
        """Remove all blocks of ``target``; it may still have some."""
        self._whole.discard(target)
        blocks = self._blocks.pop(target, None)
        if blocks is None:
            return
        self._held -= len(blocks.names)
        for name in blocks.names.values():
            self._set_tiers(name, target, 0)
        for size in blocks.sizes:
            self._sizes[size] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def match(self, tokens: Sequence[int]) -> dict[Target, CacheHit]:
        """Return the longest cached prefix of a prompt for each target that has one.

        Time: matching blocks times the targets that have them.
        """
        found: dict[Target, CacheHit] = {}
        for size in self._sizes:
            for target, hit in self._match(tokens, size).items():
                if hit.tokens > found.get(target, CacheHit()).tokens:
                    found[target] = hit
        return found

    def held(self, target: Target, tokens: Sequence[int], salt: str = "") -> HeldTokens:
        """Return how much of a prompt a target has, and where. Time: matching blocks."""
        best, blocks = HeldTokens(0, {}), self._blocks.get(target, TargetBlocks())
        for size in blocks.sizes:
            tiers, before, start = Counter[CacheTier](), _root(size, salt), 0
            while start + size <= len(tokens):
                before = _block_name(before, tokens[start : start + size])
                here = self._where.get(before, {}).get(target, 0)
                if not here:
                    break
                tiers.update({tier: size for tier in CacheTier if here >> tier & 1})
                start += size
            best = max(best, HeldTokens(start, tiers), key=lambda found: found.tokens)
        return best

    def _match(self, tokens: Sequence[int], size: int) -> dict[Target, CacheHit]:
        ended: dict[Target, CacheHit] = {}
        unread: dict[Target, int] = {}  # tokens before the first one that others cannot read
        going: dict[Target, float] | None = None  # worth so far of targets that have all blocks
        before, start = _root(size), 0
        while start + size <= len(tokens):
            before = _block_name(before, tokens[start : start + size])
            here = self._where.get(before)
            if not here:
                break
            if going is None:
                going = dict.fromkeys(here, 0.0)
            for target in [target for target in going if target not in here]:
                ended[target] = CacheHit(start, going.pop(target), unread.get(target, start))
            if not going:
                break
            for target in going:
                going[target] += size * _worth(here[target])
                if not here[target] & _READABLE:
                    unread.setdefault(target, start)
            start += size
        for target, worth in (going or {}).items():
            ended[target] = CacheHit(start, worth, unread.get(target, start))
        return ended

    def _rename(
        self, target: Target, blocks: TargetBlocks, block: EngineHash, name: BlockName
    ) -> bool:
        """Map the engine's hash ``block`` to ``name``; return False if the target is full."""
        old = blocks.names.get(block)
        if old is None:
            if not self._has_room(blocks):
                return False
            self._held += 1
        if old is not None and old != name:  # the engine used a hash twice
            self._set_tiers(old, target, 0)
            blocks.tiers.pop(block, None)
        blocks.names[block] = name
        return True

    def _has_room(self, blocks: TargetBlocks) -> bool:
        own = len(blocks.names)
        if own >= self._most:
            return False
        return self._held < self._most_of_all or own < self._most_of_all // len(self._blocks)

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


def _root(size: int, salt: str = "") -> BlockName:
    """Return what precedes a prompt's first block: other sizes and salts get other names."""
    return hash((size, salt)) if salt else size


def _block_name(before: BlockName, tokens: Sequence[int]) -> BlockName:
    """Hash integers, so equal in every process. A collision only costs a wrong estimate."""
    return hash((before, *tokens))


_READABLE = 1 << CacheTier.DEVICE | 1 << CacheTier.HOST  # what is on a device is stored on its host
_WORTH_OF = tuple(
    max((TIER_WORTH[tier] for tier in CacheTier if tiers >> tier & 1), default=0.0)
    for tiers in range(1 << len(CacheTier))
)


def _worth(tiers: int) -> float:
    return _WORTH_OF[tiers]
