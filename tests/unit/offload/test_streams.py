"""Copies on a device: several on their way, landing late, failing at any call.

The copier works on host memory through a driver that can fail; the streams here launch at once and
land when a test says so.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
xxhash = pytest.importorskip("xxhash")

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry  # noqa: E402
from kvconnect.copy.base import MAX_IN_FLIGHT  # noqa: E402
from kvconnect.copy.calibration import CopyThreshold  # noqa: E402
from kvconnect.copy.cuda import CudaCopier  # noqa: E402
from kvconnect.errors import TransferFailed  # noqa: E402
from kvconnect.offload import copy_schedule  # noqa: E402
from kvconnect.offload import streams as streams_module  # noqa: E402
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy  # noqa: E402
from kvconnect.offload.host_arena import HostArena  # noqa: E402
from kvconnect.offload.messages import GroupBlocks, JobReport, LoadBlocks, StoreBlocks  # noqa: E402
from kvconnect.offload.streams import CudaStreams, Fence, InFlightCopy, Streams, make_streams  # noqa: E402
from kvconnect.types import JobId, TransferType  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402
from tests.kernels import host_library  # noqa: E402

BLOCKS, BLOCK = 24, 320
GEOMETRY = Geometry((GroupGeometry((ByteRun(0, BLOCK, BLOCK),), BLOCKS),))
WAIT_S = 20.0  # a bound for a test that would hang, not a time that is measured


class Held(InFlightCopy):
    """Lands when told to; ``seconds`` below 0 means it failed."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.told = threading.Event()

    def land(self, seconds: float) -> None:
        self.seconds = seconds
        self.told.set()

    def wait(self) -> float:
        assert self.told.wait(WAIT_S)
        assert self.seconds is not None
        if self.seconds < 0:
            raise TransferFailed("the device failed during a copy")
        return self.seconds


class HeldFence:
    """Passes when told to; ``failed``: the device is lost."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.failed = False

    def query(self) -> bool:
        if self.failed:
            raise TransferFailed("the device is lost")
        return self.passed.is_set()

    def wait(self) -> None:
        assert self.passed.wait(WAIT_S)
        self.query()


class HeldStreams(Streams):
    """Runs copies at once; ``free`` lets them land at once too. ``after``: the fences behind which
    they were launched."""

    def __init__(self) -> None:
        self.flights: list[tuple[TransferType, Held]] = []
        self.launched = threading.Semaphore(0)
        self.free = False
        self.after: list[Fence | None] = []
        self.waits = threading.Semaphore(0)

    def fence(self) -> Fence:
        return None

    def follow(self, fence: Fence) -> None: ...

    def has_passed(self, fence: Fence) -> bool:
        assert isinstance(fence, HeldFence)
        return fence.query()

    def wait(self, fence: Fence) -> None:
        assert isinstance(fence, HeldFence)
        self.waits.release()
        fence.wait()

    def current(self) -> int:
        return 0

    def mark(self) -> None:
        return None

    def launch(
        self,
        kind: TransferType,
        fence: Fence | None,
        copy: Callable[[], None],
        digest: Callable[[], None] | None = None,
    ) -> InFlightCopy:
        self.after.append(fence)
        if isinstance(fence, HeldFence) and fence.failed:
            raise TransferFailed("a copy could not be launched")
        copy()
        if digest is not None:
            digest()
        flight = Held()
        if self.free:
            flight.land(0.25)
        self.flights.append((kind, flight))
        self.launched.release()
        return flight


class Rig:
    """A worker's copies over a fake device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host_library()  # here: the copy thread can skip no test
        monkeypatch.setattr(copy_schedule, "CHUNK_BYTES", 2 * BLOCK)  # two blocks a chunk
        monkeypatch.setattr(copy_schedule, "CHUNK_S", 0.0)  # at any rate
        generator = torch.Generator().manual_seed(1)
        size = (BLOCKS * BLOCK,)
        self.area = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        self.store = HostArena(BLOCKS, GEOMETRY.slot_bytes, "full")
        self.driver = FakeDriver()
        kernel = CopyThreshold(1 << 30, 1 << 30, fewest_rows=1)
        self.copier = CudaCopier(self.area, self.store.tensor(), GEOMETRY, self.driver, kernel)
        self.streams = HeldStreams()
        self.now = 0.0
        self.in_step = False  # loads are synchronous
        self.executor = self.made(0)

    def made(self, rate: int) -> CopyExecutor:
        return CopyExecutor(
            self.copier, self.store, GEOMETRY, self.streams, lambda: self.now, store_rate=rate
        )

    def submit(
        self,
        number: int,
        kind: type[StoreBlocks] | type[LoadBlocks],
        blocks: range,
        fence: HeldFence | None = None,
    ) -> None:
        part = GroupBlocks(0, array("q", blocks), array("q", blocks))
        job = JobId(number)
        if kind is StoreBlocks:
            self.executor.submit(StoreBlocks(job, (part,), 5.0), fence)
        else:
            self.executor.submit(LoadBlocks(job, "r", (part,), 5.0, self.in_step), fence)

    def await_launches(self, count: int) -> None:
        for _ in range(count):
            assert self.streams.launched.acquire(timeout=WAIT_S)

    def ended(self, count: int) -> list[FinishedCopy]:
        found: list[FinishedCopy] = []
        pause = threading.Event()
        for _ in range(int(WAIT_S * 200)):
            found += self.executor.poll()
            if len(found) >= count:
                return found
            pause.wait(0.005)
        raise AssertionError(f"{len(found)} of {count} jobs ended")

    def close(self) -> None:
        for _, flight in self.streams.flights:
            flight.land(0.0)
        self.executor.close()
        self.store.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.close()


