"""The ``kvconnect`` command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import ipaddress
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from kvconnect import engine_versions, extras
from kvconnect.cache.keys import TENANT_BYTES, tenant_of
from kvconnect.config import parse_bytes
from kvconnect.doctor import Finding, FindingsReport, checks, disk, models, transfers
from kvconnect.doctor import flags as doctor_flags
from kvconnect.doctor.peer_task import Task
from kvconnect.errors import ConfigError
from kvconnect.observability import report, top
from kvconnect.observability.metrics import dashboards
from kvconnect.router import cache_command
from kvconnect.router import flags as router_flags
from kvconnect.terminal import PlainParser, log_to_stderr, plain, say

Refuse = Callable[[str], NoReturn]
"""Ends the command with a usage error."""

_TENANTS = 10  # most to show; there may be one per user


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``kvconnect`` command; returns the exit code."""
    try:
        try:
            arguments = make_parser().parse_args(argv)
            code: int = arguments.run(arguments)
            return code
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as shells do; every started process has ended
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. The interpreter flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as shells do for SIGPIPE


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; its result has the function to ``run``."""
    parser = PlainParser(prog="kvconnect", description="KV-cache connector tools")
    version = engine_versions.installed("kvconnect") or "(not installed: running from a checkout)"
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="check what works here and how fast, with fixes")
    _add_doctor(doctor)
    cache = commands.add_parser("cache", help="inspect the disk tier, or control caches of engines")
    _add_cache_flags(cache)
    boards = commands.add_parser("dashboards", help="Grafana dashboards and Prometheus alerts")
    _add_dashboards_flags(boards)
    router = commands.add_parser("router", help="serve prefill and decode engines as one")
    router_flags.add_flags(router)
    router.set_defaults(run=partial(run_router, router.error))
    top.add_command(commands)
    report.add_command(commands)
    return parser


# doctor -----------------------------------------------------------------------------------------


def run_checks(arguments: argparse.Namespace) -> int:
    """Check the installation, or what works with a model; return the exit code."""
    found = models.examine(arguments.model) if arguments.model else checks.run()
    return _show(found, arguments)


def run_transport(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Move pages to another process or machine; return the exit code."""
    try:
        min_rate = parse_bytes("min-rate", arguments.min_rate)
        at = arguments.listen or arguments.peer
        host, port = parse_address("listen" if arguments.listen else "peer", at) if at else ("", 0)
        if arguments.peer and not port:
            raise ConfigError("peer", at, "use the port that the listening side prints")
        task = Task(
            "source" if arguments.listen else "reader",
            host,
            port,
            arguments.path,
            arguments.device,
            arguments.key_file,
            arguments.tls_dir,
        )
        if arguments.listen:
            return _listen(task)
        return _show(transfers.examine(task, min_rate), arguments)
    except ConfigError as error:
        refuse(f"--{error.field.replace('_', '-')} {error.value}: {error.fix}")


def run_copy(refuse: Refuse, arguments: argparse.Namespace) -> int:  # noqa: ARG001
    """Copy blocks as the host tier does; return the exit code."""
    try:
        from kvconnect.doctor import copies
    except ImportError as error:
        fix = f"install the engine: {extras.command(['vllm'])} or [sglang]"
        missing = Finding("copy", "fail", f"{error.name} is missing", fix)
        return _show(FindingsReport((missing,), "", "blocks cannot be copied here"), arguments)
    return _show(copies.examine(arguments.device), arguments)


