"""Contexts of threads, streams of our own and a refused page-lock, on a real driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvconnect.copy.driver import own_stream  # noqa: E402
from kvconnect.cuda import CudaContext, has_context, load_driver  # noqa: E402
from kvconnect.errors import TransferFailed  # noqa: E402
from kvconnect.offload.host_arena import HostArena  # noqa: E402
from kvconnect.offload.streams import CudaStreams  # noqa: E402
from kvconnect.transport.base import MemoryRegion  # noqa: E402
from kvconnect.transport.nixl import worker as nixl_worker  # noqa: E402

DEVICE = torch.device("cuda")
BUSY_CYCLES = 1_000_000_000  # about half a second


def in_new_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(work).result()


def current() -> int:
    found = ctypes.c_void_p()
    assert load_driver().cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value or 0


def test_the_context_that_a_thread_enters_is_torchs() -> None:
    torch.zeros(8, device=DEVICE)
    ours = current()
    assert ours

    def enter() -> int:
        CudaContext(torch.cuda.current_device()).enter()
        return current()

    assert not in_new_thread(has_context)  # negative control
    assert in_new_thread(enter) == ours


def test_every_thread_of_nixl_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(8, device=DEVICE)
    seen: list[bool] = []

    def start(*_: object, local: bool, owner: str) -> SimpleNamespace:
        seen.append(has_context())
        return SimpleNamespace(offer=SimpleNamespace(), close=lambda: seen.append(has_context()))

    monkeypatch.setattr(nixl_worker, "NixlAgent", start)
    memory = [MemoryRegion(0, 8, 0)]
    worker = in_new_thread(lambda: nixl_worker.NixlWorker("UCX", memory, local=True))
    over = threading.Event()
    worker.renew(worker.offer, "a test", over.set)
    assert over.wait(60)
    worker.close()
    assert len(seen) == 4 and all(seen)


def launch() -> None:
    torch.ones(8, device=DEVICE).add_(1)
    torch.cuda.synchronize()


def test_a_refused_page_lock_breaks_nothing_that_follows() -> None:
    store = HostArena(4, 1 << 20, "off")
    assert store.pin()
    twice = HostArena(4, 1 << 20, "off")
    context = CudaContext(torch.cuda.current_device())
    with pytest.raises(TransferFailed):
        context.lock(store.address, store.nbytes)  # it is locked already
    launch()
    assert twice.pin() and twice.tensor().is_pinned()
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(store.address, store.nbytes, 0)) != 0
    with pytest.raises(RuntimeError):  # negative control: torch's own way leaves the error
        launch()
    launch()
    store.close()
    twice.close()


def test_copies_share_no_stream_with_torch() -> None:
    streams = CudaStreams(DEVICE)._copies.values()
    ours = {stream.cuda_stream for stream in streams} | {own_stream(DEVICE).cuda_stream}
    least, greatest = torch.cuda.Stream.priority_range()
    pools = range(greatest, least + 1)
    theirs = {torch.cuda.Stream(DEVICE, priority=p).cuda_stream for p in pools for _ in range(64)}
    assert len(ours) == 3 and not ours & theirs
    assert len(theirs) <= 32 * len(pools)  # negative control: torch's go round


def test_a_copy_goes_on_while_all_of_torchs_streams_are_busy() -> None:
    target = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    source = torch.ones(1 << 20, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    busy = [torch.cuda.Stream(DEVICE) for _ in range(32)]
    for stream in busy:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES)
    with torch.cuda.stream(own_stream(DEVICE, urgent=True)):
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert not all(stream.query() for stream in busy)
    torch.cuda.synchronize()
    assert target.eq(1).all()
