"""Calls of the driver against ``cuda.h``: a C compiler compares prototypes, structs and numbers.

ctypes checks none of them, and a wrong one writes over memory that is not ours.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kvconnect import cuda
from kvconnect.copy import driver

PROTOTYPES = {
    "cuInit": "unsigned",
    "cuDriverGetVersion": "int *",
    "cuDeviceGet": "int *, int",
    "cuDeviceGetAttribute": "int *, CUdevice_attribute, int",
    "cuDevicePrimaryCtxRetain": "CUcontext *, int",
    "cuCtxSetCurrent": "CUcontext",
    "cuCtxGetCurrent": "CUcontext *",
    "cuCtxPushCurrent_v2": "CUcontext",
    "cuCtxPopCurrent_v2": "CUcontext *",
    "cuCtxGetStreamPriorityRange": "int *, int *",
    "cuStreamCreateWithPriority": "CUstream *, unsigned, int",
    "cuEventCreate": "CUevent *, unsigned",
    "cuEventDestroy_v2": "CUevent",
    "cuEventRecord": "CUevent, CUstream",
    "cuStreamWaitEvent": "CUstream, CUevent, unsigned",
    "cuEventSynchronize": "CUevent",
    "cuEventQuery": "CUevent",
    "cuEventElapsedTime": "float *, CUevent, CUevent",
    "cuMemHostRegister_v2": "void *, size_t, unsigned",
    "cuMemHostUnregister": "void *",
    "cuModuleLoadData": "CUmodule *, const void *",
    "cuModuleGetFunction": "CUfunction *, CUmodule, const char *",
    "cuMemcpyAsync": "CUdeviceptr, CUdeviceptr, size_t, CUstream",
    "cuLaunchKernel": f"CUfunction, {'unsigned, ' * 7}CUstream, void **, void **",
    "cuMemcpyBatchAsync": "CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,"
    "size_t *, size_t, size_t *, CUstream",
    "cuMemcpyBatchAsync_v2": "CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,"
    "size_t *, size_t, CUstream",
}
"""Arguments by call; all return a status."""

NUMBERS = {
    "CUDA_ERROR_NOT_READY": cuda._NOT_READY,
    "CU_STREAM_NON_BLOCKING": cuda._NON_BLOCKING,
    "CU_EVENT_BLOCKING_SYNC": cuda._BLOCKING_WAIT,
    "CU_EVENT_DISABLE_TIMING": cuda._NO_TIMING,
    "CU_MEMHOSTREGISTER_PORTABLE": cuda._PORTABLE,
    "CU_MEMHOSTREGISTER_DEVICEMAP": cuda._MAPPED,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": (
        cuda._HOST_POINTERS_OF_REGISTERED
    ),
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": driver._ORDER_STREAM,
    "CU_MEMCPY_SRC_ACCESS_ORDER_ANY": driver._ORDER_ANY,
    "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": driver._OVERLAP_WITH_COMPUTE,
    "CU_MEM_LOCATION_TYPE_INVALID": driver._NO_HINT,
    "sizeof(CUmemcpyAttributes)": driver.ctypes.sizeof(driver._CopyAttributes),
    "offsetof(CUmemcpyAttributes, srcAccessOrder)": driver._CopyAttributes.order.offset,
    "offsetof(CUmemcpyAttributes, srcLocHint)": driver._CopyAttributes.source_hint.offset,
    "offsetof(CUmemcpyAttributes, dstLocHint)": driver._CopyAttributes.target_hint.offset,
    "offsetof(CUmemcpyAttributes, flags)": driver._CopyAttributes.flags.offset,
}


def find_include() -> Path | None:
    """Return the folder of ``cuda.h``: of the toolkit, or of Triton, which has one, too."""
    triton = find_spec("triton")
    places = sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return next((place for place in places if (place / "cuda.h").exists()), None)


INCLUDE, COMPILER = find_include(), shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(INCLUDE is None or COMPILER is None, reason="no cuda.h")


def complaints(prototypes: dict[str, str], numbers: dict[str, int]) -> str:
    """Return what the compiler says where the header differs; "" if nothing does."""
    text = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n#include <stddef.h>\n"
    for name, arguments in prototypes.items():
        same = f"__builtin_types_compatible_p(__typeof__(&{name}), CUresult (*)({arguments}))"
        text += f'_Static_assert({same}, "{name}");\n'
    for name, number in numbers.items():
        text += f'_Static_assert(({name}) == {number}, "{name}");\n'
    command = [str(COMPILER), "-fsyntax-only", f"-I{INCLUDE}", "-xc", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


def in_header(name: str) -> bool:
    assert INCLUDE is not None
    return bool(re.search(rf"\b{name}\b", (INCLUDE / "cuda.h").read_text()))


def test_calls_are_those_of_the_header() -> None:
    there = {name: text for name, text in PROTOTYPES.items() if in_header(name)}
    assert len(there) >= len(PROTOTYPES) - 2  # the forms of a batch, in old headers
    assert complaints(there, NUMBERS) == ""


def test_every_call_is_compared() -> None:
    package = Path(cuda.__file__).parent
    used = set()
    for path in (package / "cuda.py", package / "copy" / "driver.py"):
        used |= set(re.findall(r"(?:library|short_calls|_cuda)\.(cu[A-Z]\w+)", path.read_text()))
        used |= set(re.findall(r'"(cuMemcpyBatch\w+)", \d', path.read_text()))
        used |= set(re.findall(r"load_driver\(\)\.(cu[A-Z]\w+)", path.read_text()))
    assert used == PROTOTYPES.keys()


@pytest.mark.parametrize(
    ("prototypes", "numbers"),
    [
        ({"cuDeviceGet": "int *, long"}, {}),
        ({"cuEventRecord": "CUevent, CUstream, unsigned"}, {}),
        ({}, {"CU_STREAM_NON_BLOCKING": 2}),
        ({}, {"offsetof(CUmemcpyAttributes, flags)": 16}),
    ],
)
def test_what_differs_is_found(prototypes: dict[str, str], numbers: dict[str, int]) -> None:
    """Negative control."""
    (name,) = {**prototypes, **numbers}
    assert name.rpartition(", ")[2].rstrip(")") in complaints(prototypes, numbers)
