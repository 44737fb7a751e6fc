"""Whom SGLang asks over HTTP: the address that was checked, and no other one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from kvconnect.engines.sglang import direct_requests


class Server(ThreadingHTTPServer):
    """Answers ``/here`` and sends whoever asks for something else there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(f"{self.command} {self.path}")
        self.send_response(200 if self.path == "/here" else 307)
        self.send_header("Location", "/here")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
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
