"""vLLM's schedulers with KVConnect, at random: no wrong token, nothing stuck, nothing left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import get_args

import pytest

from tests.schedulers.engine import Engine, Prompt
from tests.schedulers.fleets import run_handoffs, run_sharing
from tests.schedulers.shapes import EngineShape, Kind
from tests.schedulers.workload import run_alone, running, tokens

ALONE, SHARING, HANDOFFS = 30, 5, 5
"""Seeds of each kind of run, so that all of them take about half a minute."""


def tokens_from(engines: Iterable[Engine]) -> Counter[str | None]:
    """Return where the engines had the tokens of their prompts from."""
    found: Counter[str | None] = Counter()
    for engine in engines:
        for (name, label), count in engine.counts.items():
            if name == "prompt_tokens":
                found[label] += int(count)
    return found


def run_all(run: Callable[[int], Iterable[Engine]], seeds: int) -> Counter[str | None]:
    found: Counter[str | None] = Counter()
    for seed in range(seeds):
        try:
            found += tokens_from(run(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return found


def test_engines_alone() -> None:
    found = run_all(lambda seed: [run_alone(seed)], ALONE)
    assert min(found["host"], found["disk"]) > 0  # else the runs would show nothing


def test_engines_that_share_host_memory() -> None:
    assert run_all(run_sharing, SHARING)["peer"] > 0


def test_engines_that_hand_off() -> None:
    assert run_all(run_handoffs, HANDOFFS)["handoff"] > 0


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_cached_prompt_is_loaded(kind: Kind) -> None:
    """Without any fault all that was stored is loaded, so that the runs above are not empty. The
    device has so many blocks that none has to wait for a store."""
    engine = Engine(EngineShape(kind=kind, blocks=400), Random(1))
    prompt = Prompt(tokens(Random(2), 100))
    with running(engine):
        engine.run("first", prompt)
        engine.drain()
        assert engine.forget_device()
        engine.run("again", prompt)
        engine.drain()
    assert tokens_from([engine])["host"] == 96
