"""Messages of hand-offs: instructions to the workers, events and reports to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvconnect.offload.messages import JobReport
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.types import Endpoint, FailureCause, JobId, Rank, Span, TransferId


@dataclass(frozen=True)
class PrefillSource:
    """A prefill engine, from a verified ticket."""

    engine_id: str
    epoch: int
    endpoints: tuple[Endpoint, ...]  # of all its workers
    tp: int
    pp: int


@dataclass(frozen=True)
class OfferBlocks:
    """Prefill side: these blocks are complete after this step's forward.

    The first offer may be empty: it announces the transfer and its prompt. The blocks are held
    until every worker has answered a :class:`Withdraw`. ``cached``: tokens of the prompt that the
    engine had and did not compute. ``reusable``, of the first offer: another transfer may follow
    under the same id, and a reader that asks again waits for it.
    """

    transfer: TransferId
    spans: tuple[Span, ...] = ()
    prompt: PromptIdentity = NO_PROMPT
    cached: int = 0
    reusable: bool = False


@dataclass(frozen=True)
class Withdraw:
    """Prefill side: stop a transfer, and answer when nothing reads its blocks any more.

    ``cause``: sent to readers that still wait.
    """

    transfer: TransferId
    cause: FailureCause


@dataclass(frozen=True)
class Receive:
    """Decode side: fetch blocks into ``spans``, at most one per group.

    Attributes:
        source: None: the hand-off was refused, so report it as failed at once.
        tokens: per span, the needed tokens [first, end). The prefill engine may not have the other
            tokens of the blocks.
        early: the prefill engine may not know the transfer yet.
        deadline_s: seconds without progress that end the receive.
        prompt: the request's; the prefill engine refuses any other than its own.
        counted: the report must say how many tokens the prefill engine had cached, so the receive
            ends after it has said so.
        held: tokens of the prompt that this engine has, so it needs none of their blocks.
    """

    job: JobId
    req_id: str
    transfer: TransferId
    source: PrefillSource | None
    spans: tuple[Span, ...]
    tokens: tuple[tuple[int, int], ...]
    early: bool
    deadline_s: float
    prompt: PromptIdentity = NO_PROMPT
    counted: bool = False
    held: int = 0


@dataclass(frozen=True)
class Drop:
    """Decode side: a receive is not needed any more. Its report still follows."""

    job: JobId


@dataclass(frozen=True)
class Keep:
    """Decode side: renew the lease of a transfer that waits to be received, every ``every_s``
    seconds until it is; 0: decline the transfer."""

    transfer: TransferId
    source: PrefillSource
    every_s: float = 0.0


class NoticeKind(StrEnum):
    """What a prefill worker reports about a reader."""

    JOINED = "joined"  # a reader requested the blocks
    DONE = "done"  # a reader has every block
    LEFT = "left"  # a reader gave up, or was lost
    RENEWED = "renewed"  # a decode engine still waits for the blocks
    DECLINED = "declined"  # the decode engine does not need the blocks
    MISMATCHED = "mismatched"  # a reader has another prompt and was refused
    WITHDRAWN = "withdrawn"  # this worker's answer to a Withdraw


class Chunk(NamedTuple):
    """Wire blocks, in all layers, that were offered together and so sent together."""

    first: int  # first wire block
    blocks: int
    began: float
    ended: float
    nbytes: int


class PeerTransfer(NamedTuple):
    """One read between two workers, for traces. Times are in seconds since the epoch, by the clock
    of the reporting worker; no decision depends on them.

    Attributes:
        first: when the first page began to move.
        ready: reader only: when it learned that all pages were computed; 0 if the pages came first.
        seconds: duration of the transfers.
        chunks: sender only.
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
    """One event of a transfer, prefill worker to scheduler.

    Attributes:
        reader: rank of the decode worker.
        first: JOINED: how many blocks of group 0 the reader has, and so the first one it needs.
        nbytes: DONE: bytes sent.
        seconds: DONE: duration of their transfers.
        moved: DONE: times for a trace, if the engine traces.
        detail: MISMATCHED: how the prompts differ.
    """

    transfer: TransferId
    kind: NoticeKind
    reader: Rank | None = None
    first: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    moved: PeerTransfer | None = None
    detail: str = ""


@dataclass(frozen=True)
class ReceiveReport(JobReport):
    """One worker's answer to a :class:`Receive`.

    ``moved``: the reads from each worker; empty unless the engine traces. ``detail``: what the
    prefill engine said when it ended a read. ``cached``: tokens of the prompt that the prefill
    engine had cached.
    """

    moved: tuple[PeerTransfer, ...] = ()
    detail: str = ""
    cached: int = 0


@dataclass
class DisaggregationInstructions:
    """One step's hand-offs, for every worker."""

    offers: list[OfferBlocks] = field(default_factory=list)
    withdrawals: list[Withdraw] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
