"""The ``kvconnect`` command: its subcommands are in ``commands``, ``top`` and ``report``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvconnect import engine_versions
from kvconnect.commands import cache, config, dashboards, doctor, router, try_engine
from kvconnect.observability import report, top
from kvconnect.terminal import PlainParser


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
    for command in (doctor, config, try_engine, cache, dashboards, router, top, report):
        command.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
