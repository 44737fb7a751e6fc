"""Dicts that keep their newest entries: what others name must not fill the memory."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(known: dict[K, V], key: K, value: V, limit: int) -> tuple[K, V] | None:
    """Add an entry to ``known`` as the newest one. Above ``limit`` entries, remove the oldest one
    and return it; else return None."""
    known.pop(key, None)
    known[key] = value
    if len(known) <= limit:
        return None
    oldest = next(iter(known))
    return oldest, known.pop(oldest)
