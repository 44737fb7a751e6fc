"""A decode worker's side of hand-offs: what is asked from whom, what has come, when a job is over.

A job is finished only when no page of it can land any more, however it ends: every want of it is
cancelled at the transport, also one that is complete, and the transport has answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.disaggregation.reads import GroupView, wire_ids
from kvconnect.disaggregation.states import TRANSFER, Event, TransferState
from kvconnect.errors import ProtocolError
from kvconnect.offload.messages import FailedBlock, JobReport, Receive
from kvconnect.types import Endpoint, FailureCause, JobId, Span, TransferId

MAX_WAIT_S = 600.0
"""Seconds after which a receive ends even if the other side keeps saying that it is coming."""


class Origin(NamedTuple):
    """One worker of one incarnation of a prefill engine. No ``engine_id``: whoever is there."""

    endpoint: Endpoint
    engine_id: str
    epoch: int


# What to do ---------------------------------------------------------------------------------


class NeedPeer(NamedTuple):
    """Connect; ``connected`` or ``refused`` follows. Asked once until it has."""

    origin: Origin


class AskPages(NamedTuple):
    """Submit an ``Incoming`` and send the want. ``spans``: per group the first wire block and the
    wire-block ids here; the want's parts are (group, first, count) of each."""

    peer: int
    want: int
    transfer: TransferId
    early: bool
    spans: tuple[Span, ...]


class CancelWant(NamedTuple):
    """Tell the peer, and cancel at the transport; ``quiet`` follows."""

    peer: int
    want: int


class Thank(NamedTuple):
    """Tell the peer that the reader is done, and cancel at the transport, so that no stray page
    can land later; ``quiet`` follows. The want is of ``job``, which may have others."""

    peer: int
    want: int
    job: JobId


class Finished(NamedTuple):
    """The job is over; nothing of it is written any more."""

    report: JobReport
    job: Receive


Action = NeedPeer | AskPages | CancelWant | Thank | Finished


