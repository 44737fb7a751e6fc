"""The flags of ``kvconnect top``."""

from __future__ import annotations

import argparse

_LONGEST_S = 3600.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags."""
    add = parser.add_argument
    what = "an engine's or a router's address, HOST:PORT or a URL; /metrics if it has no path"
    add("urls", nargs="+", metavar="URL", help=what)
    wait = "seconds between two looks (default: %(default)g)"
    add("--interval", type=seconds, default=2.0, metavar="S", help=wait)
    add("--once", action="store_true", help="look twice, show once, and end")
    add("--json", action="store_true", help="print one JSON object per look instead of a screen")
    add("--record", default="", metavar="FILE", help="append every look to a file, for report")


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
