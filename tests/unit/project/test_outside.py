"""What is said of programs of others is what their runs reported."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.outside import __main__ as outside
from tests.outside.suites import PROGRAMS, SUITES

REPORT = """<testsuites><testsuite>
<testcase classname="tests.outside.sglang.test_handoff.TestParity" name="test_a"/>
<testcase classname="tests.outside.sglang.test_handoff.TestParity" name="test_a"/>
<testcase classname="tests.outside.sglang.test_handoff.TestPair" name="test_b"><{tag}/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("tag", ["failure", "error", "skipped"])
def test_what_did_not_pass_is_told(tag: str) -> None:
    found = outside.outcome(ET.fromstring(REPORT.replace("{tag}", tag)))
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
    root = Path(outside.__file__).resolve().parents[2]
    assert all((root / suite.tests).is_file() for suite in SUITES)
    assert all(suite.quick.startswith(suite.tests) for suite in SUITES if suite.quick)
    assert len({(p.name, p.used_on) for p in PROGRAMS}) == len(PROGRAMS)
