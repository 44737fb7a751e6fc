"""``kvconnect cache``: looks into the disk tier, or asks a router to control caches of engines."""

from __future__ import annotations

import argparse
import importlib
from functools import partial
from typing import Any

from kvconnect.commands import router_caches
from kvconnect.commands.doctor import Refuse
from kvconnect.commands.router_caches import RouterAnswer
from kvconnect.errors import ConfigError
from kvconnect.terminal import say


def add_command(commands: Any) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    text = "inspect the disk tier, or control caches of engines"
    parser = commands.add_parser("cache", help=text)
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
    router_caches.add_stats_flags(stats)
    for each in router_caches.add_commands(what):
        each.set_defaults(run=partial(run_cache, each.error))
    for each in (stats, ls, clear):
        of_model = "only formats of this model; '' for formats of unknown models"
        of_model += "; of a router: only its engines" if each is stats else ""
        each.add_argument("--model", metavar="NAME", help=of_model)
    for each in (ls, clear):
        old = "only blocks stored longer ago than 7d, 12h or 30m"
        each.add_argument("--older-than", metavar="TIME", help=old)
        of_format = "only formats whose fingerprint (see stats) starts with HEX"
        each.add_argument("--format", metavar="HEX", help=of_format)
        tenant = each.add_mutually_exclusive_group()
        tenant.add_argument("--tenant", metavar="SALT", help="only blocks of this cache_salt")
        tenant.add_argument("--tenant-id", metavar="HEX", help="the same, by its id (see stats)")


def run_cache(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Inspect the disk tier, or control caches of engines; return the exit code."""
    try:
        if arguments.what in router_caches.COMMANDS:
            return _show(router_caches.ask_router(arguments))
        if arguments.what == "stats" and router_caches.is_router(arguments.folder):
            return _show(router_caches.router_stats(arguments))
        disk_caches = importlib.import_module("kvconnect.commands.disk_caches")
        code: int = getattr(disk_caches, arguments.what)(arguments)
        return code
    except ImportError as error:
        refuse(f"{error.name} is missing: pip install {error.name}")
    except ConfigError as error:
        refuse(f"{error.field} {error.value}: {error.fix}")


def _show(answer: RouterAnswer) -> int:
    say(*answer.text.splitlines())
    return answer.code
