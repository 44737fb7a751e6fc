"""Measures one part of the benchmark of copies: python -m scripts.gpu.measure PART [--dry]

Parts are those of ``benchmarks/copy_cuda.py``, "page-<size>" for each of its pages, and
"calibration", which chooses between kernel and DMA. With ``--dry``, the same code runs over host
memory with few bytes.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from benchmarks import copy_cuda
from kvconnect.copy import calibration
from kvconnect.copy.cuda import sample_move

if TYPE_CHECKING:
    from kvconnect.copy.driver import Driver

ROUNDS, DRY_ROUNDS = 9, 1
PAGE = "page-"


def calibrate(driver: Driver) -> dict[str, object]:
    move = sample_move(driver)
    taken = calibration.time_methods(driver, move)
    found = calibration.measure(driver, move)
    return {
        "taken_us": {
            f"{direction}_{method}_{page >> 10}k": [round(1e6 * seconds, 1) for seconds in times]
            for (direction, method, page), times in taken.items()
        },
        "driver": driver.name,
        "kernels_unavailable_reason": driver.kernels_unavailable_reason,
        "has_batch": driver.has_batch,
        "threshold": vars(found.threshold),
        "gbps": dict(found.gbps),
    }


def measure(part: str, rounds: int) -> dict[str, float]:
    bench = copy_cuda.CudaBench(0)
    if part.startswith(PAGE):
        return copy_cuda.measure_page(bench, part.removeprefix(PAGE), rounds)
    figures: dict[str, float] = getattr(copy_cuda, f"measure_{part}")(bench, rounds)
    return figures


def main() -> int:
    part = sys.argv[1]
    dry = "--dry" in sys.argv[2:]
    rounds = DRY_ROUNDS if dry else ROUNDS
    with ExitStack() as stack:
        if dry:
            import pytest

            from tests.fakes.cuda_driver import FakeDriver
            from tests.fakes.host_bench import use_host

            use_host(stack.enter_context(pytest.MonkeyPatch.context()), FakeDriver)
        elif not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device")
        figures: dict[str, object] | dict[str, float]
        if part == "calibration":
            figures = calibrate(copy_cuda.open_driver(torch.device("cuda")))
        else:
            figures = measure(part, rounds)
    print(json.dumps(figures), flush=True)
    return int(not figures)


if __name__ == "__main__":
    sys.exit(main())
