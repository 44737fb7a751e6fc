"""How many requests a router works on at a time, how many may wait, and what memory they may take.
On the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvconnect.errors import KVConnectError
from kvconnect.router.options import Limits


class Busy(KVConnectError):
    """The request cannot be taken now. ``retry_s``: seconds after which to ask again."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Admission:
    """The door: first come, first served."""

    def __init__(self, limits: Limits, waiting: Callable[[int], None]) -> None:
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
            await self._turn()
        try:
            yield
        finally:
            self._leave()

    async def _turn(self) -> None:
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


class Bodies:
    """Memory for the bodies of all open requests together: ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes room for so many bytes more; the block's end gives it back.

        Raises:
            Busy: (the function) there is no room for them now.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            self._left -= size
            if self._left < 0:
                raise Busy("the bodies of open requests take all the memory they may", 1)

        try:
            yield take
        finally:
            self._left += taken
