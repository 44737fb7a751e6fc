"""State machine of a decode worker: which pages are requested, which arrived, when a job is over.

A job is finished only when none of its pages can be written any more, however it ends: each of its
reads, complete or not, was cancelled at the transport, and the transport has confirmed that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.disaggregation.decode_actions import (
    Action,
    CancelReceive,
    ConfirmRead,
    ConnectPeer,
    ReportFinished,
    RequestPages,
)
from kvconnect.disaggregation.messages import Receive, ReceiveReport
from kvconnect.disaggregation.states import TRANSFER, TransferState
from kvconnect.disaggregation.wire_blocks import GroupView, wire_ids
from kvconnect.errors import ProtocolError
from kvconnect.life_cycles import Event
from kvconnect.offload.messages import FailedBlock
from kvconnect.types import Endpoint, FailureCause, JobId, Origin, Span

MAX_WAIT_S = 600.0
"""Seconds after which a receive ends even if the source still sends heartbeats; its own deadline if
that is longer."""


class _UnitLayers(NamedTuple):
    group: int
    layers: tuple[int, ...]


@dataclass(eq=False)
class _AwaitedPages:
    """One read request of a job: the pages that one peer has to send."""

    job: _ReceiveJob
    origin: Origin
    read_id: int
    state: TransferState = TRANSFER.start
    peer: int = -1
    spans: dict[int, Span] = field(default_factory=dict)  # by group, in wire blocks
    ratios: dict[int, int] = field(default_factory=dict)
    units: dict[int, _UnitLayers] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)  # by group, of each layer
    got: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, layer) -> bit set
    left: int = 0  # wire blocks that have not arrived, counted once per layer
    ready: bool = False  # the peer has computed them all, and said what it had cached

    def start(self, peer: int, views: Mapping[int, GroupView], block_tokens: Sequence[int]) -> None:
        """Derive the pages that the peer has to send."""
        self.state, self.peer = TRANSFER.after(self.state, Event.STARTED), peer
        for span, (begin, end) in zip(self.job.receive.spans, self.job.receive.tokens, strict=True):
            view = views.get(span.group)
            if view is None:
                continue
            tokens = block_tokens[span.group] // view.ratio  # per wire block
            first, stop = begin // tokens, -(-end // tokens)
            if first >= stop:
                continue
            group, units = span.group, view.unit_of_layer
            self.spans[group] = Span(group, first, wire_ids(span, view.ratio, first, stop))
            self.ratios[group], self.heads[group] = view.ratio, view.heads
            layers = [layer for layer, unit in enumerate(units) if unit >= 0]
            self.units.update({units[layer]: _UnitLayers(group, (layer,)) for layer in layers})
            self.units[view.unit_all] = _UnitLayers(group, tuple(layers))
            self.got.update({(group, layer): 0 for layer in layers})
            self.left += (stop - first) * len(layers)

    def take(self, number: int, blocks: range) -> int:
        """Mark pages as arrived; return their group.

        Raises:
            ProtocolError: the pages were not requested, or arrived before.
        """
        group, layers = self.units.get(number, (-1, ()))
        span = self.spans.get(group)
        end = span.first + len(span.block_ids) if span else 0
        if not span or not span.first <= blocks.start < blocks.stop <= end:
            raise ProtocolError(f"pages {blocks} of unit {number} were not requested")
        bits = ((1 << len(blocks)) - 1) << (blocks.start - span.first)
        for layer in layers:
            if self.got[group, layer] & bits:
                raise ProtocolError(f"pages {blocks} of unit {number} arrived twice")
            self.got[group, layer] |= bits
        self.left -= len(blocks) * len(layers)
        return group

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield (group, block id) of incomplete blocks here."""
        if self.peer < 0:
            for span in self.job.receive.spans:
                yield from ((span.group, block) for block in span.block_ids)
        for (group, _), bits in self.got.items() if self.left else ():
            span = self.spans[group]
            for place, wire_id in enumerate(span.block_ids):
                if not bits >> place & 1:
                    yield group, wire_id // self.ratios[group]


