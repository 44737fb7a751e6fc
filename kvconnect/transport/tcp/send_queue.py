"""Pages that one peer sends and receives over TCP: queued, expected and under way."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kvconnect.bounded import remember
from kvconnect.errors import Misuse, ProtocolError
from kvconnect.protocol.frames import FrameHeader
from kvconnect.transport.base import (
    Drained,
    Fence,
    IncomingPages,
    OutgoingPages,
    PagesSent,
    PeerId,
    Unit,
)
from kvconnect.transport.event_queue import EventQueue
from kvconnect.transport.tcp.frame_priority import FramePriority
from kvconnect.transport.tcp.stall_watchdog import StallWatchdog

MIN_FRAME_BYTES = 4 << 20  # smaller ones cost more in headers and wake-ups than they share out
MAX_FRAME_BYTES = 128 << 20  # what a cancelled read may keep a connection busy with
MAX_STAGED_FRAME_BYTES = 8 << 20  # what keeps a staging buffer from others, at the reader's pace
_MAX_ENDED = 4096  # the source learns of a cancel within a round trip; this is far more


@dataclass
class SendRequest:
    """One :class:`OutgoingPages` and how many of its frames are not sent yet."""

    order: OutgoingPages
    frames: int
    started: float = 0.0  # 0: not yet


class OutboundFrame(NamedTuple):
    """The part of a request that goes over one connection in one piece."""

    request: SendRequest
    first: int
    ids: array[int]


@dataclass
class FrameTarget:
    """Where the pages of one inbound frame go. Write after ``fence`` has passed, and not once
    ``stop[0]`` is set."""

    unit: Unit
    ids: array[int]
    stop: bytearray
    fence: Fence | None


@dataclass
class _Expected:
    order: IncomingPages
    stop: bytearray


class SendQueue:
    """Orders of one peer, shared by its data connections. Thread-safe.

    ``on_first`` is called once, on the thread that submits the first pages to send. No event is
    emitted after ``close`` returns. Threads of data connections call ``next_frame`` and what stands
    below it.

    ``priority``: of the frames of this process. ``first``: these count there; others wait for those
    that count, and are small, so that one that is being sent does not keep the network from them.
    ``most_bytes`` returns the limit of a frame to send.
    """

    def __init__(
        self,
        peer: PeerId,
        events: EventQueue,
        connections: int,
        watch: StallWatchdog,
        on_first: Callable[[], None],
        priority: FramePriority | None = None,
        *,
        first: bool = True,
        most_bytes: Callable[[], int] = lambda: MAX_FRAME_BYTES,
    ) -> None:
        self.stop = bytearray(1)  # set by ``close``; interrupts frames that are being sent
        self.watch = watch
        self._peer = peer
        self._events = events
        self._connections = connections
        self._on_first: Callable[[], None] | None = on_first  # None: was called
        self._changed = threading.Condition()
        self._queue: deque[OutboundFrame] = deque()
        self._expected: dict[int, _Expected] = {}
        self._ended: dict[int, int] = {}  # reads cancelled here, oldest first: largest wire block
        self._busy: Counter[int] = Counter()  # frames under way per read
        self._draining: set[int] = set()
        self._most_bytes = most_bytes
        self._waits_for = None if first else priority
        self._counts_in = priority if first else None
        self._sending = 0  # frames
        self._fenced = 0  # of these, those that wait for their fences
        self._counted = 0  # of ``priority``, as of the last change

    def submit(self, order: IncomingPages | OutgoingPages) -> None:
        """Queue pages to send, as frames for all connections; or expect the pages of a read."""
        if isinstance(order, IncomingPages):
            self._expect(order)
            return
        if not order.ids:
            raise Misuse(f"nothing to send: {order}")
        with self._changed:
            if self.stop[0]:
                return
            step = self._frame_blocks(order)
            starts = range(0, len(order.ids), step)
            request = SendRequest(order, len(starts))
            for start in starts:
                ids = order.ids[start : start + step]
                self._queue.append(OutboundFrame(request, order.first + start, ids))
            self._changed.notify(len(starts))
            self._count()
            on_first, self._on_first = self._on_first, None
        if on_first:
            on_first()

    def _expect(self, order: IncomingPages) -> None:
        with self._changed:
            if not self.stop[0]:
                self._expected[order.read_id] = _Expected(order, bytearray(1))

    def _frame_blocks(self, order: OutgoingPages) -> int:
        size = order.unit.block_bytes
        share = len(order.ids) * size // self._connections
        most = MIN_FRAME_BYTES if self._waits_for else self._most_bytes()
        frame_bytes = min(max(share, MIN_FRAME_BYTES), most)
        # A share is rounded up, a limit down: a staging buffer has room for no more than that.
        return max(1, min(-(-frame_bytes // size), most // size))

    def cancel(self, read_id: int) -> None:
        """Drop a read's queued frames and discard the rest; emits ``Drained`` at the end."""
        with self._changed:
            if self.stop[0]:
                return
            self._queue = deque(f for f in self._queue if f.request.order.read_id != read_id)
            self._count()
            expected = self._expected.pop(read_id, None)
            if expected:
                expected.stop[0] = 1
                largest = max((unit.block_bytes for unit in expected.order.units), default=0)
                remember(self._ended, read_id, largest, _MAX_ENDED)
            self._draining.add(read_id)
            self.watch.shorten(read_id)
            self._report_drained(read_id)

    def close(self) -> None:
        """Drop everything, since the peer is down."""
        with self._changed:
            self.stop[0] = 1
            for expected in self._expected.values():
                expected.stop[0] = 1
            self._expected.clear()
            self._queue.clear()
            self._count()
            self._changed.notify_all()

    @contextmanager
    def next_frame(self) -> Iterator[OutboundFrame | None]:
        """Wait for a frame and mark it under way inside the ``with``; None once closed."""
        frame = self._take()
        try:
            yield frame
        finally:
            if frame:
                with self._changed:
                    self._sending -= 1
                    self._count()
                self._release(frame.request.order.read_id)

    def _take(self) -> OutboundFrame | None:
        waits_for = self._waits_for
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self.stop[0])
                if self.stop[0]:
                    return None
                if waits_for is None:
                    frame = self._queue.popleft()
                    self._busy[frame.request.order.read_id] += 1
                    self._sending += 1
                    return frame
            waits_for.wait()
            waits_for = None

    @contextmanager
    def at_fence(self) -> Iterator[None]:
        """Inside the ``with``, a frame that was taken waits for its fence. It does not count, nor
        do those behind it, whose fences are later ones: nobody waits for the device."""
        with self._changed:
            self._fenced += 1
            self._count()
        try:
            yield
        finally:
            with self._changed:
                self._fenced -= 1
                self._count()

    def _count(self) -> None:
        """Tell ``priority`` how many frames are being sent, or can be."""
        if self._counts_in is not None:
            queued = 0 if self._fenced else len(self._queue)
            frames = queued + self._sending - self._fenced
            self._counts_in.add(frames - self._counted)
            self._counted = frames

    def dropped(self, frame: OutboundFrame) -> bool:
        """Return whether a frame under way is not needed any more."""
        return bool(self.stop[0]) or frame.request.order.read_id in self._draining

    def sent(self, frame: OutboundFrame) -> None:
        """Record that a frame was sent; emits ``PagesSent`` with the last one of its order."""
        request = frame.request
        order = request.order
        with self._changed:
            request.frames -= 1
            if request.frames or self.stop[0]:
                return
            nbytes = len(order.ids) * order.unit.block_bytes
            seconds = time.perf_counter() - request.started
            self._events.put(PagesSent(self._peer, order.read_id, nbytes, seconds))

    @contextmanager
    def receive(self, header: FrameHeader) -> Iterator[FrameTarget | None]:
        """Mark an arriving frame under way inside the ``with``; None if its read was cancelled.
        Such a frame is written nowhere, so the read ends without it.

        Raises:
            ProtocolError: nobody asked for these pages.
        """
        with self._changed:
            target = self._find(header)
            if target is not None:
                self._busy[header.read_id] += 1
        try:
            yield target
        finally:
            if target is not None:
                self._release(header.read_id)

    def _find(self, header: FrameHeader) -> FrameTarget | None:
        block_bytes = header.nbytes // header.count
        expected = self._expected.get(header.read_id)
        if expected is None:
            block_bytes = min(block_bytes, self._ended.get(header.read_id, 0))
        if header.nbytes > MAX_FRAME_BYTES + block_bytes:
            raise ProtocolError(f"a frame of {header.nbytes} bytes in {header.count} blocks")
        if expected is None:
            if header.read_id in self._ended or self.stop[0]:
                return None
            raise ProtocolError(f"pages of read {header.read_id}, which is not known here")
        order = expected.order
        if header.unit >= len(order.units):
            raise ProtocolError(
                f"unit {header.unit} of read {header.read_id}, of {len(order.units)}"
            )
        unit = order.units[header.unit]
        first, ids = order.spans[header.unit]
        start = header.first - first
        if start < 0 or start + header.count > len(ids):
            raise ProtocolError(
                f"blocks {header.first} to {header.first + header.count - 1} of unit {header.unit} "
                f"of read {header.read_id}, expected are {first} to {first + len(ids) - 1}"
            )
        if header.nbytes != header.count * unit.block_bytes:
            raise ProtocolError(
                f"{header.nbytes} bytes for {header.count} blocks of {unit.block_bytes} bytes"
            )
        ids = ids[start : start + header.count]
        return FrameTarget(unit, ids, expected.stop, order.fence)

    def _release(self, read_id: int) -> None:
        with self._changed:
            self._busy[read_id] -= 1
            self._report_drained(read_id)

    def _report_drained(self, read_id: int) -> None:
        if self._busy[read_id] == 0:
            del self._busy[read_id]
            if read_id in self._draining and not self.stop[0]:
                self._draining.discard(read_id)
                self._events.put(Drained(self._peer, read_id))
