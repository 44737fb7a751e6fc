"""One request to one engine: send, read, and report how it ended. Event loop only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from kvconnect.errors import KVConnectError
from kvconnect.router.connections.engine_connection import (
    EVENT_STREAM,
    JSON,
    ClosedByEngine,
    ConnectionLost,
    EngineConnection,
    Exhausted,
    NotTaken,
    TooLong,
    Unreachable,
    read,
)
from kvconnect.router.connections.http1 import request_head
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.connections.relay import Passage
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.http.admission import Busy
from kvconnect.router.metrics import CallOutcome, RouterMetrics
from kvconnect.router.policy.choice import Cause
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.prompt_times import StartedPrompt
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.engine_bodies import EngineRequest
from kvconnect.router.requests.errors import error_body
from kvconnect.router.tracing import CallSpan

_EVENT_END = b"\n\n"
_SHOWN = 500  # characters of an engine's own message in an error of the router
_PASSED_HEADERS = ("Retry-After", "X-Request-Id")
_MOST_ERROR = 1 << 20  # bytes of an engine's error
_LONG_ERROR = f"the engine's error has more than {_MOST_ERROR} bytes"
_MOST_BEGINNING = 1 << 20  # bytes of a stream that are inspected before it is passed on
HELD_BYTES = 1 << 20
"""Bytes of an answer that is no stream, until which another engine can be tried if it breaks off.
The rest of a longer one is passed on as it arrives."""


@dataclass(frozen=True)
class EngineResponse:
    """An engine's complete response. ``headers``: those that the client gets, too."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class EngineFailed(KVConnectError):
    """An engine could not be reached, was lost, or failed; ``answer`` is its response, if any.
    ``crashed``: URL of an engine that seems to have ended by itself, while it was up."""

    def __init__(
        self,
        role: Role,
        cause: Cause,
        message: str,
        answer: EngineResponse | None = None,
        *,
        crashed: str = "",
    ) -> None:
        super().__init__(message)
        self.role = role
        self.cause = cause
        self.answer = answer
        self.crashed = crashed


class NotOffered(EngineFailed):
    """A drained engine offers no hand-off of its streams, which is no failure."""


class Rejected(KVConnectError):
    """An engine rejected the client's request (4xx)."""

    def __init__(self, answer: EngineResponse) -> None:
        super().__init__(f"{answer.status}")
        self.answer = answer


class Overhead:
    """Time that the router adds: from when it could send a request to when it has sent it."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since = self._written = time.monotonic()

    def written(self) -> None:
        """Note that a request was written."""
        self._written = time.monotonic()

    def answered(self) -> None:
        """Restart the clock: the wait for the engine that just answered does not count."""
        self._spent = self.seconds
        self._since = self._written = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds added so far."""
        return self._spent + self._written - self._since


class PromptWork(Enum):
    """What an engine does with the prompt of a request."""

    NONE = 0  # it computes none, or only the last token
    UNSEEN = 1  # it computes it, but nothing tells when that has happened
    SEEN = 2  # it computes it, and its first token, or its whole answer, comes then