@dataclass(eq=False)
class _ReceiveJob:
    receive: Receive
    started: float
    progress_at: float
    reads: list[_AwaitedPages] = field(default_factory=list)
    cause: FailureCause | None = None  # why the job was given up
    detail: str = ""  # what the peer said of it
    cached: int = 0  # tokens of the prompt that the peer's engine had
    failures: dict[tuple[int, int], FailureCause] = field(default_factory=dict)

    def give_up(self, cause: FailureCause) -> list[Action]:
        """Start nothing more, and cancel reads in flight."""
        self.cause = self.cause or cause
        actions: list[Action] = []
        for read in self.reads:
            if read.state in (TransferState.MOVING, TransferState.COMPLETE):
                actions.append(CancelReceive(read.peer, read.read_id))
            read.state = TRANSFER.after(read.state, Event.ABORT)
        return actions

    def confirm(self) -> list[Action]:
        """Confirm every read, once all of them are complete."""
        served = (TransferState.COMPLETE, TransferState.OVER)
        if self.cause is not None or any(read.state not in served for read in self.reads):
            return []
        complete = [read for read in self.reads if read.state is TransferState.COMPLETE]
        for read in complete:
            read.state = TRANSFER.after(read.state, Event.ABORT)
        return [ConfirmRead(read.peer, read.read_id, self.receive.job) for read in complete]

    def report(self, layers: Sequence[int], heads: Sequence[int]) -> ReceiveReport:
        """Return the report, with failed blocks. By group: ``layers`` and ``heads``, how many this
        worker has. All heads of all layers must have come."""
        places = [place for read in self.reads for place in read.missing()]
        for span, (begin, end) in zip(self.receive.spans, self.receive.tokens, strict=True):
            brought = Counter[int]()  # heads, by layer
            for read in self.reads:
                for group, layer in read.got:
                    brought[layer] += read.heads[group] if group == span.group else 0
            whole = sum(count == heads[span.group] for count in brought.values())
            if begin < end and whole < layers[span.group]:
                places += [(span.group, block) for block in span.block_ids]
        for place in places:
            self.failures.setdefault(place, self.cause or FailureCause.REFUSED)
        failures = (
            FailedBlock(group, block, -1, cause) for (group, block), cause in self.failures.items()
        )
        return ReceiveReport(
            self.receive.job, tuple(failures), detail=self.detail, cached=self.cached
        )


class _ConnectedPeer(NamedTuple):
    peer: int
    views: Mapping[int, GroupView]