def causes(done: FinishedCopy) -> list[tuple[int, str]]:
    return [(failure.block_id, failure.cause.value) for failure in done.report.failures]


def test_several_chunks_are_on_their_way_and_no_more(rig: Rig) -> None:
    rig.submit(1, StoreBlocks, range(2 * MAX_IN_FLIGHT + 4))
    rig.await_launches(MAX_IN_FLIGHT)
    assert len(rig.streams.flights) == MAX_IN_FLIGHT
    assert not rig.streams.launched.acquire(timeout=0.05)  # there is no room for the next
    rig.streams.flights[0][1].land(0.5)  # makes room
    rig.await_launches(1)
    rig.submit(2, LoadBlocks, range(0))  # loads have room of their own
    assert [done.report.job for done in rig.ended(1)] == [2]


def test_jobs_end_when_they_land(rig: Rig) -> None:
    """Copies of one direction land in the order of their launch."""
    for number in range(3):
        rig.submit(number, StoreBlocks, range(2 * number, 2 * number + 2))
    rig.await_launches(3)
    for number in range(3):
        assert rig.executor.poll() == []
        rig.streams.flights[number][1].land(0.5)
        (done,) = rig.ended(1)
        assert (done.report.job, done.report.failures, done.seconds) == (number, (), 0.5)
        assert done.nbytes == 2 * BLOCK


def test_a_load_passes_stores_that_are_on_their_way(rig: Rig) -> None:
    rig.streams.free = True
    rig.submit(1, StoreBlocks, range(4))
    rig.ended(1)
    rig.streams.free = False
    rig.submit(2, StoreBlocks, range(4, 20))
    rig.await_launches(2 + MAX_IN_FLIGHT)
    rig.submit(3, LoadBlocks, range(2))
    rig.await_launches(1)
    assert rig.streams.flights[-1][0] is TransferType.CPU_TO_GPU
    rig.streams.flights[-1][1].land(0.1)
    assert [done.report.job for done in rig.ended(1)] == [3]


