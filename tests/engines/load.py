"""Clients that keep asking a router while its fleet changes, and the administrators' API."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

from tests.engines.server import REQUEST_TIMEOUT_S, Router, StreamBroken

CLIENTS = 3


@dataclass
class Load:
    """Requests to a router, one after the other from each client, every second one streamed; use
    as a context manager. Each answer is compared with ``want``.

    ``right`` counts good ones by the numbers of the engines that made them (prefill, decode).
    ``broken`` are the errors that streams ended with after they had begun, ``failed`` what became
    of all other requests that got no good answer.
    """

    router: Router
    prompts: Sequence[list[int]]
    want: Sequence[tuple[int, ...]]
    right: Counter[tuple[int, int]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._lock, self._stop, self._asked = threading.Lock(), threading.Event(), 0
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._keep_asking) for _ in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def advance(self, requests: int) -> None:
        """Wait until so many more requests have ended."""
        enough = self.ended + requests
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while self.ended < enough:
            assert time.monotonic() < deadline, "requests do not end"
            assert not any(client.done() for client in self._clients), "a client has stopped"
            time.sleep(0.05)

    @property
    def ended(self) -> int:
        """How many requests have got their answer or failed."""
        with self._lock:
            return self.right.total() + len(self.broken) + len(self.failed)

    def _keep_asking(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self._asked += 1
                number = self._asked
            self._ask(number % len(self.prompts), stream=number % 2 == 0)

    def _ask(self, number: int, stream: bool) -> None:
        prompt, want = self.prompts[number], self.want[number]
        ended, what = self.failed, ""
        try:
            if stream:
                answer = self.router.stream(prompt, len(want))[1]
            else:
                answer = self.router.complete(prompt, len(want))
            what = "" if answer.tokens == want else f"wrong tokens from {dict(answer.headers)}"
        except StreamBroken as error:
            ended, what = self.broken, str(error)
        except urllib.error.HTTPError as error:
            with error:
                what = f"{error.code} {error.read().decode()}"
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            what = repr(error)
        with self._lock:
            if what:
                ended.append(what)
            else:
                names = (answer.headers[f"X-KVConnect-{role}"] for role in ("Prefill", "Decode"))
                prefill, decode = map(int, names)
                self.right[prefill, decode] += 1


@dataclass
class Admin:
    """Asks a router's API for administrators."""

    port: int
    token: str

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("GET", "/workers")
        return found

    def add(self, role: str, worker: str) -> int:
        """Return the number of the new engine, once it is up."""
        number = self._ask("POST", "/workers", role=role, worker=worker)["number"]
        self._until(lambda one: one["number"] == number and one["role"] == role and one["up"])
        return int(number)

    def until_all_are_up(self) -> None:
        """Wait for what has been restarted: the router looks for a lost engine less and less."""
        self._until(lambda one: not one["up"], there=False)

    def drain(self, role: str, url: str) -> None:
        """Return when its last request has ended."""
        self._ask("POST", "/workers/drain", role=role, url=url)
        self._until(lambda one: one["url"] == url and one["draining"] and not one["requests"])

    def remove(self, role: str, url: str) -> None:
        """Return when it is forgotten."""
        self._ask("DELETE", "/workers", role=role, url=url)
        self._until(lambda one: one["url"] == url, there=False)

    def _until(self, is_it: Callable[[dict[str, Any]], bool], *, there: bool = True) -> None:
        """Wait until an engine is listed, or is not."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while any(map(is_it, self.workers())) is not there:
            assert time.monotonic() < deadline, self.workers()
            time.sleep(0.05)

    def _ask(self, method: str, path: str, **body: str) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode() if body else None,
            headers={"Authorization": f"Bearer {self.token}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.load(answer)
