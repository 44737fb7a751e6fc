"""One request to one engine. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvconnect.errors import KVConnectError
from kvconnect.router.http import upstream_requests
from kvconnect.router.http.admission import Busy
from kvconnect.router.http.http1 import (
    Connection,
    ConnectionLost,
    Exhausted,
    Unreachable,
    read,
    request_head,
)
from kvconnect.router.http.pool import ConnectionPool
from kvconnect.router.metrics import RouterMetrics, UpstreamOutcome
from kvconnect.router.policy.choice import Cause, TargetChoice
from kvconnect.router.policy.loads import Role
from kvconnect.router.supervisor import Supervisor, TaskKind

if TYPE_CHECKING:
    from kvconnect.router.fleet.upstreams import Upstream
    from kvconnect.router.tracing import UpstreamSpan

_EVENT_STREAM = "text/event-stream"
_EVENT_END = b"\n\n"
_MOST_BEGINNING = 1 << 20  # bytes of a stream that are looked at before they are passed on


@dataclass(frozen=True)
class EngineResponse:
    """A whole answer of an engine."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True)
class EngineRequest:
    """What to send: method, path, headers, and a JSON body unless it is None."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None


class UpstreamFailed(KVConnectError):
    """An engine could not be reached, was lost, or failed; ``answer`` is what it said, if any."""

    def __init__(
        self, role: Role, cause: Cause, message: str, answer: EngineResponse | None = None
    ) -> None:
        super().__init__(message)
        self.role = role
        self.cause = cause
        self.answer = answer


class Rejected(KVConnectError):
    """An engine says that the client's request is wrong (4xx)."""

    def __init__(self, answer: EngineResponse) -> None:
        super().__init__(f"{answer.status}")
        self.answer = answer


class Overhead:
    """The time a router adds: from when it could send a request to when it had sent it."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since = self._written = time.monotonic()

    def written(self) -> None:
        """A piece of a request went out."""
        self._written = time.monotonic()

    def answered(self) -> None:
        """What the next request had to wait for is there; the wait itself does not count."""
        self._spent = self.seconds
        self._since = self._written = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time added so far."""
        return self._spent + self._written - self._since


