"""Scheduler to worker: blocks to offer and to receive. Worker to scheduler: events and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvconnect.offload.messages import JobReport
from kvconnect.types import Endpoint, FailureCause, JobId, Rank, Span, TransferId


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


@dataclass(frozen=True)
class ReceiveReport(JobReport):
    """One worker's answer to a :class:`Receive`.

    ``moved``: what came from which worker; empty unless the engine traces.
    """

    moved: tuple[PeerTransfer, ...] = ()


@dataclass
class DisaggregationInstructions:
    """One step's hand-offs, for every worker."""

    offers: list[OfferBlocks] = field(default_factory=list)
    withdrawals: list[Withdraw] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
