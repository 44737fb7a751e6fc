"""Requests to servers that an operator named reach nobody else, and end."""

from __future__ import annotations

import http.server
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import IncompleteRead
from pathlib import Path

import pytest

from kvconnect import cli
from kvconnect.direct_http import answer_of, whole
from kvconnect.observability.top import scrape

TOKEN = "secret-token-of-an-operator"


class Server:
    """A server on loopback. Tells who asked what; redirects to ``elsewhere`` if that is set.
    ``announced`` is the length that it says its body has."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.elsewhere = ""
        self.status = 200
        self.body = b"x" * 100
        self.announced = 0
        self.endless = self.endless_head = False
        self.ended = threading.Event()
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told.asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(302 if told.elsewhere else told.status)
                if told.elsewhere:
                    self.send_header("Location", told.elsewhere)
                if told.announced:
                    self.send_header("Content-Length", str(told.announced))
                if told.endless_head:
                    self.drip_head()
                self.end_headers()
                self.wfile.write(told.body)
                while told.endless and not told.ended.wait(0.01):
                    self.wfile.write(b"x")

            def drip_head(self) -> None:
                """Ends so that a client which waits for it does not wait for ever."""
                self.flush_headers()
                for _ in range(2000):
                    if told.ended.wait(0.01):
                        break
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
    with answer_of(named.url, 30.0, headers={"Authorization": TOKEN}) as answer:
        assert whole(answer, 1000) == b"x" * 100
    assert named.asked == [("/", TOKEN)] and not other.asked
    urllib.request.build_opener().open(asked, timeout=30.0).close()
    assert len(other.asked) == 1, "the control: others take it"


def test_no_redirect_is_followed(named: Server, other: Server) -> None:
    named.elsewhere = other.url
    asked = urllib.request.Request(named.url, headers={"Authorization": TOKEN})
    with answer_of(named.url, 30.0, headers={"Authorization": TOKEN}) as answer:
        assert answer.status == 302
    assert not other.asked
    urllib.request.build_opener().open(asked, timeout=30.0).close()
    assert other.asked == [("/", TOKEN)], "the control: others follow it"


def test_an_answer_without_an_end_is_given_up(named: Server) -> None:
    named.endless = True
    with pytest.raises(TimeoutError), answer_of(named.url, 0.5) as answer:
        whole(answer, 1 << 20)


def test_a_head_without_an_end_is_given_up(named: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_TIMEOUT_S", 0.5)
    named.endless_head = True
    with pytest.raises(TimeoutError), answer_of(named.url, 0.5):
        pass
    assert scrape.scrape(named.url).error


def test_an_answer_that_is_too_long_is_refused(named: Server) -> None:
    with answer_of(named.url, 30.0) as answer, pytest.raises(ValueError, match="more than"):
        whole(answer, 99)


def test_an_answer_that_is_cut_off_is_none(named: Server) -> None:
    named.announced = 101
    with answer_of(named.url, 30.0) as answer, pytest.raises(IncompleteRead):
        whole(answer, 1000)
    named.announced = 100  # the control
    with answer_of(named.url, 30.0) as answer:
        assert whole(answer, 100) == named.body


@pytest.mark.parametrize("url", ["http://", "http:///path", "http://host:x", "http://[::1"])
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError), answer_of(url, 30.0):
        pass


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("status", "body", "announced", "said"),
    [
        (200, b"x", 0, "name the admin API"),
        (200, b'{"engines": 5}', 0, "name the admin API"),
        (200, b'{"engines": [5]}', 0, "name the admin API"),
        pytest.param(200, b"[" * 100_000, 0, "name the admin API", id="deep"),
        (200, b'{"engines": []}', 100, "does not answer"),
        (404, b"", 0, "it answers 404"),
        (404, b"out of or", 100, "out of or"),  # what came of an error's text is enough
        (500, b"out of order", 0, "out of order"),
    ],
)
def test_a_router_that_answers_something_else_is_one_line(
    named: Server,
    token: str,
    capsys: pytest.CaptureFixture[str],
    status: int,
    body: bytes,
    announced: int,
    said: str,
) -> None:
    named.status, named.body, named.announced = status, body, announced
    with pytest.raises(SystemExit):
        cli.main(["cache", "stats", named.url, "--admin-token-file", token])
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_admin_token_goes_to_the_router_alone(
    named: Server, other: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", other.url)
    named.elsewhere = other.url
    stats = ["cache", "stats", named.url, "--admin-token-file", token]
    with pytest.raises(SystemExit):
        cli.main(stats)
    assert named.asked and not other.asked
