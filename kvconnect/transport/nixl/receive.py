"""The reader's half of a NIXL path: where reads go, what has landed, and when writes have ended."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvconnect.errors import ProtocolError, TransferFailed
from kvconnect.protocol import nixl_messages
from kvconnect.protocol.codec import DIGEST_BYTES, MAX_MESSAGE, digested
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
from kvconnect.transport.tcp.context import ConnectionContext

_MAX_ENDED = 4096  # the source learns of an end within a round trip; this is far more


@dataclass(eq=False)
class _InboundRead:
    order: IncomingPages
    left: int  # wire blocks that may still land
    plain: bool = False
    placed: bool = False  # the source was told where it goes: it may be written to
    ended: bool = False  # cancelled here: nothing of it is an event any more
    stopped: bool = False  # the source writes no more of it
    busy: int = 0  # writes that are complete but not yet looked at
    waits: ExitStack = field(default_factory=ExitStack)  # for the source's last word

    @property
    def exposed(self) -> bool:
        """Whether the source may write to its places now."""
        return self.placed and not self.plain and not self.stopped


class InboundWrites:
    """Thread-safe. After ``close`` there are no events."""

    def __init__(self, line: ConnectionContext, mover: NixlWorker) -> None:
        self._line = line
        self._mover = mover
        self._period = 0
        self._lock = threading.Lock()
        self._closed = False
        self._reads: dict[int, _InboundRead] = {}
        self._ended: dict[int, None] = {}  # oldest first
        # For the thread that prepares: lists of units by number, and whether the source has them.
        self._units: list[tuple[Sequence[Unit], bool]] = []

    def settle(self, period: int) -> None:
        """Set the agreed digest period; before anything else."""
        self._period = period

    def expect(self, order: IncomingPages) -> None:
        """Let pages of a read in."""
        read = _InboundRead(
            order, sum(len(ids) for _, ids in order.spans), plain=order.path == "tcp"
        )
        with self._lock:
            if self._closed:
                return
            self._reads[order.read_id] = read
        if read.plain:
            self._tell_place(read, None)
        else:
            self._mover.prepare("landings", partial(self._place, read), self._line.fail)

    def cancel(self, number: int) -> bool:
        """End a read; say False if there is none of that number. ``Drained`` follows."""
        with self._lock:
            read = self._reads.get(number)
            if read is None or read.ended or self._closed:
                return read is not None
            read.ended = True
            self._ended[number] = None
            if len(self._ended) > _MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            read.stopped = not read.exposed
            if not read.stopped:
                read.waits.enter_context(self._line.watch.over(number, 0))
        if read.plain:
            self._line.cancel_plain(number)
        self._line.say(
            StopWriting(want=number)
        )  # also of one without a place: its pages are not held
        self._fall_quiet(read)
        return True

    def on_stopped(self, number: int) -> None:
        """The source writes no more of a read."""
        with self._lock:
            read = self._reads.get(number)
            if read is None:
                return  # it had no place
            if not read.ended:
                raise ProtocolError(f"read {number} stopped, which was not asked for")
            read.stopped = True
        self._fall_quiet(read)

    def on_landed(self, landed: PagesWritten) -> None:
        """A write is complete; look at it once its mark is there too.

        Raises:
            ProtocolError: it is not one that was asked for.
        """
        with self._lock:
            read = self._reads.get(landed.want)
            if read is None:
                if landed.want not in self._ended:
                    raise ProtocolError(f"pages of read {landed.want}, which is not known here")
                return
            if read.plain or not read.placed:
                raise ProtocolError(f"pages of read {landed.want}, which has no place yet")
            self._check(read.order, landed)
            read.left -= landed.count
            if read.left < 0:
                raise ProtocolError(f"more pages of read {landed.want} than were asked for")
            read.busy += 1
        waiting = ExitStack()
        waiting.enter_context(self._line.watch.over(landed.want, 0))
        self._mover.call(
            lambda _: self._mover.watch(partial(self._look_for_mark, read, landed, waiting))
        )

    def close(self) -> bool:
        """End everything; say whether writes may still land."""
        with self._lock:
            self._closed = True
            reads, self._reads = self._reads, {}
        for read in reads.values():
            read.waits.close()
        return any(read.exposed for read in reads.values())

    def _place(self, read: _InboundRead) -> None:
        """Tell the source where a read goes, once the device is done with these places."""
        order = read.order
        if order.fence:
            order.fence.wait()
        number = self._number_of(order.units)
        if number is None:
            self._tell_place(read, None)
            return
        chosen: dict[bytes, int] = {}
        spans = [
            (first, chosen.setdefault(ids.tobytes(), len(chosen))) for first, ids in order.spans
        ]
        places = Destinations(want=order.read_id, units=number, spans=spans, ids=list(chosen))
        fits = len(nixl_messages.encode(places)) <= MAX_MESSAGE
        self._tell_place(read, places if fits else None)

    def _tell_place(self, read: _InboundRead, places: Destinations | None) -> None:
        """Let the source send a read, by the data connections if it has no places."""
        with self._lock:
            if read.ended or self._closed:
                return
            read.placed, read.plain = True, places is None
            if read.plain:  # under the lock, so that a cancel comes before or after it
                self._line.plain(read.order)
        self._line.say(places or UseTcp(want=read.order.read_id))

    def _number_of(self, units: Sequence[Unit]) -> int | None:
        """Return the number that the source knows a list of units by; None if it is too much to
        tell."""
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
            self._line.say(note)
        return number if told else None

    def _describe(self, unit: Unit) -> UnitLocation:
        area = self._line.pages().region_of(unit)
        return UnitLocation(
            address=area.address,
            nbytes=area.nbytes,
            device=area.device,
            phases=unit.phases,
            block_bytes=unit.block_bytes,
            segments=unit.segments.tobytes(),
        )

    def _check(self, order: IncomingPages, landed: PagesWritten) -> None:
        if landed.unit >= len(order.units):
            raise ProtocolError(f"unit {landed.unit} of read {landed.want}, of {len(order.units)}")
        first, ids = order.spans[landed.unit]
        start, size = landed.first - first, order.units[landed.unit].block_bytes
        if start < 0 or start + landed.count > len(ids):
            raise ProtocolError(f"blocks outside what was asked for: {landed.want, landed.first}")
        blocks = digested(landed.first, landed.count, landed.unit, self._period)
        if (landed.nbytes, len(landed.digests)) != (
            landed.count * size,
            len(blocks) * DIGEST_BYTES,
        ):
            raise ProtocolError(f"{landed.nbytes} bytes for {landed.count} blocks of {size} bytes")

    def _look_for_mark(
        self, read: _InboundRead, landed: PagesWritten, waiting: ExitStack, agent: NixlAgent
    ) -> bool:
        if self._closed:
            waiting.close()
            return True
        try:
            if not agent.take_mark(self._line.session, self._line.mark(landed.number)):
                return False
        except TransferFailed as error:
            self._line.fail(str(error))
            return True
        waiting.close()
        self._mover.prepare("landings", partial(self._verify, read, landed), self._line.fail)
        return True

    def _verify(self, read: _InboundRead, landed: PagesWritten) -> None:
        order, number = read.order, landed.unit
        first, ids = order.spans[number]
        ids = ids[landed.first - first : landed.first - first + landed.count]
        bad: tuple[int, ...] = ()
        if not read.ended and landed.digests:
            unit = order.units[number]
            ours = self._line.digests(unit, number, landed.first, ids, self._period)
            bad = _differing(landed, ours, self._period)
        with self._lock:
            read.busy -= 1
            if not (read.ended or self._closed):
                self._line.events.put(
                    PagesReceived(
                        self._line.peer,
                        landed.want,
                        number,
                        landed.first,
                        landed.count,
                        bad,
                        landed.nbytes,
                        landed.seconds,
                    )
                )
        self._fall_quiet(read)

    def _fall_quiet(self, read: _InboundRead) -> None:
        number = read.order.read_id
        with self._lock:
            over = read.ended and read.stopped and not read.busy
            if not over or self._reads.get(number) is not read:
                return
            del self._reads[number]
            read.waits.close()
            if not (self._closed or read.plain):  # the data connections say so themselves
                self._line.events.put(Drained(self._line.peer, number))


def _differing(landed: PagesWritten, ours: bytes, period: int) -> tuple[int, ...]:
    blocks = digested(landed.first, landed.count, landed.unit, period)
    pairs = zip(array("Q", ours), array("Q", landed.digests), strict=True)
    return tuple(block for block, (a, b) in zip(blocks, pairs, strict=True) if a != b)
