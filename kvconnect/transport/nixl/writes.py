"""Writes of one peer's path, as far as they need the agent: all of it on the mover's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvconnect.errors import TransferFailed
from kvconnect.protocol.nixl_messages import NixlOffer, PagesWritten
from kvconnect.transport.base import OutgoingPages
from kvconnect.transport.nixl.agent import NixlAgent
from kvconnect.transport.nixl.descriptors import Ints
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.tcp.context import ConnectionContext

ROOM = 4
"""Writes of one peer under way: enough to keep it busy, few enough to be cancelled soon."""


@dataclass(eq=False)
class NixlWrite:
    """Some wire blocks of an order, on their way. ``pieces`` and ``devices``: see
    :meth:`NixlAgent.write`."""

    order: OutgoingPages
    first: int
    count: int
    pieces: tuple[Ints, Ints, Ints]
    devices: tuple[int, int]
    digests: bytes
    dropped: Callable[[], bool]  # whether nobody wants it any more
    over: Callable[[float | None], None]  # called when it is, with its start if it was written
    started: float = 0.0
    number: int = 0
    handle: int = -1
    watched: ExitStack = field(default_factory=ExitStack)

    @property
    def nbytes(self) -> int:
        """How much it writes."""
        return self.count * self.order.unit.block_bytes


class WriteQueue:
    """Starts writes, tells the reader when each has landed, and gives up those that remain.

    ``theirs`` is the reader's offer, to be set before the first write.
    """

    def __init__(self, line: ConnectionContext, mover: NixlWorker) -> None:
        self.theirs: NixlOffer | None = None
        self._line = line
        self._mover = mover
        self._name = ""
        self._under_way: dict[NixlWrite, NixlAgent] = {}
        self._queue: deque[NixlWrite] = deque()
        self._started = 0

    def start(self, write: NixlWrite, agent: NixlAgent) -> None:
        """Begin to write when its turn comes, unless nobody wants it any more then."""
        self._queue.append(write)
        self._go_on(agent)

    def _go_on(self, agent: NixlAgent) -> None:
        while self._queue and len(self._under_way) < ROOM:
            write = self._queue.popleft()
            if write.dropped():
                write.over(None)
            else:
                self._begin(write, agent)

    def _begin(self, write: NixlWrite, agent: NixlAgent) -> None:
        write.started = time.perf_counter()
        write.watched.enter_context(self._line.watch.over(write.order.read_id, write.nbytes))
        self._started += 1
        write.number = self._started
        try:
            if not self._name:
                assert self.theirs is not None
                self._name = agent.meet(self.theirs)
            mark = self._line.mark(write.number)
            write.handle = agent.write(self._name, write.pieces, write.devices, mark)
        except TransferFailed as error:
            write.watched.close()
            self._line.fail(str(error))
            return
        self._under_way[write] = agent
        self._mover.watch(partial(self._look, write))

    def end(self, agent: NixlAgent) -> None:
        """Give up what is under way."""
        for write, owner in self._under_way.items():
            owner.release(write.handle)
            write.watched.close()
        self._under_way.clear()
        self._queue.clear()
        if self._name:
            agent.part(self._name)

    def _look(self, write: NixlWrite, agent: NixlAgent) -> bool:
        """Say whether a write is over, and report it if it is."""
        if write not in self._under_way:
            return True
        try:
            seconds = agent.seconds(write.handle)
        except TransferFailed as error:
            self._line.fail(str(error))
            return True
        if seconds is None:
            return False
        del self._under_way[write]
        agent.release(write.handle)
        write.watched.close()
        landed = PagesWritten(
            want=write.order.read_id,
            unit=write.order.number,
            first=write.first,
            count=write.count,
            nbytes=write.nbytes,
            number=write.number,
            seconds=seconds,
            digests=write.digests,
        )
        self._line.say(landed)
        write.over(write.started)
        self._go_on(agent)
        return True
