"""What goes to a terminal: text of others cannot move its cursor, set its title or hide lines."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
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
    """A parser whose errors are plain: they repeat arguments, and what servers answered."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(plain_lines(message), file)


class PlainFormatter(logging.Formatter):
    """Formats log records, whose messages repeat what others said."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines (called by ``logging``)."""
        return plain_lines(super().format(record))


def log_to_stderr() -> None:
    """Log from INFO on, for commands that run until they are stopped."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
