"""Responses to clients: whole ones, and the heads of all. Event loop only."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple

from kvconnect.router.requests.errors import error_body

_NO_BODY = (204, 304)
_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n" for each in HTTPStatus}


@dataclass(frozen=True)
class HttpResponse:
    """A whole response. ``headers`` have no lengths, and nothing about the connection."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def json_response(value: Any, status: int = 200) -> HttpResponse:
    """Return a response with a JSON document."""
    headers = {"Content-Type": "application/json; charset=utf-8"}
    return HttpResponse(status, json.dumps(value).encode(), headers)


def error_response(
    path: str, status: int, message: str, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """Return an error in the format of the path's API."""
    kind = {"Content-Type": "application/json", **(headers or {})}
    return HttpResponse(status, error_body(path, status, message), kind)


class Framing(NamedTuple):
    """How a response ends. ``length``: of its body; None: the body comes in chunks, or ends with
    the connection of an ``old`` client (HTTP/1.0)."""

    length: int | None
    keep_alive: bool
    old: bool = False


class ResponseHeads:
    """Writes the heads of responses. What they have in common is made once a second."""

    def __init__(self) -> None:
        self._date, self._second = "", 0

    def head(self, status: int, headers: Mapping[str, str], framing: Framing) -> bytes:
        """Return a head.

        Raises:
            ValueError: a header has a line end in it.
        """
        second = int(time.time())
        if second != self._second:
            self._date, self._second = f"Date: {formatdate(second, usegmt=True)}\r\n", second
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        if framing.length is None and not framing.old:
            lines.append("Transfer-Encoding: chunked\r\n")
        elif framing.length is not None and status not in _NO_BODY:
            lines.append(f"Content-Length: {framing.length}\r\n")
        if not framing.keep_alive:
            lines.append("Connection: close\r\n")
        elif framing.old:
            lines.append("Connection: keep-alive\r\n")
        text = "".join(lines)
        if text.count("\n") != len(lines) or text.count("\r") != len(lines):
            raise ValueError(f"one of the headers {', '.join(headers)} has a line end in it")
        line = _LINES.get(status) or f"HTTP/1.1 {status} \r\n"
        return f"{line}{text}{self._date}\r\n".encode("utf-8", "surrogateescape")