class DecodePlanner:
    """Receives of one decode worker. One thread; ``now`` is in seconds of one monotonic clock.

    Events about finished reads are ignored, since messages cross.
    """

    def __init__(
        self, block_tokens: Sequence[int], layers: Sequence[int], heads: Sequence[int]
    ) -> None:
        """By group: ``block_tokens``, tokens per block here, and ``layers`` and ``heads``, how many
        layers and KV heads this worker has. A layer whose heads do not all come has failed."""
        self._block_tokens = tuple(block_tokens)
        self._layers = tuple(layers)
        self._heads = tuple(heads)
        self._peers: dict[Origin, _ConnectedPeer] = {}
        self._connecting: set[Origin] = set()
        self._jobs: dict[JobId, _ReceiveJob] = {}
        self._reads: dict[tuple[int, int], _AwaitedPages] = {}  # by peer and number
        self._last = 0

    def __repr__(self) -> str:
        return f"<DecodePlanner {len(self._jobs)} jobs, {len(self._reads)} reads>"

    def receive(self, job: Receive, endpoints: Sequence[Endpoint], now: float) -> list[Action]:
        """Start a receive from the source workers at ``endpoints``. A job without a source fails
        at once."""
        record = self._jobs[job.job] = _ReceiveJob(job, now, now)
        actions: list[Action] = []
        source = job.source
        origins = [Origin(e, source.engine_id, source.epoch) for e in endpoints] if source else []
        for origin in origins:
            self._last += 1
            read = _AwaitedPages(record, origin, self._last)
            record.reads.append(read)
            if origin in self._peers:
                actions += self._start(read)
            elif origin not in self._connecting:
                self._connecting.add(origin)
                actions.append(ConnectPeer(origin))
        return actions + self._advance(record)

    def connected(self, origin: Origin, peer: int, views: Mapping[int, GroupView]) -> list[Action]:
        """A peer accepts read requests. ``views``: by group; groups that only one worker has are
        missing."""
        self._connecting.discard(origin)
        self._peers[origin] = _ConnectedPeer(peer, views)
        actions: list[Action] = []
        for job in list(self._jobs.values()):
            for read in list(job.reads):
                if read.origin == origin and read.state is TransferState.REQUESTED:
                    actions += self._start(read)
            actions += self._advance(job)
        return actions

    def refused(self, origin: Origin, cause: FailureCause) -> list[Action]:
        """The connection or the negotiation failed."""
        self._connecting.discard(origin)
        waiting = [
            read.job
            for job in self._jobs.values()
            for read in job.reads
            if read.origin == origin and read.state is TransferState.REQUESTED
        ]
        return [action for job in waiting for action in self._fail(job, cause)]

    def received(
        self, peer: int, read_id: int, number: int, blocks: range, bad: Sequence[int], now: float
    ) -> list[Action]:
        """Wire blocks ``blocks`` of unit ``number`` arrived; ``bad`` ones have a wrong digest.

        Raises:
            ProtocolError: the pages were not requested, or arrived before. The caller closes the
                connection.
        """
        read = self._reads.get((peer, read_id))
        if read is None or read.state in (TransferState.STOPPING, TransferState.OVER):
            return []
        group = read.take(number, blocks)
        job, span = read.job, read.spans[group]
        for block in bad:
            block_id = span.block_ids[block - span.first] // read.ratios[group]
            job.failures[group, block_id] = FailureCause.DIGEST
        job.progress_at = now
        return self._complete(read)

    def ready(self, peer: int, read_id: int, cached: int) -> list[Action]:
        """The peer has computed every page of a read; its engine had ``cached`` tokens."""
        read = self._reads.get((peer, read_id))
        if read is None or read.state is not TransferState.MOVING:
            return []
        read.ready, read.job.cached = True, max(read.job.cached, cached)
        return self._complete(read)

    def failed(
        self, peer: int, read_id: int, cause: FailureCause, detail: str = ""
    ) -> list[Action]:
        """The peer has refused a read or stopped serving it; ``detail`` is its reason."""
        read = self._reads.get((peer, read_id))
        if read is None or read.state is not TransferState.MOVING:
            return []
        read.job.detail = read.job.detail or detail
        return self._fail(read.job, cause)

    def alive(self, peer: int, read_ids: Sequence[int], now: float) -> None:
        """The peer still serves these read requests."""
        for read_id in read_ids:
            read = self._reads.get((peer, read_id))
            if read is not None:
                read.job.progress_at = now

    def drained(self, peer: int, read_id: int) -> list[Action]:
        """The transport has ended a cancelled or confirmed read."""
        read = self._reads.pop((peer, read_id), None)
        if read is None:
            return []
        read.state = TRANSFER.after(read.state, Event.DRAINED)
        return self._advance(read.job)

    def peer_lost(self, peer: int) -> list[Action]:
        """A connection is gone; no page of the peer is written any more."""
        self._peers = {o: known for o, known in self._peers.items() if known.peer != peer}
        actions: list[Action] = []
        for key in [key for key in self._reads if key[0] == peer]:
            read = self._reads.pop(key)
            moving = read.state is TransferState.MOVING
            read.state = TRANSFER.after(read.state, Event.PEER_LOST)
            if moving:
                actions += self._fail(read.job, FailureCause.PEER)
            else:
                actions += self._advance(read.job)
        return actions

    def drop(self, job: JobId) -> list[Action]:
        """The job is not needed any more; its report still follows."""
        record = self._jobs.get(job)
        return [] if record is None else self._fail(record, FailureCause.SKIPPED)

    def tick(self, now: float) -> list[Action]:
        """Fail jobs without progress; call it about every second."""
        late = [
            job
            for job in self._jobs.values()
            if now - job.progress_at >= job.receive.deadline_s
            or now - job.started >= max(MAX_WAIT_S, job.receive.deadline_s)
        ]
        return [action for job in late for action in self._fail(job, FailureCause.DEADLINE)]

    def _start(self, read: _AwaitedPages) -> list[Action]:
        peer, views = self._peers[read.origin]
        read.start(peer, views, self._block_tokens)
        if not read.left:  # the job needs no page of this peer
            read.job.reads.remove(read)
            return []
        self._reads[peer, read.read_id] = read
        job = read.job.receive
        spans = tuple(span for _, span in sorted(read.spans.items()))
        return [
            RequestPages(
                peer, read.read_id, job.transfer, job.early, spans, prompt=job.prompt, held=job.held
            )
        ]

    def _complete(self, read: _AwaitedPages) -> list[Action]:
        """End a read that has everything: its pages, and the peer's word if the job needs it."""
        if read.left or (read.job.receive.counted and not read.ready):
            return []
        read.state = TRANSFER.after(read.state, Event.COMPLETED)
        return self._advance(read.job)

    def _fail(self, job: _ReceiveJob, cause: FailureCause) -> list[Action]:
        return job.give_up(cause) + self._advance(job)

    def _advance(self, job: _ReceiveJob) -> list[Action]:
        """Confirm complete reads; finish the job once no page of it can be written any more."""
        actions = job.confirm()
        if any(read.state is not TransferState.OVER for read in job.reads):
            return actions
        if self._jobs.pop(job.receive.job, None) is not None:
            actions.append(ReportFinished(job.report(self._layers, self._heads), job.receive))
        return actions
