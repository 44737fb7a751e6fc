"""Limits on requests: how many run, wait, or are open per client, and the memory of their bodies.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from kvconnect.errors import KVConnectError
from kvconnect.router.http.fair_queue import FairQueue
from kvconnect.router.options import RouterLimits

SLOW = "the request body arrived slowly, and other requests needed its memory"


class Busy(KVConnectError):
    """The router cannot take the request now. ``retry_s``: seconds after which to retry."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Admission:
    """A queue for running requests, in which clients take turns."""

    def __init__(self, limits: RouterLimits, waiting: Callable[[int], None]) -> None:
        self._limits = limits
        self._inside = 0
        self._queue = FairQueue(limits.queue)
        self._waiting = waiting  # is told the queue's length

    @asynccontextmanager
    async def enter(self, client: str, weight: int = 1) -> AsyncIterator[None]:
        """Wait for a turn of ``client``, then hold it for the block. ``weight``: turns in a row
        that it has.

        Raises:
            Busy: the queue is full, or the turn does not come in time.
        """
        if not self._limits.concurrent:
            yield
            return
        if self._inside < self._limits.concurrent:
            self._inside += 1
        else:
            await self._wait_turn(client, weight)
        try:
            yield
        finally:
            self._leave()

    async def _wait_turn(self, client: str, weight: int) -> None:
        retry_s = max(1, round(self._limits.queue_s))
        full = f"the queue is full: {self._limits.queue} requests wait"
        turn = asyncio.get_running_loop().create_future()
        gives_way = self._queue.add(client, weight, turn)
        if gives_way is turn:
            raise Busy(full, retry_s)
        if gives_way is not None:
            gives_way.set_exception(Busy(full, retry_s))
        self._waiting(len(self._queue))
        try:
            await asyncio.wait({turn}, timeout=self._limits.queue_s)
        except asyncio.CancelledError:
            self._give_up(client, turn)
            raise
        if not turn.done():
            self._give_up(client, turn)
            raise Busy(f"no turn within {self._limits.queue_s:g} seconds", retry_s)
        turn.result()

    def _give_up(self, client: str, turn: asyncio.Future[None]) -> None:
        """Leave the queue; a turn that was just granted goes to the next request."""
        if not turn.done():
            self._queue.remove(client, turn)
            self._waiting(len(self._queue))
        elif turn.exception() is None:
            self._leave()

    def _leave(self) -> None:
        turn = self._queue.next()
        if turn is None:
            self._inside -= 1
        else:
            turn.set_result(None)  # the next request takes the turn
            self._waiting(len(self._queue))


class ClientConcurrency:
    """Limits the open requests of each client to ``most``; 0: no limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, int] = {}

    @contextmanager
    def enter(self, client: str) -> Iterator[None]:
        """Count a request of ``client`` as open during the block.

        Raises:
            Busy: the client has ``most`` requests open.
        """
        now = self._open.get(client, 0)
        if self._most and now >= self._most:
            raise Busy(f"this client has {now} open requests, the limit", 1)
        self._open[client] = now + 1
        try:
            yield
        finally:
            left = self._open.pop(client) - 1
            if left:
                self._open[client] = left


class BodyAllocation:
    """The memory that one request's body takes, or its answers that are no streams; a context
    manager, whose end gives it back."""

    def __init__(self, bodies: BodyMemory, client: str) -> None:
        self.client = client
        self.taken = 0
        self.lost = False  # evicted, because other bodies needed the memory
        self.ended = False  # so is the request; a prefill answer may still arrive for seconds
        self._bodies = bodies
        self._reader: asyncio.Task[Any] | None = None

    def __enter__(self) -> BodyAllocation:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.free()

    def take(self, size: int) -> None:
        """Take ``size`` more bytes.

        Raises:
            Busy: no memory is left. They are not taken, and a body that arrives has none any more:
                until its request has ended, the next one would find the memory taken, too.
        """
        if self.ended:
            return
        self.taken += size
        try:
            self._bodies.taken(self, size)
        except Busy:
            self._give_back(self.taken if self in self._bodies.arriving else size)
            raise

    def try_take(self, size: int) -> bool:
        """Take ``size`` more bytes if they are left; return whether they were."""
        try:
            self.take(size)
        except Busy:
            return False
        return True

    @contextmanager
    def arriving(self, reader: asyncio.Task[Any] | None) -> Iterator[None]:
        """Mark the body as incomplete for the block: eviction cancels ``reader``."""
        # A frame that refers to the task that it fails in would keep the body.
        self._reader, reader = reader, None
        self._bodies.arriving[self] = None
        try:
            yield
        finally:
            self._bodies.arriving.pop(self, None)
            self._reader = None

    def evict(self) -> None:
        """Give all memory to another request, and stop this one."""
        assert self._reader is not None, "only an incomplete body is evicted"
        self.lost = True
        self._bodies.arriving.pop(self, None)
        self.free()
        self._reader.cancel()

    def free(self) -> None:
        """Give all memory back."""
        self._give_back(self.taken)

    def _give_back(self, size: int) -> None:
        self.taken -= size
        self._bodies.taken(self, -size)


class BodyMemory:
    """Limits the memory of all request bodies, or of all answers, to ``most`` bytes, and of one
    client's to ``share``.

    When memory runs out, incomplete bodies are evicted, the oldest first.
    """

    def __init__(self, what: str, most: int, share: int) -> None:
        self._what = what  # they are, for errors
        self.arriving: dict[BodyAllocation, None] = {}  # oldest first
        self._free_bytes, self._share = most, share
        self._by_client: dict[str, int] = {}

    def allocation(self, client: str) -> BodyAllocation:
        """Return an empty allocation."""
        return BodyAllocation(self, client)

    def taken(self, allocation: BodyAllocation, size: int) -> None:
        """Record that a request takes ``size`` bytes; a negative size gives bytes back.

        Raises:
            Busy: not even evicting incomplete bodies makes enough room.
        """
        self._free_bytes -= size
        now = self._by_client.get(allocation.client, 0) + size
        self._by_client[allocation.client] = now
        if not now:
            del self._by_client[allocation.client]
        if size <= 0:
            return
        while self._by_client[allocation.client] > self._share:
            if not self._evict_oldest(allocation, allocation.client):
                raise Busy(f"{self._what} of this client take all the memory they may", 1)
        while self._free_bytes < 0:
            if not self._evict_oldest(allocation, ""):
                raise Busy(f"{self._what} of all clients take all the memory they may", 1)

    def _evict_oldest(self, allocation: BodyAllocation, client: str) -> bool:
        """Evict the oldest incomplete body (of ``client`` if named); return whether one was.

        Raises:
            Busy: it is that of ``allocation``, and there are others.
        """
        of_client = [each for each in self.arriving if client in ("", each.client)]
        if not of_client or of_client == [allocation]:
            return False
        if of_client[0] is allocation:
            raise Busy(SLOW, 1)
        of_client[0].evict()
        return True
