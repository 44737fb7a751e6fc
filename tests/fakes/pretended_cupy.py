"""CuPy where there is no device: nvcc compiles in NVRTC's place, for one architecture."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from scripts.build_kernels import find_nvcc

ARCHITECTURE = "sm_90"


class CompileException(Exception):
    """``cupy.cuda.compiler.CompileException``."""


def _compiled(nvcc: str, code: str, options: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source.cu"), Path(folder, "code.cubin")
        source.write_text(code)
        command = [nvcc, *options, f"-arch={ARCHITECTURE}", "-cubin", str(source)]
        made = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
        if made.returncode:
            raise CompileException(made.stderr)
        return target.read_bytes()


def _raw_module(nvcc: str, handles: Mapping[str, int]) -> Callable[..., SimpleNamespace]:
    """Return what stands in for ``cupy.RawModule``."""

    def module(code: str, options: tuple[str, ...]) -> SimpleNamespace:
        machine_code: list[bytes] = []  # it compiles when a function is first asked for

        def get_function(name: str) -> SimpleNamespace:
            machine_code.extend([] if machine_code else [_compiled(nvcc, code, options)])
            if f".text.{name}\0".encode() not in machine_code[0]:
                raise RuntimeError(f"no function {name}")
            return SimpleNamespace(kernel=SimpleNamespace(ptr=handles[name]))

        return SimpleNamespace(get_function=get_function)

    return module


def pretend_cupy(patch: pytest.MonkeyPatch, handles: Mapping[str, int]) -> None:
    """Let CuPy be installed where nvcc is. ``handles``: those of the driver's kernels."""
    nvcc = find_nvcc()
    if nvcc is None:
        return
    cupy = ModuleType("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    compiler = SimpleNamespace(CompileException=CompileException)
    names = {
        "RawModule": _raw_module(nvcc, handles),
        "cuda": SimpleNamespace(Device=nullcontext, compiler=compiler),
    }
    vars(cupy).update(names)
    patch.setitem(sys.modules, "cupy", cupy)
