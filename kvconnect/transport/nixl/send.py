"""The source's side of a NIXL path: writes pages to the reader's destinations."""

from __future__ import annotations

import threading
import time
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvconnect.bounded import remember
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
from kvconnect.transport.nixl.agent import NixlAgent, WriteDevices
from kvconnect.transport.nixl.descriptors import LocatedUnit, check_unit, paired, runs_of
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.nixl.writes import NixlWrite, WriteQueue
from kvconnect.transport.tcp.page_path import ConnectionContext

MAX_WRITE_BYTES = 32 << 20
MAX_WRITE_BLOCKS = 1 << 16  # their digests fit into one message
MAX_WRITE_RUNS = 1 << 18
_MAX_READS = 4096  # open reads of one reader
_MAX_ID_BYTES = 64 << 20  # block ids of all these reads
_MAX_SEGMENT_BYTES = 64 << 20
_MAX_STOPPED = 4096


class _Span(NamedTuple):
    place: LocatedUnit
    first: int
    ids: array[int]


@dataclass(eq=False)
class _OutboundRead:
    spans: list[_Span] | None = None  # None until the reader has sent its destinations
    over_tcp: bool = False
    stopped: bool = False  # by the reader
    cancelled: bool = False  # by this side
    id_bytes: int = 0
    busy: int = 0  # writes in preparation or under way
    held: list[OutgoingPages] = field(default_factory=list)
    waits: ExitStack = field(default_factory=ExitStack)  # deadline for the reader's destinations


@dataclass(eq=False)
class _WriteRequest:
    read: _OutboundRead
    order: OutgoingPages
    left: int = 1  # writes that have not ended
    nbytes: int = 0  # written so far
    started: float = 0.0


