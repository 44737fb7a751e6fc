"""Part of the corpus of hostile peers, and that it can tell."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvconnect.plan.sender import Sender  # noqa: E402
from tests.hostile import peers  # noqa: E402


def test_hostile_peers_end_their_own_connections_alone() -> None:
    outcome = peers.run(limit=400, seed=3)
    assert outcome.cases == 3 * 400
    bad = (outcome.crashes, outcome.hangs, outcome.smuggled, outcome.wrong)
    assert bad == (0, 0, 0, 0), outcome.notes


def test_a_bug_that_a_peer_finds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(Sender, "want", lambda *_: 1 / 0)  # what most of them say first
    assert peers.run(limit=400, seed=3).crashes