class UpstreamRequest:
    """A request to one engine, from its dispatch to its last byte.

    Use as a context: leaving it closes the connection, upon which the engine drops what is not
    finished. Every call raises :class:`UpstreamFailed` when the engine fails or is lost.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        metrics: RouterMetrics,
        upstream: Upstream,
        target_choice: TargetChoice,
        span: UpstreamSpan,
    ) -> None:
        self.upstream = upstream
        self._pool = pool
        self._metrics = metrics
        self.target_choice = target_choice
        self._span = span
        self._began = 0.0
        self._connection: Connection | None = None
        self._outcome = UpstreamOutcome.CANCELLED  # until something else is known

    async def __aenter__(self) -> UpstreamRequest:
        self._metrics.upstream_began(self.upstream.role, self.upstream.url)
        self._began = time.monotonic()
        self.upstream.began(self.target_choice, self._began)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._pool.release(self.upstream.base, self._connection)
        self.upstream.ended(self.target_choice)
        if self._outcome in (UpstreamOutcome.OK, UpstreamOutcome.REJECTED):
            self.upstream.breaker.succeeded()
        elif self._outcome is not UpstreamOutcome.CANCELLED:
            self.upstream.breaker.failed(time.monotonic(), self._began)
        self._metrics.upstream_ended(self.upstream.role, self.upstream.url, self._outcome)
        self._span.end(self._outcome)

    @property
    def content_type(self) -> str:
        """The answer's ``Content-Type``, as it came."""
        return self._opened.response.headers.get("content-type", "application/octet-stream")

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.content_type.startswith(_EVENT_STREAM)

    async def open(self, ask: EngineRequest, on_written: Callable[[], None]) -> None:
        """Send the request and wait for the head of a good answer.

        Raises:
            Rejected: the engine answered with 4xx.
            LegFailed: it answered otherwise but not with 200, or not at all.
            Busy: the router may open no more connections.
        """
        base = self.upstream.base
        headers = {**ask.headers, **self._span.headers()}
        length = None if ask.body is None else len(ask.body)
        head = request_head(base, ask.method, ask.path, headers, length)
        with self._failures():
            self._connection = await self._pool.open(base, head, ask.body or b"", on_written)
            status = self._connection.response.status
            if status == 200:
                return
            answer = EngineResponse(status, self.content_type, await read(self._connection))
        if 400 <= status < 500:
            self._outcome = UpstreamOutcome.REJECTED
            raise Rejected(answer)
        raise self._error(answer)

    async def read(self) -> bytes:
        """Return the whole answer."""
        with self._failures():
            body = await read(self._opened)
        self._outcome = UpstreamOutcome.OK
        return body

    async def first_event(self) -> bytes:
        """Return the beginning of a stream: its first event that tells anything, and what came
        before and with it.

        An engine that fails a request before its first token says so in that event.
        """
        begin = rest = b""
        with self._failures():
            while True:
                event, end, after = rest.partition(_EVENT_END)
                if end and upstream_requests.opens_without_content(event):
                    rest = after
                elif (
                    end
                    or len(begin) > _MOST_BEGINNING
                    or not (chunk := await self._opened.readany())
                ):
                    break
                else:
                    begin, rest = begin + chunk, rest + chunk
        error = upstream_requests.error_in(event)
        if error is not None:
            status, body = error
            raise self._error(EngineResponse(status, "application/json", body))
        return begin

    async def chunks(self, forward: Callable[[bytes], bool]) -> AsyncIterator[bytes]:
        """Yield of the rest of a stream, as it comes, what ``forward`` does not take."""
        with self._failures():
            while chunk := await self._opened.readany(forward):
                yield chunk
        self._outcome = UpstreamOutcome.OK

    def fail(self, message: str) -> UpstreamFailed:
        """Return the error for an answer that makes no sense."""
        self._outcome = UpstreamOutcome.ERROR
        return UpstreamFailed(self.upstream.role, "error", f"{self._name}: {message}")

    @property
    def _name(self) -> str:
        return f"{self.upstream.role.value} engine {self.upstream.index}"

    @property
    def _opened(self) -> Connection:
        assert self._connection is not None, "open() comes first"
        return self._connection

    def _error(self, answer: EngineResponse) -> UpstreamFailed:
        self._outcome = UpstreamOutcome.ERROR
        message = f"{self._name} answered {answer.status}"
        # What is neither an answer nor an error is the router's to explain.
        said = answer if 500 <= answer.status < 600 else None
        return UpstreamFailed(self.upstream.role, "error", message, said)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Translate what the connection raises, and let the engine's watcher know."""
        try:
            yield
        except Exhausted as error:
            raise Busy("the router has as many connections as it may have", 1) from error
        except Unreachable as error:
            self.upstream.mark(up=False)
            raise self._unreachable("cannot be reached") from error
        except ConnectionLost as error:
            self.upstream.suspect()
            raise self._unreachable("was lost") from error

    def _unreachable(self, what: str) -> UpstreamFailed:
        self._outcome = UpstreamOutcome.UNREACHABLE
        return UpstreamFailed(self.upstream.role, "unreachable", f"{self._name} {what}")


# Prefill legs that outlive the answer they were for.


END_S = 10.0


class DrainingPrefills:
    """Prefills whose blocks are all there, but who have not said so yet.

    Decode can be done first: what prefill answers has to go through its own engine's steps. To hang
    up then would have that engine count a request as aborted, and cost the next one a connection.
    So they may end by themselves, within ``END_S`` seconds. On the event loop.
    """

    def __init__(self, tasks: Supervisor) -> None:
        self._tasks = tasks
        self._timers: dict[asyncio.Task[Any], asyncio.TimerHandle] = {}

    def add(self, prefill: asyncio.Task[Any]) -> None:
        """Let a task end. That an engine fails it is of no interest, only a bug is."""
        if prefill.done():
            self._look_at(prefill)
            return
        self._timers[prefill] = asyncio.get_running_loop().call_later(END_S, prefill.cancel)
        prefill.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel those that are left."""
        tasks = list(self._timers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, prefill: asyncio.Task[Any]) -> None:
        self._timers.pop(prefill).cancel()
        self._look_at(prefill)

    def _look_at(self, prefill: asyncio.Task[Any]) -> None:
        error = None if prefill.cancelled() else prefill.exception()
        if not isinstance(error, KVConnectError):
            self._tasks.look(TaskKind.PREFILL, "a client's request", prefill)
