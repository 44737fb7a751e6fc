"""What a prefill worker's side of hand-offs is made of: readers, transfers, the current step.

:mod:`kvconnect.disaggregation.sender` puts them together and explains the rules.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvconnect.disaggregation.states import TRANSFER, Event, TransferState
from kvconnect.errors import Misuse, ProtocolError, contained
from kvconnect.offload.messages import NoticeKind, TransferEvent
from kvconnect.types import FailureCause, Rank, Span, TransferId


class GroupView(NamedTuple):
    """How this worker and a peer number one group's units.

    ``ratio``: wire blocks per block here. ``unit_all``: the unit of all layers that the two
    share. ``unit_of_layer[i]``: the unit of this worker's layer i, -1 if the peer has no part in
    it. The wire block w of block b has the id ``b * ratio + w``.
    """

    ratio: int
    unit_all: int
    unit_of_layer: tuple[int, ...]


class AcceptedRead(NamedTuple):
    """A reader's want. ``views`` by group; groups that the two do not share are missing.
    ``parts``: (group, first wire block, count), groups ascending. ``early``: the transfer may not
    be known here yet."""

    peer: int
    want: int
    transfer: TransferId
    early: bool
    reader: Rank
    views: Mapping[int, GroupView]
    parts: Sequence[tuple[int, int, int]]


# What to do ---------------------------------------------------------------------------------


class SendPages(NamedTuple):
    """Submit an ``Outgoing``: wire blocks ``first ...`` of unit ``number`` at wire-block ids
    ``ids``, once ``fence`` has passed. ``sent`` is to be called for each."""

    peer: int
    want: int
    group: int
    number: int
    first: int
    ids: array[int]
    fence: Any


class CancelRead(NamedTuple):
    """Cancel a want at the transport; ``quiet`` follows."""

    peer: int
    want: int


class Refuse(NamedTuple):
    """Tell a reader that its want is not, or no longer, served."""

    peer: int
    want: int
    cause: FailureCause
    detail: str


class StillThere(NamedTuple):
    """Tell a reader that these wants are being worked on."""

    peer: int
    wants: tuple[int, ...]


class AllReady(NamedTuple):
    """Tell a reader that the last of what it wants has been computed and is on its way."""

    peer: int
    want: int


class Tell(NamedTuple):
    """Report a notice to the scheduler."""

    notice: TransferEvent


class Served(NamedTuple):
    """A reader has everything and nothing of it is in flight any more: report the notice, with
    what was moved for the want."""

    peer: int
    want: int
    notice: TransferEvent


class Break(NamedTuple):
    """End a peer's connection: what it asked for raised an error that nobody foresaw."""

    peer: int
    error: Exception


Action = SendPages | CancelRead | Refuse | StillThere | AllReady | Tell | Served | Break


def guarded(peer: int, work: Callable[[], list[Action]]) -> list[Action]:
    """Work for one peer, on a thread that works for others too: the engine's, for instance. An
    error ends that peer's connection, and nothing else."""
    actions: list[Action] = []
    with contained(lambda error: actions.append(Break(peer, error))):
        actions += work()
    return actions


# Who is served what -------------------------------------------------------------------------


def wire_ids(span: Span, ratio: int, first: int, stop: int) -> array[int]:
    """Return the ids of the wire blocks [first, stop) of a span whose blocks have ``ratio``."""
    begin, end = first // ratio, -(-stop // ratio)
    blocks = span.block_ids[begin - span.first : end - span.first]
    if ratio == 1:
        return blocks
    ids = array("q", [block * ratio + phase for block in blocks for phase in range(ratio)])
    return ids[first - begin * ratio : stop - begin * ratio]


@dataclass(eq=False)
class ServedRead:
    """One want that is, or was, served."""

    ask: AcceptedRead
    state: TransferState = TRANSFER.start
    left: int = 0  # wire blocks, once per layer, that were not submitted yet
    in_flight: int = 0  # orders submitted and not sent
    moved: bool = False  # something was sent since the last heartbeat

    def start(self) -> Tell:
        self.state = TRANSFER.after(self.state, Event.STARTED)
        self.left = sum(
            count * len(self._units(group, view.unit_all))
            for group, _, count in self.ask.parts
            for view in (self.ask.views[group],)
        )
        group, first, _ = self.ask.parts[0]
        block = 0 if group else first // self.ask.views[group].ratio
        return Tell(TransferEvent(self.ask.transfer, NoticeKind.JOINED, self.ask.reader, block))

    def send(self, span: Span, number: int, fence: Any) -> list[Action]:
        """Submit what the reader wants of a span, in one unit; -1 is of no layer it takes."""
        for group, first, count in self.ask.parts if number >= 0 else ():
            if group == span.group:
                ratio = self.ask.views[group].ratio
                start = max(first, span.first * ratio)
                stop = min(first + count, (span.first + len(span.block_ids)) * ratio)
                if start < stop:
                    self.left -= (stop - start) * len(self._units(group, number))
                    self.in_flight += 1
                    ids = wire_ids(span, ratio, start, stop)
                    peer, want = self.ask.peer, self.ask.want
                    pages = SendPages(peer, want, group, number, start, ids, fence)
                    return [pages] if self.left else [pages, AllReady(peer, want)]
        return []

    def send_all(self, span: Span, fence: Any) -> list[Action]:
        """Submit a span's blocks in all layers at once."""
        view = self.ask.views.get(span.group)
        return [] if view is None else self.send(span, view.unit_all, fence)

    def send_layer(self, span: Span, layer: int, fence: Any) -> list[Action]:
        """Submit one of this worker's layers."""
        view = self.ask.views.get(span.group)
        return [] if view is None else self.send(span, view.unit_of_layer[layer], fence)

    def stop(self) -> list[Action]:
        """Begin nothing new; cancel what is under way."""
        self.state = TRANSFER.after(self.state, Event.ABORT)
        if self.in_flight:
            return [CancelRead(self.ask.peer, self.ask.want)]
        self.state = TRANSFER.after(self.state, Event.QUIET)
        return []

    def sent(self, in_flight: int) -> None:
        """Some of it has left; ``in_flight`` orders have not."""
        self.in_flight = in_flight
        self.moved = True
        if self.state is TransferState.STOPPING and not in_flight:
            self.state = TRANSFER.after(self.state, Event.QUIET)

    def served(self) -> list[Action]:
        """Say so once the reader has everything and the last of it has left: its word may be
        faster than that of our own sockets."""
        if self.state is not TransferState.COMPLETE or self.in_flight:
            return []
        notice = TransferEvent(self.ask.transfer, NoticeKind.DONE, self.ask.reader)
        return [Served(self.ask.peer, self.ask.want, notice)]

    def tell(self, kind: NoticeKind) -> Tell:
        return Tell(TransferEvent(self.ask.transfer, kind, self.ask.reader))

    def _units(self, group: int, number: int) -> list[int]:
        """Return the units of the layers that a unit is made of."""
        view = self.ask.views[group]
        return [u for u in view.unit_of_layer if u >= 0] if number == view.unit_all else [number]


