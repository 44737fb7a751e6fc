"""The disk tier as a store."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.offload.eviction import make_policy
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends.base import (
    BlockOutcome,
    InFlightGuard,
    PagePool,
    Store,
    StoreMeter,
    Usage,
    WriteBudget,
    check_buffers,
    check_fingerprint,
    check_keys,
)
from kvconnect.tiers.backends.disk.disk_options import DiskOptions
from kvconnect.tiers.backends.disk.files import MAX_PAYLOAD
from kvconnect.tiers.backends.disk.folder import Folder
from kvconnect.tiers.backends.disk.formats import write_format
from kvconnect.tiers.backends.disk.log import SegmentLog
from kvconnect.tiers.backends.disk.record import PAGE, index_bytes, pages_of
from kvconnect.tiers.backends.disk.table import SLOTS, RecordTable
from kvconnect.tiers.backends.disk.transfers import BlockRead, BlockWrite
from kvconnect.types import TransferType

logger = logging.getLogger(__name__)

_CLOSE_S = 30.0  # a disk that hangs must not keep the process
_READ_FAILURES = 3  # open the circuit breaker; fewer may be one bad spot of the disk
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EBUSY)


class Guards(NamedTuple):
    """Limits on the use of a disk."""

    writes: CircuitBreaker
    reads: CircuitBreaker
    budget: WriteBudget


class DiskStore(Store):
    """Blocks of one worker in a folder of its own.

    Blocks are appended to segments. When the capacity is used, the eviction policy chooses a
    segment to delete. Writes are not flushed: a crash loses the blocks in flight, and after a power
    failure digests reveal blocks that did not reach the disk. Reads and writes bypass the page
    cache if the file system can do that.

    ``clock`` returns seconds since 1970, ``steady`` seconds of a clock that never jumps. Raises
    :class:`ConfigError` for a folder that cannot be used.
    """

    def __init__(
        self,
        options: DiskOptions,
        fingerprint: bytes,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._fingerprint = check_fingerprint(fingerprint)
        self._clock = clock
        self._steady = steady
        self._meter = StoreMeter()
        self._folder = Folder(options.path, options.owner)
        self._table = RecordTable(make_policy("lru", SLOTS), options.ttl_s, options.quota_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.close)
            self._log = SegmentLog(
                self._folder, self._table, options, fingerprint, clock, self._meter.evicted
            )
            write_format(self._folder.files, fingerprint, options.about)
            undo.pop_all()
        self._pool = PagePool()
        self._in_flight = InFlightGuard()
        self._guards = Guards(
            CircuitBreaker(1, trial_factor=2),
            CircuitBreaker(_READ_FAILURES, trial_factor=2),
            WriteBudget(options.daily_write_bytes, steady()),
        )

    def __repr__(self) -> str:
        totals = self._table.totals()
        state = "closed" if self._in_flight.closed else "open"
        return f"DiskStore({self._folder.path}, {totals.blocks} blocks, {state})"

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, payloads, writable=False)
        with self._in_flight.enter() as entered:
            outcomes = [BlockOutcome.SIZE if entered else BlockOutcome.UNAVAILABLE] * len(keys)
            fitting = [n for n, key in enumerate(keys) if self._fits(key, payloads[n].nbytes)]
            if entered and fitting:
                done = self._put_admitted(
                    [keys[n] for n in fitting], [payloads[n] for n in fitting]
                )
                for number, outcome in zip(fitting, done, strict=True):
                    outcomes[number] = outcome
        self._meter.count_failed(outcomes)
        return outcomes

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        with self._in_flight.enter() as entered:
            began = self._steady()
            if entered and keys and self._guards.reads.enter(began):
                outcomes = self._read(keys, buffers, began)
            else:
                outcomes = [BlockOutcome.UNAVAILABLE] * len(keys)
        self._meter.count_failed(outcomes)
        return outcomes

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        check_keys(keys)
        with self._in_flight.enter() as entered:
            if entered and self._guards.reads.allows(self._steady()):
                return self._table.lengths(keys, self._clock())
        return [0] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        check_keys(keys)
        with self._in_flight.enter() as entered:
            if not entered:
                return [BlockOutcome.UNAVAILABLE] * len(keys)
            meaning = {None: BlockOutcome.ABSENT, True: BlockOutcome.OK, False: BlockOutcome.FAILED}
            outcomes = [meaning[deleted] for deleted in self._log.drop(keys)]
        self._meter.count_failed(outcomes)
        return outcomes

    def usage(self) -> Usage:
        totals = self._table.totals()
        guards = (self._guards.reads, self._guards.writes)
        available = not self._in_flight.closed and all(guard.closed for guard in guards)
        return Usage(totals.blocks, totals.nbytes, self._options.capacity, available)

    def take_stats(self) -> OffloadingConnectorStats | None:
        return self._meter.take()

    def close(self) -> None:
        if not self._in_flight.close():
            return  # closed before
        if self._in_flight.wait(_CLOSE_S):
            self._log.close()
            self._folder.close()
        else:  # the files stay open and the folder stays locked until this process ends
            logger.warning("disk tier: calls to %s do not end; not closed", self._folder.path)

    def _fits(self, key: bytes, nbytes: int) -> bool:
        """Return whether an empty segment has room for a block."""
        needed = PAGE + pages_of(nbytes) * PAGE + index_bytes((key,))
        return nbytes <= MAX_PAYLOAD and needed <= self._options.segment_bytes

    def _put_admitted(
        self, keys: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[BlockOutcome]:
        """Write the blocks that their tenants' quotas admit."""
        lengths = [payload.nbytes for payload in payloads]
        with self._table.admit(keys, lengths) as admitted:
            if len(admitted) == len(keys):
                return self._write(keys, payloads)
            outcomes = [BlockOutcome.LIMITED] * len(keys)
            if admitted:
                done = self._write([keys[n] for n in admitted], [payloads[n] for n in admitted])
                for number, outcome in zip(admitted, done, strict=True):
                    outcomes[number] = outcome
        self._log.expire()  # otherwise only writes would expire the tenant's old blocks
        return outcomes

    def _write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        now = self._steady()
        nbytes = sum(payload.nbytes for payload in payloads)
        if not self._guards.writes.enter(now):
            return [BlockOutcome.UNAVAILABLE] * len(keys)
        if not self._guards.budget.spend(nbytes, now):
            return [BlockOutcome.LIMITED] * len(keys)
        writing = BlockWrite(self._log, self._pool, self._fingerprint, self._clock())
        outcomes = writing.run(keys, payloads)
        if writing.error is None:
            self._guards.writes.succeeded()
        elif writing.error.errno != errno.EBUSY:  # EBUSY ends with the running calls
            self._guards.writes.failed(self._steady(), now)
            logger.warning("disk tier: cannot write to %s: %s", self._folder.path, writing.error)
        if writing.error is not None and writing.error.errno in _NO_ROOM:
            outcomes = [o if o is BlockOutcome.OK else BlockOutcome.FULL for o in outcomes]
        self._count(TransferType.CPU_TO_DISK, payloads, outcomes, writing.seconds)
        return outcomes

    def _read(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], began: float
    ) -> list[BlockOutcome]:
        reading = BlockRead(self._table, self._pool, self._clock)
        outcomes = reading.run(keys, buffers)
        if reading.error is not None:
            self._guards.reads.failed(self._steady(), began)
            logger.warning("disk tier: cannot read from %s: %s", self._folder.path, reading.error)
        elif BlockOutcome.OK in outcomes:
            self._guards.reads.succeeded()
        lost = (BlockOutcome.CORRUPT, BlockOutcome.FAILED)
        bad = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome in lost]
        if bad:
            logger.warning("disk tier: %d blocks of %s are damaged", len(bad), self._folder.path)
            self._log.drop(bad)
        self._count(TransferType.DISK_TO_CPU, buffers, outcomes, reading.seconds)
        return outcomes

    def _count(
        self,
        kind: TransferType,
        buffers: Sequence[memoryview],
        outcomes: Sequence[BlockOutcome],
        seconds: float,
    ) -> None:
        moved = (b.nbytes for b, o in zip(buffers, outcomes, strict=True) if o is BlockOutcome.OK)
        self._meter.moved(kind, sum(moved), seconds)
