"""Calls that a disk can hold up for ever, such as ``stat`` on a network mount, with a limit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvconnect import threads
from kvconnect.errors import contained

LIMIT_S = 2.0
_T = TypeVar("_T")


class TimedCalls:
    """Makes each call on a thread of its own, one at a time. For one caller's thread.

    A call that is late is not waited for again: until it has ended, others are refused at once.
    """

    def __init__(self, name: str, limit_s: float = LIMIT_S) -> None:
        """``name``: of the threads. ``limit_s``: of each wait."""
        self._name, self._limit_s = name, limit_s
        self._last: Future[Any] | None = None

    def __call__(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns, or raise what it raises.

        Raises:
            TimeoutError: it does not end in time, an earlier one has not, or the system has no more
                threads.
        """
        if self._last is not None and not self._last.done():
            raise TimeoutError("an earlier call still waits for its disk")
        made = Future[_T]()

        def run() -> None:
            with contained(made.set_exception):
                made.set_result(work())

        try:
            threads.make(threads.ThreadKind.TIER, self._name, run).start()
        except RuntimeError as error:
            raise TimeoutError(str(error)) from error
        self._last = made
        return made.result(self._limit_s)
