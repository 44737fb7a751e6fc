"""The reader's half of a NIXL path: where wants go, what has landed, and when writes have ended."""

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

_ENDED_WANTS = 4096  # the source learns of an end within a round trip; this is far more


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
        self._wants: dict[int, _InboundRead] = {}
        self._ended: dict[int, None] = {}  # oldest first
        # For the thread that prepares: lists of units by number, and whether the source has them.
        self._units: list[tuple[Sequence[Unit], bool]] = []

    def settle(self, period: int) -> None:
        """Set the agreed digest period; before anything else."""
        self._period = period

    def expect(self, order: IncomingPages) -> None:
        """Let pages of a want in."""
        want = _InboundRead(
            order, sum(len(ids) for _, ids in order.spans), plain=order.path == "tcp"
        )
        with self._lock:
            if self._closed:
                return
            self._wants[order.want] = want
        if want.plain:
            self._tell_place(want, None)
        else:
            self._mover.prepare("landings", partial(self._place, want), self._line.fail)

    def cancel(self, number: int) -> bool:
        """End a want; say False if there is none of that number. ``Drained`` follows."""
        with self._lock:
            want = self._wants.get(number)
            if want is None or want.ended or self._closed:
                return want is not None
            want.ended = True
            self._ended[number] = None
            if len(self._ended) > _ENDED_WANTS:
                del self._ended[next(iter(self._ended))]
            want.stopped = not want.exposed
            if not want.stopped:
                want.waits.enter_context(self._line.watch.over(number, 0))
        if want.plain:
            self._line.cancel_plain(number)
        self._line.say(
            StopWriting(want=number)
        )  # also of one without a place: its pages are not held
        self._fall_quiet(want)
        return True

    def on_stopped(self, number: int) -> None:
        """The source writes no more of a want."""
        with self._lock:
            want = self._wants.get(number)
            if want is None:
                return  # it had no place
            if not want.ended:
                raise ProtocolError(f"want {number} stopped, which was not asked for")
            want.stopped = True
        self._fall_quiet(want)

    def on_landed(self, landed: PagesWritten) -> None:
        """A write is complete; look at it once its mark is there too.

        Raises:
            ProtocolError: it is not one that was asked for.
        """
        with self._lock:
            want = self._wants.get(landed.want)
            if want is None:
                if landed.want not in self._ended:
                    raise ProtocolError(f"pages of want {landed.want}, which is not known here")
                return
            if want.plain or not want.placed:
                raise ProtocolError(f"pages of want {landed.want}, which has no place yet")
            self._check(want.order, landed)
            want.left -= landed.count
            if want.left < 0:
                raise ProtocolError(f"more pages of want {landed.want} than were asked for")
            want.busy += 1
        waiting = ExitStack()
        waiting.enter_context(self._line.watch.over(landed.want, 0))
        self._mover.call(
            lambda _: self._mover.watch(partial(self._look_for_mark, want, landed, waiting))
        )

    def close(self) -> bool:
        """End everything; say whether writes may still land."""
        with self._lock:
            self._closed = True
            wants, self._wants = self._wants, {}
        for want in wants.values():
            want.waits.close()
        return any(want.exposed for want in wants.values())

    def _place(self, want: _InboundRead) -> None:
        """Tell the source where a want goes, once the device is done with these places."""
        order = want.order
        if order.fence:
            order.fence.wait()
        number = self._number_of(order.units)
        if number is None:
            self._tell_place(want, None)
            return
        chosen: dict[bytes, int] = {}
        spans = [
            (first, chosen.setdefault(ids.tobytes(), len(chosen))) for first, ids in order.spans
        ]
        places = Destinations(want=order.want, units=number, spans=spans, ids=list(chosen))
        fits = len(nixl_messages.encode(places)) <= MAX_MESSAGE
        self._tell_place(want, places if fits else None)

    def _tell_place(self, want: _InboundRead, places: Destinations | None) -> None:
        """Let the source send a want, by the data connections if it has no places."""
        with self._lock:
            if want.ended or self._closed:
                return
            want.placed, want.plain = True, places is None
            if want.plain:  # under the lock, so that a cancel comes before or after it
                self._line.plain(want.order)
        self._line.say(places or UseTcp(want=want.order.want))

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
            raise ProtocolError(f"unit {landed.unit} of want {landed.want}, of {len(order.units)}")
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
        self, want: _InboundRead, landed: PagesWritten, waiting: ExitStack, agent: NixlAgent
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
        self._mover.prepare("landings", partial(self._verify, want, landed), self._line.fail)
        return True

    def _verify(self, want: _InboundRead, landed: PagesWritten) -> None:
        order, number = want.order, landed.unit
        first, ids = order.spans[number]
        ids = ids[landed.first - first : landed.first - first + landed.count]
        bad: tuple[int, ...] = ()
        if not want.ended and landed.digests:
            unit = order.units[number]
            ours = self._line.digests(unit, number, landed.first, ids, self._period)
            bad = _differing(landed, ours, self._period)
        with self._lock:
            want.busy -= 1
            if not (want.ended or self._closed):
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
        self._fall_quiet(want)

    def _fall_quiet(self, want: _InboundRead) -> None:
        number = want.order.want
        with self._lock:
            over = want.ended and want.stopped and not want.busy
            if not over or self._wants.get(number) is not want:
                return
            del self._wants[number]
            want.waits.close()
            if not (self._closed or want.plain):  # the data connections say so themselves
                self._line.events.put(Drained(self._line.peer, number))


def _differing(landed: PagesWritten, ours: bytes, period: int) -> tuple[int, ...]:
    blocks = digested(landed.first, landed.count, landed.unit, period)
    pairs = zip(array("Q", ours), array("Q", landed.digests), strict=True)
    return tuple(block for block, (a, b) in zip(blocks, pairs, strict=True) if a != b)
