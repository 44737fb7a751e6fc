"""Moves blocks between memory and segments, in few and large transfers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import xxhash

from kvconnect.tiers.backends.base import BlockOutcome, PagePool
from kvconnect.tiers.backends.disk.files import MAX_BYTES, MAX_RECORDS, TransferBuffers
from kvconnect.tiers.backends.disk.log import SegmentLog
from kvconnect.tiers.backends.disk.record import (
    LAST_SECOND,
    PAGE,
    RecordHead,
    pages_of,
)
from kvconnect.tiers.backends.disk.segment import Segment
from kvconnect.tiers.backends.disk.table import RecordPlace, RecordTable

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # a block may be replaced while it is read, but hardly three times


class BlockWrite:
    """Writes the blocks of one call. For one thread.

    ``seconds`` is the time of the disk; ``error`` is the last error of the system.
    """

    def __init__(self, log: SegmentLog, pool: PagePool, fingerprint: bytes, now: float) -> None:
        self._log = log
        self._pool = pool
        self._fingerprint = fingerprint
        self._now = min(max(int(now), 0), LAST_SECOND)  # of a clock that is wrong, too
        self.seconds = 0.0
        self.error: OSError | None = None

    def run(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        """Write blocks and return the outcome of each. After an error, the rest is not tried."""
        outcomes: list[BlockOutcome] = []
        digests = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        heads = [
            RecordHead(key, self._fingerprint, payload.nbytes, self._now, digest)
            for key, payload, digest in zip(keys, payloads, digests, strict=True)
        ]
        while len(outcomes) < len(keys) and self.error is None:
            start = len(outcomes)
            end = _batch_end([payload.nbytes for payload in payloads], start)
            try:
                done = self._write(heads[start:end], payloads[start:end])
                outcomes += [BlockOutcome.OK] * done
            except OSError as error:
                self.error = error
        return outcomes + [BlockOutcome.FAILED] * (len(keys) - len(outcomes))

    def _write(self, heads: Sequence[RecordHead], payloads: Sequence[memoryview]) -> int:
        """Write the first of these records, as many as fit consecutively. Return their number."""
        run = self._log.reserve([h.key for h in heads], [h.length for h in heads])
        heads, payloads = heads[: run.records], payloads[: run.records]
        offsets, offset = [], run.offset
        for head in heads:
            offsets.append(offset)
            offset += pages_of(head.length) * PAGE
        try:
            with TransferBuffers(self._pool, payloads) as run_buffers:
                run_buffers.prepare_write(heads, run.segment.head.identity)
                started = time.perf_counter()
                run.segment.file.write(run_buffers.views(), run.offset)
                self.seconds += time.perf_counter() - started
        except OSError:
            self._log.abandon(run)
            raise
        self._log.commit(run, heads, offsets)
        return run.records


class BlockRead:
    """Reads the blocks of one call. For one thread.

    ``seconds`` is the time of the disk; ``error`` is the last error of the system.
    """

    def __init__(self, table: RecordTable, pool: PagePool, clock: Callable[[], float]) -> None:
        self._table = table
        self._pool = pool
        self._clock = clock
        self.seconds = 0.0
        self.error: OSError | None = None

    def run(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        """Read blocks; return the outcome of each."""
        outcomes = [BlockOutcome.ABSENT] * len(keys)
        todo = list(range(len(keys)))
        for attempt in range(_ATTEMPTS):
            places = self._table.find([keys[n] for n in todo], self._clock())
            found = dict(zip(todo, places, strict=True))
            try:
                self._read(keys, buffers, found, outcomes, side_by_side=attempt == 0)
            finally:
                self._table.release([place for place in places if place is not None])
            # CORRUPT: maybe replaced during the read. FAILED: maybe only a neighbour is unreadable.
            again = (
                (BlockOutcome.CORRUPT, BlockOutcome.FAILED)
                if attempt == 0
                else (BlockOutcome.CORRUPT,)
            )
            todo = [n for n in todo if outcomes[n] in again]
            if not todo:
                break
        return outcomes

    def _read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        places: dict[int, RecordPlace | None],
        outcomes: list[BlockOutcome],
        side_by_side: bool,
    ) -> None:
        wanted = []
        for number, place in places.items():
            if place is None:
                outcomes[number] = BlockOutcome.ABSENT
            elif place.length != buffers[number].nbytes:
                outcomes[number] = BlockOutcome.SIZE
            else:
                wanted.append((place, number))
        for segment, page, numbers in _runs(wanted, MAX_RECORDS if side_by_side else 1):
            try:
                with TransferBuffers(
                    self._pool, [buffers[number] for number in numbers]
                ) as run_buffers:
                    started = time.perf_counter()
                    segment.file.read(run_buffers.views(), page * PAGE)
                    self.seconds += time.perf_counter() - started
                    for at, number in enumerate(numbers):
                        head = run_buffers.finish_read(at, segment.head.identity)
                        good = _is(head, keys[number], buffers[number])
                        outcomes[number] = BlockOutcome.OK if good else BlockOutcome.CORRUPT
            except OSError as error:
                self.error = error
                for number in numbers:
                    outcomes[number] = BlockOutcome.FAILED


def _is(head: RecordHead | None, key: bytes, payload: memoryview) -> bool:
    """Return whether a record belongs to a key and its payload matches its digest."""
    return (
        head is not None
        and head.live
        and head.key == key
        and head.length == payload.nbytes
        and head.digest == xxhash.xxh3_64_intdigest(payload)
    )


def _runs(
    wanted: list[tuple[RecordPlace, int]], most: int
) -> Iterator[tuple[Segment, int, list[int]]]:
    """Yield (segment, first page, numbers) of consecutive blocks, at most ``most`` at a time."""
    wanted.sort(key=lambda pair: (pair[0].segment.slot, pair[0].page))
    at = 0
    while at < len(wanted):
        place, number = wanted[at]
        numbers, end, nbytes = [number], place.page + pages_of(place.length), place.length
        at += 1
        while at < len(wanted) and len(numbers) < most and nbytes < MAX_BYTES:
            following, number = wanted[at]
            if following.segment is not place.segment or following.page != end:
                break
            numbers.append(number)
            end += pages_of(following.length)
            nbytes += following.length
            at += 1
        yield place.segment, place.page, numbers


def _batch_end(lengths: Sequence[int], start: int) -> int:
    """Return the end of the batch that begins at ``start``. It has at least one block."""
    end, nbytes = start, 0
    while end < len(lengths) and end - start < MAX_RECORDS and nbytes < MAX_BYTES:
        nbytes += lengths[end]
        end += 1
    return end
