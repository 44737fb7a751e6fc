"""HTTP requests to servers that an operator named: no proxy of the environment is used, and no
redirect is followed. Either would get what is sent, such as tokens."""

from __future__ import annotations

import time
import urllib.request
from http.client import HTTPResponse
from typing import Any, cast

_PIECE = 1 << 16


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect is an error of its status."""


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def open_direct(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Return the answer to a request; ``timeout_s``: of each socket operation.

    Raises:
        OSError: there is none; ``urllib.error.HTTPError`` if its status is no success.
        http.client.HTTPException: it is no HTTP.
    """
    return cast("HTTPResponse", _OPENER.open(request, timeout=timeout_s))


def read_within(answer: HTTPResponse, seconds: float, most: int) -> bytes:
    """Return an answer's body, however slowly it comes.

    Raises:
        TimeoutError: it has not come within about ``seconds``.
        ValueError: it has more than ``most`` bytes.
    """
    pieces, held, deadline = [], 0, time.monotonic() + seconds
    while piece := answer.read1(_PIECE):
        pieces.append(piece)
        held += len(piece)
        if held > most:
            raise ValueError(f"more than {most >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no whole answer in {seconds:g} s")
    return b"".join(pieces)
