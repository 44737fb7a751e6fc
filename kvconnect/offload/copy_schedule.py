"""Decides which copy job launches its next chunk, and how large the chunk is.

For one thread. Time is an argument: seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from kvconnect.copy.base import MAX_IN_FLIGHT
from kvconnect.offload.messages import GroupBlocks
from kvconnect.types import TransferType

CHUNK_BYTES = 8 << 20
"""Smallest chunk, and the size until the link's rate is known."""

CHUNK_S = 0.002
"""Seconds that a chunk takes on the link: longer than a digest kernel waits beside prefill (1.6 ms:
LMCache's pull request 5067). Also the longest that a load waits for a store where both share a
thread."""

DESCRIPTOR_S = 0.5e-6
"""Seconds that the driver takes for one copy of a batch (measured on an H100: vLLM's pull request
48434). It grows with the chunk, so that longer chunks would not make up for it."""

_MAX_CHUNK_S = 0.05
_PER_LAUNCH = 2.0  # a chunk takes at least this many times as long as its launch
_FRESH = 0.25  # weight of the newest measurement


class ChunkSize:
    """Size of one direction's chunks, from measured times.

    Chunks are longer where launches are slow, for example because another thread holds the GIL:
    otherwise the link would wait for launches.
    """

    def __init__(self) -> None:
        self._rate = 0.0  # bytes per second; 0: not known
        self._launch_s = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the next chunk."""
        seconds = min(max(CHUNK_S, _PER_LAUNCH * self._launch_s), _MAX_CHUNK_S)
        return max(CHUNK_BYTES, int(self._rate * seconds))

    def launched(self, seconds: float, descriptors: int = 0) -> None:
        """Record how long a launch took, with how many copies; the device copied meanwhile."""
        fixed = max(0.0, seconds - DESCRIPTOR_S * descriptors)
        self._launch_s = _mean(self._launch_s, fixed)

    def copied(self, nbytes: int, seconds: float) -> None:
        """Record the time of a copy, without waits. Small copies say little about the rate."""
        if seconds > 0 and 2 * nbytes >= CHUNK_BYTES:
            self._rate = _mean(self._rate, nbytes / seconds)


def _mean(known: float, seen: float) -> float:
    return known + _FRESH * (seen - known) if known else seen


class RateLimiter:
    """Limits stores to ``rate`` bytes per second; 0: no limit.

    Unused bytes are not saved up: after a pause there is no burst over the rate.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_at = 0.0

    def delay(self, now: float) -> float:
        """Return the seconds until the next copy may start."""
        return max(0.0, self._free_at - now) if self._rate else 0.0

    def consume(self, nbytes: int, now: float) -> None:
        """Record a copy of ``nbytes`` that starts now."""
        if self._rate:
            self._free_at = max(self._free_at, now) + nbytes / self._rate


class Chunks:
    """The blocks of one job that are not launched yet. ``whole``: never cut a part."""

    def __init__(self, parts: Iterable[GroupBlocks], whole: bool = False) -> None:
        self._parts = deque(part for part in parts if part.slots)
        self._start = 0  # of what is left of the first part
        self._whole = whole

    def __bool__(self) -> bool:
        return bool(self._parts)

    def cut(
        self, nbytes: int, block_bytes: Sequence[int], most_blocks: Sequence[int] = ()
    ) -> GroupBlocks:
        """Return the next chunk: at most ``nbytes`` and ``most_blocks``, but at least one block.
        ``block_bytes``: of a block; ``most_blocks``: 0 for no limit; both by group."""
        part, start = self._parts[0], self._start
        count = len(part.slots)
        if not self._whole:
            fit = nbytes // block_bytes[part.group]
            if most_blocks and most_blocks[part.group]:
                fit = min(fit, most_blocks[part.group])
            count = max(1, fit)
        self._start = start + count
        if self._start >= len(part.slots):
            self._parts.popleft()
            self._start = 0
        return GroupBlocks(
            part.group, part.block_ids[start : start + count], part.slots[start : start + count]
        )

    def rest(self) -> Iterable[GroupBlocks]:
        """Take what is left, uncut."""
        while self._parts:
            part, start = self._parts.popleft(), self._start
            self._start = 0
            yield GroupBlocks(part.group, part.block_ids[start:], part.slots[start:])


