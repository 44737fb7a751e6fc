"""Scheduler to worker: lookups, reads and writes in the secondary tiers. Back: answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvconnect.protocol.addresses import Addresses
from kvconnect.types import JobId, Tier


@dataclass(frozen=True)
class LookupBlocks:
    """Find out which blocks are in the secondary tiers. Of other engines, only the one with workers
    at ``source`` is asked, if that is given."""

    job: JobId
    keys: tuple[bytes, ...]
    source: Addresses = ()


@dataclass(frozen=True)
class PrefetchBlocks:
    """Read blocks from the secondary tiers: ``keys[i]`` into ``slots[i]``."""

    job: JobId
    keys: tuple[bytes, ...]
    slots: array[int]
    deadline_s: float


@dataclass(frozen=True)
class WriteBackBlocks:
    """Write blocks to the secondary tiers: ``slots[i]`` as ``keys[i]``."""

    job: JobId
    keys: tuple[bytes, ...]
    slots: array[int]
    deadline_s: float


@dataclass(frozen=True)
class RemoveBlocks:
    """Remove blocks from the secondary tiers. What peers have stays theirs."""

    job: JobId
    keys: tuple[bytes, ...]
    deadline_s: float


@dataclass(frozen=True)
class TierAnswer:
    """One worker's answer to a lookup, prefetch or write-back of blocks.

    ``found[i]`` tells of ``keys[i]`` which tier has it now, or gave it: a place in
    :data:`SECONDARY_TIERS`, the first one of several.
    """

    job: JobId
    found: bytes


ABSENT, REMOVED, NOT_REMOVED = range(3)


@dataclass(frozen=True)
class RemovalAnswer(TierAnswer):
    """One worker's answer to a removal.

    ``found[i]`` tells of ``keys[i]`` that no tier had it, that all that had it removed it, or that
    a tier failed: ABSENT, REMOVED or NOT_REMOVED. Jobs are numbered apart from the others.
    """


SECONDARY_TIERS = (None, Tier.DISK, Tier.PEER, Tier.REMOTE)
"""What an :class:`TierAnswer` says of a block: 0 for none, and the slower the tier the higher."""


@dataclass
class TierInstructions:
    """One step's work on the secondary tiers, for every worker.

    ``served``: blocks of the host tier, as (key, slot), that other engines may read from now on.
    ``withdraw``: first, none of those before may be read any more. ``dropped``: nor these keys.
    ``pages``: of blocks that these and later steps name, the keys of the pages by which peers know
    them; a block that is one page has none.
    """

    lookups: list[LookupBlocks] = field(default_factory=list)
    prefetches: list[PrefetchBlocks] = field(default_factory=list)
    write_backs: list[WriteBackBlocks] = field(default_factory=list)
    removals: list[RemoveBlocks] = field(default_factory=list)
    served: list[tuple[bytes, int]] = field(default_factory=list)
    withdraw: bool = False
    dropped: list[bytes] = field(default_factory=list)
    pages: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
