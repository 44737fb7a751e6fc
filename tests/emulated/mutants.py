"""Taking out waits, one at a time: a model whose checks cannot tell is no proof of anything."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random

import kvconnect
from tests.emulated.device import Emulator, Site

Play = Callable[[Random, frozenset[Site]], Emulator]
"""Runs a model with these numbers and without these sites; raises if something is wrong."""


@cache
def sites_of(play: Play, runs: int) -> tuple[Site, ...]:
    """Return the sites that healthy runs pass, in a stable order."""
    found: set[Site] = set()
    for seed in range(runs):
        found |= play(Random(seed), frozenset()).sites
    return tuple(sorted(found))


def is_noticed(play: Play, site: Site, runs: int) -> bool:
    """Whether some of the first ``runs`` runs is wrong without a site."""
    for seed in range(runs):
        try:
            play(Random(seed), frozenset((site,)))
        except Exception:  # noqa: BLE001 - whatever it is, it was noticed
            return True
    return False


def unnoticed(play: Play, sites: Iterable[Site], runs: int) -> list[Site]:
    """Return the sites that can be taken out without anything going wrong."""
    return [site for site in sites if not is_noticed(play, site, runs)]


def waits_in(file: str) -> Iterator[tuple[str, int]]:
    """Yield the lines of a source that wait for a device or note a point in its work."""
    path = Path(kvconnect.__file__).parent / file
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name in WAITS:
                yield file, node.lineno


WAITS = {"record", "wait_event", "wait_stream", "synchronize", "query"}


def lines_of(sites: Iterable[Site]) -> set[tuple[str, int]]:
    """Return the lines of the package that did what sites do."""
    found = set()
    for site in sites:
        file, _, line = site[1].split(":")
        found.add((file, int(line)))
    return found
