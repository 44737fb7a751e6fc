"""Calls that a disk can hold up for ever, such as ``stat`` on a network mount, with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvconnect import threads
from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.errors import contained

LIMIT_S = 2.0
LONGEST_PAUSE_S = 30.0
_IDLE_S = 1.0  # after which the thread ends: an engine at rest has none
_T = TypeVar("_T")


class TimedCalls:
    """Makes calls on a thread, one at a time. For one caller's thread.

    A call that is late is not waited for again: until it has ended, and for a pause, others are
    refused at once. A slow disk holds its caller up less and less often: pauses double from one
    second to :data:`LONGEST_PAUSE_S` while each next call is late, too.
    """

    def __init__(self, name: str, limit_s: float = LIMIT_S) -> None:
        """``name``: of the thread. ``limit_s``: of each wait."""
        self._name, self._limit_s = name, limit_s
        self._breaker = CircuitBreaker(1, LONGEST_PAUSE_S)
        self._last: Future[Any] | None = None
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # of what follows; a thread that ends takes no more calls
        self._runs = False

    def __call__(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns, or raise what it raises.

        Raises:
            TimeoutError: it does not end in time, an earlier one did not, or the system has no more
                threads.
        """
        waits = self._last is not None and not self._last.done()
        if waits or not self._breaker.allows(time.monotonic()):
            raise TimeoutError("an earlier call waited long for its disk")
        made = Future[_T]()

        def run() -> None:
            with contained(made.set_exception):
                made.set_result(work())

        with self._lock:
            if not self._runs:
                self._start()
            self._calls.put(run)
        self._last = made
        try:
            return made.result(self._limit_s)
        finally:
            if made.done():
                self._breaker.succeeded()
            else:
                self._breaker.failed(time.monotonic())

    def _start(self) -> None:
        try:
            threads.make(threads.ThreadKind.TIER, self._name, self._run).start()
        except RuntimeError as error:
            raise TimeoutError(str(error)) from error
        self._runs = True

    def _run(self) -> None:
        while True:
            try:
                self._calls.get(timeout=_IDLE_S)()
            except Empty:
                with self._lock:
                    if self._calls.empty():
                        self._runs = False
                        return
