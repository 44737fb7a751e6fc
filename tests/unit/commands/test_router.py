"""``kvconnect router`` on the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvconnect import cli
from kvconnect.commands import router
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.engine_spec import EngineSpec
from kvconnect.router.options import (
    AdminAccess,
    EtcdServer,
    Intervals,
    Listening,
    RouterLimits,
    RouterOptions,
    Sources,
)
from kvconnect.router.policy.fleet_view import EngineKind, Role
from kvconnect.router.policy.ranking import RankingPolicy

ONE, TWO = "one-0123456789abcd", "two-0123456789abcd"
NEEDED = ["router", "--prefill", "http://a:1", "--decode", "http://b:2"]
ETCD = [*NEEDED, "--etcd", "http://a/kv"]


def served(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> RouterOptions:
    """What the command line asks the router to serve."""
    calls: list[Any] = []
    app = type("App", (), {"serve": staticmethod(lambda *arguments: calls.append(arguments))})
    monkeypatch.setattr(router.importlib, "import_module", lambda name: app)
    monkeypatch.setattr(router, "log_to_stderr", lambda level, form: None)
    assert cli.main(argv) == 0
    ((options,),) = calls
    assert isinstance(options, RouterOptions)
    return options


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RouterOptions((EngineSpec("http://a:1"),), (EngineSpec("http://b:2"),))
    assert served(monkeypatch, NEEDED) == options


def test_everything_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    keys = tmp_path / "keys"
    keys.write_text(f"# of team A\n{ONE}\n\n  alice\t{TWO} \r\n")
    argv = [
        *(
            "router",
            "--prefill",
            "http://a:1/",
            "http://a:2,engine=sglang",
            "--decode",
            "http://b:2",
        ),
        *("--host", "10.0.0.1", "--port", "81", "--pull"),
        *("--push-min-tokens", "256", "--timeout", "30", "--dp-minimum-tokens-scheduler"),
        *("--prefill-policy", "session", "--decode-policy", "random"),
        *(
            "--worker-load-check-interval",
            "5",
            "--probe-interval",
            "6",
            "--silence-timeout",
            "40",
            "--max-concurrent",
            "7",
        ),
        *("--queue", "8", "--queue-timeout", "9", "--drain-timeout", "11"),
        *("--workers-file", str(keys), "--prefill-dns", "http://p:1", "--decode-dns", "http://d:2"),
        *("--prefill-kubernetes", "http://s.n:3", "--etcd", "http://e:2379/kv"),
        *("--shared-port", "--tls-cert", "/c", "--tls-key", "/k", "--api-key-file", str(keys)),
        *("--allowed-origin", "http://c", "https://d:1"),
        *("--admin-token-file", str(token), "--admin-host", "::1", "--admin-port", "82"),
    ]
    a, b = EngineSpec("http://a:1"), EngineSpec("http://a:2", EngineKind.SGLANG)
    options = RouterOptions(
        (a, b),
        (EngineSpec("http://b:2"),),
        handoff="pull",
        push_min_tokens=256,
        limits=RouterLimits(30.0, 40.0, 7, 8, 9.0, 11.0),
        sources=Sources(
            str(keys),
            {Role.PREFILL: ("http://p:1",), Role.DECODE: ("http://d:2",)},
            {Role.PREFILL: ("http://s.n:3",)},
            EtcdServer("http://e:2379/kv"),
        ),
        admin=AdminAccess("::1", 82, "0123456789abcdef", str(token)),
        listening=Listening(
            *("10.0.0.1", 81, True, "/c", "/k", (ApiKey(ONE), ApiKey(TWO, "alice"))),
            api_key_file=str(keys),
            allowed_origins=("http://c", "https://d:1"),
        ),
        prefill_policy=RankingPolicy.SESSION,
        decode_policy=RankingPolicy.RANDOM,
        dp_minimum_tokens=True,
        intervals=Intervals(5.0, 6.0),
    )
    assert served(monkeypatch, argv) == options


def test_a_unified_router_needs_no_prefill_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = served(monkeypatch, ["router", "--unified", "--decode", "http://b:2"])
    assert options == RouterOptions((), (EngineSpec("http://b:2"),), handoff="none")


@pytest.mark.parametrize(
    ("flags", "decode"),
    [
        (["--prefill", "http://a:1"], RankingPolicy.LEAST_TOKENS),
        (["--prefill", "http://a:1", "--disaggregate", "auto"], RankingPolicy.LEAST_TOKENS),
        (["--prefill", "http://a:1", "--disaggregate", "never"], RankingPolicy.CACHE_AWARE),
        (["--unified"], RankingPolicy.CACHE_AWARE),
        (["--unified", "--decode-policy", "least_tokens"], RankingPolicy.LEAST_TOKENS),
    ],
)
def test_where_prompts_are_computed_cached_prefixes_count(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], decode: RankingPolicy
) -> None:
    rules = served(monkeypatch, ["router", "--decode", "http://b:2", *flags]).rules
    assert (rules.prefill, rules.decode) == (RankingPolicy.CACHE_AWARE, decode)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["router"], "--prefill : name an engine"),
        (["router", "--prefill", "http://a:1"], "--decode : name an engine"),
        ([*NEEDED, "--unified"], "--unified on: name no prefill engines"),
        (["router", "--unified"], "--decode : name an engine"),
        ([*NEEDED, "--prefill-dns", "http://a"], "--prefill-dns http://a: name the port"),
        (
            [*NEEDED, "--decode-kubernetes", "http://a"],
            "--decode-kubernetes http://a: name the port",
        ),
        ([*NEEDED, "--etcd", "http://a:2379"], "--etcd http://a:2379: use a URL with a prefix"),
        ([*NEEDED, "--etcd-user", "a"], "--etcd-user a: set --etcd, too"),
        ([*ETCD, "--etcd-user", "a"], "--etcd-user a: set --etcd-user and --etcd-password-file"),
        ([*ETCD, "--etcd-tls-dir", "/none"], "--etcd-tls-dir /none: put the file ca.crt there"),
        (
            [*NEEDED, "--workers-file", "/none"],
            "--workers-file /none: name a file that can be read: No such file or directory\n",
        ),
        ([*NEEDED, "--admin-token-file", "/none"], "--admin-token-file /none: name a file"),
        ([*NEEDED, "--api-key-file", "/dev/null"], "others may write it"),
        ([*NEEDED, "--tls-cert", "/c"], "--tls-cert /c: name --tls-cert and --tls-key"),
        ([*NEEDED, "--admin-token-file", "/dev/null"], "others may write it"),
        ([*NEEDED, "--prefill-policy", "best"], "--prefill-policy"),
        (["router", "--prefill", "a:1", "--decode", "http://b"], "--prefill a:1: use a URL"),
        ([*NEEDED, "http://b:2"], "--decode http://b:2: name each engine once"),
        ([*NEEDED, "--timeout", "0"], "--timeout 0.0: use seconds"),
        ([*NEEDED, "--push-min-tokens", "-1"], "--push-min-tokens -1: use 0 or more"),
        ([*NEEDED, "--port", "70000"], "--port"),
        ([*NEEDED, "--port", "http"], "--port"),
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "extra"),
    [("--prefill-kubernetes", "http://a:1", "kubernetes"), ("--etcd", "http://a/kv", "etcd")],
)
def test_a_source_without_its_package_says_what_to_install(
    flag: str,
    value: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("kubernetes", "etcd3gw"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit):
        cli.main([*NEEDED, flag, value])
    assert f"pip install 'kvconnect[{extra}]'" in capsys.readouterr().err


def test_without_its_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("aiohttp", "zmq", "etcd3gw"):
        monkeypatch.setitem(sys.modules, package, None)
    for flags, what in (
        ([], "aiohttp, zmq are missing: pip install 'kvconnect[router]'"),
        (
            ["--etcd", "http://a/kv"],
            "aiohttp, zmq, etcd3gw are missing: pip install 'kvconnect[router,etcd]'",
        ),
    ):
        with pytest.raises(SystemExit):
            cli.main([*NEEDED, *flags])
        assert what in capsys.readouterr().err


def test_it_serves_until_it_is_told_to_stop() -> None:
    # Ports of engines that do not exist: the router is up, its health is not.
    argv = ["router", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
    command = [sys.executable, "-m", "kvconnect.cli", *argv, "--port"]
    with subprocess.Popen([*command, "0"], stderr=subprocess.PIPE, text=True) as router:
        try:
            assert router.stderr is not None
            line = next(line for line in router.stderr if "router on" in line)
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            assert found is not None
            url = f"{found[0]}/health"
            with pytest.raises(urllib.error.HTTPError) as answer:
                urllib.request.urlopen(url, timeout=60)
            with answer.value as error:
                assert error.code == 503
                assert json.load(error)["missing"] == ["prefill", "decode"]
            taken = subprocess.run([*command, found[1]], capture_output=True, text=True, timeout=60)
            assert taken.returncode == 1
            assert "address already in use" in taken.stderr.lower()
        finally:
            router.send_signal(signal.SIGTERM)
        assert router.wait(60) == 0
