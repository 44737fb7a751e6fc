"""Declare the optional C extension; everything else is in pyproject.toml.

KVCONNECT_BUILD_NATIVE  unset: build it if a C compiler works, else say so and go without
                        1: build it or fail        0: never build it
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup

SWITCH = "KVCONNECT_BUILD_NATIVE"
NATIVE = Extension(
    "kvconnect._native",
    sources=["kvconnect/_native.c", "kvconnect/_net.c", "kvconnect/_pages.c"],
    depends=["kvconnect/_native.h", "kvconnect/_pages.h", "kvconnect/_vendor/xxhash.h"],
    extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
)


def compiler_works() -> bool:
    """Compile and link a few lines that need Python's headers, as the extension does."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = ["-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "probe.c"), Path(folder, "probe.so")
        source.write_text("#include <Python.h>\nvoid probe(void) { Py_Initialize(); }\n")
        command = [*compiler, *flags, str(source), "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return False
        return target.exists()


def extensions() -> list[Extension]:
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        sys.exit(f"{SWITCH}={switch!r} is not usable: leave it unset, or set it to 0 or 1")
    if switch == "0":
        return []
    if switch == "" and not compiler_works():
        sys.stderr.write(
            f"kvconnect: no C compiler works, so no native code ({SWITCH}=1 insists)\n"
        )
        return []
    return [NATIVE]


setup(
    ext_modules=extensions(),
    # MANIFEST.in is for the sdist alone.
    exclude_package_data={"kvconnect": ["*.c", "*.h", "_vendor/*"]},
)
