"""What a client gets: headers and body of its response, or an error. Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from kvconnect.router.connections.engine_connection import EVENT_STREAM
from kvconnect.router.connections.relay import NO_MEMORY, RelayedStream, Returned, StreamRelay
from kvconnect.router.http.engine_call import EngineResponse
from kvconnect.router.http.http_request import HttpRequest
from kvconnect.router.http.http_response import HttpResponse
from kvconnect.router.http.response_writer import ResponseStream
from kvconnect.router.policy.choice import RoutingChoice
from kvconnect.router.policy.ranking import RankingReason
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.errors import error_body
from kvconnect.router.requests.event_form import EventForm

_EVENT_END = b"\n\n"
_COMMENT = b": keep-alive\n\n"
_ERROR_EVENT_S = 1.0  # time to send the error event to a client that does not read


class Reply:
    """The response to one request. Runs in the request's own task."""

    def __init__(
        self,
        request: HttpRequest,
        *,
        named_events: bool,
        show_hits: bool,
        relay: StreamRelay | None,
    ) -> None:
        """``named_events``: SSE events have names. ``show_hits``: headers tell expected hits.
        ``relay``: passes streams on where it can."""
        self._relay = relay
        self._named_events, self._show_hits = named_events, show_hits
        self.choice: RoutingChoice | None = None  # shown in the response's headers
        self.stream: ResponseStream | None = None  # set once the stream has begun
        self.status = 0  # HTTP status, 0 before the response
        self._request = request
        self.began = False  # the stream has more than comments
        self._tail = b""  # last bytes of the stream
        self._sent_at = 0.0  # when the client was last sent something
        self._relayed: RelayedStream | None = None
        self._comments: asyncio.TimerHandle | None = None

    def whole(self, answer: EngineResponse) -> HttpResponse:
        """Return an engine's response unchanged."""
        headers = {**self._headers(answer.content_type), **answer.headers}
        self.status = answer.status
        return HttpResponse(answer.status, answer.body, headers)

    def error(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Return an error response of the router."""
        body = error_body(self._request.path, status, message)
        return self.whole(EngineResponse(status, "application/json", body, headers or {}))

    def begin(self, content_type: str, headers: Mapping[str, str]) -> ResponseStream:
        """Start a stream, whose head goes with its first chunk; ``headers``: those of the engine
        that the client gets, too. After comments, the head is gone."""
        self.began = True
        if self.stream is None:
            head = {**self._headers(content_type), **headers}
            self.stream = self._request.writer.begin(self._request, head)
            self.status = self.stream.status
        return self.stream

    async def write(self, chunk: bytes, *, last: bool = False) -> None:
        """Send a chunk of the stream, and its end with the last one; wait while the client does not
        read.

        Raises:
            ConnectionError: the client has disconnected.
        """
        assert self.stream is not None, "begin() comes first"
        self._sending(chunk)
        await (self.stream.end(chunk) if last else self.stream.write(chunk))

    @property
    def ready(self) -> bool:
        """Whether a chunk can be sent without a wait."""
        return self._writable() is not None

    def forward(self, chunk: bytes) -> bool:
        """Send a chunk if that needs no wait; return whether it was sent."""
        if self._writable() is None:
            return False
        assert self.stream is not None, "it has begun"
        self._sending(chunk)
        self.stream.send(chunk)
        return True

    def relay(
        self,
        engine: asyncio.Transport,
        back: Callable[[Returned], None],
        *,
        events_only: bool = False,
        form: EventForm | None = None,
    ) -> RelayedStream | None:
        """Leave the stream to the relay; see :class:`Passage` and :meth:`StreamRelay.start`."""
        client = self._writable()
        if client is None or self._relay is None:
            return None

        def returned(stream: Returned) -> None:
            self._relayed, self._sent_at = None, stream.heard
            self._tail = stream.tail_after(self._tail)
            if stream.reason == NO_MEMORY:  # among what was lost may be bytes that count as sent
                client.abort()
            elif stream.unsent and not client.is_closing():
                client.write(stream.unsent)
            back(stream)

        self._relayed = self._relay.start(
            engine, client, returned, events_only=events_only, form=form
        )
        return self._relayed

    def comment_after(self, silence_s: float) -> None:
        """Send a comment whenever the client was sent nothing for ``silence_s`` seconds, 0: never.
        Proxies take silent streams for dead. The first one begins the stream: what fails later is
        an event in it."""
        if silence_s:
            self._sent_at = time.monotonic()
            self._comment_later(silence_s, silence_s)

    def close(self) -> None:
        """Send no more comments."""
        if self._comments is not None:
            self._comments.cancel()

    def _comment_later(self, after_s: float, silence_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._comments = loop.call_later(after_s, self._comment, silence_s)

    def _comment(self, silence_s: float) -> None:
        if self._relayed is not None:
            self._sent_at = max(self._sent_at, self._relayed.heard)
        left = self._sent_at + silence_s - time.monotonic()
        if left <= 0:
            self._send_comment()
        self._comment_later(left if left > 0 else silence_s, silence_s)

    def _send_comment(self) -> None:
        """Send a comment, unless that needs a wait, or the last event is not complete."""
        if self.stream is not None and self.stream.ended:
            return
        if self.stream is None and not self._request.old:  # HTTP/1.0 has no chunks
            head = {"Content-Type": f"{EVENT_STREAM}; charset=utf-8"}
            self.stream = self._request.writer.begin(self._request, head)
            self.status = self.stream.status
        if self._relayed is not None:
            self._relayed.stop()
        # What came back with the stream may have been sent, and the relay begun again: it writes.
        away = self._relayed is not None
        if self.stream is not None and not away and self._tail in (b"", _EVENT_END):
            self.forward(_COMMENT)

    async def break_off(self, message: str) -> None:
        """End the stream with an error event in the engines' format; what is no stream of events
        ends with the connection, so that nobody takes it for whole."""
        assert self.stream is not None, "begin() comes first"
        if not self.stream.content_type.startswith(EVENT_STREAM):
            self._abort()
            return
        begin = b"" if self._tail == _EVENT_END else _EVENT_END  # the last event may be incomplete
        last = begin + engine_bodies.error_event(message, named_events=self._named_events)
        try:
            await asyncio.wait_for(self.stream.write(last), _ERROR_EVENT_S)
        except (TimeoutError, ConnectionError):  # the client does not read, or has disconnected
            self._abort()

    def _sending(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk)[-len(_EVENT_END) :]
        if self._comments is not None:
            self._sent_at = time.monotonic()

    def _abort(self) -> None:
        self._request.writer.transport.abort()

    def _writable(self) -> asyncio.Transport | None:
        """Return the client's transport if chunks can be written to it without a wait."""
        transport = self._request.writer.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return None
        assert self.stream is not None, "write() comes first"
        return transport if self.stream.chunked else None  # HTTP/1.1

    def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Content-Type": content_type}
        if self.choice is not None:
            headers["X-KVConnect-Mode"] = self.choice.mode.value
            made = self.choice.handoff
            # What is expected depends on what others have had cached, as a hit does.
            if made is not None and (self._show_hits or made.expected is None):
                headers["X-KVConnect-Handoff-Reason"] = made.reason.value
            self._name_target(headers, "Decode", self.choice.decode)
            if self.choice.prefill is not None:
                self._name_target(headers, "Prefill", self.choice.prefill)
        return headers

    def _name_target(self, headers: dict[str, str], role: str, target_choice: TargetChoice) -> None:
        """Add headers with the engine's number, its rank, the reason, and the expected cache hit.

        A cache hit reveals what other clients sent, so hits are shown only if the operator says so.
        """
        headers[f"X-KVConnect-{role}"] = str(target_choice.target.engine)
        if target_choice.target.rank is not None:
            headers[f"X-KVConnect-{role}-Rank"] = str(target_choice.target.rank)
        if self._show_hits or target_choice.why not in (RankingReason.HIT, RankingReason.NO_HIT):
            headers[f"X-KVConnect-{role}-Reason"] = target_choice.why.value
        if self._show_hits and target_choice.hit:
            headers[f"X-KVConnect-{role}-Hit"] = str(target_choice.hit)