class EngineCall:
    """A request to one engine, from its start to its last byte; an async context manager.

    Leaving the context early closes the connection, and the engine then aborts the request. Every
    method raises :class:`EngineFailed` when the engine fails or is lost.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        metrics: RouterMetrics,
        engine: Engine,
        target_choice: TargetChoice,
        span: CallSpan,
        work: PromptWork,
        *,
        role: Role,
    ) -> None:
        """``role``: what the engine does; not its own where a drained one hands off."""
        self.engine = engine
        self._role = role
        self._pool = pool
        self._metrics = metrics
        self.target_choice = target_choice
        self._span = span
        self._began = 0.0
        self._connection: EngineConnection | None = None
        self._outcome = CallOutcome.CANCELLED  # until another outcome is known
        self._computed = False
        self._work = work
        self._prompt: StartedPrompt | None = None

    async def __aenter__(self) -> EngineCall:
        self._metrics.call_began(self.engine.role, self.engine.url)
        self._began = time.monotonic()
        self.engine.began(self.target_choice, self._began)
        if self._work is not PromptWork.NONE:
            chosen, seen = self.target_choice, self._work is PromptWork.SEEN
            self._prompt = self.engine.timer.begin(
                chosen.target.rank, chosen.work_tokens, self._began, seen=seen
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._pool.release(self.engine.base, self._connection)
        self.engine.ended(self.target_choice, computed=self._computed)
        self._end_prompt(measured=False)
        if self._outcome in (CallOutcome.OK, CallOutcome.REJECTED):
            self.engine.breaker.succeeded()
        elif self._outcome is not CallOutcome.CANCELLED:
            self.engine.breaker.failed(time.monotonic(), self._began)
        self._metrics.call_ended(self.engine.role, self.engine.url, self._outcome)
        self._span.end(self._outcome)

    @property
    def content_type(self) -> str:
        """The response's ``Content-Type``, unchanged."""
        return self._opened.response.headers.get("content-type", "application/octet-stream")

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response that clients get, too."""
        given = self._opened.response.headers
        return {name: given[name.lower()] for name in _PASSED_HEADERS if name.lower() in given}

    @property
    def streams(self) -> bool:
        """Whether the response is a stream of server-sent events."""
        return self.content_type.startswith(EVENT_STREAM)

    def starts_in_s(self) -> float:
        """Return the seconds until the engine is expected to begin with the prompt; 0 if that is
        not known, or it has."""
        if self._prompt is None:
            return 0.0
        return self.engine.timer.starts_in_s(self._prompt, time.monotonic())

    async def open(self, ask: EngineRequest, on_written: Callable[[], None]) -> None:
        """Send the request and wait for the head of a response with status 200.

        Raises:
            Rejected: the engine answered with 4xx, or its API has nothing for the request.
            EngineFailed: it answered with another status, or not at all.
            Busy: the router cannot open more connections.
        """
        base = self.engine.base
        headers = {**ask.headers, **self._span.headers()}
        length = None if ask.body is None else len(ask.body)
        head = request_head(base, ask.method, ask.path, headers, length)
        with _Failures(self):
            try:
                self._connection = await self._pool.open(base, head, ask.body or b"", on_written)
            except NotTaken as error:  # the engine was not asked, so nothing counts for or against
                body = error_body(ask.path, error.status, str(error))
                raise Rejected(EngineResponse(error.status, JSON, body)) from error
            status = self._connection.response.status
            if status == 200:
                return
            try:
                body, kind = await read(self._connection, _MOST_ERROR), self.content_type
            except TooLong:  # engines repeat what they refuse, so it proves no fault of theirs
                body, kind = error_body(ask.path, status, _LONG_ERROR), JSON
            answer = EngineResponse(status, kind, body, self.headers)
        if 400 <= status < 500:
            self._outcome = CallOutcome.REJECTED
            raise Rejected(answer)
        raise self._error(answer)

    async def read(self, take: Callable[[int], None]) -> bytes:
        """Return the whole response body; ``take`` is told of its bytes as they arrive.

        Raises:
            Busy: ``take`` finds no memory for it.
        """
        with _Failures(self):
            body = await read(self._opened, take=take)
        self._end_prompt(measured=self._work is PromptWork.SEEN)
        self._outcome = CallOutcome.OK
        return body

    async def beginning(self, take: Callable[[int], None]) -> bytes:
        """Return the whole response body, or its first bytes if it has more than ``HELD_BYTES``;
        :attr:`ended` tells which. ``take``: as of :meth:`read`."""
        pieces, held = [], 0
        with _Failures(self):
            while held <= HELD_BYTES and (piece := await self._opened.readany()):
                take(len(piece))
                pieces.append(piece)
                held += len(piece)
        if self.ended:
            self._outcome = CallOutcome.OK
        else:  # a client may read it slowly
            self._computed = True
            self.engine.computed(self.target_choice)
        return b"".join(pieces)

    async def first_event(self) -> bytes:
        """Return a stream's first bytes, up to and including its first event with content.

        An engine that fails a request before its first token reports the error in that event.
        """
        begin = rest = b""
        with _Failures(self):
            while True:
                event, end, after = rest.partition(_EVENT_END)
                if end and engine_bodies.opens_without_content(event):
                    rest = after
                elif (
                    end
                    or len(begin) > _MOST_BEGINNING
                    or not (chunk := await self._opened.readany())
                ):
                    break
                else:
                    begin, rest = begin + chunk, rest + chunk
        error = engine_bodies.error_in(event)
        if error is not None:
            status, body = error
            raise self._error(EngineResponse(status, JSON, body))
        self._end_prompt(measured=self._work is PromptWork.SEEN)
        return begin

    @property
    def ended(self) -> bool:
        """Whether the whole response has arrived."""
        return self._opened.response.ended

    def interrupt(self) -> None:
        """Have :meth:`chunks` raise :class:`Interrupted` soon; it can be called again then."""
        self._opened.interrupt()

    async def chunks(self, passage: Passage | None) -> AsyncIterator[bytes]:
        """Yield the rest of a stream as it arrives, except what ``passage`` passes on itself."""
        with _Failures(self):
            while chunk := await self._opened.readany(passage):
                yield chunk
        self._outcome = CallOutcome.OK

    def fail(self, message: str) -> EngineFailed:
        """Return the error for an unusable response."""
        self._outcome = CallOutcome.ERROR
        return EngineFailed(self._role, "error", f"{self._name}: {message}")

    def _end_prompt(self, *, measured: bool) -> None:
        if self._prompt is not None:
            self.engine.timer.end(self._prompt, time.monotonic(), measured=measured)
            self._prompt = None

    @property
    def _name(self) -> str:
        return f"{self.engine.role.value} engine {self.engine.index}"

    @property
    def _opened(self) -> EngineConnection:
        assert self._connection is not None, "open() comes first"
        return self._connection

    def _error(self, answer: EngineResponse) -> EngineFailed:
        self._outcome = CallOutcome.ERROR
        why = engine_bodies.message_of(answer.body)[:_SHOWN]
        message = f"{self._name} answered {answer.status}" + (f": {why}" if why else "")
        # The router explains a status that is neither success nor error itself.
        shown = answer if 500 <= answer.status < 600 else None
        return EngineFailed(self._role, "error", message, shown)

    def translated(self, error: BaseException | None) -> KVConnectError | None:
        """Return what an error of the connection means, and have the engine's health checked; None
        for any other error."""
        match error:
            case Exhausted():
                return Busy("the router cannot open more connections", 1)
            case Unreachable():
                self.engine.mark(up=False)
                self._outcome = CallOutcome.UNREACHABLE
                what = f"{self._name} cannot be reached"
                return EngineFailed(self._role, "unreachable", what)
            case ConnectionLost():
                # An engine that is drained or already down was told to end.
                well = self.engine.up and not self.engine.draining
                crashed = self.engine.url if well and isinstance(error, ClosedByEngine) else ""
                self.engine.suspect()
                self._outcome = CallOutcome.UNREACHABLE
                what = f"{self._name} was lost"
                return EngineFailed(self._role, "lost", what, crashed=crashed)
        return None


class _Failures:
    """Raises what errors of a call's connection mean. A class, since a call enters it six times."""

    __slots__ = ("_call",)

    def __init__(self, call: EngineCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and (meant := self._call.translated(error)) is not None:
            raise meant from error
