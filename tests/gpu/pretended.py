"""Which tests of this folder cannot hold on a pretended device, and why.

python -m tests.gpu.pretended     lists them, and counts the others
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

STREAMS = "test_cuda_streams.py::"
AT_ONCE = "work that was submitted is over, so nothing is seen to wait"
FAIL = {
    "test_cuda_context.py::test_a_refused_page_lock_breaks_nothing_that_follows": "no CUDA runtime",
    "test_cuda_context.py::test_a_copy_goes_on_while_all_of_torchs_streams_are_busy": AT_ONCE,
    "test_cuda_copy.py::test_a_copy_waits_for_its_fence_and_for_nothing_else[dma]": AT_ONCE,
    "test_cuda_copy.py::test_a_copy_waits_for_its_fence_and_for_nothing_else[kernel]": AT_ONCE,
    "test_cuda_executor.py::test_the_device_waits_for_each_layer_of_a_synchronous_load": AT_ONCE,
    f"{STREAMS}test_a_store_follows_the_stream_that_its_fence_was_taken_on": AT_ONCE,
    f"{STREAMS}test_a_store_is_hashed_beside_its_copy": AT_ONCE,
    f"{STREAMS}test_a_digest_delays_no_later_copy[CPU_to_GPU]": AT_ONCE,
    f"{STREAMS}test_a_digest_delays_no_later_copy[GPU_to_CPU]": AT_ONCE,
    f"{STREAMS}test_a_captured_forward_reads_what_was_loaded_before_its_replay": "no graphs",
    "test_kernel_cache.py::test_every_kernel_loads[False]": "CuPy compiles for a device",
    "test_handoff_staging.py::test_each_layer_can_be_read_behind_its_own_fence": AT_ONCE,
}
"""Tests whose bodies run up to what no device in host memory can show."""
LEFT_OUT = {
    "test_cuda_copy.py::test_events_tell_the_time": "nothing but time",
    "test_cuda_copy.py::test_ways_can_be_measured": "copies of a minute: gpu_run has them in small",
}
FILES_LEFT_OUT = {
    "test_cuda_faults.py": "processes of their own, of which some lose the device",
    "test_nixl_device.py": "NIXL registers the memory of a device",
    "test_sanitizer.py": "compute-sanitizer",
    "test_sleep.py": "an engine on a GPU",
    "test_vllm_bytes.py": "an engine on a GPU",
}

COLLECT = ("-m", "pytest", "-q", "--collect-only", "-p", "tests.fakes.pretended_cuda")
FOLDER = Path(__file__).parent


def collected() -> list[str]:
    """Return the tests of this folder, as the tables above name them."""
    command = [sys.executable, *COLLECT, "-p", "no:cacheprovider", str(FOLDER)]
    root = FOLDER.parents[1]
    quiet = {**os.environ, "PYTEST_ADDOPTS": ""}  # a -v there would list the tests as a tree
    listed = subprocess.run(
        command, cwd=root, env=quiet, check=True, capture_output=True, text=True
    ).stdout
    return [line.removeprefix("tests/gpu/") for line in listed.splitlines() if "::" in line]


def not_run(tests: Iterable[str]) -> dict[str, str]:
    """Return why a test does not hold on a pretended device, for those that do not."""
    reasons = {**FAIL, **LEFT_OUT, **FILES_LEFT_OUT}
    found = {}
    for test in tests:
        for name in (test, test.partition("[")[0], test.partition("::")[0]):
            if name in reasons:
                found[test] = reasons[name]
    return found


def main() -> None:
    tests = collected()
    left = not_run(tests)
    for test, reason in left.items():
        sys.stdout.write(f"{test}: {reason}\n")
    figures = {"gpu_tests": len(tests), "gpu_tests_run_here": len(tests) - len(left)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
