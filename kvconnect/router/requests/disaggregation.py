"""What a client asks about hand-offs, by a header. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.errors import Refused
from kvconnect.router.policy.expected_ttft import Disaggregate

HEADER = "X-KVConnect-Disaggregate"
_SHOWN = 64  # characters of a wrong value that an error repeats


def asked_disaggregation(headers: Mapping[str, str]) -> Disaggregate | None:
    """Return what the header asks for; None without one. ``headers``: names in lower case.

    Raises:
        Refused: it has another value.
    """
    asked = headers.get(HEADER.lower())
    if asked is None:
        return None
    try:
        return Disaggregate(asked.strip().lower())
    except ValueError:
        known = ", ".join(Disaggregate)
        raise Refused(HEADER, f"use one of {known}, not {asked[:_SHOWN]!r}") from None
