"""Text of others reaches a terminal without control characters, whatever command shows it."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvconnect import cli
from kvconnect.doctor import Finding, FindingsReport
from kvconnect.terminal import JsonFormatter, PlainFormatter, plain, plain_lines, say
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore

HOSTILE = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\x7f"
ADMIN_TOKEN = "0123456789abcdef"


def is_harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def hostile(word: str) -> str:
    """A label's hostile value in the text of a scrape, with a word by which a reader knows it."""
    text = json.dumps(HOSTILE.replace("pwned", f"pwned {word}"), ensure_ascii=False)
    return text.replace("\\u001b", "\x1b").replace("\\u0007", "\x07")


ENGINE_PAGE = (
    f"vllm:kvconnect_ledger_held_blocks{{owner={hostile('owner')}}} 5\n"
    f"vllm:kvconnect_jobs_in_flight{{transfer_type={hostile('job')}}} 5\n"
    f"vllm:kvconnect_failed_blocks_total{{cause={hostile('cause')}}} 5\n"
    f"vllm:kvconnect_handoff_peer_bytes_total{{peer={hostile('peer')}}} 5\n"
)
ROUTER_PAGE = (
    f'kvconnect_router_requests_total{{mode="push",outcome={hostile("outcome")}}} 5\n'
    f"kvconnect_router_imbalance{{role={hostile('imbalance')}}} 5\n"
    f"kvconnect_router_upstream_up{{role={hostile('role')},upstream={hostile('url')}}} 1\n"
    "kvconnect_router_queue 1\n"
)


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """A server that answers everything so; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_line_stays_a_line() -> None:
    out = io.StringIO()
    say(f"one {HOSTILE}", "two\nforged", to=out)
    assert is_harmless(out.getvalue()) and out.getvalue().count("\n") == 2
    assert plain("Zürich 東京 a b") == "Zürich 東京 a b"
    assert plain_lines("a\n\tb\r") == "a\n?b?"
    assert not is_harmless(HOSTILE)  # control


@pytest.mark.parametrize(
    ("page", "flags", "words"),
    [
        (ENGINE_PAGE, [], ("owner", "cause", "peer")),
        (ENGINE_PAGE, ["--json"], ("owner", "job", "cause", "peer")),
        (ROUTER_PAGE, [], ("outcome", "imbalance", "role", "url")),
        (ROUTER_PAGE, ["--json"], ("outcome", "imbalance", "role", "url")),
    ],
    ids=["engine-screen", "engine-json", "router-screen", "router-json"],
)
def test_top(
    page: str,
    flags: list[str],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    with answering(200, page) as url:
        assert cli.main(["top", f"{url}/metrics", "--once", "--interval", "0.1", *flags]) == 0
    out = capsys.readouterr().out
    assert [word for word in words if f"pwned {word}" not in out] == []
    assert is_harmless(out)


@pytest.mark.parametrize("command", ["stats", "ls"])
def test_names_of_folders(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (f"0{HOSTILE}", "0\nforged"):
        options = DiskOptions(path=str(tmp_path), capacity=16 << 20, owner="tp0")
        store = DiskStore(options, b"\x01")
        assert store.put([b"key"], [memoryview(b"block")]) == [BlockOutcome.OK]
        store.close()
        (tmp_path / "tp0").rename(tmp_path / name)
    assert cli.main(["cache", command, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert is_harmless(out) and "pwned" in out and "0?forged" in out
    assert not any(line.startswith("forged") for line in out.splitlines())


def test_what_a_server_answers_to_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(ADMIN_TOKEN)
    engine = {"role": HOSTILE, "url": HOSTILE, "rank": 0, "error": HOSTILE}
    for status, body in ((400, HOSTILE), (200, json.dumps({"engines": [engine]}))):
        with answering(status, body) as url:
            asked = ["cache", "stats", url, "--admin-token-file", str(token)]
            asked += ["--model", "tiny", "--prompt", "a"]
            try:
                assert cli.main(asked) == 1
            except SystemExit:
                assert status == 400
        shown = capsys.readouterr()
        assert "pwned" in shown.out + shown.err
        assert is_harmless(shown.out + shown.err)


def test_findings_of_the_doctor() -> None:
    finding = Finding(HOSTILE, "fail", f"{HOSTILE}\nok    forged", HOSTILE)
    text = FindingsReport((finding,), "good", "bad").text()
    assert is_harmless(text) and len(text.splitlines()) == 2


def test_logs_of_commands() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "said: %s", (HOSTILE,), None)
    assert is_harmless(PlainFormatter("%(message)s").format(record))
    assert not is_harmless(logging.Formatter("%(message)s").format(record))  # control
    line = JsonFormatter().format(record)
    assert json.loads(line)["message"] == f"said: {HOSTILE}"
    assert is_harmless(line) and len(line.splitlines()) == 1


def test_an_error_in_a_json_log_keeps_its_traceback() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "", 0, "no", (), error)
    found = json.loads(JsonFormatter().format(record))
    assert (found["level"], found["logger"]) == ("error", "x")
    assert "ValueError" in found["exception"] and found["time"].endswith("+00:00")
