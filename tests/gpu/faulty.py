"""Processes whose device or page-locks fail: ``python -m tests.gpu.faulty NAME``.

Each has a process of its own, because what it breaks stays broken.
"""

from __future__ import annotations

import resource
import sys
from array import array
from collections.abc import Callable

import torch

from kvconnect.copy import make_copier
from kvconnect.copy.cuda import CudaCopier
from kvconnect.copy.driver import own_stream
from kvconnect.cuda import CudaContext
from kvconnect.errors import TransferFailed
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.messages import LoadBlocks, StoreBlocks
from kvconnect.types import FailureCause
from tests.fakes.pretended_cuda import pretend_as_told
from tests.gpu.worker import DEVICE, DMA, Worker, layers, noise

NOWHERE = 8
"""An address that no kernel may read."""


def check(what: bool, text: str) -> None:
    if not what:
        raise SystemExit(f"wrong: {text}")


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except TransferFailed:
        return True
    return False


def illegal_access() -> None:
    """After an illegal access each copy fails, each job ends, and the threads can be closed."""
    worker = Worker(DMA, blocks=8)
    numbers = array("q", range(8))
    memory = bytearray(4096)
    context = CudaContext(torch.cuda.current_device())
    calls: dict[str, Callable[[], object]] = {
        "store": lambda: worker.copier.store(0, numbers, numbers),
        "load": lambda: worker.copier.load(0, numbers, numbers),
        "synchronize": worker.driver.synchronize,
        "upload": lambda: worker.driver.upload(numbers),
        "stream": lambda: own_stream(DEVICE),
        "lock": lambda: context.lock(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), 4096),
    }
    for name in ("store", "load", "synchronize", "upload", "stream"):
        check(not fails(calls[name]), f"{name} fails on a healthy device")  # negative control
    fence = worker.executor.fence()
    worker.driver.launch("pack_blocks", 1, 32, (*(NOWHERE,) * 3, 1, 1, NOWHERE, 1, 16, 1))
    check(fails(worker.driver.synchronize), "the access was legal")
    for name, call in calls.items():
        check(fails(call), f"{name} works on a lost device")
    worker.submit(1, LoadBlocks, range(8), fence)
    worker.submit(2, StoreBlocks, range(8), fence)
    for done in worker.finished(2):
        causes = [failed.cause for failed in done.report.failures]
        check(causes == [FailureCause.COPY] * 8, f"job {done.report.job} failed by {causes}")
    worker.close()
    check(not worker.executor._thread.is_alive(), "the copy thread lives on")


def memlock_limit() -> None:
    """The limit on locked memory is 0. Drivers may lock memory all the same."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    copy_whether_locked_or_not(HostArena(8, 2 * 4096, "full"))


def locked_before() -> None:
    """The driver refuses a range whose last page is locked already."""
    store = HostArena(8, 2 * 4096, "full")
    CudaContext(torch.cuda.current_device()).lock(store.address + store.nbytes - 4096, 4096)
    check(not copy_whether_locked_or_not(store), "the range was locked twice")


def copy_whether_locked_or_not(store: HostArena) -> bool:
    """Check a copy and a launch after :meth:`HostArena.pin`; return whether that locked."""
    geometry = layers(2, 8, 4096, 0, 0)
    area = noise(geometry.area_bytes, 9).to(DEVICE)
    before, locked = area.clone(), store.pin()
    copier = make_copier(area, store.tensor(), geometry)
    check(isinstance(copier, CudaCopier) == locked, f"{type(copier)} though locked is {locked}")
    copier.store(0, range(8), range(7, -1, -1))
    area.zero_()
    check(not torch.equal(area, before), "zeros are what was there")  # negative control
    copier.load(0, range(8), range(7, -1, -1))
    check(torch.equal(area, before), "other bytes came back")  # and no error was left to torch
    store.close()
    return locked


CASES = {case.__name__: case for case in (illegal_access, memlock_limit, locked_before)}

if __name__ == "__main__":
    pretend_as_told()
    CASES[sys.argv[1]]()
    sys.stdout.write(f"{sys.argv[1]} ended well\n")
