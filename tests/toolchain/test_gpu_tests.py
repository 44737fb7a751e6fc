"""The bodies of ``tests/gpu`` run on a pretended device, so that no GPU meets a slip in them.

``tests/gpu/pretended.py`` lists those that cannot run there, with the reason. What they show of
waits is shown by a device that is at fault: the same tests fail on it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from tests.fakes.deferred_device import Fault
from tests.gpu.pretended import FILES_LEFT_OUT, collected, not_run

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 800.0  # for bodies that take a minute on an idle machine
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

CONTEXT, COPY, EXECUTOR, STAGING, STREAMS = (
    f"test_{name}.py::test_"
    for name in ("cuda_context", "cuda_copy", "cuda_executor", "handoff_staging", "cuda_streams")
)
NOTICED = {
    Fault.ONE_QUEUE: {
        f"{CONTEXT}a_copy_goes_on_while_all_of_torchs_streams_are_busy",
        f"{COPY}a_copy_waits_for_its_fence_and_for_nothing_else",
        f"{STREAMS}a_store_follows_the_stream_that_its_fence_was_taken_on",
        f"{STREAMS}a_store_is_hashed_beside_its_copy",
        f"{STREAMS}a_digest_delays_no_later_copy",
        f"{STAGING}each_layer_can_be_read_behind_its_own_fence",
    },
    Fault.HEEDLESS_MODEL: {
        f"{EXECUTOR}the_device_waits_for_each_layer_of_a_synchronous_load",
        f"{STREAMS}a_captured_forward_reads_what_was_loaded_before_its_replay",
    },
    Fault.HEEDLESS_COPIES: {
        f"{STREAMS}a_load_is_hashed_behind_its_copy",
        f"{STREAMS}a_store_is_hashed_beside_its_copy",
    },
    Fault.HEEDLESS_THREADS: {
        f"{COPY}a_copy_waits_for_its_fence_and_for_nothing_else",
        f"{EXECUTOR}blocks_survive_the_trip_behind_the_work_that_wrote_them",
        f"{STREAMS}a_store_follows_the_stream_that_its_fence_was_taken_on",
        f"{STREAMS}a_digest_delays_no_later_copy",
        f"{STREAMS}nothing_of_a_store_is_queued_before_its_fence_has_passed",
        f"{STAGING}each_layer_can_be_read_behind_its_own_fence",
        f"{STAGING}layers_cross_a_socket_from_device_to_device",
    },
}
"""The tests that must fail on a device with a fault."""

SKIPS = {} if shutil.which("nvcc") else {"test_kernel_cache.py::test_every_kernel_loads"}
"""What needs a compiler that may not be there."""


def run(folder: Path, *arguments: str) -> dict[str, str]:
    """Run tests on the pretended device; return ``passed``, ``failure`` or ``skipped`` by test."""
    report = folder / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "tests.fakes.pretended_cuda"),
        *("-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"),
        *arguments,
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    whole = ended.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    assert whole, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2]
        name = f"{file}.py::{case.attrib['name']}"
        found[name] = next((child.tag for child in case if child.tag != "properties"), "passed")
    return found


def test_bodies_hold_on_a_pretended_device(tmp_path: Path) -> None:
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    assert {*FILES_LEFT_OUT} < {file.name for file in files}
    found = run(tmp_path, *(str(file) for file in files if file.name not in FILES_LEFT_OUT))
    wrong = {name for name, ending in found.items() if ending != "passed"}
    assert {name.partition("[")[0] for name in wrong} <= {*SKIPS}, wrong
    assert len(found) >= 99


@pytest.mark.parametrize("fault", Fault)
def test_a_device_at_fault_fails_the_tests_of_what_it_does_wrong(
    tmp_path: Path, fault: Fault
) -> None:
    chosen = (f"tests/gpu/{test}" for test in sorted(NOTICED[fault]))
    found = run(tmp_path, f"--device-fault={fault.value}", *chosen)
    assert {name.partition("[")[0] for name in found} == NOTICED[fault]
    assert {*found.values()} == {"failure"}, found


def test_what_does_not_run_here_is_counted() -> None:
    tests = collected()
    left = not_run(tests)
    assert {test.partition("::")[0] for test in left} == FILES_LEFT_OUT.keys()
    run_here = f"{len(tests) - len(left)} of {len(tests)}"
    assert run_here in " ".join((ROOT / "docs" / "copy.md").read_text().split()), run_here
    assert not_run(["test_cuda_copy.py::test_new"]) == {}  # negative control
