"""The source's half of a NIXL path: writes pages to where the reader said."""

from __future__ import annotations

import threading
import time
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvconnect.errors import Misuse, ProtocolError
from kvconnect.protocol.nixl_messages import (
    MAX_UNITS,
    Destinations,
    NixlOffer,
    UnitLocation,
    UnitLocations,
    WritesStopped,
)
from kvconnect.transport.base import Drained, MemoryRegion, OutgoingPages, PagesSent, Unit
from kvconnect.transport.nixl.agent import NixlAgent
from kvconnect.transport.nixl.descriptors import LocatedUnit, check_unit, paired, runs_of
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.nixl.writes import NixlWrite, WriteQueue
from kvconnect.transport.tcp.context import ConnectionContext

MAX_WRITE_BYTES = 32 << 20
MAX_WRITE_BLOCKS = 1 << 16  # whose digests fit into one message
MAX_WRITE_RUNS = 1 << 18
_MAX_WANTS = 4096  # of one reader
_MAX_ID_BYTES = 64 << 20  # of all its wants
_MAX_SEGMENT_BYTES = 64 << 20
_STOPPED_WANTS = 4096


class _Span(NamedTuple):
    place: LocatedUnit
    first: int
    ids: array[int]


@dataclass(eq=False)
class _OutboundRead:
    spans: list[_Span] | None = None  # once the reader has said where it goes
    plain: bool = False
    stopped: bool = False  # by the reader
    cancelled: bool = False  # here
    id_bytes: int = 0
    busy: int = 0  # writes that are prepared or under way
    held: list[OutgoingPages] = field(default_factory=list)
    waits: ExitStack = field(default_factory=ExitStack)  # for the reader's word


@dataclass(eq=False)
class _WriteRequest:
    want: _OutboundRead
    order: OutgoingPages
    left: int = 1  # writes
    nbytes: int = 0  # that were written
    started: float = 0.0


