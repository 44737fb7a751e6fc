"""The thread of an agent that talks to workers of other engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvconnect import threads
from kvconnect.transport.base import Event, Transport

TICK_S = 0.25
"""Seconds between two ticks, at least."""

_JOIN_TIMEOUT_S = 10.0


class PeerLoop:
    """Polls a transport on a thread of its own: passes each event on, and the time now and then.

    ``on_event`` and ``tick`` contain the errors of single peers. Another error ends the thread,
    which its owner must notice: the transport closes then, else peers would believe that the worker
    is there. With ``again``, the thread goes on instead after a pause.

    Attributes:
        closed: whether :meth:`close` was called.
    """

    def __init__(
        self,
        kind: threads.ThreadKind,
        transport: Transport,
        on_event: Callable[[Event], None],
        tick: Callable[[float], None],
        *,
        again: bool = False,
    ) -> None:
        self._transport = transport
        self._on_event = on_event
        self._tick = tick
        self._again = again
        self._closed = threading.Event()
        name = f"kvconnect-{kind.value}"
        self._thread = threads.make(kind, name, self._run, again=again, stopped=self._closed.is_set)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def alive(self) -> bool:
        """Whether events are still taken."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, once what it calls is there."""
        self._thread.start()

    def stop(self) -> None:
        """Take no event any more; :meth:`join` waits for the last one."""
        self._closed.set()
        self._transport.wake()

    def join(self) -> None:
        """Wait for the thread, for a few seconds at most."""
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._poll()
        finally:
            if not self._again:
                self._transport.close()

    def _poll(self) -> None:
        timeout, due = 0.0, 0.0
        while not self._closed.is_set():
            for event in self._transport.poll(timeout):
                self._on_event(event)
            now, timeout = time.monotonic(), TICK_S
            if now >= due:
                due = now + TICK_S
                self._tick(now)
