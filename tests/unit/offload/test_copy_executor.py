"""The copy thread: order, chunks, failures by cause, and a thread that outlives them all."""

from __future__ import annotations

import importlib.util
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.errors import TransferFailed
from kvconnect.offload.host_arena import DigestMode, HostArena
from kvconnect.offload.messages import FailedBlock, GroupBlocks, LoadBlocks, StoreBlocks
from kvconnect.types import JobId, TransferType

torch = pytest.importorskip("torch")

from kvconnect.copy import Copier, make_copier  # noqa: E402
from kvconnect.copy.reference import ReferenceCopier  # noqa: E402
from kvconnect.offload import copy_schedule  # noqa: E402
from kvconnect.offload import layer_loads as layers_module  # noqa: E402
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy  # noqa: E402
from kvconnect.offload.streams import HostStreams  # noqa: E402

BLOCK_BYTES, NUM_BLOCKS, NUM_SLOTS = 96, 8, 8
SEGMENTS = (ByteRun(0, 64, 64), ByteRun(64 * NUM_BLOCKS, 32, 32))
GEOMETRY = Geometry((GroupGeometry(SEGMENTS, NUM_BLOCKS),))
WAIT_S = 20.0  # a bound for a test that would hang, not a time that is measured
has_digest = importlib.util.find_spec("xxhash") is not None
needs_digest = pytest.mark.skipif(not has_digest, reason="xxhash is not installed")


class Spy(Copier):
    """Passes calls on and notes them; ``gate`` holds each back, ``broken`` ones raise."""

    def __init__(self, inner: Copier) -> None:
        self.inner = inner
        self.calls: list[tuple[str, list[int]]] = []
        self.entered = threading.Semaphore(0)
        self.gate: threading.Semaphore | None = None
        self.broken: Exception | None = None

    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.note("store", block_ids, lambda: self.inner.store(group, block_ids, slots))

    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.note("load", block_ids, lambda: self.inner.load(group, block_ids, slots))

    def note(self, name: str, block_ids: Sequence[int], copy: Callable[[], None]) -> None:
        self.calls.append((name, list(block_ids)))
        self.entered.release()
        if self.gate is not None:
            assert self.gate.acquire(timeout=WAIT_S)
        if self.broken is not None:
            raise self.broken
        copy()


class Bench:
    """An executor over a small KV cache, its copier under the test's control."""

    def __init__(self, kind: Callable[..., Copier], digest: DigestMode) -> None:
        generator = torch.Generator().manual_seed(3)
        size = (NUM_BLOCKS * BLOCK_BYTES,)
        self.area = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        self.store = HostArena(NUM_SLOTS, GEOMETRY.slot_bytes, digest)
        self.spy = Spy(kind(self.area, self.store.tensor(), GEOMETRY))
        self.now = 0.0
        self.executor = CopyExecutor(
            self.spy, self.store, GEOMETRY, HostStreams(), clock=lambda: self.now
        )
        self.jobs = 0

    def submit(
        self, kind: type[StoreBlocks] | type[LoadBlocks], pairs: dict[int, int], **more: Any
    ) -> JobId:
        """Submit a job of {block: slot}."""
        self.jobs += 1
        part = GroupBlocks(0, array("q", pairs), array("q", pairs.values()))
        job = JobId(self.jobs)
        deadline_s = more.pop("deadline_s", 5.0)
        if kind is StoreBlocks:
            self.executor.submit(StoreBlocks(job, (part,), deadline_s), self.executor.fence())
        else:
            sync = more.pop("sync", False)
            load = LoadBlocks(job, f"req{job}", (part,), deadline_s, sync)
            self.executor.submit(load, self.executor.fence())
        assert not more
        return job

    def ended(self, count: int = 1) -> list[FinishedCopy]:
        """Return the next jobs to end."""
        found: list[FinishedCopy] = []
        pause = threading.Event()
        for _ in range(int(WAIT_S * 200)):
            found += self.executor.poll()
            if len(found) >= count:
                return found
            pause.wait(0.005)
        raise AssertionError(f"{len(found)} of {count} jobs ended")

    def hold(self) -> threading.Semaphore:
        """Hold every copy back until released; return the gate."""
        self.spy.gate = threading.Semaphore(0)
        return self.spy.gate

    def await_copy(self) -> None:
        assert self.spy.entered.acquire(timeout=WAIT_S)

    def block(self, number: int) -> bytes:
        runs = [self.area[s.offset + number * s.stride :][: s.length] for s in SEGMENTS]
        return bytes(torch.cat(runs).numpy())

    def blocks(self) -> list[bytes]:
        return [self.block(number) for number in range(NUM_BLOCKS)]

    def slot(self, number: int) -> bytes:
        return bytes(self.store.view(number, BLOCK_BYTES))


