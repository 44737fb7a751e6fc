"""The threads that call one store, which blocks them. Tested in ``test_worker.py`` and
``test_hanging_disk.py``."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.errors import contained
from kvconnect.threads import ThreadKind, failed, make

logger = logging.getLogger(__name__)

_MAX_QUEUED = 4096


class StoreCall(ABC):
    """One call to a store about ``blocks`` blocks."""

    blocks: int

    @abstractmethod
    def expired(self, now: float) -> bool:
        """Return whether nobody waits for the call any more. It is not started then."""

    @abstractmethod
    def run(self) -> None:
        """Make the call, which may block."""

    @abstractmethod
    def ended(self) -> None:
        """Continue after the call returned, raised, or was dropped before it started."""


class StoreThreads:
    """Up to ``threads`` daemon threads that make the calls to one store, in order.

    A call is late after ``late_s`` seconds. While one is late, no other call is started or
    accepted: a store that hangs delays each caller once. After the last late call has ended, the
    store is tried again with back-off. Thread-safe.
    """

    def __init__(self, name: str, threads: int, late_s: float, clock: Callable[[], float]) -> None:
        self._name = name
        self._late_s = late_s
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[StoreCall] = deque()
        self._running: dict[StoreCall, float] = {}  # when each call started
        self._late: set[StoreCall] = set()
        self._late_blocks = 0  # not yet taken by take_late_blocks
        self._breaker = CircuitBreaker(1, trial_factor=2)
        self._threads = self._to_start = threads
        self._idle = 0
        self._closed = False

    def submit(self, call: StoreCall) -> bool:
        """Queue a call without blocking. False: refused, and ``ended`` will not be called."""
        now = self._clock()
        with self._changed:
            self._mark_late(now)
            full = len(self._queue) >= _MAX_QUEUED
            if self._closed or self._late or full or not self._breaker.enter(now):
                return False
            self._queue.append(call)
            if self._idle < len(self._queue) and self._to_start:
                self._start(now)
            if self._to_start == self._threads:  # there is none
                self._queue.pop()
                return False
            self._changed.notify()
            return True

    def drop_expired(self) -> None:
        """End the queued calls that expired; end all queued calls if a call is late."""
        if not self._running and not self._queue:
            return
        now = self._clock()
        with self._changed:
            self._mark_late(now)
            dropped = [call for call in self._queue if self._late or call.expired(now)]
            for call in dropped:
                self._queue.remove(call)
        for call in dropped:
            call.ended()

    def available(self) -> bool:
        """Return whether no call is late, and one has ended in time since the last late one."""
        with self._changed:
            self._mark_late(self._clock())
            return not self._late and self._breaker.closed

    def take_late_blocks(self) -> int:
        """Return the number of blocks in calls that became late since the last call."""
        with self._changed:
            taken, self._late_blocks = self._late_blocks, 0
            return taken

    def close(self) -> None:
        """Accept no more calls and drop the queued ones without ending them. Idempotent."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def join(self) -> bool:
        """After ``close``, wait for running calls that are not late; return whether all ended."""
        with self._changed:
            while self._running:
                self._mark_late(self._clock())
                if self._late.issuperset(self._running):
                    return False
                self._changed.wait(min(self._late_s / 10, 1.0))
            return True

    def _start(self, now: float) -> None:
        """Start a thread. If the system has no more, the calls are left to those there; without
        any, the store is tried again with back-off. The caller holds the lock."""
        try:
            make(ThreadKind.TIER, f"kvconnect-{self._name}", self._work).start()
            self._to_start -= 1
        except RuntimeError as error:
            if self._to_start == self._threads:
                logger.warning("%s: %s; the tier is not used for now", self._name, error)
                self._breaker.failed(now)

    def _mark_late(self, now: float) -> None:
        """Find calls that became late. The caller holds the lock."""
        for call, started in self._running.items():
            if now - started >= self._late_s and call not in self._late:
                if not self._late:
                    text = "%s: a call takes more than %g s; the tier is not used until it ends"
                    logger.warning(text, self._name, self._late_s)
                self._late.add(call)
                self._late_blocks += call.blocks

    def _work(self) -> None:
        while (call := self._next()) is not None:
            with self._changed:
                now = self._clock()
                due = not self._late and not self._closed and not call.expired(now)
                if due:
                    self._running[call] = now
            if due:
                with contained(partial(failed, ThreadKind.TIER, self._name)):
                    call.run()
                self._finish(call)
            with contained(partial(failed, ThreadKind.TIER, self._name)):
                call.ended()

    def _next(self) -> StoreCall | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._idle -= 1
            return self._queue.popleft() if self._queue else None

    def _finish(self, call: StoreCall) -> None:
        now = self._clock()
        with self._changed:
            self._mark_late(now)
            del self._running[call]
            if call not in self._late:
                self._breaker.succeeded()
            else:
                self._late.discard(call)
                if not self._late:
                    self._breaker.failed(now)
                    logger.warning("%s: late calls have ended; the tier is tried again", self._name)
            self._changed.notify_all()
