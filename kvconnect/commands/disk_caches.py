"""The caches of disk tiers, on the command line: shown, verified and cleared."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time

from kvconnect.cache.keys import TENANT_BYTES, tenant_of
from kvconnect.commands import router_caches
from kvconnect.errors import ConfigError
from kvconnect.terminal import plain, say
from kvconnect.tiers.backends.disk import inspect

_TENANTS = 10  # most to show; there may be one per user


def stats(arguments: argparse.Namespace) -> int:
    """Show what each worker has stored; return the exit code.

    Raises:
        ConfigError: the folder is unusable, or a flag is for a router only.
    """
    for flag in router_caches.OF_ROUTER:
        if (value := getattr(arguments, flag)) not in (None, ""):
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


def ls(arguments: argparse.Namespace) -> int:
    """List every block that the flags select; return the exit code.

    Raises:
        ConfigError: a flag or the folder is unusable.
    """
    for entry in inspect.ls(arguments.folder, _wanted(arguments)):
        if arguments.json:
            say(json.dumps(entry._asdict()))
        else:
            what = f"{entry.key}{_named(entry.model)}"
            say(f"{entry.owner}  {_when(entry.seconds)}  {entry.nbytes:>10}  {what}")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read every block, and remove bad ones where no engine runs; return 1 if there is one.

    Raises:
        ConfigError: a flag or the folder is unusable.
    """
    found = inspect.verify(arguments.folder, _show_progress if sys.stderr.isatty() else _hide)
    if arguments.json:
        say(json.dumps(found.json()))
    else:
        say(f"{found.blocks} blocks read, {found.bad} bad, {found.removed} of them removed")
    return 1 if found.bad else 0


def clear(arguments: argparse.Namespace) -> int:
    """Remove the blocks that the flags select; return the exit code.

    Raises:
        ConfigError: a flag or the folder is unusable.
    """
    removed = inspect.clear(arguments.folder, _wanted(arguments))
    say(json.dumps({"removed": removed}) if arguments.json else f"{removed} blocks removed")
    return 0


def _wanted(arguments: argparse.Namespace) -> inspect.BlockFilter:
    """Return the selection of blocks; raise :class:`ConfigError`."""
    before = tenant = None
    if arguments.older_than is not None:
        before = time.time() - parse_seconds("older-than", arguments.older_than)
    if arguments.tenant is not None:
        tenant = tenant_of(arguments.tenant)
    elif arguments.tenant_id is not None:
        tenant = parse_tenant("tenant-id", arguments.tenant_id)
    formats = "" if arguments.format is None else parse_format("format", arguments.format)
    return inspect.BlockFilter(before, formats, arguments.model, tenant)


def parse_format(field: str, text: str) -> str:
    """Return the beginning of a format's fingerprint, as ``stats`` shows it.

    Raises:
        ConfigError: malformed; an empty one would be of every format.
    """
    if not re.fullmatch("[0-9a-fA-F]+", text):
        raise ConfigError(field, text, "use hexadecimal digits that stats shows")
    return text.lower()


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
