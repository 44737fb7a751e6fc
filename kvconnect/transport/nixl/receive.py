"""The reader's side of a NIXL path: destinations, completed writes and the end of writes."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvconnect.bounded import remember
from kvconnect.errors import ProtocolError, TransferFailed
from kvconnect.protocol import nixl_messages
from kvconnect.protocol.codec import MAX_MESSAGE
from kvconnect.protocol.frames import DIGEST_BYTES, digested
from kvconnect.protocol.nixl_messages import (
    Destinations,
    PagesWritten,
    StopWriting,
    UnitLocation,
    UnitLocations,
    UseTcp,
)
from kvconnect.transport.base import Drained, IncomingPages, PagesReceived, Unit
from kvconnect.transport.nixl.agent import NixlAgent
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.tcp.page_path import ConnectionContext

_MAX_ENDED = 4096  # far more than end within the round trip that tells the source


@dataclass(eq=False)
class _InboundRead:
    order: IncomingPages
    left: int  # wire blocks that may still be written
    over_tcp: bool = False
    placed: bool = False  # the source knows the destinations and may write
    ended: bool = False  # cancelled here: it produces no more events
    stopped: bool = False  # the source will not write to it any more
    busy: int = 0  # complete writes that are not verified yet
    waits: ExitStack = field(default_factory=ExitStack)  # deadline for the answer to a cancel

    @property
    def exposed(self) -> bool:
        """Whether the source may write now."""
        return self.placed and not self.over_tcp and not self.stopped


class InboundWrites:
    """Reads whose pages a peer writes into this memory. Thread-safe. No events after ``close``."""

    def __init__(self, context: ConnectionContext, worker: NixlWorker) -> None:
        self._context = context
        self._worker = worker
        self._period = 0
        self._lock = threading.Lock()
        self._closed = False
        self._reads: dict[int, _InboundRead] = {}
        self._ended: dict[int, None] = {}  # cancelled reads, oldest first
        self._last_path = ""  # of the last order
        self._agent_lost = ""  # why the source has no agent to write to any more
        # For the worker's second thread: lists of units, and whether they were sent to the source.
        self._units: list[tuple[Sequence[Unit], bool]] = []

    def settle(self, period: int) -> None:
        """Set the agreed digest period; called before all else."""
        self._period = period

    def expect(self, order: IncomingPages) -> None:
        """Accept the pages of a read, and tell the source where they go."""
        read = _InboundRead(
            order, sum(len(ids) for _, ids in order.spans), over_tcp=order.path == "tcp"
        )
        with self._lock:
            if self._closed:
                return
            if self._agent_lost and not read.over_tcp:
                self._context.fail(self._agent_lost)
                return
            self._last_path = order.path
            self._reads[order.read_id] = read
        if read.over_tcp:
            self._tell_source(read, None)
        else:
            self._worker.prepare(partial(self._send_destinations, read), self._context.fail)

    def cancel(self, number: int) -> bool:
        """End a read; ``Drained`` follows. Return False if the read is not known."""
        with self._lock:
            read = self._reads.get(number)
            if read is None or read.ended or self._closed:
                return read is not None
            read.ended = True
            remember(self._ended, number, None, _MAX_ENDED)
            read.stopped = not read.exposed
            if not read.stopped:
                read.waits.enter_context(self._context.watch.over(number, 0))
                self._context.watch.shorten(number)
        if read.over_tcp:
            self._context.tcp.cancel(number)
        # Sent even if the source has no destinations, so that it drops the orders it holds.
        self._context.say(StopWriting(read_id=number))
        self._report_drained(read)
        return True

    def on_stopped(self, number: int) -> None:
        """Record that the source stopped a read; :class:`ProtocolError` if nobody asked it to."""
        with self._lock:
            read = self._reads.get(number)
            if read is None:
                return  # the source had no destinations for it
            if not read.ended:
                raise ProtocolError(f"read {number} stopped, which was not asked for")
            read.stopped = True
        self._report_drained(read)

    def on_written(self, written: PagesWritten) -> None:
        """Accept a complete write; it is verified once NIXL's notification has arrived.

        Raises:
            ProtocolError: these pages were not requested.
        """
        with self._lock:
            read = self._reads.get(written.read_id)
            if read is None:
                if written.read_id not in self._ended:
                    raise ProtocolError(f"pages of read {written.read_id}, which is not known here")
                return
            if read.over_tcp or not read.placed:
                raise ProtocolError(f"pages of read {written.read_id}, which has no place yet")
            self._check(read.order, written)
            read.left -= written.count
            if read.left < 0:
                raise ProtocolError(f"more pages of read {written.read_id} than were asked for")
            read.busy += 1
        waiting = ExitStack()
        waiting.enter_context(self._context.watch.over(written.read_id, 0))
        self._worker.call(
            lambda _: self._worker.watch(partial(self._check_notification, read, written, waiting))
        )

    def on_agent_lost(self, reason: str) -> bool:
        """The agent that the source writes to has ended. Return whether the connection can do
        without it: its pages go over TCP. The next order for NIXL ends the connection."""
        with self._lock:
            uses = any(not read.over_tcp for read in self._reads.values())
            if uses or self._last_path != "tcp":
                return False
            self._agent_lost = reason
            return True

    def close(self) -> bool:
        """End all reads; return whether the source may still write to one."""
        with self._lock:
            self._closed = True
            reads, self._reads = self._reads, {}
        for read in reads.values():
            read.waits.close()
        return any(read.exposed for read in reads.values())

    def _send_destinations(self, read: _InboundRead) -> None:
        """Send a read's destinations to the source, once its fence has passed."""
        order = read.order
        if order.fence:
            order.fence.wait()
        number = self._number_of(order.units)
        if number is None:
            self._tell_source(read, None)
            return
        chosen: dict[bytes, int] = {}
        spans = [
            (first, chosen.setdefault(ids.tobytes(), len(chosen))) for first, ids in order.spans
        ]
        places = Destinations(read_id=order.read_id, units=number, spans=spans, ids=list(chosen))
        fits = len(nixl_messages.encode(places)) <= MAX_MESSAGE
        self._tell_source(read, places if fits else None)

    def _tell_source(self, read: _InboundRead, places: Destinations | None) -> None:
        """Let the source send a read: to ``places``, or over TCP if there are none."""
        with self._lock:
            if read.ended or self._closed:
                return
            read.placed, read.over_tcp = True, places is None
            if read.over_tcp:  # under the lock, so that no cancel comes in between
                self._context.tcp.submit(read.order)
        self._context.say(places or UseTcp(read_id=read.order.read_id))

    def _number_of(self, units: Sequence[Unit]) -> int | None:
        """Return the number of a list of units, which is sent to the source first if it is new.
        None if it is too long, or one list too many."""
        for number, (known, told) in enumerate(self._units):
            if known is units or known == units:
                return number if told else None
        number = len(self._units)
        if number == nixl_messages.MAX_UNIT_LISTS:
            return None
        notes = [
            UnitLocations(number=number, first=first, units=[self._describe(unit)])
            for first, unit in enumerate(units)
        ]
        told = all(len(nixl_messages.encode(note)) <= MAX_MESSAGE for note in notes)
        self._units.append((units, told))
        for note in notes if told else ():
            self._context.say(note)
        return number if told else None

    def _describe(self, unit: Unit) -> UnitLocation:
        area = self._context.pages().region_of(unit)
        return UnitLocation(
            address=area.address,
            nbytes=area.nbytes,
            device=area.device,
            phases=unit.phases,
            block_bytes=unit.block_bytes,
            segments=unit.segments.tobytes(),
        )

    def _check(self, order: IncomingPages, written: PagesWritten) -> None:
        if written.unit >= len(order.units):
            raise ProtocolError(
                f"unit {written.unit} of read {written.read_id}, of {len(order.units)}"
            )
        first, ids = order.spans[written.unit]
        start, size = written.first - first, order.units[written.unit].block_bytes
        if start < 0 or start + written.count > len(ids):
            raise ProtocolError(
                f"blocks outside what was asked for: {written.read_id, written.first}"
            )
        blocks = digested(written.first, written.count, written.unit, self._period)
        if (written.nbytes, len(written.digests)) != (
            written.count * size,
            len(blocks) * DIGEST_BYTES,
        ):
            raise ProtocolError(
                f"{written.nbytes} bytes for {written.count} blocks of {size} bytes"
            )

    def _check_notification(
        self, read: _InboundRead, written: PagesWritten, waiting: ExitStack, agent: NixlAgent
    ) -> bool:
        if self._closed:
            waiting.close()
            return True
        try:
            if not agent.take_notification(
                self._context.session, self._context.notification(written.number)
            ):
                return False
        except TransferFailed as error:
            self._context.fail(str(error))
            return True
        waiting.close()
        self._worker.prepare(partial(self._verify, read, written), self._context.fail)
        return True

    def _verify(self, read: _InboundRead, written: PagesWritten) -> None:
        order, number = read.order, written.unit
        first, ids = order.spans[number]
        ids = ids[written.first - first : written.first - first + written.count]
        bad: tuple[int, ...] = ()
        if not read.ended and written.digests:
            unit = order.units[number]
            ours = self._context.digests(
                unit, number, written.first, ids, self._period, lambda: read.ended or self._closed
            )
            bad = _differing(written, ours, self._period) if ours else ()
        with self._lock:
            read.busy -= 1
            if not (read.ended or self._closed):
                self._context.events.put(
                    PagesReceived(
                        self._context.peer,
                        written.read_id,
                        number,
                        written.first,
                        written.count,
                        bad,
                        written.nbytes,
                        written.seconds,
                    )
                )
        self._report_drained(read)

    def _report_drained(self, read: _InboundRead) -> None:
        number = read.order.read_id
        with self._lock:
            over = read.ended and read.stopped and not read.busy
            if not over or self._reads.get(number) is not read:
                return
            del self._reads[number]
            read.waits.close()
            if not (self._closed or read.over_tcp):  # the TCP path reports that itself
                self._context.events.put(Drained(self._context.peer, number))


def _differing(written: PagesWritten, ours: bytes, period: int) -> tuple[int, ...]:
    blocks = digested(written.first, written.count, written.unit, period)
    pairs = zip(array("Q", ours), array("Q", written.digests), strict=True)
    return tuple(block for block, (a, b) in zip(blocks, pairs, strict=True) if a != b)
