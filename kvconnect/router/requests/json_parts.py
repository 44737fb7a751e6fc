"""A limit of parts of JSON that become objects, which take many times its bytes. Pure."""

from __future__ import annotations

from kvconnect.errors import Refused

MOST_PARTS = 65_536
"""Limit of brackets and commas in a field that is decoded into objects."""


def check_parts(field: str, raw: bytes, fix: str) -> None:
    """Refuse a field with too many parts; those in its strings count, too.

    Raises:
        Refused: there are more than :data:`MOST_PARTS`.
    """
    if sum(map(raw.count, (b",", b"{", b"["))) > MOST_PARTS:
        raise Refused(field, f"{field} has too many parts: {fix}")