def run_disk(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Write and read a file; return the exit code."""
    try:
        nbytes = parse_bytes("bytes", arguments.bytes)
        if not nbytes:
            raise ConfigError("bytes", arguments.bytes, "use more than 0")
    except ConfigError as error:
        refuse(f"--{error.field} {error.value}: {error.fix}")
    return _show(disk.examine(arguments.folder, nbytes), arguments)


def run_peers(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Ask workers that share their host memory; return the exit code."""
    from kvconnect.doctor import cache_peers

    try:
        found = cache_peers.examine(arguments.ask, arguments.key_file, arguments.tls_dir)
        return _show(found, arguments)
    except ConfigError as error:
        refuse(f"{error.field} {error.value}: {error.fix}")


def parse_address(field: str, text: str) -> tuple[str, int]:
    """Return (IP address, port) of ``HOST:PORT``; names are looked up.

    Raises:
        ConfigError: malformed, or an unknown host name.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ConfigError(field, text, "use HOST:PORT such as 10.1.2.3:14580")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(field, text, f"use a host that can be resolved: {error}") from error
    return str(ipaddress.ip_address(found[0][4][0])), int(port)


def _listen(task: Task) -> int:
    log_to_stderr()
    with contextlib.suppress(KeyboardInterrupt):
        transfers.listen(task, _say_now, lambda: False)
    return 0


def _say_now(line: str) -> None:
    say(line)
    sys.stdout.flush()


def _show(found: FindingsReport, arguments: argparse.Namespace) -> int:
    say(*(found.json() if arguments.json else found.text()).splitlines())
    return 0 if found.ok else 1


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_checks)
    runs = {"transport": run_transport, "copy": run_copy, "disk": run_disk, "peers": run_peers}
    for name, each in doctor_flags.add_flags(parser).items():
        each.set_defaults(run=partial(runs[name], each.error))


# cache ------------------------------------------------------------------------------------------


def run_cache(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Inspect the disk tier, or control caches of engines; return the exit code."""
    try:
        inspect = importlib.import_module("kvconnect.tiers.backends.disk.inspect")
    except ImportError as error:
        refuse(f"{error.name} is missing: pip install {error.name}")
    try:
        code: int = _CACHE[arguments.what](inspect, arguments)
        return code
    except ConfigError as error:
        refuse(f"{error.field} {error.value}: {error.fix}")


def _cache_stats(inspect: ModuleType, arguments: argparse.Namespace) -> int:
    if cache_command.is_router(arguments.folder):
        code, text = cache_command.router_stats(arguments)
        say(*text.splitlines())
        return code
    for flag in cache_command.OF_ROUTER:
        if value := getattr(arguments, flag):
            raise ConfigError(flag.replace("_", "-"), value, "only with the URL of a router")
    parts = inspect.stats(arguments.folder, arguments.model)
    if arguments.json:
        say(json.dumps([part.json() for part in parts]))
        return 0
    for part in parts:
        times = f"{_when(part.oldest)} to {_when(part.newest)}" if part.blocks else "empty"
        say(
            f"{part.owner}  format {part.format or '-'}{_named(part.model)}  {part.blocks} blocks, "
            f"{part.block_bytes / 2**20:.1f} MiB, in {part.segments} segments of "
            f"{part.file_bytes / 2**20:.1f} MiB, {times}  {part.in_use_by or 'not in use'}"
        )
        tenants = sorted(part.tenants.items(), key=lambda item: -item[1])
        for tenant, nbytes in tenants[:_TENANTS]:
            say(f"    tenant {tenant}  {nbytes / 2**20:.1f} MiB")
        if len(tenants) > _TENANTS:
            say(f"    and {len(tenants) - _TENANTS} more tenants")
    return 0


def _cache_ls(inspect: ModuleType, arguments: argparse.Namespace) -> int:
    for entry in inspect.ls(arguments.folder, _wanted(inspect, arguments)):
        if arguments.json:
            say(json.dumps(entry._asdict()))
        else:
            what = f"{entry.key}{_named(entry.model)}"
            say(f"{entry.owner}  {_when(entry.seconds)}  {entry.nbytes:>10}  {what}")
    return 0


def _cache_verify(inspect: ModuleType, arguments: argparse.Namespace) -> int:
    found = inspect.verify(arguments.folder, _show_progress if sys.stderr.isatty() else _hide)
    if arguments.json:
        say(json.dumps(found.json()))
    else:
        say(f"{found.blocks} blocks read, {found.bad} bad, {found.removed} of them removed")
    return 1 if found.bad else 0


def _cache_clear(inspect: ModuleType, arguments: argparse.Namespace) -> int:
    removed = inspect.clear(arguments.folder, _wanted(inspect, arguments))
    say(json.dumps({"removed": removed}) if arguments.json else f"{removed} blocks removed")
    return 0


def _cache_hint(_: ModuleType, arguments: argparse.Namespace) -> int:
    code, text = cache_command.ask_router(arguments)
    say(*text.splitlines())
    return code


_CACHE: dict[str, Callable[[ModuleType, argparse.Namespace], int]] = {
    "stats": _cache_stats,
    "ls": _cache_ls,
    "verify": _cache_verify,
    "clear": _cache_clear,
    **dict.fromkeys(cache_command.COMMANDS, _cache_hint),
}


def _wanted(inspect: ModuleType, arguments: argparse.Namespace) -> Any:
    """Return the selection of blocks; raise :class:`ConfigError`."""
    before = tenant = None
    if arguments.older_than:
        before = time.time() - parse_seconds("older-than", arguments.older_than)
    if arguments.tenant is not None:
        tenant = tenant_of(arguments.tenant)
    elif arguments.tenant_id is not None:
        tenant = parse_tenant("tenant-id", arguments.tenant_id)
    return inspect.BlockFilter(before, arguments.format.lower(), arguments.model, tenant)


def parse_tenant(field: str, text: str) -> bytes:
    """Return a tenant's id: 16 hexadecimal digits, or fewer in folders of other software.

    Raises:
        ConfigError: malformed.
    """
    if not re.fullmatch(rf"([0-9a-fA-F]{{2}}){{1,{TENANT_BYTES}}}", text):
        raise ConfigError(field, text, "use the 16 hexadecimal digits that stats shows")
    return bytes.fromhex(text)


def parse_seconds(field: str, text: str) -> float:
    """Return seconds of a duration such as ``90s``, ``30m``, ``12h`` or ``7d``.

    Raises:
        ConfigError: malformed.
    """
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:])
    if unit is None or not text[:-1].isdecimal():
        raise ConfigError(field, text, "use a number and s, m, h or d, such as 7d")
    return float(int(text[:-1]) * unit)


