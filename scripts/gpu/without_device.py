"""Stand-ins for what vLLM's CUDA build needs of a machine to be imported: a driver and a platform.

The driver has no devices, and its functions do nothing. That the libraries load with it shows that
torch and CUDA's libraries have every other symbol.

As a plugin of pytest (``-p scripts.gpu.without_device``), it lets tests of the connector run with
that build.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

NO_DEVICE = 100


def load_driver(libraries: list[Path]) -> None:
    """Load a driver with all functions that ``libraries`` need.

    Raises:
        OSError: there is no C compiler.
    """
    listed = subprocess.run(
        ["nm", "-D", "-u", *libraries], check=True, capture_output=True, text=True
    )
    wanted = sorted({"cuInit", *re.findall(r"\bU (cu[A-Z]\w*)", listed.stdout)})
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in wanted)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libcuda.so.1")
        flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-"]
        subprocess.run(["gcc", *flags, f"-o{path}"], check=True, input=source, text=True)
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def pretend_device(vllm: Path) -> None:
    """Let vLLM believe that this machine has an H200. ``vllm``: the folder of the package."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else Triton wants an active driver
    load_driver(sorted(vllm.rglob("*.so")))
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Pretended(NonNvmlCudaPlatform):
        get_device_capability = staticmethod(lambda *_, **__: DeviceCapability(9, 0))
        get_device_name = staticmethod(lambda *_, **__: "NVIDIA H200")
        get_device_total_memory = staticmethod(lambda *_, **__: 139 << 30)

    platforms._current_platform = Pretended()


def pytest_configure() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    pretend_device(Path(spec.origin).parent)
