"""Type-checks KVConnect against the digest of an engine version, which need not be installed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.engine_api.digest import CALLS, MISSING, parts, unpack
from scripts.engine_api.uses import ROOT, users

OF_TESTS = {"call-arg"}
"""The kinds of errors that count in tests and benchmarks, which use stand-ins. What they import is
in the digest, or named in it as missing, or newer than it."""

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


def problems(digest: str, package: str, folder: Path, cache: Path | None = None) -> list[str]:
    """Return what KVConnect expects of an engine and a digest of it does not have, as mypy's lines.

    Args:
        digest: What ``python -m scripts.engine_api`` printed for that version.
        package: ``vllm`` or ``sglang``.
        folder: An empty folder for what is unpacked.
        cache: mypy's cache, which checks of other digests may share.
    """
    stubs = folder / "stubs"
    unpack(digest, stubs)
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS.format(package=package))
    paths = [str(path.relative_to(ROOT)) for path in users(package)]
    calls = stubs / f"{CALLS}.py"
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            f"--config-file={settings}",
            f"--cache-dir={cache or folder / 'cache'}",
        ]
        + paths
        + [str(calls)] * calls.exists(),
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": f"{stubs}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    if made.returncode > 1 or not re.search(r"^(Found|Success)", made.stdout, re.M):
        raise RuntimeError(f"mypy cannot check: {made.stdout}{made.stderr}")
    checked = {*paths, str(calls)}
    lacking = [line for line in digest.splitlines() if line.startswith(MISSING)]
    has = members(digest)
    wrong = [line for line in made.stdout.splitlines() if is_problem(line, checked)]
    return [*lacking, *(line for line in wrong if not is_of_subclass(line, has))]


def is_problem(line: str, checked: set[str]) -> bool:
    found = re.match(r"(?P<path>[^:]+):\d+: error: .*\[(?P<kind>[a-z-]+)\]$", line)
    if not found or found["path"] not in checked:
        return False
    if found["path"].startswith(("tests/", "benchmarks/")):
        return found["kind"] in OF_TESTS
    return found["kind"] not in NOT_OURS


def members(digest: str) -> dict[str, tuple[set[str], set[str]]]:
    """Return the names of each class's bases and of its members."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for _, text in parts(digest):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                bases, names = found.setdefault(node.name, (set(), set()))
                bases |= {ast.unparse(base) for base in node.bases}
                for child in node.body:
                    names.add(getattr(child, "name", ast.unparse(child).partition(":")[0]))
    return found


def is_of_subclass(line: str, has: dict[str, tuple[set[str], set[str]]]) -> bool:
    """Whether an error is about an attribute that a subclass has: KVConnect tells by other means
    than types which objects have it."""
    found = re.search(r'"(?P<of>\w+)" has no attribute "(?P<name>\w+)"', line)
    below = {found["of"]} if found else set()
    while more := {name for name, (bases, _) in has.items() if bases & below} - below:
        below |= more
    return found is not None and any(found["name"] in has[name][1] for name in below & set(has))
