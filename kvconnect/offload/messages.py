"""What the plan tells the workers to do, and what they answer.

Sent from the scheduler to every worker and back through the engine's own channel, once per step.
Durations, not points in time: clocks of two processes are not comparable.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvconnect.types import Endpoint, FailureCause, JobId, Rank, Span, Tier, TransferId


class GroupBlocks(NamedTuple):
    """The blocks of one KV-cache group in one job, in prefix order.

    ``block_ids[i]`` on the device belongs to ``slots[i]`` in the host tier. A slot of -1 stands
    for a block that the tier lost between promise and plan; it counts as failed.
    """

    group: int
    block_ids: array[int]  # typecode q, as the copy loop wants it
    slots: array[int]


@dataclass(frozen=True)
class StoreBlocks:
    """Copy device blocks to slots, once the device has finished writing them."""

    job: JobId
    parts: tuple[GroupBlocks, ...]
    deadline_s: float


@dataclass(frozen=True)
class LoadBlocks:
    """Copy slots to device blocks that belong to ``req_id``.

    ``sync`` loads must be complete before this step's forward; others are reported when done.
    """

    job: JobId
    req_id: str
    parts: tuple[GroupBlocks, ...]
    deadline_s: float
    sync: bool


@dataclass(frozen=True)
class LookupBlocks:
    """Find out which blocks are in the tiers below host memory."""

    job: JobId
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class PrefetchBlocks:
    """Read blocks from the tiers below host memory: ``keys[i]`` into ``slots[i]``."""

    job: JobId
    keys: tuple[bytes, ...]
    slots: array[int]
    deadline_s: float


@dataclass(frozen=True)
class WriteBackBlocks:
    """Write blocks to the tiers below host memory: ``slots[i]`` as ``keys[i]``."""

    job: JobId
    keys: tuple[bytes, ...]
    slots: array[int]
    deadline_s: float


@dataclass(frozen=True)
class TierAnswer:
    """One worker's answer to a lookup, prefetch or write-back of blocks.

    ``found[i]`` tells of ``keys[i]`` which tier has it now, or gave it: a place in
    :data:`SECONDARY_TIERS`, the first one of several.
    """

    job: JobId
    found: bytes


SECONDARY_TIERS = (None, Tier.DISK, Tier.REMOTE)
"""What an :class:`TierAnswer` says of a block: 0 for none, and the slower the tier the higher."""


@dataclass(frozen=True)
class PrefillSource:
    """A prefill engine, as a verified ticket names it."""

    engine_id: str
    epoch: int
    endpoints: tuple[Endpoint, ...]  # of all its workers
    tp: int
    pp: int


@dataclass(frozen=True)
class OfferBlocks:
    """Prefill side: these blocks are complete after this step's forward.

    The first offer of a transfer may be empty: it announces that the request is known. The
    blocks are held until every worker has answered a :class:`Withdraw`.
    """

    transfer: TransferId
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Withdraw:
    """Prefill side: send no more of a transfer and answer when nothing reads its blocks.

    ``cause`` is what readers that still wait are told.
    """

    transfer: TransferId
    cause: FailureCause


@dataclass(frozen=True)
class Receive:
    """Decode side: fetch blocks into ``spans``, at most one per group.

    ``source`` None: refused, to be reported as failed at once. ``tokens[i]`` says which tokens
    [first, end) of ``spans[i]`` are needed: the other side may not have what its blocks hold
    beside them. ``early``: the other side may not know of the transfer yet. ``deadline_s``
    without progress ends it.
    """

    job: JobId
    req_id: str
    transfer: TransferId
    source: PrefillSource | None
    spans: tuple[Span, ...]
    tokens: tuple[tuple[int, int], ...]
    early: bool
    deadline_s: float


@dataclass(frozen=True)
class Drop:
    """Decode side: a receive is not wanted any more; it is reported all the same."""

    job: JobId


@dataclass(frozen=True)
class Keep:
    """Decode side: renew the lease of a transfer that waits for its turn, every so many seconds
    until it is received or, with 0, given up."""

    transfer: TransferId
    source: PrefillSource
    every_s: float = 0.0


class NoticeKind(str, Enum):
    """What a prefill worker saw of the other side."""

    JOINED = "joined"  # a reader asked for the blocks
    DONE = "done"  # a reader has everything
    LEFT = "left"  # a reader gave up, or was lost
    RENEWED = "renewed"  # someone waits for them
    DECLINED = "declined"  # nobody will want them
    WITHDRAWN = "withdrawn"  # this worker's answer to a Withdraw


class Chunk(NamedTuple):
    """Blocks that were offered, and so sent, together: of all layers."""

    first: int  # wire block
    blocks: int
    began: float
    ended: float
    nbytes: int


class PeerTransfer(NamedTuple):
    """What became of all that one worker asked another one for, for a trace; ``seconds`` is how
    long its bytes were on their way. Points in time are in seconds since the epoch, by the clock
    of the worker that says them: nothing is decided by them.

    Attributes:
        first: when the first page began to move.
        ready: reader's side: when it heard that all had been computed; 0 if the pages were faster.
        chunks: sender's side.
    """

    worker: int
    path: str
    asked: float
    first: float
    ready: float
    ended: float
    nbytes: int
    seconds: float
    chunks: tuple[Chunk, ...] = ()


class TransferEvent(NamedTuple):
    """One event of a transfer, prefill worker to scheduler. ``reader`` is the decode worker.

    ``first`` is the first block of group 0 that a reader who JOINED asks for, ``nbytes`` and
    ``seconds`` what one that is DONE was sent and how long these bytes were on their way; ``moved``
    the same for a trace, where the engine traces.
    """

    transfer: TransferId
    kind: NoticeKind
    reader: Rank | None = None
    first: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    moved: PeerTransfer | None = None


@dataclass
class Instructions:
    """One step's work for every worker."""

    stores: list[StoreBlocks] = field(default_factory=list)
    loads: list[LoadBlocks] = field(default_factory=list)
    offers: list[OfferBlocks] = field(default_factory=list)
    withdrawals: list[Withdraw] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    lookups: list[LookupBlocks] = field(default_factory=list)
    prefetches: list[PrefetchBlocks] = field(default_factory=list)
    write_backs: list[WriteBackBlocks] = field(default_factory=list)


class FailedBlock(NamedTuple):
    """One block that was not copied. Its device or slot bytes are unknown."""

    group: int
    block_id: int
    slot: int
    cause: FailureCause


@dataclass(frozen=True)
class JobReport:
    """One worker's answer to one job. An empty ``failures`` means every block is there. ``moved``:
    what came from whom, of a :class:`Receive` where the engine traces. ``seconds``: what the copies
    of a load or store took."""

    job: JobId
    failures: tuple[FailedBlock, ...] = ()
    moved: tuple[PeerTransfer, ...] = ()
    seconds: float = 0.0
