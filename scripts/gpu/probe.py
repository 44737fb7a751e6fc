"""Says what the machine is: device, driver, link, the time to page-lock memory, packages.

python -m scripts.gpu.probe [--dry]     # --dry: with the stub driver of the tests
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack

from kvconnect import cuda
from kvconnect.offload.host_arena import HostArena

PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "msgspec", "pytest", "xxhash", "vllm", "nixl")
QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,compute_cap"
GIB = 1 << 30
LOCKED_BYTES, DRY_BYTES = 8 * GIB, 8 << 20


def device() -> dict[str, object]:
    """Return what nvidia-smi says of the first device."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia_smi": str(error)}
    first = said.stdout.splitlines()[0]
    return dict(zip(QUERY.split(","), map(str.strip, first.split(",")), strict=True))


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def page_lock(nbytes: int) -> dict[str, object]:
    """Time the page-lock of an arena, per GiB; the memory is touched before."""
    arena = HostArena(nbytes >> 21, 2 << 20, "off")
    arena.tensor().zero_()
    began = time.perf_counter()
    locked = arena.pin()
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    arena.close()
    return {
        "page_locked": locked,
        "page_lock_s_per_gib": round(seconds * GIB / nbytes, 4),
        "page_unlock_s_per_gib": round((time.perf_counter() - began) * GIB / nbytes, 4),
    }


def main() -> int:
    dry = "--dry" in sys.argv[1:]
    with ExitStack() as stack:
        if dry:
            import pytest

            from tests.fakes.stub_driver import StubDriver

            patches = stack.enter_context(pytest.MonkeyPatch.context())
            StubDriver(patches)
            patches.setattr("torch.cuda.current_device", lambda: 0)
        context = cuda.CudaContext(0)
        figures = {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "nvcc": shutil.which("nvcc"),
            "compute_sanitizer": shutil.which("compute-sanitizer"),
            **device(),
            **packages(),
            "cuda": context.version,
            "reaches_host_addresses": context.reaches_host_addresses,
            **page_lock(DRY_BYTES if dry else LOCKED_BYTES),
        }
    print(json.dumps(figures), flush=True)
    return int(not figures["page_locked"])


if __name__ == "__main__":
    sys.exit(main())
