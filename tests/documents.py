"""The commands of the documentation, as a shell would read them, for tests that check each one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("benchmarks/README.md", "demo/README.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
SHELL = ("", "sh", "bash", "shell", "console")
"""Languages of blocks that are commands; a block that does not name one is."""
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
NOT_SHELL = {
    "root    = blake2b(": "text",
    "ok    tcp ": "text",
    "    0.0  297.9  POST ": "text",
}
"""How blocks of pages that name no language begin -> their language."""


class Block(NamedTuple):
    """A fenced block. ``place`` is ``page:line``."""

    place: str
    language: str
    text: str


class Command(NamedTuple):
    """One command: its words, and the variables set in front of it."""

    place: str
    words: tuple[str, ...]
    variables: dict[str, str]

    @property
    def line(self) -> str:
        """What was written, in one line, for messages."""
        return shlex.join(self.words)


def blocks() -> Iterator[Block]:
    """Yield all fenced blocks."""
    for page in PAGES:
        yield from blocks_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yield the fenced blocks of one page."""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        body = match[3]
        known = next((name for start, name in NOT_SHELL.items() if body.startswith(start)), "")
        yield Block(f"{page}:{line}", match[2] or known, body)


def commands() -> list[Command]:
    """Return the commands of all shell blocks."""
    return [
        command
        for block in blocks()
        if block.language in SHELL
        for command in commands_of(block.text, block.place)
    ]


def commands_of(text: str, place: str) -> Iterator[Command]:
    """Yield the commands of one block; raise :class:`ValueError` for a quote without an end."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        words = _split(line)
        while words is None:  # a quote goes on in the next line
            more = next(lines, None)
            if more is None:
                raise ValueError(f"{place}: a quote without an end: {line}")
            line = f"{line}\n{more}"
            words = _split(line)
        yield from _commands_of_words(words, place)


def _split(line: str) -> list[str] | None:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&>")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def _commands_of_words(words: list[str], place: str) -> Iterator[Command]:
    """Yield one command, or those of a pipe; what it is redirected to is left out."""
    part: list[str] = []
    for word in [*words, ";"]:
        grouping = not part and word in ("{", "}")
        if not grouping and word not in (";", "|", "&&", "||", "&"):
            part.append(word)
            continue
        if ">" in part:
            del part[part.index(">") : part.index(">") + 2]
        variables = {}
        if part[:1] == ["export"]:
            part.pop(0)
        while part and _ASSIGNMENT.match(part[0]):
            name, _, value = part.pop(0).partition("=")
            variables[name] = value
        if part or variables:
            yield Command(place, tuple(part), variables)
        part = []
