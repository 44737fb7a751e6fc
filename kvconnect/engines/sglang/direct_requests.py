"""HTTP requests to servers that clients name. They follow no redirect: it would lead to an address
that nobody has checked. They take no answer that is long, or that goes on and on. They use nothing
of the environment: a proxy's answer is not timed, and ``.netrc`` has others' passwords."""

from __future__ import annotations

import functools
import io
import socket
import time
from collections.abc import Generator
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

import requests

_MOST_BYTES = 1 << 20  # of an answer; SGLang's have some hundred
_MOST_S = 5.0  # for an answer, where SGLang sets no limit
_PIECE = 1 << 16


class _TimedReader(io.RawIOBase):
    """Reads from a socket for as long as the socket's timeout says. A socket itself lets each read
    take that long."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._raw = connection.makefile("rb", buffering=0)
        self._ends = time.monotonic() + (connection.gettimeout() or _MOST_S)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer has not ended in time")
        self._socket.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedAnswer(HTTPResponse):
    """An answer with one timeout for its headers and its body."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(sock))


@functools.cache
def _timed(pool: Any) -> Any:
    """Return a class of connection pools like ``pool``, with timed answers."""
    connection = type("TimedConnection", (pool.ConnectionCls,), {"response_class": _TimedAnswer})
    return type("TimedPool", (pool,), {"ConnectionCls": connection})


class DirectSession(requests.Session):
    """A session that takes these for errors, which SGLang logs as failed requests: a redirect, an
    answer of more than a MiB, and one that has not ended after the request's timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False

    def mount(self, prefix: Any, adapter: Any) -> None:
        """Use ``adapter`` for addresses with this prefix."""
        pools = adapter.poolmanager
        pools.pool_classes_by_scheme = {
            scheme: _timed(pool) for scheme, pool in pools.pool_classes_by_scheme.items()
        }
        super().mount(prefix, adapter)

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a request and read its answer.

        Raises:
            requests.RequestException: there is no answer, or none that can be taken.
        """
        kwargs["stream"] = True
        response, content = super().send(request, **kwargs), bytearray()
        with response:
            for piece in response.iter_content(_PIECE):
                content += piece
                if len(content) > _MOST_BYTES:
                    raise requests.RequestException(f"{response.url} says more than a MiB")
        response._content = bytes(content)
        return response

    def resolve_redirects(self, *args: Any, **_: Any) -> Generator[requests.Response, None, None]:
        """Raise :class:`requests.TooManyRedirects` if the answer ``args[0]`` is a redirect."""
        target = self.get_redirect_target(args[0])
        if target:
            raise requests.TooManyRedirects(f"{args[0].url} redirects to {target}: not followed")
        yield from ()


def _ask(method: str, url: str, **options: Any) -> requests.Response:
    with DirectSession() as session:
        return session.request(method, url, **options)


def get(url: str, **options: Any) -> requests.Response:
    """Ask as ``requests.get`` does."""
    return _ask("GET", url, **options)


def put(url: str, **options: Any) -> requests.Response:
    """Ask as ``requests.put`` does."""
    return _ask("PUT", url, **options)


def post(url: str, **options: Any) -> requests.Response:
    """Ask as ``requests.post`` does."""
    return _ask("POST", url, **options)


def install(module: Any) -> None:
    """Have a module of SGLang ask in this way. It uses these parts of ``requests``."""
    module.requests = SimpleNamespace(
        Session=DirectSession, adapters=requests.adapters, get=get, put=put, post=post
    )
