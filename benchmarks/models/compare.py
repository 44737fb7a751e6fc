"""The prompts of a proof, and how answers to them are compared."""

from __future__ import annotations

import math
import random
from typing import Any

from benchmarks.models.engine import Answer

LENGTHS = (41, 203, 517, 701)
"""Tokens of the prompts. None is a whole number of blocks."""
EXACT = 1e-3
"""Largest difference of log probabilities that counts as none. What comes back from a tier is
compared with what comes from the device's own prefix cache, since bfloat16 shows the difference."""


def prompts() -> list[list[int]]:
    """The prompts, which share no block."""
    source = random.Random(12)
    return [[source.randrange(10, 2000) for _ in range(length)] for length in LENGTHS]


def other_prompts() -> list[list[int]]:
    """As many others of the same lengths."""
    source = random.Random(13)
    return [[source.randrange(10, 2000) for _ in range(length)] for length in LENGTHS]


def full_blocks(groups: list[tuple[str, int]]) -> list[int]:
    """Return the tokens of each prompt's full blocks."""
    step = math.lcm(*(tokens for _, tokens in groups)) if groups else 1
    return [length // step * step for length in LENGTHS]


def is_same(found: dict[str, Any]) -> bool:
    """Return whether tokens and their log probabilities were those of the other engine."""
    return bool(found["same"]) and found["logprobs"] <= EXACT


def was_caught(found: dict[str, Any] | None) -> bool:
    """Return whether broken loads were noticed and computed instead."""
    return found is None or (found["same"] and found["bad_blocks"] > 0)


def tokens(answers: list[Answer]) -> list[list[int]]:
    """Return the tokens of each answer."""
    return [answer.tokens for answer in answers]


def difference(one: list[Answer], other: list[Answer]) -> float:
    """The largest difference of log probabilities, up to the first token that differs."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        for x, y, left, right in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=True):
            worst = max(worst, abs(left - right))
            if x != y:
                break
    return _rounded(worst)


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
