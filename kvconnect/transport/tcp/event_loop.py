"""One thread that serves sockets, calls from other threads and a periodic tick; socket helpers.

Every socket of this transport is non-blocking. Threads wait in ``poll`` only, where they notice a
shutdown by another thread.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvconnect import threads
from kvconnect.errors import contained

logger = logging.getLogger(__name__)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Handler = Callable[[int], None]
"""Gets the mask of events that its socket is ready for; must not block."""

_CLEANUP_S = 1.0  # for the calls of ``on_error``


class EventLoop:
    """Runs handlers and calls one after the other, on its own thread.

    ``call`` and ``alive`` are for any thread, ``join`` for any other thread; the rest is for
    handlers and calls. ``tick`` is called every ``tick_s`` seconds, after all ready sockets have
    been handled, so that a loop that was held up reads heartbeats before it judges silence.

    An exception of a handler, a call or a tick is logged and ends nothing else; the handler's
    socket is not watched any more. ``on_error`` is called before the thread ends with an error of
    the loop itself; calls that it makes still run.
    """

    def __init__(
        self, tick: Callable[[float], None], tick_s: float, on_error: Callable[[], None]
    ) -> None:
        self._tick = tick
        self._tick_s = tick_s
        self._on_error = on_error
        self._now = self._woke = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Handler] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._stopped = False
        self._thread = threads.make(threads.ThreadKind.TCP, "kvconnect-tcp", self._run)

    def start(self) -> None:
        """Start the thread."""
        self.watch(self._woken.fileno(), READ, lambda _: None)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop's thread, in the order of calls."""
        self._calls.append(function)
        try:
            self._waker.send(b"\0")
        except OSError:
            return  # full: it will wake up anyway; closed: the loop has ended

    def watch(self, fd: int, mask: int, handler: Handler) -> None:
        """Call ``handler`` whenever ``fd`` is ready for ``mask``; replaces an earlier handler."""
        if fd in self._handlers:
            self._selector.modify(fd, mask)
        else:
            self._selector.register(fd, mask)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``; call it before closing. No effect if it is not watched."""
        if self._handlers.pop(fd, None):
            self._selector.unregister(fd)

    def stop(self) -> None:
        """End the thread after the current handler."""
        self._stopped = True

    def now(self) -> float:
        """Return the time that ``tick`` gets, in seconds. For any thread.

        The clock stands still while the loop is held up, for instance by a process that does not
        let its threads run. Peers are not blamed for that time.
        """
        return self._now

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; say whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._run_until_stopped()
        finally:
            try:
                if not self._stopped:
                    self._clean_up()
            finally:
                self._selector.close()
                self._waker.close()
                self._woken.close()

    def _run_until_stopped(self) -> None:
        next_tick = self._now
        while not self._stopped:
            self._handle(max(0.0, next_tick - self._now))
            if self._now >= next_tick:
                next_tick = self._now + self._tick_s
                with contained(_log):
                    self._tick(self._now)

    def _clean_up(self) -> None:
        self._on_error()
        deadline = time.monotonic() + _CLEANUP_S
        while not self._stopped and time.monotonic() < deadline:
            self._select(self._tick_s)
            self._make_calls()

    def _handle(self, timeout: float) -> None:
        ready = [(key.fd, self._handlers[key.fd], mask) for key, mask in self._select(timeout)]
        for fd, handler, mask in ready:
            if self._handlers.get(fd) is handler:  # not closed by one of the handlers before
                with contained(partial(self._on_handler_error, fd)):
                    handler(mask)
        self._make_calls()

    def _on_handler_error(self, fd: int, error: Exception) -> None:
        self.unwatch(fd)  # it would be called again at once
        _log(error)

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            with contained(_log):
                self._calls.popleft()()

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(timeout)
        woke = time.monotonic()
        # A loop that is not held up gets here at least once per tick.
        self._now += min(woke - self._woke, 2 * self._tick_s)
        self._woke = woke
        with suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        return ready


def _log(error: Exception) -> None:
    logger.error("internal error of KVConnect on the thread of its sockets", exc_info=error)