def test_one_failed_flight_fails_its_chunk_and_what_was_not_launched(rig: Rig) -> None:
    blocks = range(2 * MAX_IN_FLIGHT + 2)
    rig.submit(1, StoreBlocks, blocks)
    rig.await_launches(MAX_IN_FLIGHT)
    rig.streams.flights[1][1].land(-1.0)
    for number in (0, 2, 3):
        rig.streams.flights[number][1].land(0.5)
    while len(rig.streams.flights) > MAX_IN_FLIGHT and rig.streams.flights[-1][1].seconds is None:
        rig.streams.flights[-1][1].land(0.5)
    (done,) = rig.ended(1)
    assert causes(done)[:2] == [(2, "copy"), (3, "copy")]
    assert done.nbytes == (len(blocks) - len(causes(done))) * BLOCK
    rig.streams.free = True
    rig.submit(2, StoreBlocks, range(2))  # the worker lives
    assert causes(rig.ended(1)[0]) == []


def test_who_follows_a_load_is_told_when_all_of_it_is_launched(rig: Rig) -> None:
    rig.streams.free = True
    rig.submit(1, StoreBlocks, range(6))
    rig.ended(1)
    rig.streams.free = False
    rig.await_launches(3)
    chunks: list[int] = []

    def launched(_: Fence) -> None:
        chunks.append(len(rig.streams.flights))

    part = GroupBlocks(0, array("q", range(6)), array("q", range(6)))
    rig.executor.submit(LoadBlocks(JobId(2), "r", (part,), 5.0, False), None, launched=launched)
    rig.await_launches(3)
    for _, flight in rig.streams.flights:
        flight.land(0.1)
    rig.ended(1)
    assert chunks == [5]  # within the launch of the third chunk, behind two of it and the store's
    missing = GroupBlocks(0, array("q", [0]), array("q", [-1]))
    rig.streams.free = True
    job = LoadBlocks(JobId(3), "r", (missing, part), 5.0, False)
    rig.executor.submit(job, None, launched=launched)
    assert causes(rig.ended(1)[0])[0] == (0, "missing")


def test_a_store_is_launched_when_its_fence_has_passed(rig: Rig) -> None:
    rig.streams.free = True
    rig.submit(0, StoreBlocks, range(2))
    rig.ended(1)  # what the load below reads
    first, second = HeldFence(), HeldFence()
    rig.submit(1, StoreBlocks, range(4), first)
    rig.submit(2, StoreBlocks, range(4, 6), first)
    rig.submit(3, StoreBlocks, range(6, 8), second)
    assert rig.streams.waits.acquire(timeout=WAIT_S)
    behind = HeldFence()
    rig.submit(4, LoadBlocks, range(2), behind)  # the device lets it wait, and nothing is before it
    assert [done.report.job for done in rig.ended(1)] == [4]
    assert rig.streams.after == [None, behind]
    first.passed.set()
    assert [done.report.job for done in rig.ended(2)] == [1, 2]
    assert rig.streams.waits.acquire(timeout=WAIT_S)
    assert rig.streams.after == [None, behind, None, None, None]
    second.passed.set()
    assert [done.report.job for done in rig.ended(1)] == [3]
    passed = HeldFence()
    passed.passed.set()
    rig.submit(5, StoreBlocks, range(2), passed)
    rig.ended(1)
    assert not rig.streams.waits.acquire(blocking=False)  # no thread waited for what was over


def test_copies_go_on_where_the_system_has_no_thread_for_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvconnect-await-") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fence = HeldFence()
    rig.submit(0, StoreBlocks, range(2), fence)
    fence.passed.set()
    for job in range(2):
        assert rig.streams.launched.acquire(timeout=WAIT_S)
        rig.streams.flights[job][1].land(0.25)
        assert [done.report for done in rig.ended(1)] == [JobReport(JobId(job), (), 0.25)]
        rig.submit(job + 1, LoadBlocks, range(2))
    assert len(refused) == 2
    assert rig.streams.launched.acquire(timeout=WAIT_S)
    rig.streams.flights[2][1].land(0.25)
    rig.ended(1)
    rig.executor.pause()  # nothing is in flight any more