class OutboundWrites:
    """Writes one peer's pages into its memory. Thread-safe. No events after ``close``."""

    def __init__(self, context: ConnectionContext, worker: NixlWorker) -> None:
        self._context = context
        self._worker = worker
        self._period = 0
        self._lock = threading.Lock()
        self._closed = False
        self._reads: dict[int, _OutboundRead] = {}
        self._stopped: dict[int, None] = {}  # reads that the reader stopped, oldest first
        self._units: dict[int, list[LocatedUnit]] = {}
        self._segment_bytes = 0
        self._writes = WriteQueue(context, worker)

    def settle(self, theirs: NixlOffer, period: int) -> None:
        """Set the reader's offer and the agreed digest period; called before all else."""
        self._writes.theirs = theirs
        self._period = period

    def send(self, order: OutgoingPages) -> None:
        """Write pages once the reader has sent their destinations."""
        if not order.ids:
            raise Misuse(f"nothing to send: {order}")
        with self._lock:
            if self._closed:
                return
            if order.read_id in self._stopped:
                self._context.events.put(PagesSent(self._context.peer, order.read_id, 0, 0.0))
                return
            read = self._reads.setdefault(order.read_id, _OutboundRead())
            if read.spans is None and not read.over_tcp:
                if not read.held:
                    read.waits.enter_context(self._context.watch.over(order.read_id, 0))
                read.held.append(order)
                return
            read.busy += not read.over_tcp
        self._submit(read, order)

    def cancel(self, number: int) -> None:
        """Drop the queued orders of a read; ``Drained`` follows."""
        with self._lock:
            if self._closed:
                return
            read = self._reads.get(number)
            if read is not None:
                read.held.clear()
                read.waits.close()
                read.cancelled = True
                if not (read.over_tcp or read.busy):
                    self._context.events.put(Drained(self._context.peer, number))
        if read is None or read.over_tcp:  # None: perhaps a TCP read that the reader stopped
            self._context.tcp.cancel(number)

    def on_units(self, message: UnitLocations) -> None:
        """Add units that the reader describes; raises :class:`ProtocolError` if invalid."""
        known = self._units.setdefault(message.number, [])
        self._segment_bytes += sum(len(unit.segments) for unit in message.units)
        too_many = len(known) + len(message.units) > MAX_UNITS
        if message.first != len(known) or too_many or self._segment_bytes > _MAX_SEGMENT_BYTES:
            raise ProtocolError(f"units from {message.first} on, after {len(known)} others")
        known += map(_locate, message.units)

    def on_places(self, message: Destinations) -> None:
        """Start a read with its destinations; raises :class:`ProtocolError` if they are invalid."""
        places = self._units.get(message.units)
        if places is None or len(places) != len(message.spans):
            raise ProtocolError(f"{len(message.spans)} spans of units number {message.units}")
        if any(len(ids) % 8 for ids in message.ids):
            raise ProtocolError("block numbers that are cut off")
        lists = [array("q", ids) for ids in message.ids]
        if max(index for _, index in message.spans) >= len(lists):
            raise ProtocolError(f"a span that is not among {len(lists)}")
        self._answer(
            message.read_id,
            [
                _Span(place, first, lists[index])
                for place, (first, index) in zip(places, message.spans, strict=True)
            ],
            sum(map(len, message.ids)),
        )

    def on_use_tcp(self, number: int) -> None:
        """Start a read over the TCP data connections."""
        self._answer(number, None, 0)

    def on_stop(self, number: int) -> None:
        """Stop a read; tell the reader once no write of it is under way."""
        with self._lock:
            remember(self._stopped, number, None, _MAX_STOPPED)
            read = self._reads.get(number)
            if read is not None:
                read.stopped = True
                read.waits.close()
                held, read.held = read.held, []
                for _ in held:
                    self._context.events.put(PagesSent(self._context.peer, number, 0, 0.0))
                if read.busy:
                    return
                del self._reads[number]
        self._context.say(WritesStopped(read_id=number))

    def end(self, agent: NixlAgent) -> None:
        """End the writes under way. For the agent's thread."""
        self._writes.end(agent)

    def close(self) -> None:
        """Drop all reads."""
        with self._lock:
            self._closed = True
            for read in self._reads.values():
                read.waits.close()
            self._reads.clear()

    def _answer(self, number: int, spans: list[_Span] | None, id_bytes: int) -> None:
        with self._lock:
            if number in self._stopped or self._closed:
                return
            read = self._reads.setdefault(number, _OutboundRead())
            if read.spans is not None or read.over_tcp or len(self._reads) > _MAX_READS:
                raise ProtocolError(f"places of read {number}, of {len(self._reads)}")
            if sum(each.id_bytes for each in self._reads.values()) + id_bytes > _MAX_ID_BYTES:
                raise ProtocolError(f"{id_bytes} bytes of block numbers, and many before")
            read.id_bytes = id_bytes
            read.spans, read.over_tcp = spans, spans is None
            read.waits.close()
            held, read.held = read.held, []
            read.busy += 0 if read.over_tcp else len(held)
            if read.over_tcp:  # under the lock, so that no cancel comes in between
                for order in held:
                    self._context.tcp.submit(order)
                return
        for order in held:
            self._submit(read, order)

    def _submit(self, read: _OutboundRead, order: OutgoingPages) -> None:
        """Submit an order. Unless it goes over TCP, it is already counted in ``busy``."""
        if read.over_tcp:
            self._context.tcp.submit(order)
            return
        work = partial(self._prepare, _WriteRequest(read, order))
        self._worker.prepare(work, self._context.fail)

    def _prepare(self, request: _WriteRequest) -> None:
        """Compute an order's writes and queue them, once its fence has passed."""
        order, spans = request.order, request.read.spans
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
            request.left = len(starts)
            request.read.busy += len(starts) - 1
        here = LocatedUnit(order.unit, self._context.pages().region_of(order.unit))
        dropped = partial(self._dropped, request.read)
        for at in starts:
            ids = order.ids[at : at + step]
            write = NixlWrite(
                order=order,
                first=order.first + at,
                count=len(ids),
                pieces=paired(runs_of(here, ids), runs_of(span.place, there[at : at + step])),
                devices=WriteDevices(here.area.device, span.place.area.device),
                digests=self._context.digests(
                    order.unit, order.number, order.first + at, ids, self._period, dropped
                ),
                dropped=dropped,
                on_done=partial(self._finish, request, len(ids)),
            )
            self._worker.call(partial(self._writes.start, write))

    def _dropped(self, read: _OutboundRead) -> bool:
        return self._closed or read.stopped or read.cancelled

    def _finish(self, request: _WriteRequest, count: int, started: float | None) -> None:
        read, number = request.read, request.order.read_id
        with self._lock:
            read.busy -= 1
            request.left -= 1
            if started is not None:
                request.started = request.started or started
                request.nbytes += count * request.order.unit.block_bytes
            if self._closed:
                return
            if not (request.left or read.cancelled):
                seconds = time.perf_counter() - request.started if request.started else 0.0
                self._context.events.put(
                    PagesSent(self._context.peer, number, request.nbytes, seconds)
                )
            if read.busy:
                return
            if read.cancelled:
                self._context.events.put(Drained(self._context.peer, number))
            if read.stopped:
                del self._reads[number]  # only once: a stopped read gets no new writes
        if read.stopped:
            self._context.say(WritesStopped(read_id=number))


def _blocks_per_write(here: Unit, there: Unit) -> int:
    runs = sum(len(unit.segments) // (3 * unit.phases) for unit in (here, there))
    step = min(MAX_WRITE_BYTES // here.block_bytes, MAX_WRITE_RUNS // runs, MAX_WRITE_BLOCKS)
    return max(1, step)


def _locate(unit: UnitLocation) -> LocatedUnit:
    """Return the place of a reader's unit; raises :class:`ProtocolError` if it is invalid."""
    if len(unit.segments) % 8:
        raise ProtocolError(f"{len(unit.segments)} bytes of segments")
    area = MemoryRegion(unit.address, unit.nbytes, unit.device)
    segments = array("q", unit.segments)
    place = LocatedUnit(Unit(segments, unit.phases, unit.block_bytes), area)
    check_unit(place)
    return place
