"""``kvconnect config`` says what an engine would say, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvconnect import cli
from kvconnect.settings import Settings, schema


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCONNECT_CONFIG", raising=False)


def test_good_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text("lease_s: 5\n")
    for given in ('{"lease_s": 5}', str(path)):
        assert cli.main(["config", "check", given]) == 0
        assert "can be used" in capsys.readouterr().out


def test_every_fault_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", '{"disk": {"paht": "/x"}, "lease_s": 0}']) == 1
    said = capsys.readouterr().err.splitlines()
    fields = [line.partition("=")[0] for line in said]
    assert fields == ["disk.paht", "disk.path", "disk.capacity", "lease_s"]
    assert "did you mean 'disk.path'" in said[0]


@pytest.mark.parametrize("given", ["{", "[]", '{"a": 1'])
def test_what_is_no_object(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["config", "check", given])
    assert stop.value.code == 2 and "no JSON object" in capsys.readouterr().err


def test_the_check_is_of_what_is_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCONNECT_CONFIG", '{"lease_s": 0}')
    assert cli.main(["config", "check", "{}"]) == 0
    assert cli.main(["config", "show", "{}"]) == 1  # control: that reads the environment


def test_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv.json"
    path.write_text('{"wait_s": 1, "lease_s": 1, "host_bytes": "1GiB"}')
    environ = {"lease_s": 2, "deadline_s": 2, "config_file": str(path)}
    monkeypatch.setenv("KVCONNECT_CONFIG", json.dumps(environ))
    assert cli.main(["config", "show", '{"deadline_s": 3}', "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(rows) == list(Settings.__struct_fields__)
    assert rows["deadline_s"] == {"value": 3.0, "from": "the engine's flag"}
    assert rows["lease_s"] == {"value": 2.0, "from": "KVCONNECT_CONFIG"}
    assert rows["wait_s"] == {"value": 1.0, "from": str(path)}
    assert rows["host_bytes"] == {"value": 1 << 30, "from": str(path)}
    assert rows["policy"] == {"value": "lru", "from": "default"}
    assert cli.main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) and lines[1].split() == [
        *("host_bytes", "=", "1073741824", str(path)),
    ]


def test_secrets_are_masked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.metadata import EntryPoint

    from kvconnect.settings import validation

    entry = EntryPoint("theirs", "somewhere:Store", "kvconnect.stores")
    monkeypatch.setattr(validation, "entry_points", lambda group: [entry])
    given = '{"remote": {"kind": "theirs", "password": "hunter2", "user": "me"}}'
    for flags in ([], ["--json"]):
        assert cli.main(["config", "show", given, *flags]) == 0
        said = capsys.readouterr().out
        assert "hunter2" not in said and '"me"' in said
    assert cli.main(["config", "check", given.replace("theirs", "nobody")]) == 1
    assert "hunter2" not in capsys.readouterr().err


def test_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(schema.text())
