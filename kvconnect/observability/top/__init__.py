"""``kvconnect top``: watches engines and routers on a terminal.

This module is the command line. Modules that need an extra are imported when the command runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from functools import partial
from typing import Any

from kvconnect.errors import ConfigError
from kvconnect.extras import what_to_install

_LONGEST_S = 3600.0


def add_command(commands: Any) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("top", help="watch engines and routers on a terminal")
    add = parser.add_argument
    what = "address of an engine or router: HOST:PORT, or a URL; the default path is /metrics"
    add("urls", nargs="+", metavar="URL", help=what)
    wait = "seconds between two scrapes (default: %(default)g)"
    add("--interval", type=seconds, default=2.0, metavar="S", help=wait)
    add("--once", action="store_true", help="scrape twice, show rates once, and exit")
    add("--json", action="store_true", help="print one JSON object per scrape")
    add(
        "--record",
        default="",
        metavar="FILE",
        help="append every scrape to a file",
    )
    parser.set_defaults(run=partial(run, parser))


def seconds(text: str) -> float:
    """Return the interval in ``text``.

    Raises:
        argparse.ArgumentTypeError: not a number from 0.1 to 3600.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"use 0.1 to {_LONGEST_S:g} seconds, not {text}")
    return value


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Show the endpoints' metrics; return the exit code: 1 with ``--once`` if one is down."""
    if lacking := what_to_install(["top"]):
        parser.error(lacking)
    app = importlib.import_module("kvconnect.observability.top.app")
    try:
        return 0 if app.run(app.options_of(arguments), sys.stdout) else 1
    except ConfigError as error:
        parser.error(f"{error.field} {error.value}: {error.fix}")
    except BrokenPipeError:  # the reader closed the pipe; Python flushes stdout again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
