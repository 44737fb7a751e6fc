"""HTTP requests to servers that an operator named: no proxy of the environment is used, and no
redirect is followed. Either would get what is sent, such as tokens. Each answer ends by its
deadline, however slowly the server sends it."""

from __future__ import annotations

import io
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.parse import SplitResult, urlsplit


@contextmanager
def answer_of(
    url: str,
    seconds: float,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[HTTPResponse]:
    """Yield the answer to a request, of any status. All of it is read within ``seconds``.

    To connect may take ``seconds`` for each address that the host has.

    Raises:
        OSError: there is none; ``TimeoutError`` if it has not come in time.
        http.client.HTTPException: it is no HTTP.
        ValueError: the URL is malformed, or names no host.
    """
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    deadline = time.monotonic() + seconds
    with closing(_connection(parts, seconds)) as made:
        made.response_class = partial(_Response, deadline=deadline)  # type: ignore[assignment]
        made.request(method, target, body, {**(headers or {}), "Connection": "close"})
        with made.getresponse() as answer:
            yield answer


def whole(answer: HTTPResponse, most: int) -> bytes:
    """Return an answer's body.

    Raises:
        OSError, http.client.HTTPException: it did not come in time, or is cut off.
        ValueError: it has more than ``most`` bytes.
    """
    found = answer.read(most + 1)
    if len(found) > most:
        raise ValueError(f"more than {most >> 20} MiB")
    if answer.length:  # http.client lets a body pass that is shorter than announced
        raise IncompleteRead(found, answer.length)
    return found


def _connection(parts: SplitResult, seconds: float) -> HTTPConnection:
    if not parts.hostname:
        raise ValueError("the URL names no host")
    # http.client would look for a port in an IPv6 address without one.
    if parts.scheme == "https":
        context = ssl.create_default_context()
        port = parts.port or 443
        return HTTPSConnection(parts.hostname, port, timeout=seconds, context=context)
    return HTTPConnection(parts.hostname, parts.port or 80, timeout=seconds)


class _Response(HTTPResponse):
    """An answer whose reads all end by one deadline. A socket's timeout counts from each byte."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._keeps_open = self.fp  # the socket closes with the last file made of it
        self.fp = io.BufferedReader(_UntilDeadline(sock, deadline))

    def close(self) -> None:
        self._keeps_open.close()
        super().close()


class _UntilDeadline(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)
