"""Whom SGLang asks over HTTP: the address that was checked, and no other one. What it answers there
is short, and ends."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from kvconnect.engines.sglang import direct_requests


class Server(ThreadingHTTPServer):
    """Answers ``/here`` and what ``ANSWERS`` has, and sends whoever asks for something else to
    ``/here``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.passwords: list[str | None] = []
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(f"{self.command} {self.path}")
        self.server.passwords.append(self.headers.get("Authorization"))
        if self.path in ANSWERS:
            try:
                ANSWERS[self.path](self)
            except OSError:  # whoever asked has hung up
                self.close_connection = True
            return
        self.send_response(200 if self.path == "/here" else 307)
        self.send_header("Location", "/here")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self, start: bytes) -> None:
        self.wfile.write(start)
        while True:
            time.sleep(0.01)
            self.wfile.write(b"0")


START = b"HTTP/1.1 200 OK\r\n"
LONG = 10 << 20
ANSWERS: dict[str, Callable[[Handler], None]] = {
    "/says": lambda handler: handler.answer(b'{"a": 1}'),
    "/drips": lambda handler: handler.drip(START + b"Content-Length: 1000000\r\n\r\n"),
    "/drips-to-the-end": lambda handler: handler.drip(START + b"\r\n"),
    "/drips-headers": lambda handler: handler.drip(START),
    "/drips-chunks": lambda handler: handler.drip(START + b"Transfer-Encoding: chunked\r\n\r\n"),
    "/long": lambda handler: handler.answer(bytes(LONG)),
    "/packed": lambda handler: handler.answer(gzip.compress(bytes(LONG)), Content_Encoding="gzip"),
}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def of_session(method: str) -> Callable[..., Any]:
    def ask(asked: Any, url: str) -> Any:
        with asked.Session() as session:
            session.mount("http://", asked.adapters.HTTPAdapter(pool_maxsize=1))
            return getattr(session, method)(url, timeout=10)

    return ask


@pytest.mark.parametrize(
    "ask",
    [
        lambda asked, url: asked.get(url, timeout=10),
        lambda asked, url: asked.put(url, json={}, timeout=10),
        lambda asked, url: asked.post(url, json={}, timeout=10),
        of_session("get"),
        of_session("post"),
    ],
    ids=["get", "put", "post", "get of a session", "post of a session"],
)
def test_a_redirect_is_an_error(server: Server, ask: Callable[..., Any]) -> None:
    module: Any = SimpleNamespace(requests=requests)
    assert ask(module.requests, f"{server.url}/there").status_code == 200  # the control
    assert len(server.asked) == 2
    direct_requests.install(module)
    with pytest.raises(requests.TooManyRedirects, match="/here: not followed"):
        ask(module.requests, f"{server.url}/there")
    assert len(server.asked) == 3
    assert ask(module.requests, f"{server.url}/here").status_code == 200


def direct() -> Any:
    module: Any = SimpleNamespace()
    direct_requests.install(module)
    return module.requests


@pytest.mark.parametrize("path", [path for path in ANSWERS if path.startswith("/drips")])
def test_an_answer_that_goes_on_and_on_is_an_error(server: Server, path: str) -> None:
    """A byte comes well within the timeout, each time."""
    with pytest.raises(requests.RequestException):
        direct().get(f"{server.url}{path}", timeout=(10, 0.2))
    assert server.asked == [f"GET {path}"]


@pytest.mark.parametrize("path", ["/long", "/packed"])
def test_a_long_answer_is_an_error(server: Server, path: str) -> None:
    assert len(requests.get(f"{server.url}{path}", timeout=10).content) == LONG  # the control
    with pytest.raises(requests.RequestException, match="more than a MiB"):
        direct().get(f"{server.url}{path}", timeout=10)


def test_short_answers_come_over_one_connection(server: Server) -> None:
    with direct().Session() as session:
        session.mount("http://", direct().adapters.HTTPAdapter(pool_maxsize=1))
        for _ in range(3):
            answer = session.get(f"{server.url}/says", timeout=10)
            assert answer.json() == {"a": 1} and answer.text == '{"a": 1}'
    assert server.connections == 1


@pytest.mark.parametrize("session", [False, True])
def test_proxies_and_passwords_of_the_environment_are_not_used(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, session: bool
) -> None:
    """A proxy is asked for a whole URL, and the same server is the proxy here."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", server.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    url = f"{server.url}/here"

    def ask(asked: Any) -> Any:
        return of_session("get")(asked, url) if session else asked.get(url, timeout=10)

    with pytest.raises(requests.TooManyRedirects):
        ask(requests)  # the control: the proxy answers with a redirect
    assert {*server.asked} == {f"GET {url}"} and all(server.passwords)
    server.asked.clear()
    server.passwords.clear()
    assert ask(direct()).status_code == 200
    assert (server.asked, server.passwords) == (["GET /here"], [None])
