"""Trials of hand-offs: what is said of pairs that hand off, compute instead, or change tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvconnect import cli
from kvconnect.trial import counters, engine_api, handoff_trial
from tests.fakes.trial_engine import Clock, TrialEngine, serving

FEW = ("--tokens", "256", "--rounds", "2", "--json")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only engines move; nothing is waited for that never comes."""
    found = Clock()
    monkeypatch.setattr(engine_api, "time", found)
    monkeypatch.setattr(counters, "_SETTLE_S", 0.0)
    monkeypatch.setattr(handoff_trial, "_COUNT_S", 0.0)
    return found


def try_pair(
    capsys: pytest.CaptureFixture[str], prefill: TrialEngine, decode: TrialEngine
) -> dict[str, Any]:
    """Return what the command says of two engines."""
    with serving(prefill, decode):
        code = cli.main(["try", "--prefill", prefill.url, "--decode", decode.url, *FEW])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    return found


def test_a_prompt_is_computed_by_one_engine_and_received_by_the_other(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = TrialEngine(clock), TrialEngine(clock)
    found = try_pair(capsys, prefill, decode)
    assert (found["cold_ms"], found["loaded_ms"], found["control_ms"]) == (2000, 100, 2000)
    assert (found["received"], found["tokens_equal"]) == ({"done": 2}, True)
    # The decode engine gets each of them once, and computes what it is not handed.
    handed = [prompt for prompt in decode.prompts if prompt in prefill.prompts]
    assert len(handed) == len(set(handed)) == 2


def test_servers_of_sglang_meet_in_a_room(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    prefill = TrialEngine(clock, "sglang", half="prefill")
    decode = TrialEngine(clock, "sglang", half="decode")
    found = try_pair(capsys, prefill, decode)
    assert found["received"] == {"done": 9}  # with the prompt that is counted
    assert sorted(prefill.prompts) == sorted(decode.prompts)


BAD = {
    "computes itself": ({"computes": True}, "received 0 of 2 prompts"),
    "other tokens": ({"forgets": True}, "the tokens differ"),
    "no connector": ({"offloads": False}, "runs without KVConnect"),
    "no metrics": ({"counts": False}, "metrics cannot be read"),
}


@pytest.mark.parametrize(("settings", "said"), BAD.values(), ids=BAD)
def test_a_decode_engine_that_receives_nothing_is_told_why(
    clock: Clock, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: str
) -> None:
    found = try_pair(capsys, TrialEngine(clock), TrialEngine(clock, **settings))
    assert not found["ok"]
    assert said in found["problem"]


def test_engines_that_do_not_go_together_end_with_one_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, engine = TrialEngine(clock, offloads=False), TrialEngine(clock)
    whole, half = (TrialEngine(clock, "sglang", half=each) for each in ("null", "decode"))
    with serving(plain, engine, whole, half):
        for prefill, decode, said in (
            (plain, engine, "offers no hand-off"),
            (half, engine, "must both be"),
            (whole, half, "--prefill names a server that is no such half"),
        ):
            assert cli.main(["try", "--prefill", prefill.url, "--decode", decode.url, *FEW]) == 1
            (line,) = capsys.readouterr().out.splitlines()
            assert said in line
        assert cli.main(["try", half.url]) == 1
        assert "the decode half of a hand-off" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["push", "plain"])
def test_a_router_says_how_it_answered(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    router = TrialEngine(clock)
    monkeypatch.setattr(
        router,
        "metrics",
        lambda: f'kvconnect_router_requests_total{{mode="{mode}"}} {len(router.prompts)}',
    )
    with serving(router):
        code = cli.main(["try", "--router", router.url, *FEW])
    found = json.loads(capsys.readouterr().out)
    assert found["modes"] == {mode: 9}  # with the prompt that is counted
    assert (code, "handed off no prompt" in found["problem"]) == (
        (0, False) if mode == "push" else (1, True)
    )
