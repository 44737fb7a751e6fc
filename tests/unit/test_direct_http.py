"""Requests to servers that an operator named reach nobody else, and end."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvconnect import cli
from kvconnect.direct_http import open_direct, read_within

TOKEN = "secret-token-of-an-operator"


class Server:
    """A server on loopback. Tells who asked what; redirects to ``elsewhere`` if that is set."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.elsewhere = ""
        self.endless = False
        self.ended = threading.Event()
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told.asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(302 if told.elsewhere else 200)
                if told.elsewhere:
                    self.send_header("Location", told.elsewhere)
                self.end_headers()
                self.wfile.write(b"x" * 100)
                while told.endless and not told.ended.wait(0.01):
                    self.wfile.write(b"x")

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture
def named() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def other() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_no_proxy_of_the_environment_gets_a_request(
    named: Server, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", other.url)
    monkeypatch.delenv("no_proxy", raising=False)
    asked = urllib.request.Request(named.url, headers={"Authorization": TOKEN})
    with open_direct(asked, 30.0) as answer:
        assert read_within(answer, 30.0, 1000) == b"x" * 100
    assert named.asked == [("/", TOKEN)] and not other.asked
    urllib.request.build_opener().open(asked, timeout=30.0).close()
    assert len(other.asked) == 1, "the control: others take it"


def test_no_redirect_is_followed(named: Server, other: Server) -> None:
    named.elsewhere = other.url
    asked = urllib.request.Request(named.url, headers={"Authorization": TOKEN})
    with pytest.raises(urllib.error.HTTPError, match="302"):
        open_direct(asked, 30.0)
    assert not other.asked
    urllib.request.build_opener().open(asked, timeout=30.0).close()
    assert other.asked == [("/", TOKEN)], "the control: others follow it"


def test_an_answer_without_an_end_is_given_up(named: Server) -> None:
    named.endless = True
    with (
        open_direct(named.url, 30.0) as answer,
        pytest.raises(TimeoutError, match="no whole answer"),
    ):
        read_within(answer, 0.1, 1 << 20)


def test_an_answer_that_is_too_long_is_refused(named: Server) -> None:
    with open_direct(named.url, 30.0) as answer, pytest.raises(ValueError, match="more than"):
        read_within(answer, 30.0, 99)


def test_the_admin_token_goes_to_the_router_alone(
    named: Server,
    other: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    token = tmp_path_factory.mktemp("secrets") / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    monkeypatch.setenv("http_proxy", other.url)
    named.elsewhere = other.url
    stats = ["cache", "stats", named.url, "--admin-token-file", str(token)]
    with pytest.raises(SystemExit):
        cli.main(stats)
    assert named.asked and not other.asked
