"""``kvconnect dashboards``: writes dashboards and alerts to a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvconnect.observability.metrics import dashboards
from kvconnect.terminal import say


def add_command(commands: Any) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("dashboards", help="Grafana dashboards and Prometheus alerts")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    export = what.add_parser("export", help="write dashboards and alerts to a folder")
    export.add_argument("folder", metavar="DIR", help="target folder; created if missing")
    export.set_defaults(run=run_dashboards)


def run_dashboards(arguments: argparse.Namespace) -> int:
    """Write dashboards and alerts to a folder; return the exit code."""
    try:
        written = dashboards.export(Path(arguments.folder))
    except OSError as error:
        say(f"kvconnect dashboards: {error}", to=sys.stderr)
        return 1
    say(*map(str, written))
    return 0
