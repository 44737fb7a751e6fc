"""Requests that wait for their turn: clients take turns, and each one's requests come in order.

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
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def add(self, client: str, turn: _Turn) -> _Turn | None:
        """Let a turn wait; return the one that gives way to it, which is ``turn`` itself if there
        is no room for it.

        In a full queue, the last request of the client with the most gives way, if that client has
        more than this one would have.
        """
        if self._waiting < self._most:
            self._append(client, turn)
            return None
        greedy = max(self._by_client, key=lambda name: len(self._by_client[name]), default=client)
        if len(self._by_client.get(greedy, ())) <= len(self._by_client.get(client, ())) + 1:
            return turn
        last = self._by_client[greedy][-1]
        self.remove(greedy, last)
        self._append(client, turn)
        return last

    def remove(self, client: str, turn: _Turn) -> None:
        """Take out a turn that waits."""
        turns = self._by_client[client]
        turns.remove(turn)
        self._waiting -= 1
        if not turns:
            del self._by_client[client]

    def next(self) -> _Turn | None:
        """Take out the turn that comes next; None if none waits."""
        client = next(iter(self._by_client), None)
        if client is None:
            return None
        turns = self._by_client.pop(client)
        turn = turns.popleft()
        self._waiting -= 1
        if turns:
            self._by_client[client] = turns  # after all others
        return turn

    def _append(self, client: str, turn: _Turn) -> None:
        self._by_client.setdefault(client, deque()).append(turn)
        self._waiting += 1
