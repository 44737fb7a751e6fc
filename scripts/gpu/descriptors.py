"""Says what batches of copies cost: python -m scripts.gpu.descriptors [--dry]

A batch takes CPU time for each copy in it, and large ones have crashed drivers. So batches grow,
each size in a process of its own with a time limit, and the first fault ends it.

- ``batch_us_<copies>_<page>``: CPU time of one call on an idle stream.
- ``queued_us_<copies>_<page>``: the longest call while the stream is busy for 200 ms, as a store
  that waits for a forward finds it; as long as that if the driver's queue is full.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from array import array
from contextlib import ExitStack

import torch

from kvconnect.copy.base import MAX_DESCRIPTORS
from kvconnect.copy.calibration import scattered
from kvconnect.copy.driver import CudaDriver, own_stream

SIZES = (64, 256, MAX_DESCRIPTORS)
PAGES = {"64k": 64 << 10, "16k": 16 << 10}
CHILD_LIMIT_S = 5.0
DRY_LIMIT_S = 60.0  # without a device, a loaded machine alone delays a child
IDLE_ROUNDS, QUEUED_ROUNDS = 9, 16
SPIN_CYCLES = 400_000_000
"""About 200 ms."""


def measure(copies: int, pretended: bool) -> None:
    """Print what batches of so many copies cost; ends the process without a device."""
    with ExitStack() as stack:
        if pretended:
            import pytest

            from tests.fakes.pretended_cuda import pretend

            pretend(stack.enter_context(pytest.MonkeyPatch.context()))
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device")
        driver = CudaDriver(torch.device("cuda", 0))
        stack.enter_context(torch.cuda.stream(own_stream(torch.device("cuda", 0))))
        for name, page in PAGES.items():
            idle, queued = measure_page(driver, copies, page)
            key = f"{copies}_{name}"
            figures = {f"batch_us_{key}": idle * 1e6, f"queued_us_{key}": queued * 1e6}
            print(json.dumps(figures), flush=True)


def measure_page(driver: CudaDriver, copies: int, page: int) -> tuple[float, float]:
    """Return the seconds of one call: the median on an idle stream, the longest on a busy one."""
    device, host = driver.device_memory(copies * page), driver.host_memory(copies * page)
    targets, sources = (
        array("q", (memory.data_ptr() + page * number for number in numbers))
        for memory, numbers in ((host, range(copies)), (device, scattered(copies)))
    )
    sizes = array("q", [page]) * copies

    def submit() -> float:
        began = time.perf_counter()
        driver.copy_batch(targets, sources, sizes, early=False)
        return time.perf_counter() - began

    idle = []
    for _ in range(IDLE_ROUNDS):
        idle.append(submit())
        driver.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    queued = [submit() for _ in range(QUEUED_ROUNDS)]
    driver.synchronize()
    return statistics.median(idle), max(queued)


def probe(pretended: bool) -> str | None:
    """Measure all sizes, rising; return the first fault. This process never uses the device, so
    that each child can begin to."""
    children = multiprocessing.get_context("fork")
    limit_s = DRY_LIMIT_S if pretended else CHILD_LIMIT_S
    for copies in SIZES:
        child = children.Process(target=measure, args=(copies, pretended))
        child.start()
        child.join(limit_s)
        if child.exitcode is None:
            child.kill()
            child.join()
            return f"batches of {copies}: no end within {limit_s} s"
        if child.exitcode:
            return f"batches of {copies}: exit status {child.exitcode}"
    return None


def main() -> int:
    fault = probe("--dry" in sys.argv[1:])
    print(json.dumps({"fault": fault}), flush=True)
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(main())
