"""How many requests a router works on at a time, how many may wait, and what memory they may take.
On the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvconnect.errors import KVConnectError
from kvconnect.router.options import RouterLimits


class Busy(KVConnectError):
    """The request cannot be taken now. ``retry_s``: seconds after which to ask again."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Admission:
    """The door: first come, first served."""

    def __init__(self, limits: RouterLimits, waiting: Callable[[int], None]) -> None:
        self._limits = limits
        self._inside = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._waiting = waiting  # told how many wait

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Wait for one's turn; the block is the work.

        Raises:
            Busy: too many wait already, or the turn does not come in time.
        """
        if not self._limits.concurrent:
            yield
            return
        if self._inside < self._limits.concurrent:
            self._inside += 1
        else:
            await self._wait_turn()
        try:
            yield
        finally:
            self._leave()

    async def _wait_turn(self) -> None:
        retry_s = max(1, round(self._limits.queue_s))
        if len(self._queue) >= self._limits.queue:
            raise Busy(f"{self._limits.queue} requests are waiting already", retry_s)
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._waiting(len(self._queue))
        try:
            await asyncio.wait({turn}, timeout=self._limits.queue_s)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        if not turn.done():
            self._give_up(turn)
            raise Busy(f"no turn within {self._limits.queue_s:g} seconds", retry_s)

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        """Who waited goes; if it was just being let in, the next one is."""
        if turn.done():
            self._leave()
            return
        self._queue.remove(turn)
        self._waiting(len(self._queue))

    def _leave(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)  # takes the place that is given up
            self._waiting(len(self._queue))
        else:
            self._inside -= 1


class ClientConcurrency:
    """How many requests each client has open; ``most`` 0: any number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, int] = {}

    @contextmanager
    def enter(self, client: str) -> Iterator[None]:
        """The block is a request of ``client``.

        Raises:
            Busy: it has too many open.
        """
        now = self._open.get(client, 0)
        if self._most and now >= self._most:
            raise Busy(f"this client has {now} requests open, as many as it may", 1)
        self._open[client] = now + 1
        try:
            yield
        finally:
            left = self._open.pop(client) - 1
            if left:
                self._open[client] = left


class BodyAllocation:
    """What one request's body takes of the memory for bodies."""

    def __init__(self, bodies: BodyMemory, client: str) -> None:
        self.client = client
        self.taken = 0
        self.lost = False  # others needed it
        self._bodies = bodies
        self._stop: Callable[[], object] | None = None

    def take(self, size: int) -> None:
        """Take room for so many bytes more.

        Raises:
            Busy: there is none now.
        """
        self.taken += size
        self._bodies.taken(self, size)

    @contextmanager
    def arriving(self, stop: Callable[[], object]) -> Iterator[None]:
        """While in the block, the body is not whole: ``stop`` is called when it loses its room."""
        self._stop = stop
        self._bodies.arriving[self] = None
        try:
            yield
        finally:
            self._bodies.arriving.pop(self, None)

    def evict(self) -> None:
        """Give all back to another request."""
        assert self._stop is not None, "only what is coming loses its room"
        self.lost = True
        self._bodies.arriving.pop(self, None)
        self.free()
        self._stop()

    def free(self) -> None:
        """Give all back."""
        size, self.taken = self.taken, 0
        self._bodies.taken(self, -size)


class BodyMemory:
    """Memory for the bodies of all open requests together, ``most`` bytes, of which one client has
    ``share`` at most.

    A body that is not whole yet holds its room only as long as no other needs it: of those, the one
    that has been coming longest loses it first.
    """

    def __init__(self, most: int, share: int) -> None:
        self.arriving: dict[BodyAllocation, None] = {}  # oldest first
        self._free_bytes, self._share = most, share
        self._by_client: dict[str, int] = {}

    @contextmanager
    def allocation(self, client: str) -> Iterator[BodyAllocation]:
        """Yield the room of a request, empty; the block's end gives it back."""
        allocation = BodyAllocation(self, client)
        try:
            yield allocation
        finally:
            allocation.free()

    def taken(self, allocation: BodyAllocation, size: int) -> None:
        """A request takes ``size`` bytes more, or gives back if it is negative.

        Raises:
            Busy: there is no room for them now.
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
                raise Busy("the bodies of this client's requests take all the memory they may", 1)
        while self._free_bytes < 0:
            if not self._evict_oldest(allocation, ""):
                raise Busy("the bodies of open requests take all the memory they may", 1)

    def _evict_oldest(self, allocation: BodyAllocation, client: str) -> bool:
        """Have the oldest body that is still coming lose its room; of ``client`` if it is named."""
        others = (other for other in self.arriving if other is not allocation)
        oldest = next((other for other in others if client in ("", other.client)), None)
        if oldest is not None:
            oldest.evict()
        return oldest is not None
