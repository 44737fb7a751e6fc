"""One thread that waits for sockets, calls from other threads and the passing of time."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvconnect import threads

Handler = Callable[[int], None]
"""Called with the mask of what its socket is ready for; must not wait."""

_WRECK_S = 1.0  # for what ``on_error`` began to end


class EventLoop:
    """Runs handlers and calls one after the other, on its own thread.

    ``call`` and ``alive`` are for any thread, ``join`` for any other; the rest is for handlers
    and calls. ``tick`` is called every ``tick_s`` seconds, after everything that is ready has
    been handled: a loop that was held up itself reads its peers' signs of life before it judges
    their silence. ``on_error`` is called before the thread dies of an error; calls that follow
    from it are still made.
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
        self.watch(self._woken.fileno(), selectors.EVENT_READ, lambda _: None)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Have ``function`` called on the loop's thread, in the order of calls."""
        self._calls.append(function)
        try:
            self._waker.send(b"\0")
        except OSError:
            return  # full: it will wake up anyway; closed: the loop has ended

    def watch(self, fd: int, mask: int, handler: Handler) -> None:
        """Call ``handler`` whenever ``fd`` is ready for ``mask``, in place of what was before."""
        if fd in self._handlers:
            self._selector.modify(fd, mask)
        else:
            self._selector.register(fd, mask)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``, before it is closed. Nothing happens if it is not watched."""
        if self._handlers.pop(fd, None):
            self._selector.unregister(fd)

    def stop(self) -> None:
        """End the thread when what runs now returns."""
        self._stopped = True

    def now(self) -> float:
        """Return the time that ``tick`` is given, in seconds. For any thread.

        It stands still while the loop is held up, by a process that does not let its threads run
        for instance: what was not read meanwhile is not the fault of who sent it.
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
            self._turn()
        finally:
            try:
                if not self._stopped:
                    self._end_badly()
            finally:
                self._selector.close()
                self._waker.close()
                self._woken.close()

    def _turn(self) -> None:
        next_tick = self._now
        while not self._stopped:
            self._handle(max(0.0, next_tick - self._now))
            if self._now >= next_tick:
                next_tick = self._now + self._tick_s
                self._tick(self._now)

    def _end_badly(self) -> None:
        self._on_error()
        deadline = time.monotonic() + _WRECK_S
        while not self._stopped and time.monotonic() < deadline:
            self._select(self._tick_s)
            self._make_calls()

    def _handle(self, timeout: float) -> None:
        ready = [(key.fd, self._handlers[key.fd], mask) for key, mask in self._select(timeout)]
        for fd, handler, mask in ready:
            if self._handlers.get(fd) is handler:  # not closed by one of the handlers before
                handler(mask)
        self._make_calls()

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(timeout)
        woke = time.monotonic()
        # Whoever is not held up comes by here once per tick at least.
        self._now += min(woke - self._woke, 2 * self._tick_s)
        self._woke = woke
        with suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        return ready