@dataclass(eq=False)
class Known:
    """A transfer that was announced here."""

    ready: dict[int, tuple[Span, Any]] = field(default_factory=dict)  # by group, with the fence
    readers: dict[tuple[int, int], ServedRead] = field(default_factory=dict)  # by peer and want
    cause: FailureCause | None = None  # why it is withdrawn

    def add(self, span: Span, fence: Any) -> None:
        """All layers of a span can be read once ``fence`` has passed, as can earlier spans.

        Raises:
            Misuse: it does not follow on the group's earlier spans.
        """
        before, _ = self.ready.get(span.group, (Span(span.group, span.first, array("q")), None))
        if span.first != before.first + len(before.block_ids):
            raise Misuse(f"group {span.group}: blocks from {span.first} on are offered out of turn")
        before.block_ids.extend(span.block_ids)
        self.ready[span.group] = before, fence

    def serves(self, rank: Rank) -> bool:
        """Whether that reader is being served, or was."""
        kept = (TransferState.MOVING, TransferState.COMPLETE)
        return any(r.ask.reader == rank and r.state in kept for r in self.readers.values())

    def moving(self) -> list[ServedRead]:
        """Return the readers that are being served."""
        return [reader for reader in self.readers.values() if reader.state is TransferState.MOVING]

    def withdraw(self, cause: FailureCause) -> list[Action]:
        """Stop every reader."""
        self.cause = cause
        actions: list[Action] = []
        for reader in self.readers.values():
            if reader.state is TransferState.MOVING:
                detail = "the prefill side gives the blocks up"
                actions.append(Refuse(reader.ask.peer, reader.ask.want, cause, detail))
            if reader.state in (TransferState.MOVING, TransferState.COMPLETE):
                actions += reader.stop()
        return actions


@dataclass(eq=False)
class Step:
    """What the current step of the engine writes."""

    pending: list[tuple[Known, Span]] = field(default_factory=list)
    written: dict[tuple[int, int], Any] = field(default_factory=dict)  # (group, layer) -> fence

    def write_layer(self, group: int, layer: int, fence: Any) -> list[Action]:
        """One layer of all pending blocks can be read once ``fence`` has passed."""
        self.written[group, layer] = fence
        return [
            action
            for known, span in self.pending
            if span.group == group
            for reader in known.moving()
            for action in guarded(reader.ask.peer, partial(reader.send_layer, span, layer, fence))
        ]

    def catch_up(self, known: Known, reader: ServedRead) -> list[Action]:
        """Send a new reader the layers that are written already."""
        return [
            action
            for owner, span in self.pending
            if owner is known
            for (group, layer), fence in self.written.items()
            if group == span.group
            for action in reader.send_layer(span, layer, fence)
        ]

    def write_rest(self, layers: Sequence[int], fence: Any) -> list[Action]:
        """All of it can be read once ``fence`` has passed; ``layers`` there are, by group."""
        actions: list[Action] = []
        for known, span in self.pending:
            rest = [n for n in range(layers[span.group]) if (span.group, n) not in self.written]
            for reader in known.moving():
                if len(rest) == layers[span.group]:
                    work = partial(reader.send_all, span, fence)
                else:
                    work = partial(_send_layers, reader, span, rest, fence)
                actions += guarded(reader.ask.peer, work)
            known.add(span, fence)
        return actions


def _send_layers(reader: ServedRead, span: Span, layers: Sequence[int], fence: Any) -> list[Action]:
    return [action for layer in layers for action in reader.send_layer(span, layer, fence)]


def check(ask: AcceptedRead, last_want: int) -> None:
    """Check what a peer asks for.

    Raises:
        ProtocolError: nothing that it may ask for.
    """
    if ask.want <= last_want:
        raise ProtocolError(f"want {ask.want} is not new")
    previous = -1
    for group, first, count in ask.parts:
        if group not in ask.views or group <= previous or first < 0 or count <= 0:
            raise ProtocolError(f"want {ask.want} asks for ({group}, {first}, {count})")
        previous = group
    if previous < 0:
        raise ProtocolError(f"want {ask.want} asks for nothing")
