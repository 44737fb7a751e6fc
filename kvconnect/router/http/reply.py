"""What a client is answered: whole, or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web

from kvconnect.router.http import upstream_requests
from kvconnect.router.http.client import EngineResponse
from kvconnect.router.policy.choice import RoutingChoice, TargetChoice
from kvconnect.router.policy.ranking import RankingReason

_EVENT_END = b"\n\n"
_LAST_WORDS_S = 1.0  # for a client that does not read


class Reply:
    """The answer to one request. On the event loop, in the request's own task."""

    def __init__(self, request: web.Request, *, named_events: bool, show_hits: bool) -> None:
        """``named_events``: SSE events have names. ``show_hits``: headers tell expected hits."""
        self._named_events, self._show_hits = named_events, show_hits
        self.choice: RoutingChoice | None = None  # named in the answer's headers
        self.stream: web.StreamResponse | None = None  # once the client has its first byte
        self.status = 0  # of the answer, once there is one
        self._request = request
        self._tail = b""  # last bytes of the stream

    def whole(self, answer: EngineResponse) -> web.Response:
        """Return an engine's answer as it is."""
        headers = self._headers(answer.content_type)
        self.status = answer.status
        return web.Response(status=answer.status, body=answer.body, headers=headers)

    def error(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        """Return an error of the router."""
        body = upstream_requests.error_body(status, message)
        answer = self.whole(EngineResponse(status, "application/json", body))
        answer.headers.update(headers or {})
        return answer

    async def begin(self, content_type: str) -> web.StreamResponse:
        """Start a stream.

        Raises:
            ConnectionError: the client is gone; so do :meth:`write` and the stream's end.
        """
        stream = web.StreamResponse(headers=self._headers(content_type))
        if self._request.version >= HttpVersion11:
            stream.enable_chunked_encoding()
        else:
            stream.force_close()  # only that ends it, and aiohttp would keep the connection
        await stream.prepare(self._request)
        self.stream, self.status = stream, stream.status
        return stream

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the stream; waits while the client does not read."""
        assert self.stream is not None, "begin() comes first"
        self._tail = (self._tail + chunk)[-len(_EVENT_END) :]
        await self.stream.write(chunk)

    def forward(self, chunk: bytes) -> bool:
        """Send a piece after the first, if that can be done at once; return whether it was."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        assert self.stream is not None, "write() comes first"
        if not self.stream.chunked:  # HTTP/1.0
            return False
        self._tail = (self._tail + chunk)[-len(_EVENT_END) :]
        transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    async def break_off(self, message: str) -> None:
        """End the stream with an error event, as engines do."""
        assert self.stream is not None, "begin() comes first"
        begin = b"" if self._tail == _EVENT_END else _EVENT_END  # it may have stopped mid-event
        last = begin + upstream_requests.error_event(message, named_events=self._named_events)
        try:
            await asyncio.wait_for(self.stream.write(last), _LAST_WORDS_S)
        except (asyncio.TimeoutError, ConnectionError):  # it does not read, or is gone
            if self._request.transport is not None:
                self._request.transport.abort()

    def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Content-Type": content_type}
        if self.choice is not None:
            headers["X-KVConnect-Mode"] = self.choice.mode.value
            self._name_target(headers, "Decode", self.choice.decode)
            if self.choice.prefill is not None:
                self._name_target(headers, "Prefill", self.choice.prefill)
        return headers

    def _name_target(self, headers: dict[str, str], role: str, target_choice: TargetChoice) -> None:
        """Say where a leg ran and why: its engine's number, its rank, the reason, the expected hit.

        What a cache has tells what others sent, so it is the operator's to ask for.
        """
        headers[f"X-KVConnect-{role}"] = str(target_choice.target.worker)
        if target_choice.target.rank is not None:
            headers[f"X-KVConnect-{role}-Rank"] = str(target_choice.target.rank)
        if self._show_hits or target_choice.why not in (RankingReason.HIT, RankingReason.NO_HIT):
            headers[f"X-KVConnect-{role}-Reason"] = target_choice.why.value
        if self._show_hits and target_choice.hit:
            headers[f"X-KVConnect-{role}-Hit"] = str(target_choice.hit)
