"""``kvconnect config``: checks and shows settings, and prints their JSON Schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from typing import Any

import msgspec

from kvconnect.errors import ConfigError, masked
from kvconnect.settings import FoundSettings, find_settings, schema
from kvconnect.settings.summary import plain
from kvconnect.terminal import Refuse, say

_GIVEN = "settings as a JSON object, or the path of a JSON or YAML file"


def add_command(commands: Any) -> None:
    """Add the command to ``commands``, a result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("config", help="check and show settings of engines")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    check = what.add_parser("check", help="name all that is wrong with some settings")
    check.add_argument("given", metavar="FILE|JSON", help=_GIVEN)
    check.set_defaults(run=partial(run_check, check.error))
    show = what.add_parser("show", help="list all settings, and where each comes from")
    text = f"of the engine's flag: {_GIVEN}; the environment is read too"
    show.add_argument("given", nargs="?", default="{}", metavar="FILE|JSON", help=text)
    show.add_argument("--json", action="store_true", help="print JSON instead of lines")
    show.set_defaults(run=partial(run_show, show.error))
    text = "print the JSON Schema of settings, for editors"
    what.add_parser("schema", help=text).set_defaults(run=print_schema)


def run_check(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Check settings without those of the environment; return 1 if they cannot be used."""
    found = _found(refuse, arguments.given, {})
    if found is not None:
        say("these settings can be used")
    return 0 if found is not None else 1


def run_show(refuse: Refuse, arguments: argparse.Namespace) -> int:
    """Print effective settings, secrets masked; return 1 if they cannot be used."""
    found = _found(refuse, arguments.given, dict(os.environ))
    if found is None:
        return 1
    rows = {
        name: {"value": masked(name, value), "from": found.origins.get(name, "default")}
        for name, value in plain(found.settings).items()
    }
    if arguments.json:
        say(*json.dumps(rows, indent=2).splitlines())
        return 0
    shown = {name: f"{name} = {json.dumps(row['value'])}" for name, row in rows.items()}
    width = min(40, max(map(len, shown.values())))
    say(*(f"{shown[name]:<{width}}  {row['from']}" for name, row in rows.items()))
    return 0


def print_schema(_: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    say(*schema.text().splitlines())
    return 0


def _found(refuse: Refuse, given: str, environ: dict[str, str]) -> FoundSettings | None:
    """Return the settings; None after naming what is wrong with them, each fault in a line."""
    flag: dict[str, Any] = {"config_file": given}
    if given.lstrip().startswith(("{", "[")):
        try:
            flag = msgspec.json.decode(given, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            refuse(f"no JSON object: {error}")
    try:
        return find_settings(flag, environ)
    except ConfigError as error:
        say(*(fault.line for fault in (error, *error.others)), to=sys.stderr)
        return None
