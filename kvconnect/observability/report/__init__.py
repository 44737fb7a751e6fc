"""``kvconnect report``: one HTML page about one run, or two compared.

This module is the command line; modules that need an extra are imported when the command runs.
"""

from __future__ import annotations

import argparse
import importlib
from functools import partial
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigError
from kvconnect.extras import what_to_install
from kvconnect.terminal import say


def add_command(commands: Any) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("report", help="write an HTML page about one run, or two compared")
    add = parser.add_argument
    what = "a benchmark's result, a folder of results, or a recording of top --record"
    add("first", metavar="RUN", help=what)
    add("second", metavar="OTHER", nargs="?", help="another run to compare with")
    page = "HTML file to write (default: %(default)s)"
    add("-o", "--output", default="report.html", metavar="FILE", help=page)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Write a page; return the exit code."""
    from kvconnect.observability.report import runs  # other commands need none of its catalogue

    if lacking := what_to_install(["report"]):
        parser.error(lacking)
    page = importlib.import_module("kvconnect.observability.report.page")
    paths = [path for path in (arguments.first, arguments.second) if path is not None]
    try:
        text = page.html([runs.read(path) for path in paths])
        Path(arguments.output).write_text(text, encoding="utf-8")
    except ConfigError as error:
        parser.error(f"{error.value}: {error.fix}")
    except OSError as error:
        parser.error(f"{arguments.output}: name a writable file: {error}")
    say(arguments.output)
    return 0
