"""``kvconnect router``: serves until a signal stops it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from functools import partial
from typing import Any

from kvconnect import extras
from kvconnect.errors import ConfigError
from kvconnect.router import flag_sources, flags
from kvconnect.terminal import Refuse, log_to_stderr, say


def add_command(commands: Any) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "router",
        help="serve prefill and decode engines as one",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="kvconnect router --prefill W... --decode W... [flags]",
        epilog=flags.EXAMPLES,
    )
    flags.add_flags(parser)
    parser.set_defaults(run=partial(run_router, parser.error))


def run_router(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Run the router until a signal stops it; return the exit code."""
    try:
        origins = flag_sources.add_elsewhere(arguments, os.environ, flags.add_flags)
    except ConfigError as error:
        refuse(f"{error.field}={error.value!r}: {error.fix}")
    if lacking := extras.what_to_install(flags.extras_of(arguments)):
        refuse(lacking)
    server = importlib.import_module("kvconnect.router.server")
    try:
        options = flags.options_of(arguments)
    except ConfigError as error:
        origin = origins.get(error.field.replace("-", "_"))
        place = f" (set in {origin})" if origin else ""
        refuse(f"--{error.field} {error.value}: {error.fix}{place}")
    log_to_stderr(arguments.log_level, arguments.log_format)
    try:
        server.serve(options)
    except (ConfigError, OSError) as error:
        say(f"kvconnect router: {error}", to=sys.stderr)
        return 1
    return 0
