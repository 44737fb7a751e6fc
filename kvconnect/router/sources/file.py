"""Engines named in a file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvconnect.errors import ConfigError
from kvconnect.router.options import worker_of, workers
from kvconnect.router.sources import Named, Source
from kvconnect.router.view import Role

logger = logging.getLogger(__name__)

EVERY_S = 1.0


async def follow(path: str) -> Source:
    """Read it whenever its text changes."""
    last: str | None = None
    while True:
        try:
            text = await asyncio.to_thread(Path(path).read_text)
            if text != last:
                last = text
                yield parse(text)
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            logger.warning("%s: %s", path, error)
        await asyncio.sleep(EVERY_S)


def parse(text: str) -> Named:
    """Return what a file of engines names: a line each, ``prefill`` or ``decode`` and a worker as
    on the command line; empty lines and those that begin with ``#`` do not count.

    Raises:
        ConfigError: a line is wrong; the field is its number.
    """
    lines: dict[Role, list[str]] = {role: [] for role in Role}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        role, _, worker = line.strip().partition(" ")
        if role not in [each.value for each in Role]:
            raise ConfigError(f"line {number}", line, "begin with prefill or decode")
        worker_of(f"line {number}", worker)
        lines[Role(role)].append(worker.strip())
    return {role: workers("file", named) for role, named in lines.items()}