def test_a_store_whose_fence_fails_fails_and_the_worker_lives(rig: Rig) -> None:
    rig.streams.free = True
    for awaited in (False, True):
        fence = HeldFence()
        fence.failed = not awaited
        rig.submit(1, StoreBlocks, range(4), fence)
        if awaited:
            assert rig.streams.waits.acquire(timeout=WAIT_S)
            fence.failed = True
        fence.passed.set()
        (done,) = rig.ended(1)
        assert {cause for _, cause in causes(done)} == {"copy", "skipped"}
        assert rig.streams.after[-1] is fence  # it was never taken for passed
        rig.streams.waits = threading.Semaphore(0)
    rig.submit(2, StoreBlocks, range(4))
    assert causes(rig.ended(1)[0]) == []


def test_a_pause_does_not_wait_for_a_fence(rig: Rig) -> None:
    rig.streams.free = True
    fence = HeldFence()
    rig.submit(1, StoreBlocks, range(2), fence)
    assert rig.streams.waits.acquire(timeout=WAIT_S)
    rig.executor.pause()
    fence.passed.set()
    assert rig.executor.poll() == [] == rig.streams.flights
    rig.executor.resume()
    assert causes(rig.ended(1)[0]) == []


def round_trip(rig: Rig) -> list[FinishedCopy]:
    """Store blocks and load them; return what the two jobs said."""
    rig.streams.free = True
    rig.submit(1, StoreBlocks, range(6))
    (stored,) = rig.ended(1)
    rig.area[: 6 * BLOCK] = 0
    rig.submit(2, LoadBlocks, range(6))
    return [stored, *rig.ended(1)]


def test_digests_never_touch_the_slots(rig: Rig) -> None:
    before = rig.area.clone()
    hashed: list[int] = []
    rig.store.digests._hash = lambda view: hashed.append(1) or 0  # type: ignore[func-returns-value]
    for done in round_trip(rig):
        assert causes(done) == []
    assert torch.equal(rig.area, before)
    assert hashed == []
    assert rig.driver.calls.count("hash_blocks") == 6  # of three chunks each way


def test_a_rotten_slot_is_found_on_the_device(rig: Rig) -> None:
    rig.streams.free = True
    rig.submit(1, StoreBlocks, range(6))
    rig.ended(1)
    rig.store.view(2)[5] ^= 1
    rig.submit(2, LoadBlocks, range(6))
    (done,) = rig.ended(1)
    assert causes(done)[:2] == [(2, "digest"), (3, "skipped")]
    rig.store.view(2)[5] ^= 1  # the control: as it was, it loads
    rig.submit(3, LoadBlocks, range(6))
    assert causes(rig.ended(1)[0]) == []


@pytest.mark.parametrize("in_step", [False, True])
def test_whichever_call_fails_the_worker_lives_and_no_bad_block_counts_as_good(
    monkeypatch: pytest.MonkeyPatch, in_step: bool
) -> None:
    healthy = Rig(monkeypatch)
    healthy.in_step = in_step
    first = len(healthy.driver.calls)
    before = healthy.area.clone()
    round_trip(healthy)
    calls = len(healthy.driver.calls) - first
    healthy.close()
    assert calls >= (8 if in_step else 12)
    for number in range(calls):
        for lost in (False, True):
            rig = Rig(monkeypatch)
            rig.in_step = in_step
            rig.driver.fail_at, rig.driver.lost = first + number, lost
            jobs = round_trip(rig)
            failed = [block for done in jobs for block, _ in causes(done)]
            assert failed, number
            for block in set(range(6)) - set(failed):
                run = slice(block * BLOCK, (block + 1) * BLOCK)
                assert torch.equal(rig.area[run], before[run]), (number, block)
            rig.driver.fail_at = None
            rig.submit(3, StoreBlocks, range(8, 10))
            assert causes(rig.ended(1)[0]) == []
            rig.close()


