"""A store in this process's memory, the reference for other stores, and one that keeps nothing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvconnect.offload.slot_digests import load_hash
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends.base import (
    BlockOutcome,
    Store,
    StoreMeter,
    Usage,
    check_buffers,
    check_keys,
)


class _StoredBlock(NamedTuple):
    """One block."""

    payload: bytes
    digest: int


class MemoryStore(Store):
    """Keeps up to ``capacity`` bytes of blocks and evicts the least recently used.

    The blocks end with the process, so the store needs no fingerprint. Raises
    :class:`ConfigError` if the hash library is missing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hash = load_hash("store", "memory", "install xxhash")
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, _StoredBlock] = OrderedDict()
        self._nbytes = 0
        self._meter = StoreMeter()
        self._closed = False

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, payloads, writable=False)
        with self._lock:
            outcomes = [self._put(key, given) for key, given in zip(keys, payloads, strict=True)]
        self._meter.count_failed(outcomes)
        return outcomes

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        with self._lock:
            outcomes = [self._get(key, into) for key, into in zip(keys, buffers, strict=True)]
        self._meter.count_failed(outcomes)
        return outcomes

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        check_keys(keys)
        with self._lock:
            return [len(self._blocks[key].payload) if key in self._blocks else 0 for key in keys]

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        check_keys(keys)
        with self._lock:
            if self._closed:
                return [BlockOutcome.UNAVAILABLE] * len(keys)
            return [BlockOutcome.OK if self._drop(key) else BlockOutcome.ABSENT for key in keys]

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._blocks), self._nbytes, self._capacity, not self._closed)

    def take_stats(self) -> OffloadingConnectorStats | None:
        return self._meter.take()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._blocks.clear()
            self._nbytes = 0

    def _put(self, key: bytes, payload: memoryview) -> BlockOutcome:
        if self._closed:
            return BlockOutcome.UNAVAILABLE
        if payload.nbytes > self._capacity:
            return BlockOutcome.SIZE
        self._drop(key)
        while self._nbytes + payload.nbytes > self._capacity:
            self._drop(next(iter(self._blocks)))
            self._meter.evicted(1)
        self._blocks[key] = _StoredBlock(bytes(payload), self._hash(payload))
        self._nbytes += payload.nbytes
        return BlockOutcome.OK

    def _get(self, key: bytes, buffer: memoryview) -> BlockOutcome:
        if self._closed:
            return BlockOutcome.UNAVAILABLE
        if key not in self._blocks:
            return BlockOutcome.ABSENT
        payload, digest = self._blocks[key]
        if len(payload) != buffer.nbytes:
            return BlockOutcome.SIZE
        buffer[:] = payload
        if self._hash(buffer) != digest:
            self._drop(key)
            return BlockOutcome.CORRUPT
        self._blocks.move_to_end(key)
        return BlockOutcome.OK

    def _drop(self, key: bytes) -> bool:
        """Remove a block. Return whether it existed."""
        kept = self._blocks.pop(key, None)
        self._nbytes -= len(kept.payload) if kept else 0
        return kept is not None


class NullStore(Store):
    """Discards every block; measures the overhead of a tier that always misses. No settings."""

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, payloads, writable=False)
        return [BlockOutcome.OK] * len(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        return [BlockOutcome.ABSENT] * len(keys)

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        check_keys(keys)
        return [0] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        check_keys(keys)
        return [BlockOutcome.ABSENT] * len(keys)

    def usage(self) -> Usage:
        return Usage(0, 0, 0, available=True)

    def take_stats(self) -> OffloadingConnectorStats | None:
        return None

    def close(self) -> None:
        """Do nothing."""
