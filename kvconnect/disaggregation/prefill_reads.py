"""Parts of the prefill worker's state machine: served reads, offered transfers, the current step.

:mod:`kvconnect.disaggregation.prefill_planner` combines them and states the rules.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvconnect.disaggregation.messages import NoticeKind, TransferEvent
from kvconnect.disaggregation.prefill_actions import (
    Action,
    AnnounceReady,
    CancelRead,
    DropPeer,
    RefuseRead,
    ReportNotice,
    ReportServed,
    SendPages,
)
from kvconnect.disaggregation.states import TRANSFER, TransferState
from kvconnect.disaggregation.wire_blocks import GroupView, wire_ids
from kvconnect.errors import Misuse, ProtocolError, contained
from kvconnect.life_cycles import Event
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity, difference
from kvconnect.types import FailureCause, Rank, Span, TransferId


class AcceptedRead(NamedTuple):
    """A read request of a peer. ``views``: by group; groups that only one worker has are missing.
    ``parts``: (group, first wire block, count), groups ascending. ``early``: this worker may not
    know the transfer yet. ``prompt``: the peer's. ``held``: how many blocks of group 0, as they are
    here, the reader has."""

    peer: int
    read_id: int
    transfer: TransferId
    early: bool
    reader: Rank
    views: Mapping[int, GroupView]
    parts: Sequence[tuple[int, int, int]]
    prompt: PromptIdentity = NO_PROMPT
    held: int = 0


def isolated(peer: int, work: Callable[[], list[Action]]) -> list[Action]:
    """Run ``work`` for one peer. An error ends that peer's connection only, although the thread
    (the engine's, for instance) also serves other peers."""
    actions: list[Action] = []
    with contained(lambda error: actions.append(DropPeer(peer, error))):
        actions += work()
    return actions


@dataclass(eq=False)
class ServedRead:
    """One read request that is, or was, served."""

    request: AcceptedRead
    offered: OfferedTransfer = field(repr=False)
    state: TransferState = TRANSFER.start
    left: int = 0  # wire blocks to submit, counted once per layer
    in_flight: int = 0  # orders submitted and not sent
    moved: bool = False  # something was sent since the last heartbeat

    def start(self) -> ReportNotice:
        self.state = TRANSFER.after(self.state, Event.STARTED)
        self.left = sum(
            count * len(self._units(group, view.unit_all))
            for group, _, count in self.request.parts
            for view in (self.request.views[group],)
        )
        return self.notice(NoticeKind.JOINED, self.request.held)

    def send(self, span: Span, number: int, fence: Any) -> list[Action]:
        """Submit the requested blocks of a span in one unit; -1: the reader takes no such layer."""
        for group, first, count in self.request.parts if number >= 0 else ():
            if group == span.group:
                ratio = self.request.views[group].ratio
                start = max(first, span.first * ratio)
                stop = min(first + count, (span.first + len(span.block_ids)) * ratio)
                if start < stop:
                    self.left -= (stop - start) * len(self._units(group, number))
                    self.in_flight += 1
                    ids = wire_ids(span, ratio, start, stop)
                    peer, read_id = self.request.peer, self.request.read_id
                    pages = SendPages(peer, read_id, group, number, start, ids, fence)
                    ready = AnnounceReady(peer, read_id, self.offered.cached)
                    return [pages] if self.left else [pages, ready]
        return []

    def send_all(self, span: Span, fence: Any) -> list[Action]:
        """Submit a span's blocks in all layers at once."""
        view = self.request.views.get(span.group)
        return [] if view is None else self.send(span, view.unit_all, fence)

    def send_layer(self, span: Span, layer: int, fence: Any) -> list[Action]:
        """Submit one of this worker's layers."""
        view = self.request.views.get(span.group)
        return [] if view is None else self.send(span, view.unit_of_layer[layer], fence)

    def stop(self) -> list[Action]:
        """Submit nothing more; cancel pages in flight."""
        self.state = TRANSFER.after(self.state, Event.ABORT)
        if self.in_flight:
            return [CancelRead(self.request.peer, self.request.read_id)]
        self.state = TRANSFER.after(self.state, Event.DRAINED)
        return []

    def sent(self, in_flight: int) -> None:
        """Pages were sent; ``in_flight`` orders remain."""
        self.in_flight = in_flight
        self.moved = True
        if self.state is TransferState.STOPPING and not in_flight:
            self.state = TRANSFER.after(self.state, Event.DRAINED)

    def served(self) -> list[Action]:
        """Report the read once the reader has confirmed it and no order is in flight: the
        confirmation can overtake the transport's own report."""
        if self.state is not TransferState.COMPLETE or self.in_flight:
            return []
        notice = TransferEvent(self.request.transfer, NoticeKind.DONE, self.request.reader)
        return [ReportServed(self.request.peer, self.request.read_id, notice)]

    def notice(self, kind: NoticeKind, first: int = 0) -> ReportNotice:
        return ReportNotice(TransferEvent(self.request.transfer, kind, self.request.reader, first))

    def _units(self, group: int, number: int) -> list[int]:
        """Return the per-layer units that unit ``number`` consists of."""
        view = self.request.views[group]
        return [u for u in view.unit_of_layer if u >= 0] if number == view.unit_all else [number]


@dataclass(eq=False)
class OfferedTransfer:
    """A transfer that the scheduler has announced."""

    prompt: PromptIdentity = NO_PROMPT
    cached: int = 0  # tokens of the prompt that the engine did not compute
    ready: dict[int, tuple[Span, Any]] = field(default_factory=dict)  # by group, with the fence
    readers: dict[tuple[int, int], ServedRead] = field(default_factory=dict)  # by peer and read id
    cause: FailureCause | None = None  # why the transfer was withdrawn
    outdated: bool = False  # some of it may be of former weights
    reusable: bool = False  # another transfer may follow under this id
    answered: set[Rank] = field(default_factory=set)  # readers that have read it, or declined

    def add(self, span: Span, fence: Any) -> None:
        """All layers of a span, and of earlier spans, can be read once ``fence`` has passed.

        Raises:
            Misuse: the span does not continue the group's earlier spans.
        """
        before, _ = self.ready.get(span.group, (Span(span.group, span.first, array("q")), None))
        if span.first != before.first + len(before.block_ids):
            raise Misuse(f"group {span.group}: blocks from {span.first} on are offered out of turn")
        before.block_ids.extend(span.block_ids)
        self.ready[span.group] = before, fence

    def mismatch(self, request: AcceptedRead) -> list[Action]:
        """Refuse a reader of another prompt and tell the scheduler; return [] for an equal one."""
        detail = difference(self.prompt, request.prompt)
        if not detail:
            return []
        event = TransferEvent(request.transfer, NoticeKind.MISMATCHED, request.reader)
        return [
            RefuseRead(request.peer, request.read_id, FailureCause.PROMPT, detail),
            ReportNotice(event._replace(detail=detail)),
        ]

    def serves(self, rank: Rank) -> bool:
        """Whether a reader of this rank is being served, or was."""
        kept = (TransferState.MOVING, TransferState.COMPLETE)
        return any(r.request.reader == rank and r.state in kept for r in self.readers.values())

    def is_for_next(self, peer: int, rank: Rank) -> bool:
        """Whether a reader that asks or declines means the transfer that follows under this id: it
        has answered for this one. It means this one while another peer of its rank reads it."""
        others = (r.request for r in self.moving() if r.request.peer != peer)
        known = self.reusable and rank in self.answered
        return known and all(request.reader != rank for request in others)

    def moving(self) -> list[ServedRead]:
        """Return the readers that are being served."""
        return [reader for reader in self.readers.values() if reader.state is TransferState.MOVING]

    def withdraw(self, cause: FailureCause) -> list[Action]:
        """Stop every reader."""
        self.cause = cause
        actions: list[Action] = []
        for reader in self.readers.values():
            if reader.state is TransferState.MOVING:
                detail = "the prefill engine releases the blocks"
                actions.append(
                    RefuseRead(reader.request.peer, reader.request.read_id, cause, detail)
                )
            if reader.state in (TransferState.MOVING, TransferState.COMPLETE):
                actions += reader.stop()
        return actions


@dataclass(eq=False)
class StepWrites:
    """The blocks that the engine's current step writes."""

    pending: list[tuple[OfferedTransfer, Span]] = field(default_factory=list)
    written: dict[tuple[int, int], Any] = field(default_factory=dict)  # (group, layer) -> fence

    def write_layer(self, group: int, layer: int, fence: Any) -> list[Action]:
        """One layer of all pending blocks can be read once ``fence`` has passed."""
        self.written[group, layer] = fence
        return [
            action
            for offered, span in self.pending
            if span.group == group
            for reader in offered.moving()
            for action in isolated(
                reader.request.peer, partial(reader.send_layer, span, layer, fence)
            )
        ]

    def catch_up(self, offered: OfferedTransfer, reader: ServedRead) -> list[Action]:
        """Send a new reader the layers that are written already."""
        return [
            action
            for owner, span in self.pending
            if owner is offered
            for (group, layer), fence in self.written.items()
            if group == span.group
            for action in reader.send_layer(span, layer, fence)
        ]

    def write_rest(self, layers: Sequence[int], fence: Any) -> list[Action]:
        """All layers of the step can be read once ``fence`` has passed. ``layers``: how many this
        worker has, by group."""
        actions: list[Action] = []
        for offered, span in self.pending:
            rest = [n for n in range(layers[span.group]) if (span.group, n) not in self.written]
            for reader in offered.moving():
                if len(rest) == layers[span.group]:
                    work = partial(reader.send_all, span, fence)
                else:
                    work = partial(_send_layers, reader, span, rest, fence)
                actions += isolated(reader.request.peer, work)
            offered.add(span, fence)
        return actions


def _send_layers(reader: ServedRead, span: Span, layers: Sequence[int], fence: Any) -> list[Action]:
    return [action for layer in layers for action in reader.send_layer(span, layer, fence)]


def check_read(request: AcceptedRead, last_read_id: int) -> None:
    """Check the id and the parts of a peer's read request.

    Raises:
        ProtocolError: the id is not above ``last_read_id``, or a part is not one the peer may read.
    """
    if request.read_id <= last_read_id:
        raise ProtocolError(f"read request {request.read_id} does not follow {last_read_id}")
    previous = -1
    for group, first, count in request.parts:
        if group not in request.views or group <= previous or first < 0 or count <= 0:
            part = f"group {group}, blocks {first} + {count}"
            raise ProtocolError(f"read request {request.read_id} has an invalid part: {part}")
        previous = group
    if previous < 0:
        raise ProtocolError(f"read request {request.read_id} names no blocks")
