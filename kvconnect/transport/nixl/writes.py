"""Queue of the NIXL writes to one peer. Runs on the agent's thread."""

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
from kvconnect.transport.nixl.agent import NixlAgent, WriteDevices
from kvconnect.transport.nixl.descriptors import PairedRuns
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.tcp.page_path import ConnectionContext

MAX_UNDER_WAY = 4
"""Writes to one peer at a time: enough to use its bandwidth, few enough to cancel quickly."""


@dataclass(eq=False)
class NixlWrite:
    """A write of ``count`` wire blocks of an order, from ``first`` on. ``pieces`` and ``devices``:
    see :meth:`NixlAgent.write`."""

    order: OutgoingPages
    first: int
    count: int
    pieces: PairedRuns
    devices: WriteDevices
    digests: bytes
    dropped: Callable[[], bool]  # whether the write was cancelled
    on_done: Callable[[float | None], None]  # called at the end; gets the start time if written
    started: float = 0.0
    number: int = 0
    handle: int = -1
    watched: ExitStack = field(default_factory=ExitStack)

    @property
    def nbytes(self) -> int:
        return self.count * self.order.unit.block_bytes


class WriteQueue:
    """Starts writes, reports each complete one to the reader, and ends the others.

    ``theirs`` is the reader's offer; it must be set before the first write.
    """

    def __init__(self, context: ConnectionContext, worker: NixlWorker) -> None:
        self.theirs: NixlOffer | None = None
        self._context = context
        self._worker = worker
        self._name = ""
        self._under_way: dict[NixlWrite, NixlAgent] = {}
        self._queue: deque[NixlWrite] = deque()
        self._started = 0

    def start(self, write: NixlWrite, agent: NixlAgent) -> None:
        """Queue a write; it is dropped if its ``dropped`` returns True when its turn comes."""
        self._queue.append(write)
        self._start_next(agent)

    def _start_next(self, agent: NixlAgent) -> None:
        while self._queue and len(self._under_way) < MAX_UNDER_WAY:
            write = self._queue.popleft()
            if write.dropped():
                write.on_done(None)
            else:
                self._begin(write, agent)

    def _begin(self, write: NixlWrite, agent: NixlAgent) -> None:
        write.started = time.perf_counter()
        write.watched.enter_context(self._context.watch.over(write.order.read_id, write.nbytes))
        self._started += 1
        write.number = self._started
        try:
            if not self._name:
                assert self.theirs is not None
                self._name = agent.add_peer(self.theirs)
            notification = self._context.notification(write.number)
            write.handle = agent.write(self._name, write.pieces, write.devices, notification)
        except TransferFailed as error:
            write.watched.close()
            self._context.fail(str(error))
            return
        self._under_way[write] = agent
        self._worker.watch(partial(self._check_done, write))

    def end(self, agent: NixlAgent) -> None:
        """End the writes under way, drop queued ones and remove the peer from the agent."""
        for write, owner in self._under_way.items():
            owner.release(write.handle)
            write.watched.close()
        self._under_way.clear()
        self._queue.clear()
        if self._name:
            agent.remove_peer(self._name)

    def _check_done(self, write: NixlWrite, agent: NixlAgent) -> bool:
        """Return whether a write has ended; report it to the reader if it is complete."""
        if write not in self._under_way:
            return True
        try:
            seconds = agent.seconds(write.handle)
        except TransferFailed as error:
            self._context.fail(str(error))
            return True
        if seconds is None:
            return False
        del self._under_way[write]
        agent.release(write.handle)
        write.watched.close()
        written = PagesWritten(
            read_id=write.order.read_id,
            unit=write.order.number,
            first=write.first,
            count=write.count,
            nbytes=write.nbytes,
            number=write.number,
            seconds=seconds,
            digests=write.digests,
        )
        self._context.say(written)
        write.on_done(write.started)
        self._start_next(agent)
        return True
