"""A source of engines: a file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvconnect.errors import ConfigError
from kvconnect.router.engine_spec import EngineSpec, engine_spec
from kvconnect.router.fleet.sources import EngineSource, NamedEngines, OnRefused
from kvconnect.router.metrics import InputKind
from kvconnect.router.policy.fleet_view import Role

logger = logging.getLogger(__name__)

FILE_EVERY_S = 1.0


async def follow(path: str, refuse: OnRefused) -> EngineSource:
    """Poll the file; yield its engines whenever its text has changed, and stays so for a poll: it
    may be in the middle of being written. That it cannot be read, or is empty, is logged once,
    until it can; its engines stay."""
    last: str | None = None
    before: str | None = None
    why = ""
    named: NamedEngines = {}
    while True:
        try:
            text = await asyncio.to_thread(Path(path).read_text)
            if any(named.values()) and not text.strip():
                raise ValueError("it is empty, without a comment that it is to be")
        except (OSError, ValueError) as error:  # missing, or not text
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if reason != why:
                logger.warning("%s: %s; its engines stay as they were", path, reason)
            why = reason
        else:
            why = ""
            whole = last is None or text == before
            before = text
            if whole and text != last:
                last = text
                named = parse(text, named, refuse)
                yield named
        await asyncio.sleep(FILE_EVERY_S)


def parse(text: str, before: NamedEngines, refuse: OnRefused) -> NamedEngines:
    """Return the engines in the text of a file.

    A line is ``prefill`` or ``decode`` and an engine as on the command line. Empty lines and lines
    that begin with ``#`` are skipped. ``refuse`` gets each invalid line. Its engine is unknown, so
    while a line is invalid, all engines in ``before`` stay.
    """
    named: dict[Role, dict[str, EngineSpec]] = {role: {} for role in Role}
    wrong = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            role, spec = _read(f"line {number}", line.strip())
            if spec.url in named[role]:
                raise ConfigError(f"line {number}", line, "name each engine once")
            named[role][spec.url] = spec
        except ConfigError as error:
            refuse(InputKind.FILE, str(error))
            wrong = True
    for role, specs in before.items() if wrong else ():
        for spec in specs:
            named[role].setdefault(spec.url, spec)
    return {role: tuple(specs.values()) for role, specs in named.items()}


def _read(field: str, line: str) -> tuple[Role, EngineSpec]:
    role, _, spec = line.partition(" ")
    if role not in [each.value for each in Role]:
        raise ConfigError(field, line, "begin with prefill or decode")
    return Role(role), engine_spec(field, spec)