@dataclass(eq=False)
class _AwaitedPages:
    """What one peer owes to a job."""

    job: _ReceiveJob
    origin: Origin
    number: int
    state: TransferState = TRANSFER.start
    peer: int = -1
    spans: dict[int, Span] = field(default_factory=dict)  # by group, in wire blocks
    ratios: dict[int, int] = field(default_factory=dict)
    units: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # group, layers
    got: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, layer) -> bit set
    left: int = 0  # wire blocks, once per layer, that have not come

    def start(self, peer: int, views: Mapping[int, GroupView], block_tokens: Sequence[int]) -> None:
        """Work out what the peer is to send."""
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
            self.ratios[group] = view.ratio
            layers = [layer for layer, unit in enumerate(units) if unit >= 0]
            self.units.update({units[layer]: (group, (layer,)) for layer in layers})
            self.units[view.unit_all] = group, tuple(layers)
            self.got.update({(group, layer): 0 for layer in layers})
            self.left += (stop - first) * len(layers)

    def take(self, number: int, blocks: range) -> int:
        """Mark what has come; return its group.

        Raises:
            ProtocolError: not asked for, or a second time.
        """
        group, layers = self.units.get(number, (-1, ()))
        span = self.spans.get(group)
        end = span.first + len(span.block_ids) if span else 0
        if not span or not span.first <= blocks.start < blocks.stop <= end:
            raise ProtocolError(f"pages {blocks} of unit {number} were not asked for")
        bits = ((1 << len(blocks)) - 1) << (blocks.start - span.first)
        for layer in layers:
            if self.got[group, layer] & bits:
                raise ProtocolError(f"pages {blocks} of unit {number} came twice")
            self.got[group, layer] |= bits
        self.left -= len(blocks) * len(layers)
        return group

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield (group, block id) of blocks here that lack something."""
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
    wants: list[_AwaitedPages] = field(default_factory=list)
    cause: FailureCause | None = None  # why it was given up
    failures: dict[tuple[int, int], FailureCause] = field(default_factory=dict)

    def give_up(self, cause: FailureCause) -> list[Action]:
        """Begin nothing new, and cancel what is under way."""
        self.cause = self.cause or cause
        actions: list[Action] = []
        for want in self.wants:
            if want.state in (TransferState.MOVING, TransferState.COMPLETE):
                actions.append(CancelWant(want.peer, want.number))
            want.state = TRANSFER.after(want.state, Event.ABORT)
        return actions

    def thank(self) -> list[Action]:
        """Thank every peer, once all have delivered everything."""
        served = (TransferState.COMPLETE, TransferState.OVER)
        if self.cause is not None or any(want.state not in served for want in self.wants):
            return []
        complete = [want for want in self.wants if want.state is TransferState.COMPLETE]
        for want in complete:
            want.state = TRANSFER.after(want.state, Event.ABORT)
        return [Thank(want.peer, want.number, self.receive.job) for want in complete]

    def report(self, layers: Sequence[int]) -> JobReport:
        """Say which blocks are not what they should be; ``layers`` there are, by group."""
        places = [place for want in self.wants for place in want.missing()]
        for span, (begin, end) in zip(self.receive.spans, self.receive.tokens, strict=True):
            brought = {layer for w in self.wants for group, layer in w.got if group == span.group}
            if begin < end and len(brought) < layers[span.group]:
                places += [(span.group, block) for block in span.block_ids]
        for place in places:
            self.failures.setdefault(place, self.cause or FailureCause.REFUSED)
        failures = (FailedBlock(*place, -1, cause) for place, cause in self.failures.items())
        return JobReport(self.receive.job, tuple(failures))


class Receiver:
    """Receives of one decode worker. One thread; ``now`` is in seconds of one monotonic clock.

    Events about wants that are over are ignored: messages cross.
    """

    def __init__(self, block_tokens: Sequence[int], layers: Sequence[int]) -> None:
        """By group, ``block_tokens`` says how many tokens a block has here, ``layers`` how many
        layers this worker has: what no peer brings has failed."""
        self._block_tokens = tuple(block_tokens)
        self._layers = tuple(layers)
        self._peers: dict[Origin, tuple[int, Mapping[int, GroupView]]] = {}
        self._connecting: set[Origin] = set()
        self._jobs: dict[JobId, _ReceiveJob] = {}
        self._wants: dict[tuple[int, int], _AwaitedPages] = {}  # by peer and number
        self._last = 0

    def __repr__(self) -> str:
        return f"<Receiver {len(self._jobs)} jobs, {len(self._wants)} wants>"

    def receive(self, job: Receive, endpoints: Sequence[Endpoint], now: float) -> list[Action]:
        """Start a receive from those workers of its source that this worker needs; none if the
        job has no source."""
        record = self._jobs[job.job] = _ReceiveJob(job, now, now)
        actions: list[Action] = []
        source = job.source
        origins = [Origin(e, source.engine_id, source.epoch) for e in endpoints] if source else []
        for origin in origins:
            self._last += 1
            want = _AwaitedPages(record, origin, self._last)
            record.wants.append(want)
            if origin in self._peers:
                actions += self._start(want)
            elif origin not in self._connecting:
                self._connecting.add(origin)
                actions.append(NeedPeer(origin))
        return actions + self._advance(record)

    def connected(self, origin: Origin, peer: int, views: Mapping[int, GroupView]) -> list[Action]:
        """A peer can be asked. ``views`` by group; groups that the two do not share are
        missing."""
        self._connecting.discard(origin)
        self._peers[origin] = peer, views
        actions: list[Action] = []
        for job in list(self._jobs.values()):
            for want in list(job.wants):
                if want.origin == origin and want.state is TransferState.ASKED:
                    actions += self._start(want)
            actions += self._advance(job)
        return actions

    def refused(self, origin: Origin, cause: FailureCause) -> list[Action]:
        """No connection, or no agreement."""
        self._connecting.discard(origin)
        waiting = [
            want.job
            for job in self._jobs.values()
            for want in job.wants
            if want.origin == origin and want.state is TransferState.ASKED
        ]
        return [action for job in waiting for action in self._fail(job, cause)]

    def received(
        self, peer: int, want: int, number: int, blocks: range, bad: Sequence[int], now: float
    ) -> list[Action]:
        """Wire blocks ``blocks`` of unit ``number`` landed; the digest of ``bad`` ones differs.

        Raises:
            ProtocolError: not asked for, or a second time. The caller closes the peer.
        """
        record = self._wants.get((peer, want))
        if record is None or record.state in (TransferState.STOPPING, TransferState.OVER):
            return []
        group = record.take(number, blocks)
        job, span = record.job, record.spans[group]
        for block in bad:
            block_id = span.block_ids[block - span.first] // record.ratios[group]
            job.failures[group, block_id] = FailureCause.DIGEST
        job.progress_at = now
        if record.left:
            return []
        record.state = TRANSFER.after(record.state, Event.COMPLETED)
        return self._advance(job)

    def failed(self, peer: int, want: int, cause: FailureCause) -> list[Action]:
        """The peer does not, or no longer, serve a want."""
        record = self._wants.get((peer, want))
        if record is None or record.state is not TransferState.MOVING:
            return []
        return self._fail(record.job, cause)

    def alive(self, peer: int, wants: Sequence[int], now: float) -> None:
        """The peer works on these wants."""
        for number in wants:
            record = self._wants.get((peer, number))
            if record is not None:
                record.job.progress_at = now

    def quiet(self, peer: int, want: int) -> list[Action]:
        """The transport answered a ``CancelWant`` or ``Thank``."""
        record = self._wants.pop((peer, want), None)
        if record is None:
            return []
        record.state = TRANSFER.after(record.state, Event.QUIET)
        return self._advance(record.job)

    def peer_lost(self, peer: int) -> list[Action]:
        """The connection is gone; nothing of the peer lands any more."""
        self._peers = {origin: item for origin, item in self._peers.items() if item[0] != peer}
        actions: list[Action] = []
        for key in [key for key in self._wants if key[0] == peer]:
            record = self._wants.pop(key)
            moving = record.state is TransferState.MOVING
            record.state = TRANSFER.after(record.state, Event.PEER_LOST)
            if moving:
                actions += self._fail(record.job, FailureCause.PEER)
            else:
                actions += self._advance(record.job)
        return actions

    def drop(self, job: JobId) -> list[Action]:
        """The job is not wanted any more; it is finished all the same."""
        record = self._jobs.get(job)
        return [] if record is None else self._fail(record, FailureCause.SKIPPED)

    def tick(self, now: float) -> list[Action]:
        """End jobs without progress; call it about every second."""
        late = [
            job
            for job in self._jobs.values()
            if now - job.progress_at >= job.receive.deadline_s or now - job.started >= MAX_WAIT_S
        ]
        return [action for job in late for action in self._fail(job, FailureCause.DEADLINE)]

    def _start(self, want: _AwaitedPages) -> list[Action]:
        peer, views = self._peers[want.origin]
        want.start(peer, views, self._block_tokens)
        if not want.left:  # this peer has nothing that the job lacks
            want.job.wants.remove(want)
            return []
        self._wants[peer, want.number] = want
        job = want.job.receive
        spans = tuple(span for _, span in sorted(want.spans.items()))
        return [AskPages(peer, want.number, job.transfer, job.early, spans)]

    def _fail(self, job: _ReceiveJob, cause: FailureCause) -> list[Action]:
        return job.give_up(cause) + self._advance(job)

    def _advance(self, job: _ReceiveJob) -> list[Action]:
        """Go on if nothing is missing; finish if nothing can land any more."""
        actions = job.thank()
        if any(want.state is not TransferState.OVER for want in job.wants):
            return actions
        if self._jobs.pop(job.receive.job, None) is not None:
            actions.append(Finished(job.report(self._layers), job.receive))
        return actions
