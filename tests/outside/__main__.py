"""Runs what others wrote against KVConnect: test suites, routers, clients.

    python -m tests.outside [--quick] [--only NAME]

``--quick`` runs the part that CI runs. Without it, what each suite said is kept in
``results.json``, and docs/compatibility.md is made of it. A test that fails is run once more, as in
``make test``. The last line of the output is one JSON object: ``suites``, ``cases``, ``passed``,
``failed``, ``not_runnable``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.outside.suites import NOT_RUNNABLE, PROGRAMS, SUITES, Suite
from tests.outside.vllm_cases import section

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1800
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
KEPT = Path(__file__).with_name("results.json")


class Outcome(NamedTuple):
    """Names of the tests of a suite that ran, and of those that did not pass."""

    cases: tuple[str, ...]
    failed: tuple[str, ...]


def run(suite: Suite, quick: bool) -> Outcome:
    """Run a suite in a process and a network of its own: its ports are fixed."""
    with tempfile.TemporaryDirectory(prefix="kvconnect-outside-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(str(ROOT / "scripts" / "in-netns"), str(ROOT / suite.environment / "bin" / "python")),
            *("-m", "pytest", suite.quick if quick else suite.tests),
            *("-q", "-rR", "--reruns=1", "-p", "no:cacheprovider", f"--junitxml={report}"),
        ]
        print(f"== {suite.name}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S, check=False)
        if not report.exists():
            return Outcome((), (f"pytest ended with {ended.returncode}",))
        return outcome(ET.parse(report).getroot())


def outcome(report: ET.Element) -> Outcome:
    """Return what a report of pytest says. A test that was skipped did not pass."""
    cases, failed = [], []
    for case in report.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        cases.append(name)
        if any(case.find(tag) is not None for tag in ("failure", "error", "skipped")):
            failed.append(name)
    once = tuple(dict.fromkeys(cases))  # a test that ran twice is reported twice
    return Outcome(once, tuple(failed) if cases else ("no test ran",))


def keep(outcomes: Mapping[str, Outcome]) -> None:
    """Keep what suites said beside what others said before, and make the page."""
    known = read()
    known["suites"] |= {name: each._asdict() for name, each in outcomes.items()}
    for program in PROGRAMS:
        environment = ROOT / program.environment
        if environment.exists():
            known["versions"][program.package] = version_of(program.package, environment)
    KEPT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    COMPATIBILITY.write_text(document(known), encoding="utf-8")


def read() -> dict[str, Any]:
    """Return what is kept."""
    empty: dict[str, Any] = {"suites": {}, "versions": {}}
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else empty


def document(known: Mapping[str, Any]) -> str:
    """Return docs/compatibility.md, made of what is kept."""
    lines = [
        "# Compatibility",
        "",
        "`make outside` runs programs that this project did not write against KVConnect, and makes",
        "this page. The engines ran on CPUs, with tiny random models.",
        "",
        "| Program | Version | Used on | Tests passed |",
        "|---|---|---|---|",
    ]
    cases = [case for each in known["suites"].values() for case in each["cases"]]
    failed = {case for each in known["suites"].values() for case in each["failed"]}
    for program in PROGRAMS:
        mine = {case for case in cases if case.startswith(program.cases)}
        version, said = known["versions"][program.package], f"{len(mine - failed)} of {len(mine)}"
        lines.append(f"| {program.name} | {version} | {program.used_on} | {said} |")
    lines += ["", "Not run:", "", "| Program | Reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in NOT_RUNNABLE.items()]
    return "\n".join([*lines, "", *section()]) + "\n"


def version_of(package: str, environment: Path) -> str:
    """Return the version of a package in an environment."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    command = [str(environment / "bin" / "python"), "-c", ask]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outside")
    parser.add_argument("--quick", action="store_true", help="the part that CI runs")
    parser.add_argument("--only", default="", help="suites whose name contains this")
    options = parser.parse_args()
    suites = [s for s in SUITES if options.only in s.name and (s.quick or not options.quick)]
    outcomes = {suite.name: run(suite, options.quick) for suite in suites}
    if not options.quick:
        keep(outcomes)
    cases = [case for each in outcomes.values() for case in each.cases]
    failed = [case for each in outcomes.values() for case in each.failed]
    for name in failed:
        print(f"failed: {name}")
    said = {
        "suites": len(suites),
        "cases": len(cases),
        "passed": len(set(cases) - set(failed)),
        "failed": len(failed),
        "not_runnable": len(NOT_RUNNABLE),
    }
    print(json.dumps(said))
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
