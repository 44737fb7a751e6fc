"""Workers of other engines that this worker may read blocks from."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.errors import ProtocolError
from kvconnect.protocol.cache_messages import WHOLE, CacheHello, CacheMessage, encode
from kvconnect.tiers.peers.same_machine import SourceMemory
from kvconnect.tiers.peers.serving import GroupUnits
from kvconnect.transport.base import PeerId, PeerMessage, Transport

LATE_ANSWERS = 3
"""In a row, after which a source is not asked for a while."""

_LONGEST_PAUSE_S = 30.0


@dataclass(eq=False)
class CacheSource:
    """One worker. ``units``: those that it has, per group: ``WHOLE`` alone if its slots are like
    this worker's. ``pages``: of its blocks, per group. ``reading``: blocks read from it now.
    ``memory``: its host tier, if this worker can read it."""

    peer: PeerId
    path: str
    units: Sequence[frozenset[int]]
    pages: Sequence[int]
    breaker: CircuitBreaker
    reading: int = 0
    memory: SourceMemory | None = None


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

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, peer: PeerId, path: str, hello: CacheHello, same_layout: bool) -> None:
        """Add a worker that keeps blocks of the same format, and perhaps in the same layout.

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
            self._sources[peer] = CacheSource(peer, path, units, pages, breaker)

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

    def say(self, peer: PeerId, message: CacheMessage) -> None:
        """Send a message."""
        self.transport.submit(PeerMessage(peer, encode(message)))

    def close(self) -> None:
        """End all waits: the transport is closed."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