def test_stores_keep_to_their_rate(rig: Rig) -> None:
    rig.executor.close()
    rig.executor = rig.made(rate=2 * BLOCK)  # a chunk per second
    rig.streams.free = True
    rig.submit(1, StoreBlocks, range(6))
    rig.await_launches(1)
    for second in (1, 2):
        assert not rig.streams.launched.acquire(timeout=0.05)
        rig.submit(2, LoadBlocks, range(0))  # loads are not held back
        rig.ended(1)
        rig.now = float(second)
        with rig.executor._wake:
            rig.executor._wake.notify()
        rig.await_launches(1)
    assert causes(rig.ended(1)[0]) == []


@pytest.mark.parametrize("paused", [False, True])
def test_a_store_within_the_limit_needs_no_other_news(rig: Rig, paused: bool) -> None:
    rig.executor.close()
    rig.executor = CopyExecutor(
        rig.copier,
        rig.store,
        GEOMETRY,
        rig.streams,
        time.monotonic,
        store_rate=4 * BLOCK,  # two chunks a second
    )
    rig.streams.free = True
    rig.submit(1, StoreBlocks, range(2))
    rig.ended(1)
    if paused:
        rig.executor.pause()
    rig.submit(2, StoreBlocks, range(2, 4))  # within half a second
    rig.executor.resume()
    assert [done.report.job for done in rig.ended(1)] == [2]


def test_close_waits_for_what_is_on_its_way(rig: Rig) -> None:
    rig.submit(1, StoreBlocks, range(4))
    rig.await_launches(2)
    closing = threading.Thread(target=rig.executor.close)
    closing.start()
    assert not rig.streams.flights[0][1].told.wait(0.05)
    assert closing.is_alive()
    for _, flight in rig.streams.flights:
        flight.land(-1.0)  # even one that fails
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert rig.executor.poll() == []


# Streams and events, with a stand-in for torch.cuda ---------------------------------------------


class FakeEvent:
    """An event that passes when told to."""

    made = 0

    def __init__(self, *_: object) -> None:
        FakeEvent.made += 1
        self.waited = False
        self.broken = False

    def record(self, stream: object = None) -> None:
        self.waited = False

    def synchronize(self) -> None:
        if self.broken:
            raise TransferFailed("cuEventSynchronize failed with CUDA error 700")
        self.waited = True

    def seconds_to(self, end: FakeEvent) -> float:
        return 1.5


class FakeStream:
    def __init__(self, device: object, urgent: bool = False) -> None:
        self.device = device
        self.urgent = urgent
        self.waited: list[object] = []
        self.drained = 0

    def synchronize(self) -> None:
        self.drained += 1

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


