"""Declare the optional C extension and CUDA kernels; everything else is in pyproject.toml.

KVCONNECT_BUILD_NATIVE   unset: build it if a C compiler works, else say so and go without
                         1: build it or fail        0: never build it
KVCONNECT_BUILD_KERNELS  the same for the kernels' fat binaries and nvcc; without them, the first
                         use on a machine with a GPU compiles the sources, which ship in any case
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there when pip builds

from scripts import build_kernels
from scripts.index_page import index_page

SWITCH = "KVCONNECT_BUILD_NATIVE"
KERNEL_SWITCH = "KVCONNECT_BUILD_KERNELS"
# One wheel for Python 3.11 and all later versions. Builds without the GIL have no such API.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")
SOURCES = ("native", "net", "pages", "relay", "token_events")
HEADERS = ("native", "pages", "token_events", "vendor/xxhash")
NATIVE = Extension(
    "kvconnect._native",
    sources=[f"kvconnect/native/{name}.c" for name in SOURCES],
    depends=[f"kvconnect/native/{name}.h" for name in HEADERS],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
    py_limited_api=STABLE,
    extra_link_args=["-pthread"],  # a library of its own before glibc 2.34
    extra_compile_args=["-pthread", "-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
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


def read_switch(name: str) -> str:
    """Return what a switch is set to: "", "0" or "1"."""
    switch = os.environ.get(name, "")
    if switch not in ("", "0", "1"):
        sys.exit(f"{name}={switch!r} is not usable: leave it unset, or set it to 0 or 1")
    return switch


def extensions() -> list[Extension]:
    switch = read_switch(SWITCH)
    if switch == "0":
        return []
    if switch == "" and not compiler_works():
        sys.stderr.write(
            f"kvconnect: no C compiler works, so no native code ({SWITCH}=1 insists)\n"
        )
        return []
    return [NATIVE]


class BuildWithKernels(build_py):
    """Compile the kernels beside their sources, where they are packed as data."""

    def run(self) -> None:
        switch = read_switch(KERNEL_SWITCH)
        nvcc = build_kernels.find_nvcc()
        if switch == "1" and nvcc is None:
            sys.exit(f"{KERNEL_SWITCH}=1, but there is no nvcc in PATH or CUDA_HOME")
        if switch == "0":
            for stale in build_kernels.SOURCES.glob("*.fatbin"):
                stale.unlink()
        elif nvcc is not None:
            try:
                build_kernels.build(build_kernels.SOURCES, nvcc)
            except build_kernels.BuildFailed as error:
                if switch == "1":
                    sys.exit(f"kvconnect: {error}")
                sys.stderr.write(f"kvconnect: no kernels ahead of time: {error}\n")
        super().run()


class BuildInPlace(build_ext):
    """Removes what a build for one version of Python left, which would be imported first."""

    def run(self) -> None:
        if self.inplace:
            for stale in Path("kvconnect").glob("_native.cpython-*.so"):
                stale.unlink()
        super().run()


setup(
    long_description=index_page(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["kvconnect*"]), "kvconnect.kernels"],
    package_dir={"kvconnect.kernels": "kernels"},
    cmdclass={"build_py": BuildWithKernels, "build_ext": BuildInPlace},
    ext_modules=extensions(),
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
    # MANIFEST.in is for the sdist alone.
    exclude_package_data={"kvconnect": ["native/*", "native/vendor/*"]},
)
