"""Events on their way from a transport's threads to the one that polls."""

from __future__ import annotations

import threading
from collections import Counter, deque

from kvconnect.transport.base import Event, Noted, PeerId

MAX_UNREAD_BYTES = 16 << 20
"""Notes of one peer that wait to be read; more, and it should be given up."""

_EVENT_BYTES = 256  # what even an empty note takes


class Mailbox:
    """A queue that is emptied at once. ``put`` is for any thread, ``drain`` for one."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._filled = threading.Condition()
        self._unread_bytes: Counter[PeerId] = Counter()

    def put(self, event: Event) -> bool:
        """Add an event; say False if so many notes of its peer are unread that no more should be
        taken."""
        with self._filled:
            self._events.append(event)
            if isinstance(event, Noted):
                self._unread_bytes[event.peer] += max(len(event.payload), _EVENT_BYTES)
            self._filled.notify()
            return self._unread_bytes[event.peer] <= MAX_UNREAD_BYTES

    def drain(self, timeout: float) -> list[Event]:
        """Return all events in order, waiting up to ``timeout`` seconds for the first."""
        with self._filled:
            self._filled.wait_for(lambda: self._events, timeout)
            events = list(self._events)
            self._events.clear()
            self._unread_bytes.clear()
            return events
