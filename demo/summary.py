"""What the turns of a conversation say about two engines: numbers in, sentences out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Turn(NamedTuple):
    """One prompt as both engines answered it. Times are to the first token, in seconds."""

    is_first: bool
    """Nothing can be found yet: the control."""
    host_hits: int
    """Prompt tokens that KVConnect loaded from host memory."""
    with_s: float
    without_s: float
    is_equal: bool
    """Whether both answered the same tokens."""


class Summary(NamedTuple):
    """Medians of ratios, with KVConnect over without."""

    control: float
    """Of first turns, where nothing can be gained: 1.0 but for the machine's noise."""
    later: float
    """Of all other turns."""


def summarize(turns: Sequence[Turn]) -> Summary:
    """Compare the engines turn by turn."""
    control = [turn.with_s / turn.without_s for turn in turns if turn.is_first]
    later = [turn.with_s / turn.without_s for turn in turns if not turn.is_first]
    return Summary(median(control), median(later))


def sentence(summary: Summary) -> str:
    """Say what was gained, as far as the control carries it."""
    gain = summary.control / summary.later
    ratios = f"control {summary.control:.2f} (expect 1.0), later turns {summary.later:.2f}"
    if not 0.67 <= summary.control <= 1.5:
        return f"{ratios}: this machine is too busy to compare times; run the demo again."
    if gain < 1.2:
        return f"{ratios}: nothing was gained."
    return (
        f"{ratios}: with KVConnect the first token of a later turn came {gain:.1f} times as fast."
    )


def problem(turns: Sequence[Turn]) -> str | None:
    """Return what is wrong with the answers, None if nothing is."""
    differ = sum(not turn.is_equal for turn in turns)
    if differ:
        return f"{differ} of {len(turns)} turns got other tokens with KVConnect than without"
    if any(turn.is_first and turn.host_hits for turn in turns):
        return "a first turn was found in host memory: the control is none"
    if not sum(turn.host_hits for turn in turns):
        return "nothing was loaded from host memory"
    return None
