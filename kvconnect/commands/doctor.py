"""``kvconnect doctor``: flags become tasks, findings become lines and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import socket
import sys
from functools import partial
from typing import Any

from kvconnect import extras
from kvconnect.doctor import Finding, FindingsReport, checks, disk, models, transfers
from kvconnect.doctor import flags as doctor_flags
from kvconnect.doctor.peer_task import Task
from kvconnect.doctor.transfer_findings import REFUSAL_FIXES
from kvconnect.errors import ConfigError
from kvconnect.settings.quantities import parse_bytes
from kvconnect.terminal import Refuse, log_to_stderr, say


def add_command(commands: Any) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("doctor", help="check what works here and how fast, with fixes")
    parser.set_defaults(run=run_checks)
    runs = {"transport": run_transport, "copy": run_copy, "disk": run_disk, "peers": run_peers}
    for name, each in doctor_flags.add_flags(parser).items():
        each.set_defaults(run=partial(runs[name], each.error))


def run_checks(arguments: argparse.Namespace) -> int:
    """Check the installation, or what works with a model; return the exit code."""
    found = models.examine(arguments.model) if arguments.model else checks.run()
    return _show(found, arguments)


def run_transport(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Move pages to another process or machine; return the exit code."""
    try:
        min_rate = parse_bytes("min-rate", arguments.min_rate)
        at = arguments.listen or arguments.peer
        side = "listen" if arguments.listen else "peer"
        host, port = parse_address(side, at) if at else ("", 0)
        if arguments.peer and not port:
            raise ConfigError("peer", at, "use the port that the listening side prints")
        proven = arguments.key_file or arguments.tls_dir
        if at and not (proven or ipaddress.ip_address(host).is_loopback):
            raise ConfigError(side, at, REFUSAL_FIXES["address"])
        task = Task(
            role="source" if arguments.listen else "reader",
            host=host,
            port=port,
            path=arguments.path,
            device=arguments.device,
            key_file=arguments.key_file,
            tls_dir=arguments.tls_dir,
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
    except (ImportError, OSError) as error:  # OSError: a library of torch cannot be loaded
        why = f"torch cannot be used: {error}"
        if isinstance(error, ModuleNotFoundError):
            why = f"{error.name} is missing"
        fix = f"install the engine: {extras.command(['vllm'])} or [sglang]"
        missing = Finding("copy", "fail", why, fix)
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