OWN_DEVICE: ContextVar[torch.device | None] = ContextVar("device", default=None)
"""The device of a thread; a new one has none."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    monkeypatch.setattr(FakeEvent, "made", 0)
    monkeypatch.setattr(streams_module, "OwnEvent", FakeEvent)
    monkeypatch.setattr(streams_module, "CudaContext", lambda _: None)
    monkeypatch.setattr(streams_module, "own_stream", FakeStream)
    monkeypatch.setattr(streams_module, "use_stream", lambda stream: stream)
    monkeypatch.setattr(streams_module.torch.cuda, "set_device", OWN_DEVICE.set)
    streams = make_streams(torch.device("cuda:3"))
    assert isinstance(streams, CudaStreams)
    return streams


LOAD, STORE = TransferType.CPU_TO_GPU, TransferType.GPU_TO_CPU


def nothing() -> None: ...


def test_loads_go_before_the_model_and_stores_behind_it(cuda: CudaStreams) -> None:
    for streams in (cuda._copies, cuda._digests):
        assert streams[LOAD].urgent  # type: ignore[attr-defined]
        assert not streams[STORE].urgent  # type: ignore[attr-defined]


def test_a_copy_waits_for_its_fence_on_its_own_stream(cuda: CudaStreams) -> None:
    fence = cuda.fence()
    flight = cuda.launch(STORE, fence, nothing)
    assert cuda._copies[STORE].waited == [fence]
    assert cuda._copies[LOAD].waited == []
    assert not flight.is_done
    assert flight.wait() == flight.wait() == 1.5
    assert flight._events.end.waited  # type: ignore[attr-defined]
    assert not flight._events.digested.waited  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [STORE, LOAD])
def test_a_digest_delays_no_later_copy(cuda: CudaStreams, kind: TransferType) -> None:
    fence, other = cuda.fence(), cuda.fence()
    flight = cuda.launch(kind, fence, nothing, nothing)
    cuda.launch(kind, other, nothing)
    events = flight._events  # type: ignore[attr-defined]
    assert cuda._copies[kind].waited == [fence, other]  # and for no digest
    # What was loaded is read behind the copy, what is stored beside it.
    assert cuda._digests[kind].waited == [events.end if kind is LOAD else fence]
    flight.wait()
    assert events.end.waited and events.digested.waited


def test_a_digest_that_breaks_off_leaves_nothing_on_its_way(cuda: CudaStreams) -> None:
    def broken() -> None:
        raise TransferFailed("refused")

    with pytest.raises(TransferFailed):
        cuda.launch(STORE, cuda.fence(), nothing, broken)
    streams: Any = cuda._copies[STORE], cuda._digests[STORE]
    assert [stream.drained for stream in streams] == [1, 1]


def test_events_are_used_again_once_their_copy_landed(cuda: CudaStreams) -> None:
    fence = cuda.fence()
    made = FakeEvent.made
    for _ in range(5):
        assert cuda.run(LOAD, fence, nothing) == 1.5
    assert FakeEvent.made == made + 4
    flights = [cuda.launch(LOAD, fence, nothing) for _ in range(3)]
    assert FakeEvent.made == made + 12
    for flight in reversed(flights):
        flight.wait()
        flight.wait()
    assert len(cuda._pool._free) == 3  # each once


def test_a_device_that_fails_is_a_failed_transfer(cuda: CudaStreams) -> None:
    flight = cuda.launch(STORE, cuda.fence(), nothing)
    flight._events.end.broken = True  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(TransferFailed, match="during a copy"):
            flight.wait()
    assert not cuda._pool._free  # what it says is unknown

    def broken() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(TransferFailed, match="could not be launched"):
        cuda.launch(STORE, cuda.fence(), broken)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), TransferFailed("refused")])
def test_a_copy_that_breaks_off_leaves_nothing_on_its_way(
    cuda: CudaStreams, error: Exception
) -> None:
    """Half of it may have been launched, into blocks that are about to be computed instead."""
    stream: Any = cuda._copies[LOAD]
    cuda.launch(LOAD, cuda.fence(), lambda: None)
    assert stream.drained == 0  # negative control: a healthy copy is not waited for

    def half() -> None:
        assert stream.drained == 0
        raise error

    with pytest.raises(TransferFailed):
        cuda.launch(LOAD, cuda.fence(), half)
    assert stream.drained == 1


def test_a_thread_that_copies_is_on_the_device_of_the_cache(cuda: CudaStreams) -> None:
    """Elsewhere it would make a context on device 0, which is another rank's."""

    def work() -> torch.device | None:
        cuda.launch(STORE, cuda.fence(), lambda: None)
        return OWN_DEVICE.get()

    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(OWN_DEVICE.get).result() is None  # negative control
        assert fresh.submit(work).result() == torch.device("cuda:3")
