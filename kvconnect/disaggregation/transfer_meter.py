"""When the pages of a hand-off moved, for its trace. Kept only where the engine traces."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from kvconnect.offload.messages import Chunk, PeerTransfer
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.base import Received, Sent
from kvconnect.types import TransferType


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


@dataclass
class TransferMeter:
    """What is measured on one connection, by want; times in seconds of the monotonic clock. A
    want that is not open (any more) is not measured: messages cross."""

    wire: dict[int, float] = field(default_factory=dict)  # open wants: how long pages moved
    moved: dict[int, int] = field(default_factory=dict)  # and how many bytes of them
    asked: dict[int, float] = field(default_factory=dict)  # since when, until the first page
    ready: dict[int, float] = field(default_factory=dict)  # when its last page was computed
    probes: int = 0  # that are over
    probed_bytes: int = 0  # of the one under way
    probed_seconds: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)  # bytes per second, by path
    paths: tuple[str, ...] = ("tcp",)  # that pages may take
    path: str = ""  # that they do take, once that is measured
    trace: TransferTrace | None = None  # where the engine traces

    def open(self, want: int, asked: bool) -> None:
        """Begin to measure a want; ``asked``: it is ours."""
        self.wire[want], self.moved[want] = 0.0, 0
        if asked:
            self.asked[want] = time.monotonic()
        if self.trace is not None:
            self.trace.open(want)

    def record(
        self,
        stats: OffloadingConnectorStats,
        kind: TransferType,
        event: Sent | Received,
        peer: str,
    ) -> None:
        """Count pages that moved."""
        stats.record_transfer(kind.value, event.nbytes, event.seconds)
        stats.count("handoff_peer_bytes", event.nbytes, label=peer)
        stats.count("handoff_peer_seconds", event.seconds, label=peer)
        if event.want in self.wire:
            self.wire[event.want] += event.seconds
            self.moved[event.want] += event.nbytes
        if self.trace is not None:
            self.trace.moved(event.want, event.nbytes, event.seconds)
        asked = self.asked.pop(event.want, None)
        if asked is not None:
            waited = time.monotonic() - asked - event.seconds
            stats.observe("handoff_wait_seconds", max(0.0, waited))

    def all_ready(self, want: int) -> None:
        """The other side has computed all of a want."""
        if want in self.wire:
            self.ready[want] = time.monotonic()
        if self.trace is not None:
            self.trace.ready(want)

    def finish(
        self, stats: OffloadingConnectorStats, want: int, role: str
    ) -> tuple[int, float, PeerTransfer | None]:
        """A want has everything: note how long its pages moved and, on the side that asked, how
        much of that came after the other side's prefill. Return the bytes and these seconds, and
        the same for a trace."""
        if want not in self.wire:
            return 0, 0.0, None
        moved = self.moved[want], self.wire[want]
        stats.observe("handoff_wire_seconds", self.wire[want], label=role)
        if role == "recv":  # no word of its being ready: the pages overtook it
            now = time.monotonic()
            stats.observe("handoff_exposed_seconds", now - self.ready.get(want, now))
        trace = None if self.trace is None else self.trace.close(want, self.path, *moved)
        self.forget(want)
        return *moved, trace

    def forget(self, want: int) -> None:
        """A want ended."""
        if self.trace is not None:
            self.trace.forget(want)
        for book in (self.wire, self.moved, self.asked, self.ready):
            book.pop(want, None)
