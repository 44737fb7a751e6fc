"""The words of ``kvconnect top``; the parts that need an extra are loaded when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from functools import partial
from typing import Any

from kvconnect.errors import ConfigError

_LONGEST_S = 3600.0


def add_command(commands: Any) -> None:
    """Add the command to what :meth:`argparse.ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser("top", help="watch engines and routers on a terminal")
    add = parser.add_argument
    what = "an engine's or a router's address, HOST:PORT or a URL; /metrics if it has no path"
    add("urls", nargs="+", metavar="URL", help=what)
    wait = "seconds between two looks (default: %(default)g)"
    add("--interval", type=seconds, default=2.0, metavar="S", help=wait)
    add("--once", action="store_true", help="look twice, show once, and end")
    add("--json", action="store_true", help="print one JSON object per look instead of a screen")
    add("--record", default="", metavar="FILE", help="append every look to a file, for report")
    parser.set_defaults(run=partial(run, parser))


def seconds(text: str) -> float:
    """Return an interval.

    Raises:
        argparse.ArgumentTypeError: too short, too long, or no number.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"use 0.1 to {_LONGEST_S:g} seconds, not {text}")
    return value


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Show what endpoints say; return the exit code: 1 with ``--once`` if one of them is down."""
    try:
        app = importlib.import_module("kvconnect.observability.top.app")
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        parser.error(f"{package} is missing: pip install 'kvconnect[top]'")
    try:
        return 0 if app.run(app.options_of(arguments), sys.stdout) else 1
    except ConfigError as error:
        parser.error(f"{error.field} {error.value}: {error.fix}")
    except BrokenPipeError:  # as with `| head`; nor may the interpreter's last flush complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
