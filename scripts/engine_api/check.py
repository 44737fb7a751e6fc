"""Type-checks KVConnect against the digest of an engine version, which need not be installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.engine_api.digest import CALLS, unpack
from scripts.engine_api.uses import ROOT, users

OF_TESTS = {"attr-defined", "call-arg", "import-not-found"}
"""The kinds of errors that count in tests and benchmarks, which pass stand-ins as arguments."""

NOT_OURS = {"misc"}
"""Contradictions between two base classes, one of which is ours and one the engine's."""

SETTINGS = """[mypy]
explicit_package_bases = True
ignore_missing_imports = True
no_site_packages = True
check_untyped_defs = True
strict_optional = False
[mypy-{package}.*]
ignore_missing_imports = False
disable_error_code = overload-cannot-match, override
"""


def problems(digest: str, package: str, folder: Path) -> list[str]:
    """Return what KVConnect expects of an engine and a digest of it does not have, as mypy's lines.

    Args:
        digest: What ``python -m scripts.engine_api`` printed for that version.
        package: ``vllm`` or ``sglang``.
        folder: An empty folder for what is unpacked.
    """
    stubs = folder / "stubs"
    unpack(digest, stubs)
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS.format(package=package))
    paths = [str(path.relative_to(ROOT)) for path in users(package)]
    calls = stubs / f"{CALLS}.py"
    made = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={settings}", f"--cache-dir={folder}/cache"]
        + paths
        + [str(calls)] * calls.exists(),
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": f"{stubs}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    if made.returncode > 1:
        raise RuntimeError(f"mypy cannot check: {made.stdout}{made.stderr}")
    checked = {*paths, str(calls)}
    return [line for line in made.stdout.splitlines() if is_problem(line, checked, stubs)]


def is_problem(line: str, checked: set[str], stubs: Path) -> bool:
    found = re.match(r"(?P<path>[^:]+):\d+: error: .*\[(?P<kind>[a-z-]+)\]$", line)
    if not found:
        return False
    path, kind = found["path"], found["kind"]
    if path.startswith(("tests/", "benchmarks/")):
        # An object of no known class is none of the engine's.
        return path in checked and kind in OF_TESTS and '"object" has no' not in line
    return path.startswith(str(stubs)) or (path in checked and kind not in NOT_OURS)
