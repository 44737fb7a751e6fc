"""Flags of the router come from the command line, the environment and a file, in this order."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect import cli
from kvconnect.errors import ConfigError
from kvconnect.router.flag_sources import PREFIX, add_elsewhere
from kvconnect.router.flags import add_flags, options_of


def found(
    line: str = "",
    file: str = "",
    environ: dict[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[argparse.Namespace, dict[str, str]]:
    """What a command line, a file and variables (without the prefix) make together."""
    words = line.split()
    if folder is not None:
        path = folder / "router.yaml"
        path.write_text(file)
        words += ["--config", str(path)]
    arguments = cli.make_parser().parse_args(["router", *words])
    variables = {PREFIX + name: value for name, value in (environ or {}).items()}
    return arguments, add_elsewhere(arguments, variables, add_flags)


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(
    tmp_path: Path,
) -> None:
    file = "port: 1\ntimeout: 1\nqueue: 1\nreceipts: true\n"
    file += "prefill: http://p:1\ndecode: [http://a:1, http://b:1]\n"
    environ = {"PORT": "2", "TIMEOUT": "2"}
    arguments, origins = found("--port 3", file, environ, tmp_path)
    assert (arguments.port, arguments.timeout, arguments.queue) == (3, 2.0, 1)
    assert arguments.decode == ["http://a:1", "http://b:1"] and arguments.receipts
    path = str(tmp_path / "router.yaml")
    assert origins == {
        "timeout": "KVCONNECT_ROUTER_TIMEOUT",
        **dict.fromkeys(("queue", "prefill", "decode", "receipts"), path),
    }
    assert [engine.url for engine in options_of(arguments).decode] == ["http://a:1", "http://b:1"]


def test_a_flag_that_is_given_its_default_is_given(tmp_path: Path) -> None:
    assert found("--port 8000", "port: 9000\n", {"PORT": "9001"}, tmp_path)[0].port == 8000
    assert found("", "port: 9000\n", {"PORT": "8000"}, tmp_path)[0].port == 8000
    assert found("", "port: 9000\n", {}, tmp_path)[0].port == 9000  # control


@pytest.mark.parametrize(
    ("line", "environ", "file", "unified", "pull"),
    [
        ("--unified", {}, "pull: true", True, False),
        ("--pull", {"UNIFIED": "1"}, "", False, True),
        ("", {"PULL": "true"}, "unified: true", False, True),
        ("", {"RECEIPTS": "false"}, "unified: true\nreceipts: true", True, False),
        ("", {"UNIFIED": "false"}, "pull: true", False, True),
    ],
)
def test_switches(
    line: str, environ: dict[str, str], file: str, unified: bool, pull: bool, tmp_path: Path
) -> None:
    arguments, _ = found(line, file, environ, tmp_path)
    assert (arguments.unified, arguments.pull, arguments.receipts) == (unified, pull, False)


def test_engines_in_the_environment_are_separated_by_spaces() -> None:
    arguments, _ = found(environ={"PREFILL": "http://a:1,engine=nixl  http://b:1"})
    assert arguments.prefill == ["http://a:1,engine=nixl", "http://b:1"]


def test_what_kubernetes_says_of_the_router_s_own_service_is_left_out() -> None:
    environ = {
        "PORT": "tcp://10.0.0.1:8000",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
        "ADMIN_PORT": "tcp://10.0.0.2:8001",  # of another service, kvconnect-router-admin
        "ADMIN_SERVICE_HOST": "10.0.0.2",
    }
    arguments, origins = found(environ=environ)
    assert (arguments.port, arguments.admin_port, origins) == (8000, 8001, {})
    assert found(environ={"PORT": "8001"})[0].port == 8001  # control


@pytest.mark.parametrize(
    ("file", "environ", "words"),
    [
        ("prot: 1", {}, "prot=1 is not usable: unknown flag of the router, did you mean 'port'?"),
        ("", {"PROT": "1"}, "KVCONNECT_ROUTER_PROT='1' .* 'KVCONNECT_ROUTER_PORT'?"),
        ("port: x", {}, r"port='x' .*invalid.*'x'.*\(set in .*router\.yaml\)"),
        ("port: 70000", {}, "70000 is no port"),
        ("port: true", {}, "use text or a number"),
        ("port:", {}, "use text or a number"),
        ("port: [1, 2]", {}, "use text or a number"),
        ("receipts: often", {}, "use true or false"),
        ("", {"RECEIPTS": "often"}, r"use true or false \(set in KVCONNECT_ROUTER_RECEIPTS\)"),
        ("decode: []", {}, "or a list of them"),
        ("decode: [[a]]", {}, "or a list of them"),
        ("prefill_policy: best", {}, "choose from"),
        ("config: other.yaml", {}, "one file is read"),
        ("pull: true\nunified: true", {}, r"leave it or pull out \(set in .*yaml\)"),
        ("", {"PULL": "1", "UNIFIED": "1"}, "leave it or pull out"),
        ("- a", {}, "name a file with an object"),
    ],
)
def test_what_cannot_be_used(
    file: str, environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        found("", file, environ, tmp_path)


def test_dashes_and_underscores_are_the_same(tmp_path: Path) -> None:
    for file in ("max-concurrent: 5", "max_concurrent: 5"):
        assert found("", file, {}, tmp_path)[0].max_concurrent == 5


VALUES: Any = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
) | st.lists(st.text(max_size=5) | st.integers(), max_size=3)
NAMES = sorted({name for name in vars(found()[0]) if name not in ("run", "command", "config")})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=3))
def test_whatever_a_file_holds_is_flags_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    import json

    folder = tmp_path_factory.mktemp("any")
    try:
        arguments, origins = found("", json.dumps(values), {}, folder)
    except ConfigError:
        return
    assert set(origins) <= {name.replace("-", "_") for name in values}
    assert all(hasattr(arguments, name) for name in origins)


def test_the_command_says_where_a_wrong_flag_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("decode: [http://a:1]\nunified: true\nqueue: -1\n")
    for variable, said in (("", f"--queue -1: use 0 or more (set in {path})"), ("x", "QUEUE")):
        if variable:
            monkeypatch.setenv(f"{PREFIX}QUEUE", variable)
        with pytest.raises(SystemExit) as stop:
            cli.main(["router", "--config", str(path)])
        assert stop.value.code == 2 and said in capsys.readouterr().err