@pytest.fixture(params=[ReferenceCopier, make_copier], ids=["reference", "fastest"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(copy_schedule, "CHUNK_BYTES", 2 * BLOCK_BYTES)  # two blocks a chunk
    monkeypatch.setattr(copy_schedule, "CHUNK_S", 0.0)  # at any rate
    bench = Bench(request.param, "full" if has_digest else "off")
    yield bench
    if bench.spy.gate is not None:
        bench.spy.gate.release(100)
    bench.executor.close()
    bench.store.close()


def causes(done: FinishedCopy) -> list[tuple[int, int, str]]:
    assert all(isinstance(failure, FailedBlock) for failure in done.report.failures)
    return [(f.block_id, f.slot, f.cause.value) for f in done.report.failures]


def test_blocks_come_back_as_they_were(bench: Bench) -> None:
    before = bench.blocks()
    job = bench.submit(StoreBlocks, {1: 4, 2: 0, 5: 7})
    (done,) = bench.ended()
    assert (done.report.job, done.report.failures) == (job, ())
    assert (done.kind, done.nbytes) == (TransferType.GPU_TO_CPU, 3 * BLOCK_BYTES)
    assert done.seconds >= 0.0
    assert [bench.slot(n) for n in (4, 0, 7)] == [before[n] for n in (1, 2, 5)]
    assert bench.blocks() == before  # a store only reads the device

    bench.area.zero_()
    job = bench.submit(LoadBlocks, {3: 4, 6: 0, 7: 7})
    (done,) = bench.ended()
    assert (done.report.job, done.report.failures) == (job, ())
    assert (done.kind, done.nbytes) == (TransferType.CPU_TO_GPU, 3 * BLOCK_BYTES)
    assert [bench.block(n) for n in (3, 6, 7)] == [before[n] for n in (1, 2, 5)]
    assert [bench.block(n) for n in (0, 1, 2, 4, 5)] == [bytes(BLOCK_BYTES)] * 5


def test_each_job_is_reported_once_in_the_order_of_its_kind(bench: Bench) -> None:
    jobs = [bench.submit(StoreBlocks, {n: n}) for n in range(4)]
    assert [done.report.job for done in bench.ended(4)] == jobs
    assert bench.executor.poll() == []


def test_who_cannot_wait_is_called_when_a_job_can_be_polled(bench: Bench) -> None:
    ended = threading.Event()
    polled: list[FinishedCopy] = []

    def note(done: FinishedCopy) -> None:
        polled.extend(bench.executor.poll())
        assert polled == [done]
        ended.set()

    part = GroupBlocks(0, array("q", [1]), array("q", [4]))
    bench.executor.submit(StoreBlocks(JobId(9), (part,), 5.0), bench.executor.fence(), note)
    assert ended.wait(WAIT_S)
    assert bench.slot(4) == bench.block(1)


def test_jobs_are_copied_in_chunks(bench: Bench) -> None:
    bench.submit(StoreBlocks, {n: n for n in range(5)})
    bench.ended()
    assert bench.spy.calls == [("store", [0, 1]), ("store", [2, 3]), ("store", [4])]


def test_a_block_larger_than_a_chunk_is_a_chunk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_schedule, "CHUNK_BYTES", BLOCK_BYTES // 2)
    bench.submit(StoreBlocks, {0: 0, 1: 1})
    bench.ended()
    assert bench.spy.calls == [("store", [0]), ("store", [1])]


def test_a_load_overtakes_queued_stores_between_two_chunks(bench: Bench) -> None:
    bench.submit(StoreBlocks, {7: 7})
    bench.ended()
    bench.spy.calls.clear()
    bench.await_copy()
    gate = bench.hold()
    slow = bench.submit(StoreBlocks, {0: 0, 1: 1, 2: 2})
    bench.await_copy()  # its first chunk is being copied
    queued = bench.submit(StoreBlocks, {3: 3})
    urgent = bench.submit(LoadBlocks, {6: 7})
    gate.release(10)
    assert [done.report.job for done in bench.ended(3)] == [urgent, slow, queued]
    assert bench.spy.calls == [
        ("store", [0, 1]),
        ("load", [6]),
        ("store", [2]),
        ("store", [3]),
    ]
    assert bench.block(6) == bench.block(7)


def test_an_empty_job_ends(bench: Bench) -> None:
    job = bench.submit(LoadBlocks, {})
    (done,) = bench.ended()
    assert (done.report.job, done.report.failures, done.nbytes) == (job, (), 0)
    assert bench.spy.calls == []


@needs_digest
def test_a_rotten_slot_stops_the_load_at_its_block(bench: Bench) -> None:
    before = bench.blocks()
    bench.submit(StoreBlocks, {n: n for n in range(6)})
    bench.ended()
    bench.area.zero_()
    bench.store.view(3)[BLOCK_BYTES - 1] ^= 1
    bench.submit(LoadBlocks, {n: n for n in range(6)})
    (done,) = bench.ended()
    assert causes(done) == [(3, 3, "digest"), (4, 4, "skipped"), (5, 5, "skipped")]
    assert done.nbytes == 3 * BLOCK_BYTES
    assert bench.blocks()[:3] == before[:3]
    assert bench.blocks()[3:] == [bytes(BLOCK_BYTES)] * 5

    bench.store.view(3)[BLOCK_BYTES - 1] ^= 1  # the control: as it was, it loads
    bench.submit(LoadBlocks, {n: n for n in range(6)})
    (done,) = bench.ended()
    assert causes(done) == [] and bench.blocks()[:6] == before[:6]


@needs_digest
def test_bytes_behind_a_block_are_not_its_business(bench: Bench) -> None:
    bench.submit(StoreBlocks, {0: 0})
    bench.ended()
    bench.store.view(0)[BLOCK_BYTES] ^= 1  # padding
    bench.submit(LoadBlocks, {1: 0})
    (done,) = bench.ended()
    assert causes(done) == [] and bench.block(1) == bench.block(0)


def test_without_digests_a_rotten_slot_goes_unnoticed() -> None:
    bench = Bench(ReferenceCopier, "off")
    bench.submit(StoreBlocks, {0: 0})
    bench.ended()
    bench.store.view(0)[5] ^= 1
    bench.submit(LoadBlocks, {1: 0})
    (done,) = bench.ended()
    assert causes(done) == [] and bench.block(1) != bench.block(0)
    bench.executor.close()
    bench.store.close()


def test_a_missing_slot_stops_the_load_at_its_block(bench: Bench) -> None:
    bench.submit(StoreBlocks, {0: 0, 1: 1})
    bench.ended()
    before = bench.blocks()
    bench.submit(LoadBlocks, {5: 0, 6: -1, 7: 1})
    (done,) = bench.ended()
    assert causes(done) == [(6, -1, "missing"), (7, 1, "skipped")]
    assert done.nbytes == BLOCK_BYTES
    assert [bench.block(n) for n in (5, 6, 7)] == [before[0], before[6], before[7]]


@pytest.mark.parametrize("kind", [StoreBlocks, LoadBlocks])
@pytest.mark.parametrize("error", [TransferFailed("device lost"), RuntimeError(), MemoryError()])
def test_a_copy_that_raises_is_a_failed_job_and_the_thread_lives_on(
    bench: Bench, caplog: pytest.LogCaptureFixture, kind: Any, error: Exception
) -> None:
    bench.submit(StoreBlocks, {0: 0, 1: 1, 2: 2})
    bench.ended()
    bench.spy.broken = error
    bench.submit(kind, {0: 0, 1: 1, 2: 2})
    (done,) = bench.ended()
    assert causes(done) == [(0, 0, "copy"), (1, 1, "copy"), (2, 2, "skipped")]
    assert done.nbytes == 0
    assert "copy of job 2 failed" in caplog.text
    bench.spy.broken = None
    bench.submit(kind, {0: 0})
    (done,) = bench.ended()
    assert causes(done) == [] and done.nbytes == BLOCK_BYTES


def test_what_was_stored_before_a_chunk_broke_is_kept(bench: Bench) -> None:
    gate = bench.hold()
    bench.submit(StoreBlocks, {n: n for n in range(5)})
    bench.await_copy()
    gate.release()
    bench.await_copy()  # the first chunk has been copied, the second is held back
    bench.spy.broken = TransferFailed("device lost")
    gate.release()
    (done,) = bench.ended()
    assert causes(done) == [(2, 2, "copy"), (3, 3, "copy"), (4, 4, "skipped")]
    assert done.nbytes == 2 * BLOCK_BYTES
    assert [bench.slot(n) for n in range(3)] == [*bench.blocks()[:2], bytes(BLOCK_BYTES)]


def test_a_request_that_cannot_be_meant_fails_alone(bench: Bench) -> None:
    bench.submit(StoreBlocks, {0: NUM_SLOTS})
    bench.submit(LoadBlocks, {0: NUM_SLOTS})
    found = {done.kind: causes(done) for done in bench.ended(2)}
    assert set(found) == {TransferType.GPU_TO_CPU, TransferType.CPU_TO_GPU}
    assert all(failures == [(0, NUM_SLOTS, "copy")] for failures in found.values())
    bench.submit(StoreBlocks, {0: 0})
    assert causes(bench.ended()[0]) == []


@pytest.mark.parametrize("kind", [StoreBlocks, LoadBlocks])
def test_a_job_not_begun_in_time_copies_nothing(bench: Bench, kind: Any) -> None:
    bench.submit(StoreBlocks, {0: 0, 1: 1, 2: 2})
    bench.ended()
    before, slots = bench.blocks(), [bench.slot(n) for n in range(NUM_SLOTS)]
    for _ in range(2):
        bench.await_copy()
    bench.spy.calls.clear()
    gate = bench.hold()
    bench.submit(StoreBlocks, {7: 7})
    bench.await_copy()
    job = bench.submit(kind, {3: 0, 4: 1, 5: 2}, deadline_s=5.0)
    bench.now = 5.0
    gate.release(10)
    (late,) = [done for done in bench.ended(2) if done.report.job == job]
    assert causes(late) == [(3, 0, "deadline"), (4, 1, "skipped"), (5, 2, "skipped")]
    assert (late.nbytes, late.seconds) == (0, 0.0)
    assert bench.spy.calls == [("store", [7])]
    assert bench.blocks() == before
    assert [bench.slot(n) for n in range(NUM_SLOTS - 1)] == slots[:-1]


def test_a_job_just_in_time_is_copied(bench: Bench) -> None:
    gate = bench.hold()
    bench.submit(StoreBlocks, {7: 7})
    bench.await_copy()
    bench.submit(StoreBlocks, {3: 0}, deadline_s=5.0)
    bench.now = 4.9
    gate.release(10)
    assert causes(bench.ended(2)[1]) == []


def test_a_deadline_between_chunks_keeps_what_was_copied(bench: Bench) -> None:
    gate = bench.hold()
    bench.submit(StoreBlocks, {n: n for n in range(5)}, deadline_s=5.0)
    bench.await_copy()
    bench.now = 5.0
    gate.release(10)
    (done,) = bench.ended()
    assert causes(done) == [(2, 2, "deadline"), (3, 3, "skipped"), (4, 4, "skipped")]
    assert done.nbytes == 2 * BLOCK_BYTES
    assert [bench.slot(n) for n in range(2)] == bench.blocks()[:2]


def test_synchronous_loads_are_waited_for(bench: Bench) -> None:
    bench.submit(StoreBlocks, {0: 0, 1: 1})
    bench.ended()
    assert bench.executor.sync.finish() == 0.0
    before = bench.blocks()
    bench.submit(LoadBlocks, {4: 0}, sync=True)
    bench.submit(LoadBlocks, {5: 1}, sync=True)
    bench.executor.sync.before_forward(hooks=True)
    assert bench.executor.sync.finish() > 0.0
    assert [bench.block(4), bench.block(5)] == before[:2]
    assert [done.report.job for done in bench.executor.poll()] == [2, 3]  # at once, after a wait
    assert bench.executor.sync.finish() == 0.0


def test_a_failed_synchronous_load_ends_the_wait(bench: Bench) -> None:
    bench.submit(LoadBlocks, {4: -1}, sync=True)
    bench.executor.sync.finish()
    (done,) = bench.executor.poll()
    assert causes(done) == [(4, -1, "missing")]


def test_other_loads_are_not_waited_for(bench: Bench) -> None:
    bench.submit(StoreBlocks, {0: 0})
    bench.ended()
    bench.await_copy()
    gate = bench.hold()
    bench.submit(LoadBlocks, {4: 0})
    bench.await_copy()
    assert bench.executor.sync.finish() == 0.0
    gate.release(10)
    assert causes(bench.ended()[0]) == []


def test_a_stuck_synchronous_load_is_an_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "_STUCK_S", 0.05)
    bench.submit(StoreBlocks, {0: 0})
    bench.ended()
    bench.await_copy()
    gate = bench.hold()
    bench.submit(LoadBlocks, {4: 0}, sync=True)
    bench.await_copy()
    with pytest.raises(TransferFailed, match="synchronous load 2 did not end"):
        bench.executor.sync.finish()
    gate.release(10)
    bench.ended()


def test_a_pause_waits_for_the_chunk_in_progress_and_holds_back_the_rest(bench: Bench) -> None:
    gate = bench.hold()
    bench.submit(StoreBlocks, {0: 0, 1: 1, 2: 2})
    bench.await_copy()
    pausing = threading.Thread(target=bench.executor.pause)
    pausing.start()
    while bench.executor._state.name != "PAUSING":
        threading.Event().wait(0.001)
    bench.submit(LoadBlocks, {3: 3})
    assert pausing.is_alive(), "the chunk is still in progress"
    gate.release(10)
    pausing.join(WAIT_S)
    assert not pausing.is_alive()
    assert bench.spy.calls == [("store", [0, 1])]
    bench.executor.pause()
    assert bench.executor.poll() == []
    bench.executor.resume()
    bench.executor.resume()
    assert len(bench.ended(2)) == 2
    assert [call for call in bench.spy.calls if call[0] == "store"] == [
        ("store", [0, 1]),
        ("store", [2]),
    ]
    bench.executor.pause()
    bench.executor.close()
    bench.executor.resume()
    assert not bench.executor._thread.is_alive()


def test_close_ends_the_thread_and_drops_the_queue(bench: Bench) -> None:
    thread = bench.executor._thread
    gate = bench.hold()
    bench.submit(StoreBlocks, {0: 0, 1: 1, 2: 2})
    bench.await_copy()
    bench.submit(StoreBlocks, {3: 3})
    closing = threading.Thread(target=bench.executor.close)
    closing.start()
    while bench.executor._state.name != "CLOSED":
        threading.Event().wait(0.001)
    gate.release(10)
    closing.join(WAIT_S)
    assert not closing.is_alive() and not thread.is_alive()
    assert bench.spy.calls == [("store", [0, 1])]  # the chunk in progress, nothing after it
    assert bench.executor.poll() == []
    bench.executor.close()


def test_close_of_an_idle_executor(bench: Bench) -> None:
    thread = bench.executor._thread
    assert thread.is_alive() and thread.daemon
    bench.executor.close()
    bench.executor.close()
    assert not thread.is_alive()


def test_repr_tells_the_queues(bench: Bench) -> None:
    queues = "<CopySchedule 0 loads, 0 stores queued>"
    assert repr(bench.executor) == f"<CopyExecutor {queues}, 0 chunks in flight>"
