"""Stores on servers that several engines share; each server needs a small client, ``Server``."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.errors import TransferFailed
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends.base import (
    BlockOutcome,
    InFlightGuard,
    PagePool,
    Store,
    StoreMeter,
    Usage,
    check_buffers,
    check_fingerprint,
    check_keys,
)
from kvconnect.tiers.backends.record_seals import Digest, Mac, RecordKeys, Seal
from kvconnect.types import TransferType

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_BYTES = 8 << 20  # of values in one exchange with the server: bounds what a call copies
_MOST_VALUES = 256
_CLOSE_S = 30.0


class Server(ABC):
    """A client of a server that keeps values under names. Thread-safe.

    Every call takes a bounded time and raises :class:`TransferFailed` if the server fails or does
    not answer. Names are ASCII: letters, digits and ``/ . : _ -``.
    """

    one_by_one = False
    """Whether :meth:`sizes` sends a request for each name."""

    @abstractmethod
    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        """Store values; return OK, FULL or FAILED for each. Their memory is free afterwards."""

    @abstractmethod
    def load(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        """Return values, None for absent ones. A value longer than ``most`` bytes is cut to that,
        since another client may have stored anything."""

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each value, 0 for absent ones."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> list[bool]:
        """Delete values; return whether each existed."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. No call is running."""


class RemoteStore(Store):
    """Blocks as values of a server, each with a head of length and digest or, with ``keys``, a MAC.

    Stores with and without keys do not see each other's blocks. A block without a valid MAC is
    CORRUPT and is removed. The server decides how much it accepts and how long it keeps values. A
    server that fails is tried again with back-off. No call takes longer than the client's timeout.
    """

    def __init__(
        self,
        server: Server,
        prefix: str,
        fingerprint: bytes,
        clock: Callable[[], float] = time.monotonic,
        keys: RecordKeys | None = None,
    ) -> None:
        self._server = server
        self._seal: Seal = Mac(keys) if keys else Digest()
        self._prefix = f"{prefix}/{self._seal.scope}{check_fingerprint(fingerprint).hex()}/"
        self._clock = clock
        self._meter = StoreMeter()
        self._breaker = CircuitBreaker(1, trial_factor=2)
        self._in_flight = InFlightGuard()
        self._pool = PagePool()

    def __repr__(self) -> str:
        state = "closed" if self._in_flight.closed else "open"
        return f"RemoteStore({self._server!r}, {self._prefix}, {state})"

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, payloads, writable=False)
        outcomes: list[BlockOutcome] = []
        started = time.perf_counter()
        for part in _parts([payload.nbytes for payload in payloads]):
            outcomes += self._ask(self._put, keys[part], payloads[part])
        self._count(TransferType.CPU_TO_REMOTE, payloads, outcomes, started)
        return outcomes

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        outcomes: list[BlockOutcome] = []
        started = time.perf_counter()
        for part in _parts([buffer.nbytes for buffer in buffers]):
            outcomes += self._ask(self._get, keys[part], buffers[part])
        self._count(TransferType.REMOTE_TO_CPU, buffers, outcomes, started)
        return outcomes

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        check_keys(keys)
        sizes = self._call(lambda: self._server.sizes(self._names(keys)))
        if isinstance(sizes, BlockOutcome):
            return [0] * len(keys)
        return [max(0, size - self._seal.nbytes) for size in sizes]

    @property
    def asks_one_by_one(self) -> bool:
        return self._server.one_by_one

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        check_keys(keys)
        found = self._call(lambda: self._server.delete(self._names(keys)))
        if isinstance(found, BlockOutcome):
            outcomes = [found] * len(keys)
        else:
            outcomes = [BlockOutcome.OK if there else BlockOutcome.ABSENT for there in found]
        self._meter.count_failed(outcomes)
        return outcomes

    def usage(self) -> Usage:
        available = not self._in_flight.closed and self._breaker.closed
        return Usage(-1, 0, 0, available)

    def take_stats(self) -> OffloadingConnectorStats | None:
        return self._meter.take()

    def close(self) -> None:
        if self._in_flight.close() and self._in_flight.wait(_CLOSE_S):
            self._server.close()

    def _ask(
        self,
        exchange: Callable[[Sequence[bytes], Sequence[memoryview]], list[BlockOutcome]],
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
    ) -> list[BlockOutcome]:
        answer = self._call(lambda: exchange(keys, buffers))
        return [answer] * len(keys) if isinstance(answer, BlockOutcome) else answer

    def _call(self, call: Callable[[], T]) -> T | BlockOutcome:
        """Return the server's answer, or the outcome if it was not asked or failed."""
        with self._in_flight.enter() as entered:
            began = self._clock()
            if not entered or not self._breaker.enter(began):
                return BlockOutcome.UNAVAILABLE
            try:
                answer = call()
            except TransferFailed as error:
                logger.warning("shared tier: %s", error)
                self._breaker.failed(self._clock(), began)
                return BlockOutcome.FAILED
            self._breaker.succeeded()
            return answer

    def _put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        last = dict(zip(keys, payloads, strict=True))  # a server may store values in any order
        names = self._names(list(last))
        sizes = [self._seal.nbytes + payload.nbytes for payload in last.values()]
        with self._pool.borrow(sum(sizes)) as memory:
            values, at = [], 0
            for name, (key, payload), size in zip(names, last.items(), sizes, strict=True):
                value = memory[at : at + size]
                value[self._seal.nbytes :] = payload
                copy = value[self._seal.nbytes :]  # seal the bytes that are sent
                value[: self._seal.nbytes] = self._seal.head(name, key, copy)
                values.append(value)
                at += size
            outcomes = self._server.store(names, values)
        by_key = dict(zip(last, outcomes, strict=True))
        return [by_key[key] for key in keys]

    def _get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        names = self._names(keys)
        most = self._seal.nbytes + max(buffer.nbytes for buffer in buffers) + 1
        values = self._server.load(names, most)
        outcomes = [
            BlockOutcome.ABSENT if value is None else self._seal.open(name, key, value, buffer)
            for name, key, value, buffer in zip(names, keys, values, buffers, strict=True)
        ]
        bad = [name for name, o in zip(names, outcomes, strict=True) if o is BlockOutcome.CORRUPT]
        if bad:
            logger.warning(
                "shared tier: removed %d records of %s that are damaged or have no valid seal",
                len(bad),
                self._prefix,
            )
            self._server.delete(bad)
        return outcomes

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _count(
        self,
        kind: TransferType,
        buffers: Sequence[memoryview],
        outcomes: Sequence[BlockOutcome],
        started: float,
    ) -> None:
        self._meter.count_failed(outcomes)
        moved = (b.nbytes for b, o in zip(buffers, outcomes, strict=True) if o is BlockOutcome.OK)
        self._meter.moved(kind, sum(moved), time.perf_counter() - started)


def _parts(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield slices of a batch, one per exchange with the server, of at least one value."""
    start = 0
    while start < len(lengths):
        end, nbytes = start, 0
        while end < len(lengths) and end - start < _MOST_VALUES and nbytes < _MOST_BYTES:
            nbytes += lengths[end]
            end += 1
        yield slice(start, end)
        start = end
