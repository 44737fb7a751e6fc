"""Which lengths of a prompt can be restored where a pool has the end of some prefixes only."""

from __future__ import annotations

from collections.abc import Iterable


def window_ends(there: Iterable[bool], window: int) -> set[int]:
    """Return the lengths, in pages, whose last ``window`` pages (all, if fewer) are there.

    A sliding window, or the one state of Mamba, is needed at the end of a prefix and nowhere else;
    it is there where some node of the tree ended, so these lengths have gaps.
    """
    ends: set[int] = set()
    run = 0
    for length, is_there in enumerate(there, start=1):
        run = run + 1 if is_there else 0
        if run >= min(window, length):
            ends.add(length)
    return ends
