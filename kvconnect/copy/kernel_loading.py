"""Loads the CUDA kernels: from fat binaries through the driver, else compiled by CuPy.

A fat binary was built by ``scripts/build_kernels.py``, when KVConnect was installed. Where none
fits the device or its driver, CuPy compiles the source, once per machine: it caches the result on
disk. Launches need neither, only the handles.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from typing import Any

from kvconnect.copy import kernels
from kvconnect.cuda import CudaContext
from kvconnect.errors import Incompatible, TransferFailed

logger = logging.getLogger(__name__)

_OPTIONS = ("-std=c++17",)

_compiled: list[Any] = []  # CuPy's modules, which it unloads with their last reference


@functools.cache
def load_kernels(index: int) -> dict[str, int]:
    """Return the handle of every kernel for a device, by name. They live until the process ends.

    Raises:
        Incompatible: a family has no fat binary that loads, and CuPy does not compile it.
    """
    context = CudaContext(index)
    handles: dict[str, int] = {}
    for family in kernels.SOURCES:
        find = _from_binary(context, family) or _from_source(index, family)
        handles |= {name: find(name) for name, of in kernels.KERNELS.items() if of == family}
    return handles


def _from_binary(context: CudaContext, family: str) -> Callable[[str], int] | None:
    """Return what finds the kernels of a family in its fat binary; None if there is none that the
    driver takes."""
    path = kernels.folder() / binary_name(family)
    try:
        module = context.load_module(path.read_bytes())
    except FileNotFoundError:
        return None
    except TransferFailed as error:  # built for a newer driver, or without code for the device
        logger.info("%s does not load (%s), compiling it here", path.name, error)
        return None
    return functools.partial(context.kernel, module)


def _from_source(index: int, family: str) -> Callable[[str], int]:
    try:
        import cupy
    except ImportError as error:
        fix = "install kvconnect[cuda12] or kvconnect[cuda13]"
        why = f"no fat binary of {family}.cu fits, and CuPy is not installed ({error})"
        raise Incompatible(f"{why}; {fix}") from error

    def find(name: str) -> int:
        with cupy.cuda.Device(index):
            return int(module.get_function(name).kernel.ptr)

    refused = (RuntimeError, OSError, ImportError, cupy.cuda.compiler.CompileException)
    try:
        module = cupy.RawModule(code=kernel_source(family), options=_OPTIONS)
        for name, of in kernels.KERNELS.items():
            if of == family:
                find(name)  # compiles
    except refused as error:  # also a CuPy for another CUDA version than the driver
        raise Incompatible(f"{family}.cu does not compile here: {error}") from error
    _compiled.append(module)
    return find


def kernel_source(family: str) -> str:
    """Return the source of a kernel family with its header inlined, as NVRTC requires."""
    header = (kernels.folder() / "runs.cuh").read_text().replace("#pragma once\n", "")
    return (kernels.folder() / f"{family}.cu").read_text().replace('#include "runs.cuh"\n', header)


def binary_name(family: str) -> str:
    """Return the file name of a fat binary: it has a digest of the sources, so that a binary of
    other sources is never loaded."""
    return f"{family}-{source_digest(family)}.fatbin"


def source_digest(family: str) -> str:
    """Return a digest of a kernel family's sources, as 12 hexadecimal digits."""
    sources = (kernels.folder() / "runs.cuh", kernels.folder() / f"{family}.cu")
    content = b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(content).hexdigest()[:12]
