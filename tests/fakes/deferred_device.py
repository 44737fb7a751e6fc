"""A device whose work waits in queues, one for each stream, as a CUDA device's does.

Work is done as soon as everything before it in its stream is, and the events that its stream
follows. Only :meth:`DeferredDevice.sleep` takes time: it ends once somebody waits for what is
behind it, and all others have called nothing for a while. So what is launched beside it is seen to
wait for it, or not, on a machine of any speed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

ROUND_S, QUIET_ROUNDS = 0.004, 50
"""A sleep ends after so many rounds of a thread that waits for it, in which no other calls."""

LONGEST_S = 2.0
"""How long others may keep a sleep from its end by what they call."""

LAUNCH_TIMEOUT = 702
CAPTURE_UNSUPPORTED, CAPTURE_ISOLATION = 900, 905

Work = Callable[[], int]
"""Returns the driver's status."""


class Fault(Enum):
    """What a device may do wrong, so that a test proves that it would notice."""

    ONE_QUEUE = "one-queue"
    """All streams are one, so all work waits for all that was launched before."""

    HEEDLESS_MODEL = "heedless-model"
    """The null stream, on which the tests' models run, waits for no event."""

    HEEDLESS_COPIES = "heedless-copies"
    """The other streams wait for no event."""

    HEEDLESS_THREADS = "heedless-threads"
    """No thread waits for an event or a stream."""


class DeviceError(RuntimeError):
    """A call is refused; ``status`` is the driver's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class Mark:
    """A record of an event: a point in the work of a stream. ``passed_at`` on the host's clock."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.passed_at: float | None = None


class _Gate:
    """Holds its stream until the device has passed a mark."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark


class _Sleep:
    """Work that takes time."""

    is_over = False


_Item = Work | Mark | _Gate | _Sleep


class DeferredDevice:
    """Any thread may call any method. A device that is ``lost`` refuses what is launched and waited
    for with that status, and does nothing more."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.lost = 0
        self._fault = fault
        self._queues: defaultdict[int, deque[_Item]] = defaultdict(deque)
        self._captured: dict[int, list[_Item]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._calls = 0

    def submit(self, stream: int, work: Work) -> None:
        """Put work behind a stream's."""
        self._put(stream, work)

    def sleep(self, stream: int) -> None:
        """Put work behind a stream's that takes time."""
        self._put(stream, _Sleep())

    def record(self, stream: int) -> Mark:
        """Return a mark behind a stream's work."""
        mark = Mark(self._key(stream))
        self._put(stream, mark)
        return mark

    def follow(self, stream: int, mark: Mark) -> None:
        """Make later work of a stream wait for a mark."""
        if stream in self._captured and mark not in self._captured[stream]:
            raise DeviceError(CAPTURE_ISOLATION)
        if self._fault is not (Fault.HEEDLESS_COPIES if stream else Fault.HEEDLESS_MODEL):
            self._put(stream, _Gate(mark))

    def has_passed(self, mark: Mark) -> bool:
        """Return whether the device has passed a mark; does not wait."""
        return mark.passed_at is not None

    def is_idle(self, stream: int) -> bool:
        """Return whether all work of a stream is done; does not wait."""
        return not self._queues[self._key(stream)]

    def wait(self, marks: Sequence[Mark]) -> None:
        """Block the calling thread until the device has passed all marks."""
        if self._fault is Fault.HEEDLESS_THREADS:
            return
        if any(mark in items for mark in marks for items in self._captured.values()):
            raise DeviceError(CAPTURE_UNSUPPORTED)
        with self._changed:
            calls, quiet, latest = self._calls, 0, time.monotonic() + LONGEST_S
            while not all(mark.passed_at is not None for mark in marks):
                self._check()
                if quiet >= QUIET_ROUNDS or time.monotonic() >= latest:
                    self._wake([s for mark in marks for s in self._asleep_before(mark)])
                    quiet, latest = 0, time.monotonic() + LONGEST_S
                elif not self._changed.wait(ROUND_S):
                    quiet = quiet + 1 if calls == self._calls else 0
                    calls = self._calls
            self._check()

    def wait_for_stream(self, stream: int) -> None:
        """Block the calling thread until a stream's work so far is done."""
        self.wait([self.record(stream)])

    def wait_for_all(self) -> None:
        """Block the calling thread until all work so far is done."""
        with self._changed:
            marks = [self.record(stream) for stream in [*self._queues]]
        self.wait(marks)

    def clear(self) -> None:
        """Drop all work: what it reads and writes may be gone."""
        with self._changed:
            for item in (item for queue in self._queues.values() for item in queue):
                if isinstance(item, Mark):
                    item.passed_at = time.perf_counter()
            self._queues.clear()
            self._changed.notify_all()

    def capture(self, stream: int) -> list[_Item]:
        """Let a stream's work be noted from now on, and not done; return the notes."""
        return self._captured.setdefault(stream, [])

    def end_capture(self, stream: int) -> None:
        """Undo :meth:`capture`."""
        del self._captured[stream]

    def replay(self, stream: int, notes: list[_Item]) -> None:
        """Put what was captured behind a stream's work."""
        for item in notes:
            if not isinstance(item, Mark | _Gate):  # what one stream captured is in order
                self._put(stream, item)

    def _check(self) -> None:
        if self.lost:
            raise DeviceError(self.lost)

    def _key(self, stream: int) -> int:
        return 0 if self._fault is Fault.ONE_QUEUE else stream

    def _put(self, stream: int, item: _Item) -> None:
        with self._changed:
            self._check()
            if stream in self._captured:
                self._captured[stream].append(item)
                return
            self._calls += 1
            self._queues[self._key(stream)].append(item)
            self._go_on()

    def _go_on(self) -> None:
        """Do all work that nothing holds up."""
        queues = deque(self._queues.values())
        idle = 0
        while idle < len(queues) and not self.lost:
            queue = queues[0]
            queues.rotate(-1)
            idle = 0 if self._step(queue) else idle + 1
        self._changed.notify_all()

    def _step(self, queue: deque[_Item]) -> bool:
        """Do what is next in a queue; return whether it could be done."""
        match queue[0] if queue else None:
            case None:
                return False
            case _Sleep() as sleep if not sleep.is_over:
                return False
            case _Gate() as gate if gate.mark.passed_at is None:
                return False
            case Mark() as mark:
                mark.passed_at = time.perf_counter()
            case _Sleep() | _Gate():
                pass
            case work:
                self.lost = work()
        queue.popleft()
        return True

    def _asleep_before(self, mark: Mark) -> Iterator[_Sleep]:
        """Yield the sleeps that hold up a mark now."""
        queue = self._queues[mark.stream]
        if mark.passed_at is not None or not queue:
            return
        match queue[0]:
            case _Sleep() as sleep:
                yield sleep
            case _Gate(mark=other):
                yield from self._asleep_before(other)

    def _wake(self, sleeps: Sequence[_Sleep]) -> None:
        if not sleeps:
            raise DeviceError(LAUNCH_TIMEOUT)  # nothing is left that could end
        for sleep in sleeps:
            sleep.is_over = True
        self._go_on()
