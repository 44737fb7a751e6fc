"""Whether all variants give the tokens of an engine without a connector, greedy and in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.common import progress
from benchmarks.offload_engine import NewPrompts
from benchmarks.serve.fleet import OURS, PLAIN, Variant, reset

NEW = 16
LENGTHS = (40, 264, 1000)
SHARED = 512
"""Tokens that the last prompt has in common with the one before it."""

Tokens = tuple[int, ...]


def prompts(seed: int) -> list[list[int]]:
    """Return new prompts, of which the last shares a prefix with another one."""
    new = NewPrompts(seed)
    found = [new.take(length) for length in LENGTHS]
    return [*found, found[-1][:SHARED] + new.take(SHARED)]


def differing(want: Sequence[Tokens], got: Sequence[Tokens]) -> int:
    """Return how many answers differ from those that are wanted."""
    return sum(a != b for a, b in zip(want, got, strict=True))


def wrong(variants: Mapping[str, Variant], seed: int) -> dict[str, int]:
    """Ask every variant for every prompt, three times: new, from the caches, and again when the
    device's are empty, which has a connector load its blocks.

    Return the number of answers that differ from the first of the plain engine, by variant.
    """
    progress("checking answers")
    asked = prompts(seed)
    got: dict[str, list[Tokens]] = {}
    for name, variant in variants.items():
        with variant.awake():
            variant.reset()
            early = [variant.front.complete(prompt, NEW) for prompt in asked * 2]
            for engine in variant.engines:
                if name == OURS:
                    engine.settle()
                reset(engine, external=False)
            last = [variant.front.complete(prompt, NEW) for prompt in asked]
        if name == OURS and not any(answer.cached for answer in last):
            raise SystemExit("KVConnect loaded nothing")
        got[name] = [answer.tokens for answer in (*early, *last)]
    want = got[PLAIN][: len(asked)] * 3
    found = {name: differing(want, tokens) for name, tokens in got.items()}
    progress(f"wrong answers of {len(want)}: {found}")
    return found
