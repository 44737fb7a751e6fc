"""Builds the C extension and the kernels in the working tree, where compilers are found.

A missing compiler is no failure: both have a slower substitute, and the step says what is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts import build_kernels

ROOT = Path(__file__).resolve().parents[2]


def extension_loads() -> bool:
    command = [sys.executable, "-c", "import kvconnect._native"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def build_extension() -> str:
    """Return what became of the extension for this interpreter."""
    if extension_loads():
        return "was there"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    sys.stderr.write(made.stdout + made.stderr)
    return "built" if extension_loads() else "not built"


def main() -> int:
    extension = build_extension()
    nvcc = build_kernels.find_nvcc()
    kernels = "no nvcc" if nvcc is None else "built"
    try:
        if nvcc is not None:
            build_kernels.build(build_kernels.SOURCES, nvcc)
    except build_kernels.BuildFailed as error:
        sys.stderr.write(f"{error}\n")
        kernels = "do not compile"
    print(json.dumps({"extension": extension, "kernels": kernels}), flush=True)
    return int(kernels == "do not compile")


if __name__ == "__main__":
    sys.exit(main())
