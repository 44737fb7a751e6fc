"""When the pages of a hand-off moved, for its trace. Kept only where the engine traces."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from kvconnect.offload.messages import Chunk, PeerTransfer


@dataclass(eq=False)
class _Sending:
    """A chunk that is on its way."""

    first: int
    blocks: int
    began: float
    ended: float = 0.0
    nbytes: int = 0


@dataclass(eq=False)
class _TracedRead:
    asked: float
    first: float = 0.0
    ready: float = 0.0
    chunks: dict[tuple[int, int, int], _Sending] = field(default_factory=dict)
    queue: deque[_Sending] = field(default_factory=deque)  # one entry per order not sent


class TransferTrace:
    """Open wants of one connection. Not synchronised; a want that is not open is left alone."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._wants: dict[int, _TracedRead] = {}

    def open(self, want: int) -> None:
        """Pages are asked for."""
        self._wants[want] = _TracedRead(time.time())

    def queued(self, want: int, chunk: tuple[int, int, int]) -> None:
        """An order was given to the transport, of one or all layers of a chunk: its group, its
        first wire block and their number."""
        found = self._wants.get(want)
        if found is not None:
            sending = found.chunks.get(chunk)
            if sending is None:
                sending = found.chunks[chunk] = _Sending(*chunk[1:], began=time.time())
            found.queue.append(sending)

    def moved(self, want: int, nbytes: int, seconds: float) -> None:
        """Pages have moved. Orders of one want leave in the order in which they were given."""
        found = self._wants.get(want)
        if found is None:
            return
        now = time.time()
        found.first = found.first or now - seconds
        if found.queue:
            sending = found.queue.popleft()
            sending.nbytes += nbytes
            sending.ended = now

    def ready(self, want: int) -> None:
        """The other side has computed all of a want."""
        found = self._wants.get(want)
        if found is not None:
            found.ready = time.time()

    def close(self, want: int, path: str, nbytes: int, seconds: float) -> PeerTransfer | None:
        """A want has everything; return what became of it."""
        found = self._wants.pop(want, None)
        if found is None:
            return None
        ended = time.time()
        sent = found.chunks.values()
        return PeerTransfer(
            worker=self._worker,
            path=path,
            asked=found.asked,
            first=found.first or ended,
            ready=found.ready,
            ended=ended,
            nbytes=nbytes,
            seconds=seconds,
            chunks=tuple(Chunk(c.first, c.blocks, c.began, c.ended, c.nbytes) for c in sent),
        )

    def forget(self, want: int) -> None:
        """A want ended without everything."""
        self._wants.pop(want, None)
