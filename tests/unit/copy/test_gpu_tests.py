"""The bodies of ``tests/gpu`` run on a pretended device, so that no GPU meets a slip in them.

A test that cannot hold there is listed with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
STREAMS = "test_cuda_streams."
AT_ONCE = "work that was submitted is over, so nothing is seen to wait"
FAIL = {
    "test_cuda_context.test_a_refused_page_lock_breaks_nothing_that_follows": "no CUDA runtime",
    "test_cuda_context.test_copies_share_no_stream_with_torch": "torch's streams are no pool",
    "test_cuda_context.test_a_copy_goes_on_while_all_of_torchs_streams_are_busy": AT_ONCE,
    "test_cuda_copy.test_a_copy_waits_for_its_fence_and_for_nothing_else[dma]": AT_ONCE,
    "test_cuda_copy.test_a_copy_waits_for_its_fence_and_for_nothing_else[kernel]": AT_ONCE,
    "test_cuda_executor.test_the_device_waits_for_each_layer_of_a_synchronous_load": AT_ONCE,
    f"{STREAMS}test_a_store_follows_the_stream_that_its_fence_was_taken_on": AT_ONCE,
    f"{STREAMS}test_a_store_is_hashed_beside_its_copy": AT_ONCE,
    f"{STREAMS}test_a_digest_delays_no_later_copy[CPU_to_GPU]": AT_ONCE,
    f"{STREAMS}test_a_digest_delays_no_later_copy[GPU_to_CPU]": AT_ONCE,
    f"{STREAMS}test_a_captured_forward_reads_what_was_loaded_before_its_replay": "no graphs",
    "test_handoff_staging.test_each_layer_can_be_read_behind_its_own_fence": AT_ONCE,
}
"""Tests whose bodies run up to what no device in host memory can show."""
LEFT_OUT = {
    "test_cuda_copy.py::test_events_tell_the_time": "nothing but time",
    "test_cuda_copy.py::test_ways_can_be_measured": "nothing but time",
    "test_cuda_copy.py::test_the_time_to_submit_work_does_not_count": "nothing but time",
    "test_cuda_copy.py::test_the_sanitizer_finds_nothing": "compute-sanitizer",
}
FILES_LEFT_OUT = {
    "test_cuda_faults.py": "processes of their own, of which some lose the device",
    "test_nixl_device.py": "NIXL registers the memory of a device",
    "test_sleep.py": "an engine on a GPU",
    "test_vllm_bytes.py": "an engine on a GPU",
}


def run(folder: Path) -> dict[str, str]:
    """Run all but what is left out; return ``passed``, ``failure`` or ``skipped`` by test."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    assert {*FILES_LEFT_OUT} < {file.name for file in files}
    report = folder / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "tests.fakes.pretended_cuda"),
        *("-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"),
        *(str(file) for file in files if file.name not in FILES_LEFT_OUT),
        *(f"--deselect=tests/gpu/{test}" for test in LEFT_OUT),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert report.exists(), ended.stdout[-3000:] + ended.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}.{case.attrib['name']}"
        found[name] = next((child.tag for child in case if child.tag != "properties"), "passed")
    return found


def test_bodies_hold_on_a_pretended_device(tmp_path: Path) -> None:
    found = run(tmp_path)
    wrong = {name for name, ending in found.items() if ending != "passed"}
    assert wrong <= {*FAIL} <= found.keys(), wrong - {*FAIL}
    assert len(wrong) > len(FAIL) / 2  # the control: the device is a pretended one
    assert len(found) - len(FAIL) >= 70