def _named(model: str) -> str:
    """Return a model's name, made safe for a terminal: it comes from an untrusted file."""
    return f"  {plain(model)}" if model else ""


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    print(f"\r{done / 2**20:.0f} of {total / 2**20:.0f} MiB", end=end, file=sys.stderr, flush=True)


def _hide(done: int, total: int) -> None:
    """Show no progress: standard error is not a terminal."""


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    stats = what.add_parser("stats", help="what a disk tier, or a router's engines, have cached")
    ls = what.add_parser("ls", help="list every block: worker, time, bytes and key")
    verify = what.add_parser("verify", help="read every block; remove bad ones if not in use")
    clear = what.add_parser("clear", help="remove blocks; no engine may use the folder")
    for each in (stats, ls, verify, clear):
        place = "path of the disk tier"
        either = f"{place}, or URL of a router's admin API"
        metavar, text = ("DIR|URL", either) if each is stats else ("DIR", place)
        each.add_argument("folder", metavar=metavar, help=text)
        each.add_argument("--json", action="store_true", help="print JSON instead of lines")
        each.set_defaults(run=partial(run_cache, each.error))
    cache_command.add_stats_flags(stats)
    for each in cache_command.add_commands(what):
        each.set_defaults(run=partial(run_cache, each.error))
    for each in (stats, ls, clear):
        of_model = "only formats of this model; '' for formats of unknown models"
        of_model += "; of a router: only its engines" if each is stats else ""
        each.add_argument("--model", metavar="NAME", help=of_model)
    for each in (ls, clear):
        old = "only blocks stored longer ago than 7d, 12h or 30m"
        each.add_argument("--older-than", default="", metavar="TIME", help=old)
        of_format = "only formats whose fingerprint (see stats) starts with HEX"
        each.add_argument("--format", default="", metavar="HEX", help=of_format)
        tenant = each.add_mutually_exclusive_group()
        tenant.add_argument("--tenant", metavar="SALT", help="only blocks of this cache_salt")
        tenant.add_argument("--tenant-id", metavar="HEX", help="the same, by its id (see stats)")


# dashboards -------------------------------------------------------------------------------------


def run_dashboards(arguments: argparse.Namespace) -> int:
    """Write dashboards and alerts to a folder; return the exit code."""
    try:
        written = dashboards.export(Path(arguments.folder))
    except OSError as error:
        say(f"kvconnect dashboards: {error}", to=sys.stderr)
        return 1
    say(*map(str, written))
    return 0


def _add_dashboards_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    export = what.add_parser("export", help="write dashboards and alerts to a folder")
    export.add_argument("folder", metavar="DIR", help="target folder; created if missing")
    export.set_defaults(run=run_dashboards)


# router -----------------------------------------------------------------------------------------


def run_router(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Run the router until a signal stops it; return the exit code."""
    if lacking := extras.what_to_install(router_flags.extras_of(arguments)):
        refuse(lacking)
    app = importlib.import_module("kvconnect.router.app")
    try:
        options = router_flags.options_of(arguments)
    except ConfigError as error:
        refuse(f"--{error.field} {error.value}: {error.fix}")
    log_to_stderr()
    try:
        app.serve(options)
    except (ConfigError, OSError) as error:
        say(f"kvconnect router: {error}", to=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
