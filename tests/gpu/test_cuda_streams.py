"""Order in time on a real device: two streams of an engine, digests on their own streams, graphs,
and the threads that copy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from kvconnect.copy.calibration import CopyThreshold
from kvconnect.cuda import load_driver
from kvconnect.offload.messages import LoadBlocks, StoreBlocks
from kvconnect.offload.streams import CudaInFlightCopy, CudaStreams, Fence
from kvconnect.types import TransferType
from tests.gpu.worker import DEVICE, DMA, KERNEL, STAGED, Worker

BUSY_CYCLES = 1_000_000_000  # about half a second
LOAD, STORE = TransferType.CPU_TO_GPU, TransferType.GPU_TO_CPU


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(DMA, blocks=8)
    yield worker
    torch.cuda.synchronize()
    worker.close()


def busy() -> None:
    torch.cuda._sleep(BUSY_CYCLES)


def nothing() -> None: ...


# Two streams of an engine ------------------------------------------------------------------------


def test_a_store_follows_the_stream_that_its_fence_was_taken_on(worker: Worker) -> None:
    """One stream of the engine writes blocks late; the other one has nothing to do with them."""
    forward = torch.cuda.Stream(DEVICE)
    wanted = worker.area.clone()
    worker.area.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        busy()
        worker.area.copy_(wanted)
        behind = worker.executor.fence()
    worker.submit(1, StoreBlocks, range(4))  # negative control: a fence of the other stream
    worker.submit(2, StoreBlocks, range(4, 8), behind)
    worker.ended(2)
    pages = wanted.cpu().view(2, 8, -1)
    slots = worker.store.tensor().view(8, 2, -1)
    assert not slots[:4].any()
    assert torch.equal(slots[4:], pages[:, 4:].transpose(0, 1))


@pytest.mark.parametrize("choice", [KERNEL, DMA, STAGED])
def test_nothing_of_a_store_is_queued_before_its_fence_has_passed(
    monkeypatch: pytest.MonkeyPatch, choice: CopyThreshold
) -> None:
    worker = Worker(choice, blocks=8)
    fences: list[Fence] = []
    early: list[bool] = []
    for name in ("launch", "copy_batch"):
        call = getattr(worker.driver, name)

        def noting(*arguments: Any, call: Callable[..., None] = call, **more: Any) -> None:
            early.append(not worker.executor.streams.has_passed(fences[0]))
            call(*arguments, **more)

        monkeypatch.setattr(worker.driver, name, noting)
    busy()
    fences.append(worker.executor.fence())
    worker.submit(1, StoreBlocks, range(4), fences[0])
    worker.ended(1)
    assert early and not any(early)
    early.clear()
    busy()
    fences[0] = worker.executor.fence()
    is_busy = not worker.executor.streams.has_passed(fences[0])
    worker.submit(2, LoadBlocks, range(4), fences[0])
    worker.ended(1)
    assert any(early) or not is_busy  # the control: the device lets a load wait
    torch.cuda.synchronize()
    worker.close()


# Digests on their own streams --------------------------------------------------------------------


def recorder(events: list[torch.cuda.Event], work: Callable[[], None]) -> Callable[[], None]:
    """Return ``work`` with an event behind it."""

    def run() -> None:
        work()
        events.append(torch.cuda.Event(blocking=True))
        events[-1].record()

    return run


def test_a_store_is_hashed_beside_its_copy() -> None:
    streams = CudaStreams(DEVICE)
    copied, hashed = list[torch.cuda.Event](), list[torch.cuda.Event]()
    busy()
    fence, passed = streams.fence(), torch.cuda.Event(blocking=True)
    passed.record()
    flight = streams.launch(STORE, fence, recorder(copied, busy), recorder(hashed, nothing))
    hashed[0].synchronize()
    assert passed.query() and not copied[0].query()  # it waits for the fence and no longer
    flight.wait()
    assert copied[0].query()


def test_a_load_is_hashed_behind_its_copy() -> None:
    streams = CudaStreams(DEVICE)
    copied, hashed = list[torch.cuda.Event](), list[torch.cuda.Event]()
    flight = streams.launch(
        LOAD, streams.fence(), recorder(copied, busy), recorder(hashed, nothing)
    )
    hashed[0].synchronize()
    assert copied[0].query()
    flight.wait()


@pytest.mark.parametrize("kind", [LOAD, STORE])
def test_a_digest_delays_no_later_copy(kind: TransferType) -> None:
    streams, hashed = CudaStreams(DEVICE), list[torch.cuda.Event]()
    first = streams.launch(kind, streams.fence(), nothing, recorder(hashed, busy))
    streams.launch(kind, streams.fence(), nothing).wait()
    assert not hashed[0].query()
    first.wait()  # negative control: a copy has ended when its digest has
    assert hashed[0].query()


# Graphs ------------------------------------------------------------------------------------------


def hooked_forward(worker: Worker, seen: torch.Tensor) -> None:
    """A forward that reads both layers, with the hooks that an engine calls."""
    sync, half = worker.executor.sync, seen.numel() // 2
    sync.before_forward(hooks=True)
    for number, name in enumerate(sync.layers):
        sync.before_layer(name)
        layer = slice(number * half, (number + 1) * half)
        seen[layer].copy_(worker.area[layer])
    sync.finish()


def test_a_captured_forward_reads_what_was_loaded_before_its_replay(worker: Worker) -> None:
    wanted, seen = worker.area.clone(), torch.zeros_like(worker.area)
    worker.executor.sync.layers = {"first": (0, 1), "second": (0, 2)}
    worker.submit(1, StoreBlocks, range(8))
    worker.ended(1)
    worker.area.zero_()
    hooked_forward(worker, seen)  # once outside, as engines warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hooked_forward(worker, seen)  # no load is under way: hooks launch nothing and wait not
    graph.replay()
    assert not seen.any()  # negative control
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        busy()  # the load has to wait for this, and the graph for the load
        fence = worker.executor.fence()
    worker.submit(2, LoadBlocks, range(8), fence, sync=True)
    worker.executor.sync.before_forward(hooks=False)
    graph.replay()
    worker.executor.sync.finish()
    worker.ended(1)
    assert torch.equal(seen, wanted)
    worker.submit(3, StoreBlocks, range(8))  # between replays
    graph.replay()
    worker.ended(1)
    assert torch.equal(seen, wanted)


# Threads -----------------------------------------------------------------------------------------


def current() -> int:
    found = ctypes.c_void_p()
    assert load_driver().cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value or 0


def test_every_thread_that_copies_is_in_torchs_context(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {}

    def noting(call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            result = call(*arguments)
            seen.setdefault(threading.current_thread().name, set()).add(current())
            return result

        return run

    monkeypatch.setattr(CudaInFlightCopy, "wait", noting(CudaInFlightCopy.wait))
    for name in ("enqueue_store", "enqueue_load"):
        monkeypatch.setattr(worker.copier, name, noting(getattr(worker.copier, name)))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(current).result() == 0  # negative control
    worker.submit(1, StoreBlocks, range(8))
    worker.ended(1)
    worker.submit(2, LoadBlocks, range(8))
    worker.ended(1)
    waiters = {"kvconnect-await-gpu-to-cpu", "kvconnect-await-cpu-to-gpu"}
    assert seen.keys() == {"kvconnect-copy"} | waiters
    # torch makes the first device's context no thread's own; calls of ours enter it and leave it.
    assert set.union(*seen.values()) <= {0, current()} and current()
    assert seen["kvconnect-copy"] == {current()}
