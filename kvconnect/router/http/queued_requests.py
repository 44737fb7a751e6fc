"""Requests of one connection that came before the answer to an earlier one. Event loop only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvconnect.router.http.http_request import HELD_BYTES, HttpRequest

MOST_QUEUED = 16
MOST_BYTES = 4 * HELD_BYTES
"""Bytes of queued requests, from which on no further one is taken."""


class QueuedRequests:
    """The requests, the earliest first, and the account of what waits on their connection."""

    def __init__(self, waits: Callable[[int], None]) -> None:
        """``waits``: is told how many bytes wait, when that changes."""
        self._waits = waits
        self._requests: deque[HttpRequest] = deque()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def last(self) -> HttpRequest | None:
        """The latest request."""
        return self._requests[-1] if self._requests else None

    @property
    def full(self) -> bool:
        """Whether enough has been received until one is taken out."""
        many = len(self._requests) >= MOST_QUEUED
        return many or (bool(self._requests) and self._bytes() > HELD_BYTES)

    def add(self, request: HttpRequest) -> bool:
        """Take a request; return whether there was room for it."""
        if len(self._requests) >= MOST_QUEUED or self._bytes() >= MOST_BYTES:
            return False
        self._requests.append(request)
        return True

    def take(self) -> HttpRequest:
        """Take the earliest request out."""
        return self._requests.popleft()

    def clear(self) -> None:
        """Forget all."""
        self._requests.clear()

    def count(self, head_bytes: int) -> None:
        """Tell the account what waits: the requests, and the bytes of a head that is not
        complete."""
        waiting = head_bytes + (self._bytes() if self._requests else 0)
        if waiting != self._waiting:
            self._waiting = waiting
            self._waits(waiting)

    def _bytes(self) -> int:
        return sum(each.held for each in self._requests)
