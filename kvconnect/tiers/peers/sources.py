"""Workers of other engines that this worker may read blocks from."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvconnect.bounded import remember
from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.errors import ProtocolError
from kvconnect.protocol.cache_messages import WHOLE, CacheHello, CacheMessage, encode
from kvconnect.tiers.peers.same_machine import SourceMemory
from kvconnect.tiers.peers.serving import GroupUnits
from kvconnect.transport.base import PeerId, PeerMessage, Transport

LATE_ANSWERS = 3
"""In a row, after which a source is not asked for a while."""

_LONGEST_PAUSE_S = 30.0
_MOST_REMEMBERED = 1024


@dataclass(eq=False)
class CacheSource:
    """One worker. ``units``: those that it has, per group: ``WHOLE`` alone if its slots are like
    this worker's. ``pages``: of its blocks, per group. ``breaker``: of questions. ``read_breaker``:
    of reads over the network, which may stall while questions are answered. ``reading``: blocks
    read from it now. ``memory``: its host tier, if this worker can read it."""

    peer: PeerId
    address: str
    path: str
    units: Sequence[frozenset[int]]
    pages: Sequence[int]
    breaker: CircuitBreaker
    read_breaker: CircuitBreaker
    reading: int = 0
    memory: SourceMemory | None = None

    def readable(self, now: float) -> bool:
        """Whether blocks may be read from it. None are for a while after a late read; then one
        read at a time is a trial, until one brings pages in time."""
        if self.read_breaker.closed:
            return True
        return not self.reading and self.read_breaker.allows(now)


class CacheSources:
    """The workers that can be asked, and what questions and reads share.

    ``groups``: per group, the units of each page of a block. The table belongs to ``changed``,
    which is notified when a question or a read goes on. Thread-safe.
    """

    def __init__(self, transport: Transport, groups: Sequence[Sequence[GroupUnits]]) -> None:
        self.transport = transport
        self.groups = groups
        self.changed = threading.Condition()
        self.numbers = itertools.count(1)
        self.closed = False
        self._sources: dict[PeerId, CacheSource] = {}
        self._read_breakers: dict[bytes, CircuitBreaker] = {}  # of workers, by their own ids

    def __len__(self) -> int:
        return len(self._sources)

    def add(
        self, peer: PeerId, address: str, path: str, hello: CacheHello, same_layout: bool
    ) -> None:
        """Add a worker that keeps blocks of the same format, and perhaps in the same layout. One
        whose reads were late is known again by another connection; a restarted one begins anew.

        Raises:
            ProtocolError: its groups or units are others.
        """
        if not len(hello.groups) == len(hello.pages or hello.groups) == len(self.groups):
            raise ProtocolError(f"{len(hello.groups)} groups there, {len(self.groups)} here")
        for mine, theirs in zip(self.groups, hello.groups, strict=True):
            for number, unit in mine[0].parts.items():
                if theirs.get(number, unit.block_bytes) != unit.block_bytes:
                    raise ProtocolError(f"unit {number} has {theirs[number]} bytes there")
        units = [frozenset({WHOLE} if same_layout else group) for group in hello.groups]
        pages = hello.pages or [1] * len(units)
        breaker = CircuitBreaker(LATE_ANSWERS, _LONGEST_PAUSE_S)
        with self.changed:
            reads = self._read_breakers.get(hello.engine) or CircuitBreaker(1, _LONGEST_PAUSE_S)
            remember(self._read_breakers, hello.engine, reads, _MOST_REMEMBERED)
            self._sources[peer] = CacheSource(peer, address, path, units, pages, breaker, reads)

    def set_memory(self, peer: PeerId, memory: SourceMemory | None) -> None:
        """Note how to read a source's memory; None: it cannot be read any more."""
        with self.changed:
            if peer in self._sources:
                self._sources[peer].memory = memory

    def remove(self, peer: PeerId) -> None:
        """Remove a worker, if it is there."""
        with self.changed:
            self._sources.pop(peer, None)

    def has(self, peers: Iterable[PeerId]) -> bool:
        """Return whether one of some workers is there."""
        with self.changed:
            return bool(self.of(peers))

    def of(self, peers: Iterable[PeerId]) -> list[CacheSource]:
        """Return those of some workers that are still there. The caller holds ``changed``."""
        return [self._sources[peer] for peer in peers if peer in self._sources]

    def resting(self, now: float) -> frozenset[PeerId]:
        """Return those that nothing is read from now. The caller holds ``changed``."""
        return frozenset(p for p, source in self._sources.items() if not source.readable(now))

    def say(self, peer: PeerId, message: CacheMessage) -> None:
        """Send a message."""
        self.transport.submit(PeerMessage(peer, encode(message)))

    def close(self) -> None:
        """End all waits: the transport is closed."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
