"""What decode reaches of a prefill server over HTTP, served by the test.

:class:`GenerateServer` is the prefill server's ``/generate``, which decode asks when it has
retracted a request. :class:`BootstrapProxy` stands in front of the bootstrap server, and may change
its answers.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_LIMIT_S = 60.0


class _Stub:
    """An HTTP server on a thread of its own; use as a context manager."""

    def __init__(self, port: int = 0) -> None:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, body = answer(self.command, self.path, self.rfile.read(size))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer. On a thread of the request's own."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Recompute:
    """A prompt that prefill is asked to compute again; ``succeeded`` takes how it ended."""

    body: dict[str, Any]
    succeeded: Future[bool] = field(default_factory=Future)


class GenerateServer(_Stub):
    """Takes ``/generate``; the test's thread takes the requests from ``waiting``."""

    def __init__(self, port: int) -> None:
        self.waiting: queue.SimpleQueue[Recompute] = queue.SimpleQueue()
        super().__init__(port)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        recompute = Recompute(json.loads(body))
        self.waiting.put(recompute)
        return (200 if recompute.succeeded.result(_LIMIT_S) else 500), b"{}"


class BootstrapProxy(_Stub):
    """Passes everything on to a bootstrap server, and lets ``change`` alter a rank's address."""

    def __init__(self, target: int, change: Callable[[dict[str, Any]], None]) -> None:
        self._target = target
        self._change = change
        super().__init__()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self._target, timeout=_LIMIT_S)
        try:
            link.request(method, path, body, {"Content-Type": "application/json"})
            reply = link.getresponse()
            content = reply.read()
        finally:
            link.close()
        if reply.status == 200 and path.startswith("/route"):
            route = json.loads(content)
            self._change(route)
            content = json.dumps(route).encode()
        return reply.status, content
