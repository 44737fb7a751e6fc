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


WORTH = (1.0, 0.9, 0.6, 0.4)
"""Of a cached token, by tier: the share of computing it that is saved. Loading is not free."""

MEDIA: Mapping[str | None, CacheTier] = {
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

Name = int
Hash = int | bytes


class Hit(NamedTuple):
    """What a target has of a prompt: tokens, and their worth in tokens computed."""

    tokens: int = 0
    worth: float = 0.0


@dataclass
class TargetBlocks:
    """Blocks of one target: the engine's hash to the name, and the tiers that hold it (a bit
    for each); and the sizes of blocks that it ever told of."""

    names: dict[Hash, Name] = field(default_factory=dict)
    tiers: dict[Hash, int] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)


class Stored(NamedTuple):
    """Blocks that follow one another in a prompt are now in ``tier``.

    ``tokens`` are those of all ``hashes`` together; empty where an engine moves blocks between
    tiers and does not repeat them. ``parent`` is the block before, None at a prompt's start.
    """

    hashes: Sequence[Hash]
    parent: Hash | None
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
        self._held: dict[Target, TargetBlocks] = {}
        self._where: dict[Name, dict[Target, int]] = {}
        self._sizes: dict[int, int] = {}  # tokens of a block -> targets that have such

    def __len__(self) -> int:
        return len(self._where)

    def targets(self) -> frozenset[Target]:
        """Return those of which anything is known."""
        return frozenset(self._held)

    def stored(self, target: Target, event: Stored) -> None:
        """``target`` has more blocks. Blocks whose beginning is unknown are left out."""
        held = self._held.setdefault(target, TargetBlocks())
        if not event.tokens:
            for name in event.hashes:
                self._add(target, held, name, event.tier)
            return
        size = event.block_size
        if size <= 0 or len(event.tokens) != size * len(event.hashes):
            return
        if size not in held.sizes and len(held.sizes) >= MOST_SIZES:
            return
        if event.parent is None:
            before = size  # so that equal tokens in blocks of other sizes have other names
        elif event.parent in held.names:
            before = held.names[event.parent]
        else:
            return
        if size not in held.sizes:
            held.sizes.add(size)
            self._sizes[size] = self._sizes.get(size, 0) + 1
        for place, block in enumerate(event.hashes):
            before = _name(before, event.tokens[place * size : (place + 1) * size])
            if self._rename(target, held, block, before):
                self._add(target, held, block, event.tier)

    def removed(self, target: Target, hashes: Iterable[Hash], tier: CacheTier) -> None:
        """``tier`` of ``target`` lost blocks."""
        held = self._held.get(target)
        if held is None:
            return
        for block in hashes:
            if block not in held.names:
                continue
            left = held.tiers[block] & ~(1 << tier)
            held.tiers[block] = left
            self._note(held.names[block], target, left)
            if not left:
                del held.names[block], held.tiers[block]

    def cleared(self, target: Target) -> None:
        """``target`` has nothing any more, or what it has is not known."""
        held = self._held.pop(target, None)
        if held is None:
            return
        for name in held.names.values():
            self._note(name, target, 0)
        for size in held.sizes:
            self._sizes[size] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def match(self, tokens: Sequence[int]) -> dict[Target, Hit]:
        """Return what each target has of a prompt's beginning, if anything.

        Time: blocks that any target has, times the targets that have them.
        """
        found: dict[Target, Hit] = {}
        for size in self._sizes:
            for target, hit in self._match(tokens, size).items():
                if hit.tokens > found.get(target, Hit()).tokens:
                    found[target] = hit
        return found

    def _match(self, tokens: Sequence[int], size: int) -> dict[Target, Hit]:
        ended: dict[Target, Hit] = {}
        going: dict[Target, float] | None = None  # worth so far, of those that have all blocks
        before, start = size, 0
        while start + size <= len(tokens):
            before = _name(before, tokens[start : start + size])
            here = self._where.get(before)
            if not here:
                break
            if going is None:
                going = dict.fromkeys(here, 0.0)
            for target in [target for target in going if target not in here]:
                ended[target] = Hit(start, going.pop(target))
            if not going:
                break
            for target in going:
                going[target] += size * _worth(here[target])
            start += size
        for target, worth in (going or {}).items():
            ended[target] = Hit(start, worth)
        return ended

    def _rename(self, target: Target, held: TargetBlocks, block: Hash, name: Name) -> bool:
        """The engine calls ``name`` by ``block``; return False if that is one block too many."""
        old = held.names.get(block)
        if old is None and len(held.names) >= self._most:
            return False
        if old is not None and old != name:  # it lied, or uses a hash again
            self._note(old, target, 0)
            held.tiers.pop(block, None)
        held.names[block] = name
        return True

    def _add(self, target: Target, held: TargetBlocks, block: Hash, tier: CacheTier) -> None:
        name = held.names.get(block)
        if name is not None:
            held.tiers[block] = held.tiers.get(block, 0) | 1 << tier
            self._note(name, target, held.tiers[block])

    def _note(self, name: Name, target: Target, tiers: int) -> None:
        if tiers:
            self._where.setdefault(name, {})[target] = tiers
            return
        here = self._where.get(name)
        if here is not None:
            here.pop(target, None)
            if not here:
                del self._where[name]


def _name(before: Name, tokens: Sequence[int]) -> Name:
    """Integers, so the same in every process. A collision costs a wrong guess, nothing more."""
    return hash((before, *tokens))


_WORTH_OF = tuple(
    max((WORTH[tier] for tier in CacheTier if tiers >> tier & 1), default=0.0)
    for tiers in range(1 << len(CacheTier))
)


def _worth(tiers: int) -> float:
    return _WORTH_OF[tiers]
