"""What is said of programs of others is what their runs reported."""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.outside import __main__ as outside
from tests.outside.suites import PROGRAMS, SUITES
from tests.outside.vllm_cases import CASES

ROOT = Path(outside.__file__).resolve().parents[2]

REPORT = """<testsuites><testsuite>
<testcase classname="tests.outside.sglang.test_handoff.TestParity" name="test_a"/>
<testcase classname="tests.outside.sglang.test_handoff.TestParity" name="test_a"/>
<testcase classname="tests.outside.sglang.test_handoff.TestPair" name="test_b"><{tag}/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("tag", ["failure", "error", "skipped"])
def test_what_did_not_pass_is_told(tag: str) -> None:
    found: Any = outside.outcome(ET.fromstring(REPORT.replace("{tag}", tag)))
    assert found == (("TestParity.test_a", "TestPair.test_b"), ("TestPair.test_b",))
    versions = dict.fromkeys((program.package for program in PROGRAMS), "1.2")
    page = outside.document({"suites": {"one": found._asdict()}, "versions": versions})
    parity, pair = (
        next(line for line in page.splitlines() if kit in line)
        for kit in ("pd_parity_kit", "basic_api_contract_kit")
    )
    assert "| 1.2 |" in parity and parity.endswith("| 1 of 1 |")
    assert pair.endswith("| 0 of 1 |")


def test_the_page_is_made_from_the_committed_results() -> None:
    known = outside.read()
    assert outside.COMPATIBILITY.read_text(encoding="utf-8") == outside.document(known)
    assert known["suites"].keys() <= {suite.name for suite in SUITES}
    assert not any(each["failed"] for each in known["suites"].values())


def test_a_run_without_tests_has_failed() -> None:
    assert outside.outcome(ET.fromstring("<testsuites/>")).failed == ("no test ran",)


def test_every_suite_has_its_file() -> None:
    assert all((ROOT / suite.tests).is_file() for suite in SUITES)
    assert all(suite.quick.startswith(suite.tests) for suite in SUITES if suite.quick)
    assert len({(p.name, p.used_on) for p in PROGRAMS}) == len(PROGRAMS)


def test_every_test_named_beside_one_of_vllm_is_there() -> None:
    named = {test for case in CASES for test in case.tests}
    assert {test for test in named if not is_there(test)} == set()
    assert all(case.tests for case in CASES)
    assert len({(case.file, case.text) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "test",
    [
        "engines/test_handoff.py::TestLlama::test_nothing",
        "engines/test_handoff.py::test_pull",  # of a class
        "engines/test_nothing.py::test_pull",
        "engines/test_handoff.py::pushing",
    ],
)
def test_negative_control_a_test_that_is_not_there(test: str) -> None:
    assert not is_there(test)


def is_there(test: str) -> bool:
    """Return whether pytest would find a test, named as it names it."""
    file, *names = test.split("::")
    path = ROOT / "tests" / file
    if not path.is_file() or not names[-1].startswith("test_"):
        return False
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True
