"""Part of the corpus of hostile peers, and that it can tell."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from kvconnect.disaggregation.decode_planner import DecodePlanner  # noqa: E402
from kvconnect.disaggregation.prefill_planner import PrefillPlanner  # noqa: E402
from tests.hostile import Outcome, peers  # noqa: E402


def test_hostile_peers_end_their_own_connections_alone() -> None:
    outcome = peers.run(limit=400, seed=3)
    assert outcome.cases == 3 * 400
    bad = (outcome.crashes, outcome.hangs, outcome.smuggled, outcome.wrong)
    assert bad == (0, 0, 0, 0), outcome.notes


def test_a_bug_that_a_peer_finds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(
        PrefillPlanner, "on_request", lambda *_: 1 / 0
    )  # what most of them say first
    play_until(lambda outcome: outcome.crashes, peers._play_readers)


def play_until(
    found: Callable[[Outcome], int], play: Callable[[Outcome, random.Random, int], None]
) -> None:
    outcome, rng = Outcome(), random.Random(3)
    while not found(outcome):
        assert outcome.cases < peers.MESSAGES, "the fault was not found"
        play(outcome, rng, 400)


def test_a_bug_that_a_source_finds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a source is heard after it was asked for pages."""
    monkeypatch.setattr(DecodePlanner, "alive", lambda *_: 1 / 0)
    play_until(lambda outcome: outcome.crashes, peers._play_sources)


def test_a_reader_that_takes_wrong_pages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sources send all that they were asked for, with digests of other pages."""
    received = DecodePlanner.received

    def trusting(self: DecodePlanner, *said: object) -> object:
        *before, _bad, now = said
        return received(self, *before, (), now)  # type: ignore[call-arg]

    monkeypatch.setattr(DecodePlanner, "received", trusting)
    play_until(lambda outcome: outcome.wrong, peers._play_sources)
