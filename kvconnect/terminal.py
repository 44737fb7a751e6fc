"""What goes to a terminal: text of others cannot move its cursor, set its title or hide lines."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, TextIO

Refuse = Callable[[str], NoReturn]
"""Ends a command with a usage error."""


def plain(text: str) -> str:
    """Return one line of text with ``?`` in place of control and other invisible characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def plain_lines(text: str) -> str:
    """Return text whose lines are :func:`plain`."""
    return "\n".join(map(plain, text.split("\n")))


def say(*lines: str, to: TextIO | None = None) -> None:
    """Write lines, each :func:`plain`, to standard output or ``to``. A line stays one line."""
    out = sys.stdout if to is None else to
    out.write("".join(f"{plain(line)}\n" for line in lines))


class PlainParser(argparse.ArgumentParser):
    """A parser whose errors are plain, since they repeat arguments and what servers answered, and
    one line each."""

    def error(self, message: str) -> NoReturn:
        """End the command with status 2."""
        self.exit(2, f"{self.prog}: error: {plain(message)}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(plain_lines(message), file)


class PlainFormatter(logging.Formatter):
    """Formats log records, whose messages repeat what others said."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines (called by ``logging``)."""
        return plain_lines(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON, with the time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line (called by ``logging``)."""
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown)


LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def log_to_stderr(level: str = "info", form: str = "text") -> None:
    """Log, for commands that run until they are stopped: from one of :data:`LOG_LEVELS` on, in one
    of :data:`LOG_FORMATS`."""
    handler = logging.StreamHandler()
    text = PlainFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
