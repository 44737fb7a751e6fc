"""Bytes and seconds of one session's reads, for metrics and, where the engine traces, for spans.

Both classes ignore reads that are not open, since messages cross.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.disaggregation.messages import Chunk, PeerTransfer
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.base import PagesReceived, PagesSent
from kvconnect.types import TransferType


class ChunkKey(NamedTuple):
    """Wire blocks that were offered together, in one group."""

    group: int
    first: int
    blocks: int


@dataclass(eq=False)
class _SentChunk:
    """A chunk in flight, or sent."""

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
    chunks: dict[ChunkKey, _SentChunk] = field(default_factory=dict)
    queue: deque[_SentChunk] = field(default_factory=deque)  # one entry per unsent order


class TransferTrace:
    """Times of the open reads of one session, in seconds of the wall clock. Not synchronised."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._reads: dict[int, _TracedRead] = {}

    def open(self, read_id: int) -> None:
        """Pages are requested."""
        self._reads[read_id] = _TracedRead(time.time())

    def queued(self, read_id: int, key: ChunkKey) -> None:
        """The transport was given an order for one or all layers of a chunk."""
        read = self._reads.get(read_id)
        if read is not None:
            chunk = read.chunks.get(key)
            if chunk is None:
                chunk = read.chunks[key] = _SentChunk(key.first, key.blocks, began=time.time())
            read.queue.append(chunk)

    def moved(self, read_id: int, nbytes: int, seconds: float) -> None:
        """Pages were transferred. Orders of one read are sent in the order of :meth:`queued`."""
        read = self._reads.get(read_id)
        if read is None:
            return
        now = time.time()
        read.first = read.first or now - seconds
        if read.queue:
            chunk = read.queue.popleft()
            chunk.nbytes += nbytes
            chunk.ended = now

    def ready(self, read_id: int) -> None:
        """The source has computed every page of a read."""
        read = self._reads.get(read_id)
        if read is not None:
            read.ready = time.time()

    def close(self, read_id: int, path: str, nbytes: int, seconds: float) -> PeerTransfer | None:
        """Forget a complete read and return its times."""
        read = self._reads.pop(read_id, None)
        if read is None:
            return None
        ended = time.time()
        sent = read.chunks.values()
        return PeerTransfer(
            worker=self._worker,
            path=path,
            asked=read.asked,
            first=read.first or ended,
            ready=read.ready,
            ended=ended,
            nbytes=nbytes,
            seconds=seconds,
            chunks=tuple(Chunk(c.first, c.blocks, c.began, c.ended, c.nbytes) for c in sent),
        )

    def forget(self, read_id: int) -> None:
        """Forget an incomplete read."""
        self._reads.pop(read_id, None)


class MeasuredRead(NamedTuple):
    """What was transferred for one complete read. ``moved``: for the trace, if there is one."""

    nbytes: int = 0
    seconds: float = 0.0
    moved: PeerTransfer | None = None


@dataclass
class TransferMeter:
    """Measurements of one session: of its open reads, by read id, and of its bandwidth probe. Times
    in seconds of the monotonic clock. Not synchronised."""

    seconds: dict[int, float] = field(default_factory=dict)  # open reads: duration of transfers
    nbytes: dict[int, int] = field(default_factory=dict)  # open reads: bytes transferred
    requested_at: dict[int, float] = field(default_factory=dict)  # until the first page arrives
    ready_at: dict[int, float] = field(default_factory=dict)  # when the last page was computed
    probes: int = 0  # finished
    probed_bytes: int = 0  # of the current probe
    probed_seconds: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)  # bytes per second, by path
    paths: tuple[str, ...] = ("tcp",)  # that pages may take
    path: str = ""  # that pages take, once the probes are finished
    trace: TransferTrace | None = None  # where the engine traces

    def open(self, read_id: int, asked: bool) -> None:
        """Begin to measure a read; ``asked``: this worker is the reader."""
        self.seconds[read_id], self.nbytes[read_id] = 0.0, 0
        if asked:
            self.requested_at[read_id] = time.monotonic()
        if self.trace is not None:
            self.trace.open(read_id)

    def record(
        self,
        stats: OffloadingConnectorStats,
        kind: TransferType,
        event: PagesSent | PagesReceived,
        peer: str,
    ) -> None:
        """Count transferred pages."""
        stats.record_transfer(kind.value, event.nbytes, event.seconds)
        stats.count("handoff_peer_bytes", event.nbytes, label=peer)
        stats.count("handoff_peer_seconds", event.seconds, label=peer)
        if event.read_id in self.seconds:
            self.seconds[event.read_id] += event.seconds
            self.nbytes[event.read_id] += event.nbytes
        if self.trace is not None:
            self.trace.moved(event.read_id, event.nbytes, event.seconds)
        requested_at = self.requested_at.pop(event.read_id, None)
        if requested_at is not None:
            waited = time.monotonic() - requested_at - event.seconds
            stats.observe("handoff_wait_seconds", max(0.0, waited))

    def all_ready(self, read_id: int) -> None:
        """The source has computed every page of a read."""
        if read_id in self.seconds:
            self.ready_at[read_id] = time.monotonic()
        if self.trace is not None:
            self.trace.ready(read_id)

    def finish(self, stats: OffloadingConnectorStats, read_id: int, role: str) -> MeasuredRead:
        """End a complete read: observe the seconds of its transfers and, for a reader, those after
        the prefill. ``role``: ``send`` or ``recv``."""
        if read_id not in self.seconds:
            return MeasuredRead()
        nbytes, seconds = self.nbytes[read_id], self.seconds[read_id]
        stats.observe("handoff_wire_seconds", seconds, label=role)
        if role == "recv":  # the pages may overtake PagesReady, which sets ready_at
            now = time.monotonic()
            stats.observe("handoff_exposed_seconds", now - self.ready_at.get(read_id, now))
        moved = None
        if self.trace is not None:
            moved = self.trace.close(read_id, self.path, nbytes, seconds)
        self.forget(read_id)
        return MeasuredRead(nbytes, seconds, moved)

    def forget(self, read_id: int) -> None:
        """Stop measuring a read."""
        if self.trace is not None:
            self.trace.forget(read_id)
        for table in (self.seconds, self.nbytes, self.requested_at, self.ready_at):
            table.pop(read_id, None)