class OutboundWrites:
    """Thread-safe. After ``close`` there are no events."""

    def __init__(self, line: ConnectionContext, mover: NixlWorker) -> None:
        self._line = line
        self._mover = mover
        self._period = 0
        self._lock = threading.Lock()
        self._closed = False
        self._wants: dict[int, _OutboundRead] = {}
        self._stopped: dict[int, None] = {}  # oldest first
        self._units: dict[int, list[LocatedUnit]] = {}
        self._segment_bytes = 0
        self._writes = WriteQueue(line, mover)

    def settle(self, theirs: NixlOffer, period: int) -> None:
        """Set whom to write to and the agreed digest period; before anything else."""
        self._writes.theirs = theirs
        self._period = period

    def send(self, order: OutgoingPages) -> None:
        """Write pages once the reader has said where."""
        if not order.ids:
            raise Misuse(f"nothing to send: {order}")
        with self._lock:
            if self._closed:
                return
            if order.want in self._stopped:
                self._line.events.put(PagesSent(self._line.peer, order.want, 0, 0.0))
                return
            want = self._wants.setdefault(order.want, _OutboundRead())
            if want.spans is None and not want.plain:
                if not want.held:
                    want.waits.enter_context(self._line.watch.over(order.want, 0))
                want.held.append(order)
                return
            want.busy += not want.plain
        self._go(want, order)

    def cancel(self, number: int) -> None:
        """Drop what is queued for a want; ``Drained`` follows."""
        with self._lock:
            if self._closed:
                return
            want = self._wants.get(number)
            if want is not None:
                want.held.clear()
                want.waits.close()
                want.cancelled = True
                if not (want.plain or want.busy):
                    self._line.events.put(Drained(self._line.peer, number))
        if want is None or want.plain:  # the reader may have ended a plain one already
            self._line.cancel_plain(number)

    def on_units(self, message: UnitLocations) -> None:
        """The reader describes a list of units; raises :class:`ProtocolError` if it cannot be."""
        known = self._units.setdefault(message.number, [])
        self._segment_bytes += sum(len(unit.segments) for unit in message.units)
        too_many = len(known) + len(message.units) > MAX_UNITS
        if message.first != len(known) or too_many or self._segment_bytes > _MAX_SEGMENT_BYTES:
            raise ProtocolError(f"units from {message.first} on, after {len(known)} others")
        known += map(_place, message.units)

    def on_places(self, message: Destinations) -> None:
        """The reader says where a want goes; raises :class:`ProtocolError` if it cannot be."""
        places = self._units.get(message.units)
        if places is None or len(places) != len(message.spans):
            raise ProtocolError(f"{len(message.spans)} spans of units number {message.units}")
        if any(len(ids) % 8 for ids in message.ids):
            raise ProtocolError("block numbers that are cut off")
        lists = [array("q", ids) for ids in message.ids]
        if max(index for _, index in message.spans) >= len(lists):
            raise ProtocolError(f"a span that is not among {len(lists)}")
        self._answer(
            message.want,
            [
                _Span(place, first, lists[index])
                for place, (first, index) in zip(places, message.spans, strict=True)
            ],
            sum(map(len, message.ids)),
        )

    def on_plain(self, number: int) -> None:
        """The reader wants this over the data connections."""
        self._answer(number, None, 0)

    def on_stop(self, number: int) -> None:
        """The reader wants no more of this: say when nothing can land any more."""
        with self._lock:
            self._stopped[number] = None
            if len(self._stopped) > _STOPPED_WANTS:
                del self._stopped[next(iter(self._stopped))]
            want = self._wants.get(number)
            if want is not None:
                want.stopped = True
                want.waits.close()
                held, want.held = want.held, []
                for _ in held:
                    self._line.events.put(PagesSent(self._line.peer, number, 0, 0.0))
                if want.busy:
                    return
                del self._wants[number]
        self._line.say(WritesStopped(want=number))

    def end(self, agent: NixlAgent) -> None:
        """Give up what is under way. For the mover's thread."""
        self._writes.end(agent)

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._closed = True
            for want in self._wants.values():
                want.waits.close()
            self._wants.clear()

    def _answer(self, number: int, spans: list[_Span] | None, id_bytes: int) -> None:
        with self._lock:
            if number in self._stopped or self._closed:
                return
            want = self._wants.setdefault(number, _OutboundRead())
            if want.spans is not None or want.plain or len(self._wants) > _MAX_WANTS:
                raise ProtocolError(f"places of want {number}, of {len(self._wants)}")
            if sum(each.id_bytes for each in self._wants.values()) + id_bytes > _MAX_ID_BYTES:
                raise ProtocolError(f"{id_bytes} bytes of block numbers, and many before")
            want.id_bytes = id_bytes
            want.spans, want.plain = spans, spans is None
            want.waits.close()
            held, want.held = want.held, []
            want.busy += 0 if want.plain else len(held)
        for order in held:
            self._go(want, order)

    def _go(self, want: _OutboundRead, order: OutgoingPages) -> None:
        """Hand an order on; it counts as busy already, unless it is plain."""
        if want.plain:
            self._line.plain(order)
            return
        work = partial(self._prepare, _WriteRequest(want, order))
        self._mover.prepare("launches", work, self._line.fail)

    def _prepare(self, shipment: _WriteRequest) -> None:
        """Work out the writes of an order, once the device has its pages."""
        order, spans = shipment.order, shipment.want.spans
        assert spans is not None
        if order.fence:
            order.fence.wait()
        if order.number >= len(spans):
            raise ProtocolError(f"unit {order.number}, the reader has {len(spans)}")
        span = spans[order.number]
        start, count = order.first - span.first, len(order.ids)
        there = span.ids[start : start + count]
        if start < 0 or len(there) < count:
            raise ProtocolError(f"blocks {order.first} on, the reader asked for others")
        if span.place.unit.block_bytes != order.unit.block_bytes:
            raise ProtocolError(f"blocks of {order.unit.block_bytes} bytes, the reader's differ")
        step = _blocks_per_write(order.unit, span.place.unit)
        starts = range(0, count, step)
        with self._lock:
            shipment.left = len(starts)
            shipment.want.busy += len(starts) - 1
        here = LocatedUnit(order.unit, self._line.pages().region_of(order.unit))
        for at in starts:
            ids = order.ids[at : at + step]
            write = NixlWrite(
                order=order,
                first=order.first + at,
                count=len(ids),
                pieces=paired(runs_of(here, ids), runs_of(span.place, there[at : at + step])),
                devices=(here.area.device, span.place.area.device),
                digests=self._line.digests(
                    order.unit, order.number, order.first + at, ids, self._period
                ),
                dropped=partial(self._dropped, shipment.want),
                over=partial(self._finish, shipment, len(ids)),
            )
            self._mover.call(partial(self._writes.start, write))

    def _dropped(self, want: _OutboundRead) -> bool:
        return self._closed or want.stopped or want.cancelled

    def _finish(self, shipment: _WriteRequest, count: int, started: float | None) -> None:
        want, number = shipment.want, shipment.order.want
        with self._lock:
            want.busy -= 1
            shipment.left -= 1
            if started is not None:
                shipment.started = shipment.started or started
                shipment.nbytes += count * shipment.order.unit.block_bytes
            if self._closed:
                return
            if not (shipment.left or want.cancelled):
                seconds = time.perf_counter() - shipment.started if shipment.started else 0.0
                self._line.events.put(PagesSent(self._line.peer, number, shipment.nbytes, seconds))
            if want.busy:
                return
            if want.cancelled:
                self._line.events.put(Drained(self._line.peer, number))
            if want.stopped:
                del self._wants[number]  # once: from then on nothing is sent for it
        if want.stopped:
            self._line.say(WritesStopped(want=number))


def _blocks_per_write(here: Unit, there: Unit) -> int:
    runs = sum(len(unit.segments) // (3 * unit.phases) for unit in (here, there))
    step = min(MAX_WRITE_BYTES // here.block_bytes, MAX_WRITE_RUNS // runs, MAX_WRITE_BLOCKS)
    return max(1, step)


def _place(unit: UnitLocation) -> LocatedUnit:
    """Return where the reader keeps a unit; raises :class:`ProtocolError` if that is nowhere."""
    if len(unit.segments) % 8:
        raise ProtocolError(f"{len(unit.segments)} bytes of segments")
    area = MemoryRegion(unit.address, unit.nbytes, unit.device)
    segments = array("q", unit.segments)
    place = LocatedUnit(Unit(segments, unit.phases, unit.block_bytes), area)
    check_unit(place)
    return place