class QueuedJob(Protocol):
    """A copy job as the schedule sees it. ``awaits_fence``: nothing of it may be launched yet."""

    chunks: Chunks
    awaits_fence: bool

    @property
    def kind(self) -> TransferType: ...


Job = TypeVar("Job", bound=QueuedJob)


class CopySchedule(Generic[Job]):
    """Queues of loads and stores. Loads go first; each direction has its own chunks in flight.

    ``block_bytes``: of one block, by group. ``store_rate``: see :class:`RateLimiter`.
    ``descriptors``: of one block, and ``most_blocks``: of one chunk, by direction and group
    (:class:`Copier` has both).
    """

    def __init__(
        self,
        block_bytes: Sequence[int],
        store_rate: int = 0,
        descriptors: Mapping[TransferType, Sequence[int]] | None = None,
        most_blocks: Mapping[TransferType, Sequence[int]] | None = None,
    ) -> None:
        self.sizes = {kind: ChunkSize() for kind in _KINDS}
        self._block_bytes = block_bytes
        none = dict.fromkeys(_KINDS, [0] * len(block_bytes))
        self._descriptors = descriptors or none
        self._most_blocks = most_blocks or none
        self._queues: dict[TransferType, deque[Job]] = {kind: deque() for kind in _KINDS}
        self._in_flight = dict.fromkeys(_KINDS, 0)
        self._limiter = RateLimiter(store_rate)

    def __repr__(self) -> str:
        loads, stores = (len(self._queues[kind]) for kind in _KINDS)
        return f"<CopySchedule {loads} loads, {stores} stores queued>"

    def add(self, job: Job) -> None:
        """Queue a job behind the others of its kind."""
        self._queues[job.kind].append(job)

    def remove(self, job: Job) -> None:
        """Take a job without further chunks from its queue."""
        self._queues[job.kind].remove(job)

    def next(self, now: float) -> Job | None:
        """Return the job that may launch a chunk now, if any."""
        for kind in _KINDS:
            queue = self._queues[kind]
            limited = kind is TransferType.GPU_TO_CPU and self._limiter.delay(now)
            is_free = self._in_flight[kind] < MAX_IN_FLIGHT and not limited
            if queue and is_free and not queue[0].awaits_fence:
                return queue[0]
        return None

    def delay(self, now: float) -> float | None:
        """Return the seconds until the rate limit lets a store start; None: no store waits for
        it."""
        left = self._limiter.delay(now) if self._queues[TransferType.GPU_TO_CPU] else 0.0
        return left or None

    def cut(self, job: Job) -> GroupBlocks:
        """Return a job's next chunk."""
        nbytes, most_blocks = self.sizes[job.kind].nbytes, self._most_blocks[job.kind]
        return job.chunks.cut(nbytes, self._block_bytes, most_blocks)

    def submitted(self, kind: TransferType, part: GroupBlocks, seconds: float) -> None:
        """Record how long the launch of a chunk took."""
        descriptors = self._descriptors[kind][part.group] * len(part.slots)
        self.sizes[kind].launched(seconds, descriptors)

    def launched(self, kind: TransferType, nbytes: int, now: float) -> None:
        """A chunk of ``nbytes`` was launched."""
        self._in_flight[kind] += 1
        if kind is TransferType.GPU_TO_CPU:
            self._limiter.consume(nbytes, now)

    def ended(self, kind: TransferType) -> None:
        """A chunk in flight has ended."""
        self._in_flight[kind] -= 1


_KINDS = TransferType.CPU_TO_GPU, TransferType.GPU_TO_CPU  # in order of urgency
