"""Which tests of this folder cannot run on a pretended device, and why.

python -m tests.gpu.pretended     lists them, and counts the others
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

FILES_LEFT_OUT = {
    "test_sanitizer.py": "compute-sanitizer looks at what runs on a device",
    "test_sleep.py": "an engine on a GPU",
    "test_vllm_bytes.py": "an engine on a GPU",
}

COLLECT = ("-m", "pytest", "-q", "--collect-only", "-p", "tests.fakes.pretended_cuda")
FOLDER = Path(__file__).parent


def collected() -> list[str]:
    """Return the tests of this folder."""
    command = [sys.executable, *COLLECT, "-p", "no:cacheprovider", str(FOLDER)]
    root = FOLDER.parents[1]
    quiet = {**os.environ, "PYTEST_ADDOPTS": ""}  # a -v there would list the tests as a tree
    listed = subprocess.run(
        command, cwd=root, env=quiet, check=True, capture_output=True, text=True
    ).stdout
    return [line.removeprefix("tests/gpu/") for line in listed.splitlines() if "::" in line]


def not_run(tests: Iterable[str]) -> dict[str, str]:
    """Return why a test does not run on a pretended device, for those that do not."""
    files = {test: test.partition("::")[0] for test in tests}
    return {test: FILES_LEFT_OUT[file] for test, file in files.items() if file in FILES_LEFT_OUT}


def main() -> None:
    tests = collected()
    left = not_run(tests)
    for test, reason in left.items():
        sys.stdout.write(f"{test}: {reason}\n")
    figures = {"gpu_tests": len(tests), "gpu_tests_run_here": len(tests) - len(left)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
