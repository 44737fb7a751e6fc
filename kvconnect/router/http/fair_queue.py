"""Requests that wait for their turn: clients take turns, as many in a row as they have weight, and
each one's requests come in order.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque

_Turn = asyncio.Future[None]


class FairQueue:
    """At most ``most`` turns that requests wait for, by client."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_client: dict[str, deque[_Turn]] = {}  # the client whose turn is next comes first
        self._weights: dict[str, int] = {}
        self._in_a_row = 0  # turns that the first client has had
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def add(self, client: str, weight: int, turn: _Turn) -> _Turn | None:
        """Let a turn wait; return the one that gives way to it, which is ``turn`` itself if there
        is no room for it.

        In a full queue, the last request of the client with the most for its weight gives way, if
        that client has more than this one would have.
        """
        if self._waiting < self._most:
            self._append(client, weight, turn)
            return None
        greedy = max(self._by_client, key=self._share, default=client)
        would_have = (len(self._by_client.get(client, ())) + 1) / weight
        if greedy not in self._by_client or self._share(greedy) <= would_have:
            return turn
        last = self._by_client[greedy][-1]
        self.remove(greedy, last)
        self._append(client, weight, turn)
        return last

    def remove(self, client: str, turn: _Turn) -> None:
        """Take out a turn that waits."""
        turns = self._by_client[client]
        turns.remove(turn)
        self._waiting -= 1
        if not turns:
            self._forget(client)

    def next(self) -> _Turn | None:
        """Take out the turn that comes next; None if none waits."""
        client = next(iter(self._by_client), None)
        if client is None:
            return None
        turns = self._by_client[client]
        turn = turns.popleft()
        self._waiting -= 1
        self._in_a_row += 1
        if not turns:
            self._forget(client)
        elif self._in_a_row >= self._weights[client]:
            self._by_client[client] = self._by_client.pop(client)  # after all others
            self._in_a_row = 0
        return turn

    def _append(self, client: str, weight: int, turn: _Turn) -> None:
        self._by_client.setdefault(client, deque()).append(turn)
        self._weights[client] = weight
        self._waiting += 1

    def _share(self, client: str) -> float:
        return len(self._by_client[client]) / self._weights[client]

    def _forget(self, client: str) -> None:
        if client == next(iter(self._by_client)):
            self._in_a_row = 0
        del self._by_client[client], self._weights[client]
