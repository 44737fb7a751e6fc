"""Calls to one store on threads of their own, and when to leave a store alone that hangs."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from kvconnect.breaker import CircuitBreaker
from kvconnect.threads import ThreadKind, failed, make

logger = logging.getLogger(__name__)

_MOST_QUEUED = 4096


class Call(ABC):
    """One call to a store, about so many ``blocks``. It is not begun once it has ``expired``."""

    blocks: int

    @abstractmethod
    def expired(self, now: float) -> bool:
        """Whether nobody waits for it any more."""

    @abstractmethod
    def run(self) -> None:
        """Make the call, which may block."""

    @abstractmethod
    def ended(self) -> None:
        """The call was made, raised, or never will be: nothing more happens for it here."""


class StoreThreads:
    """Up to so many ``threads`` that make calls to one store, in order.

    A call that takes ``late_s`` seconds or more is late. While one is, no other is begun or taken:
    a store that hangs costs each caller that once. When the last late one has ended, the store is
    probed with back-off. Threads: any. The lane's own are daemons: no end of a process waits for a
    call that does not end.
    """

    def __init__(self, name: str, threads: int, late_s: float, clock: Callable[[], float]) -> None:
        self._name = name
        self._late_s = late_s
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Call] = deque()
        self._running: dict[Call, float] = {}  # since when
        self._late: set[Call] = set()
        self._late_blocks = 0  # that nobody has counted yet
        self._breaker = CircuitBreaker(1, trial_factor=2)
        self._to_start = threads
        self._idle = 0
        self._closed = False

    def __repr__(self) -> str:
        state = f"{len(self._queue)} queued, {len(self._running)} running, {len(self._late)} late"
        return f"<Lane {self._name}: {state}>"

    def submit(self, call: Call) -> bool:
        """Take a call; does not block. False: not taken, and not ended here either."""
        now = self._clock()
        with self._changed:
            self._look(now)
            full = len(self._queue) >= _MOST_QUEUED
            if self._closed or self._late or full or not self._breaker.enter(now):
                return False
            self._queue.append(call)
            if self._idle >= len(self._queue) or not self._to_start:
                self._changed.notify()
                return True
            self._to_start -= 1
        make(ThreadKind.TIER, f"kvconnect-{self._name}", self._work).start()
        return True

    def sweep(self) -> None:
        """End the queued calls that nobody waits for, and all of them if one is late."""
        if not self._running and not self._queue:
            return
        now = self._clock()
        with self._changed:
            self._look(now)
            gone = [call for call in self._queue if self._late or call.expired(now)]
            for call in gone:
                self._queue.remove(call)
        for call in gone:
            call.ended()

    def available(self) -> bool:
        """Whether a call would be taken."""
        now = self._clock()
        with self._changed:
            self._look(now)
            return not self._late and self._breaker.allows(now)

    def take_late_blocks(self) -> int:
        """Return how many blocks late calls were about since the last time."""
        with self._changed:
            taken, self._late_blocks = self._late_blocks, 0
            return taken

    def close(self) -> None:
        """Take no more, and drop what is queued without ending it. Idempotent."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def join(self) -> bool:
        """After ``close``, wait for the calls under way that are not late; whether all ended."""
        with self._changed:
            while self._running:
                self._look(self._clock())
                if self._late.issuperset(self._running):
                    return False
                self._changed.wait(min(self._late_s / 10, 1.0))
            return True

    def _look(self, now: float) -> None:
        """Note which calls are late. The caller holds the lock."""
        for call, since in self._running.items():
            if now - since >= self._late_s and call not in self._late:
                if not self._late:
                    text = "%s: a call takes more than %g s; left alone until it ends"
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
            try:
                if due:
                    call.run()
            except Exception as error:  # noqa: BLE001 # boundary: a store that raises has nothing
                failed(ThreadKind.TIER, self._name, error)
            if due:
                self._note(call)
            call.ended()

    def _next(self) -> Call | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._idle -= 1
            return self._queue.popleft() if self._queue else None

    def _note(self, call: Call) -> None:
        """A call has been made."""
        now = self._clock()
        with self._changed:
            self._look(now)
            del self._running[call]
            if call not in self._late:
                self._breaker.succeeded()
            else:
                self._late.discard(call)
                if not self._late:
                    self._breaker.failed(now)
                    logger.warning("%s: late calls have ended; it is probed", self._name)
            self._changed.notify_all()
