"""``kvconnect try`` on the command line: four lines, JSON, a report, and what it says of engines
that gain nothing, lie, hang or are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvconnect import cli
from kvconnect.trial import counters, engine_api, eviction, results
from tests.fakes.trial_engine import Clock, TrialEngine, serving

FEW = ("--tokens", "256", "--rounds", "2")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only engines move; nothing is waited for that never comes."""
    found = Clock()
    monkeypatch.setattr(engine_api, "time", found)
    monkeypatch.setattr(counters, "_SETTLE_S", 0.0)
    monkeypatch.setattr(results, "gpus", list)
    return found


def try_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return what the command says to programs, its exit code with it."""
    code = cli.main(["try", *words, *FEW, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    return found


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_four_lines_say_what_is_gained(
    clock: Clock, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    engine = TrialEngine(clock, name)
    with serving(engine):
        assert cli.main(["try", engine.url, *FEW]) == 0
    cold, loaded, control, verdict = capsys.readouterr().out.splitlines()
    assert cold == "cold       2,000.0 ms  2 new prompts of 256 tokens, median"
    assert loaded.startswith("loaded       100.0 ms  the same, evicted by ")
    how = "POST /reset_prefix_cache" if name == "vllm" else "other prompts with"
    assert how in loaded and loaded.endswith("256 tokens each from host")
    assert control.startswith("control    2,000.0 ms  other new prompts")
    assert verdict == ("verdict     ok: loading is 20.0 times as fast as computing; tokens equal")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_without_a_reset_other_prompts_fill_the_whole_device(
    clock: Clock, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    engine = TrialEngine(clock, name, resets=False)
    with serving(engine):
        found = try_json(capsys, engine.url)
    assert found["device_tokens"] == 0
    assert found["hit_tokens"] == {"host": 256}
    filled = int(found["evicted_by"].split()[-2].replace(",", ""))
    assert f" {filled:,} tokens" in found["evicted_by"]
    assert filled >= engine.device_tokens


def test_prompts_fit_the_engine_and_none_is_another_ones(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = TrialEngine(clock, longest=200)
    with serving(engine):
        found = try_json(capsys, engine.url)
    assert found["prompt_tokens"] == int((200 - engine_api.NEW_TOKENS) * 0.9)
    assert len(set(engine.prompts)) == 1 + 2 + 2  # one to count, two of a kind, asked twice


BAD = {
    "other tokens": ({"forgets": True}, "the tokens differ"),
    "others still": ({"forgets": True, "rounds": True}, "the tokens differ"),
    "no connector": ({"offloads": False}, "runs without KVConnect"),
    "no metrics": ({"offloads": False, "counts": False}, "metrics cannot be read"),
    "slow loads": ({"load_s": 2.0}, "loading took as long as computing"),
    "no host tier": ({"host_tokens": 0}, "the host tier is off"),
    "small host tier": ({"host_tokens": 300}, "holds less than the device's cache"),
    "not evicted": ({"resets": False}, "still on the device"),
}


@pytest.mark.parametrize(("settings", "said"), BAD.values(), ids=BAD)
def test_an_engine_that_gains_nothing_is_told_why(
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    said: str,
) -> None:
    engine = TrialEngine(clock, **settings)
    if said == "still on the device":
        engine.device_tokens = 1 << 20
        monkeypatch.setattr(eviction, "_MARGIN", 0.01)
    with serving(engine):
        found = try_json(capsys, engine.url)
    assert not found["ok"]
    assert said in found["problem"]
    assert found["fix"]
    assert found["tokens_equal"] is (said != "the tokens differ")


def test_rounding_that_the_device_shows_too_is_no_difference(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(engine := TrialEngine(clock, rounds=True)):
        assert try_json(capsys, engine.url)["tokens_equal"]


def test_a_gain_without_metrics_is_still_a_gain(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(engine := TrialEngine(clock, counts=False)):
        assert try_json(capsys, engine.url)["ratio"] == 20.0


NO_ENGINE = {
    "hangs": {},
    "drips": {"drips": True},
    "garbage": {"answer": b"data: [1, 2]\n\n"},
    "no json": {"answer": b"data: {]\n\n"},
    "no tokens": {"answer": b"hello\n"},
    "an error": {"answer": b'data: {"error": {"message": "out of \x1b[2J memory"}}\n\n'},
    "deep": {"answer": b"data: " + b"[" * 100_000 + b"\n\n"},
    "a long line": {"answer": b"data: " + b"x" * (2 << 20) + b"\n\n"},
}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("what", NO_ENGINE)
def test_what_is_no_engine_ends_with_one_line(
    clock: Clock, capsys: pytest.CaptureFixture[str], what: str, name: str
) -> None:
    engine = TrialEngine(clock, name, **NO_ENGINE[what])
    if what in ("hangs", "drips"):
        engine.hang.clear()
    if what == "drips":
        engine.hang.wait = lambda timeout=None: timeout == 60  # type: ignore[method-assign]
    limit = "1" if what in ("hangs", "drips") else "60"
    with serving(engine):
        code = cli.main(["try", engine.url, *FEW, "--timeout", limit])
    said = capsys.readouterr()
    assert (code, said.err) == (1, "")
    (line,) = said.out.splitlines()
    assert line.startswith("fail: ") and line.isprintable()
    if what in ("hangs", "drips"):
        assert "no whole answer in 1 s" in line


def test_an_engine_that_fails_while_its_cache_is_filled_is_asked_no_more(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = TrialEngine(clock, resets=False, device_tokens=1 << 17, longest=256, most=20)
    with serving(engine):
        assert cli.main(["try", engine.url, *FEW]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "answered 500: out of memory" in line
    assert len(engine.prompts) == 20
    assert engine.refused <= 50  # of more than 600 that would fill it


def test_nobody_at_the_address_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "is the engine running there?" in line
    found = try_json(capsys, "http://127.0.0.1:1")
    assert not found["ok"] and "is the engine running there?" in found["problem"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["ftp://host"],
        ["http://"],
        ["http://user:secret@host"],
        ["host:99999"],
        ["http://a", "--router", "http://b"],
        ["--prefill", "http://a"],
        ["http://a", "--decode", "http://b"],
        ["http://a", "--rounds", "0"],
        ["http://a", "--tokens", "-5"],
        ["http://a", "--timeout", "nan"],
        ["http://a", "--api-key-file", "/nowhere"],
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["try", *argv])
    assert stop.value.code == 2
    assert "secret" not in capsys.readouterr().err


def test_the_report_has_figures_and_no_prompt_key_or_address(
    clock: Clock, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    key.chmod(0o600)
    report = tmp_path / "report.json"
    with serving(engine := TrialEngine(clock, api_key="s3cret")):
        words = ("--api-key-file", str(key), "--report", str(report))
        try_json(capsys, engine.url, *words)
    text = report.read_text()
    found = json.loads(text)
    assert found["machine"].keys() == {"kvconnect", "python", "system", "gpus"}
    assert found["result"]["engine_version"] == "0.1.2"
    assert found["result"]["loaded_ms"] == 100.0
    port = engine.url.rpartition(":")[2]
    for private in ("s3cret", "127.0.0.1", port, engine.prompts[0].split()[0] + " "):
        assert private not in text
    # Control: without the key, the engine refuses.
    with serving(engine):
        assert cli.main(["try", engine.url]) == 1
    assert "answered 401" in capsys.readouterr().out
