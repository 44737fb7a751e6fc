"""Events in order, from a transport's threads to the thread that polls."""

from __future__ import annotations

import threading
from collections import Counter, deque

from kvconnect.transport.base import Event, MessageReceived, PeerId

MAX_UNREAD_BYTES = 16 << 20
"""Unread messages of one peer, in bytes, above which the peer should be closed."""

_EVENT_BYTES = 256  # counted even for an empty message


class EventQueue:
    """Events in order. ``put`` and ``wake`` are for any thread, ``drain`` for one."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._filled = threading.Condition()
        self._unread_bytes: Counter[PeerId] = Counter()
        self._woken = False

    def put(self, event: Event) -> bool:
        """Add an event; return False if the peer has more than ``MAX_UNREAD_BYTES`` unread."""
        with self._filled:
            self._events.append(event)
            if isinstance(event, MessageReceived):
                self._unread_bytes[event.peer] += max(len(event.payload), _EVENT_BYTES)
            self._filled.notify()
            return self._unread_bytes[event.peer] <= MAX_UNREAD_BYTES

    def wake(self) -> None:
        """Let the ``drain`` that waits return, or else the next one."""
        with self._filled:
            self._woken = True
            self._filled.notify()

    def drain(self, timeout: float) -> list[Event]:
        """Return all events in order, waiting up to ``timeout`` seconds for the first."""
        with self._filled:
            self._filled.wait_for(lambda: self._events or self._woken, timeout)
            self._woken = False
            events = list(self._events)
            self._events.clear()
            self._unread_bytes.clear()
            return events
