"""How many workers a hand-off concerns, and how long its parts may take."""

from __future__ import annotations

from typing import NamedTuple


class HandoffLimits(NamedTuple):
    """The same at both engines.

    Attributes:
        workers: of this engine; each answers every withdrawal and every receive.
        lease_s: seconds for which blocks of a finished prefill are held until a reader asks, and
            after each renewal.
        deadline_s: seconds for which they are held after each sign of life of a reader; a receive
            ends after as many without progress.
    """

    workers: int
    lease_s: float
    deadline_s: float
