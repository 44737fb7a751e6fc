"""HTTP requests to engines: each ends by its deadline, however slowly the server answers.

Redirects and proxies of the environment are not followed: a trial asks the servers it was told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvconnect.direct_http import answer_of, whole
from kvconnect.errors import ConfigError, KVConnectError

_MOST_BYTES = 64 << 20  # of a whole answer; metrics of many ranks are the largest
_MOST_LINE = 1 << 20
_SHOWN = 200  # bytes of a server's error that are repeated


class TrialFailed(KVConnectError):
    """A trial cannot go on. The message is one line: what failed, and what to do.

    Attributes:
        status: the HTTP status that an engine answered with; 0 if it answered with none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Asks one server. Threads may share it: every request has a connection of its own.

    Args:
        url: ``http://HOST:PORT`` or https; the scheme may be missing, a path is kept.
        api_key: sent as a bearer token; "" for none.
        timeout_s: for one request, from connecting to the last byte.

    Raises:
        ConfigError: the URL is not usable.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 120.0) -> None:
        fix = "use http://HOST:PORT or https://HOST:PORT"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:
            raise ConfigError("URL", url, f"{fix}: {error}") from error
        if not good or parts.username or not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError("URL", url, fix)
        self.host = parts.hostname or ""
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> bytes:
        """Return the answer to a GET request.

        Raises:
            TrialFailed: there is none in time, or its status is not 200.
        """
        with self._answer("GET", path, None) as answer:
            return self._whole(answer)

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Return the answer to a POST request; raises as :meth:`get`."""
        with self._answer("POST", path, body) as answer:
            return self._whole(answer)

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the data of the server-sent events that answer a POST request, without ``[DONE]``.

        Raises:
            TrialFailed: as :meth:`get`, or a line is too long.
        """
        with self._answer("POST", path, body) as answer:
            while line := answer.readline(_MOST_LINE + 1):
                if len(line) > _MOST_LINE:
                    raise TrialFailed(f"{self.url}{path}: a line has more than {_MOST_LINE} bytes")
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    yield data

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[HTTPResponse]:
        raw = None if body is None else msgspec.json.encode(body)
        headers = dict(self._headers)
        if raw is not None:
            headers["Content-Type"] = "application/json"
        url = f"{self.url}{self._path}{path}"
        where = f"{method} {url}"
        asked = answer_of(url, self._timeout_s, method=method, body=raw, headers=headers)
        try:
            with asked as answer:
                if answer.status != 200:
                    said = answer.read(_SHOWN).decode("utf-8", "replace")
                    why = f"answered {answer.status}: {' '.join(said.split())}"
                    raise TrialFailed(f"{where} {why}", answer.status)
                yield answer
        except TimeoutError as error:
            raise TrialFailed(
                f"{where}: no whole answer in {self._timeout_s:g} s: is the engine stuck or busy? "
                "(--timeout sets the limit)"
            ) from error
        except (OSError, HTTPException) as error:
            why = str(error) or type(error).__name__
            raise TrialFailed(f"{where} failed: {why}: is the engine running there?") from error

    def _whole(self, answer: HTTPResponse) -> bytes:
        try:
            return whole(answer, _MOST_BYTES)
        except ValueError as error:
            raise TrialFailed(f"{self.url} answers with {error}") from error
