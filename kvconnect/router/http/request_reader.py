"""Reads, parses and salts the bodies of client requests.

Runs on the event loop. One thread parses large bodies, one at a time, which bounds memory.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvconnect.router.connections.pool import within
from kvconnect.router.freed_frames import FreedFrames
from kvconnect.router.http.admission import SLOW, BodyAllocation, Busy
from kvconnect.router.http.http_request import HttpError, HttpRequest
from kvconnect.router.http.tenants import Tenant
from kvconnect.router.policy.caches import Caches
from kvconnect.router.requests import body as bodies
from kvconnect.router.requests.apis import Api
from kvconnect.router.requests.body import Prompt, PromptPrefix
from kvconnect.router.requests.media import with_own_media
from kvconnect.router.requests.prompt_limits import refuse_many_prompts

BODY_S = 60.0  # limit for receiving a body: a slow client holds memory
_LARGE = 128 * 1024  # bytes from which on a body is parsed in the thread


class ParsedRequest(NamedTuple):
    """A request: its body's fields, a summary of its prompt, and the prompt's prefix for cache
    lookups, None if no policy uses them."""

    body: dict[str, Any]
    prompt: Prompt
    prefix: PromptPrefix | None


class RequestReader:
    """Reads the requests of one router."""

    def __init__(self, most: int, caches: Caches) -> None:
        self._most = most  # bytes of a body
        self._caches = caches
        self._thread = ThreadPoolExecutor(1, "kvconnect-bodies")

    def close(self) -> None:
        """Stop the parser thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, request: HttpRequest, api: Api, tenant: Tenant, room: BodyAllocation
    ) -> ParsedRequest:
        """Return the parsed request.

        Raises:
            Busy: there is no memory for the body.
            Refused: the body is not a JSON object, or has too many prompts.
            HttpError: the body is encoded, too large, too slow, or no HTTP.
        """
        if api.method == "GET":
            return ParsedRequest({}, Prompt(), None)
        _refuse_encoded(request)
        if request.content_length > self._most:
            raise self._too_large()
        raw = await self._whole(request, room)
        if len(raw) < _LARGE:
            return self._parsed(raw, api, tenant)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._parsed, raw, api, tenant)

    def _parsed(self, raw: bytes | bytearray, api: Api, tenant: Tenant) -> ParsedRequest:
        body = bodies.read_body(raw)
        refuse_many_prompts(body)
        if tenant.secret and api.salted:
            own = body.get(bodies.SALT)
            body[bodies.SALT] = tenant.salt(b"" if own is None else bytes(own))
        if tenant.secret:
            body = with_own_media(body, tenant.id)
        prefix, caches = None, self._caches
        if caches.indexes and not api.decode_only:
            prefix = bodies.prefix_of(body, ids=caches.by_ids)
        return ParsedRequest(body, bodies.prompt_of(body), prefix)

    async def _whole(self, request: HttpRequest, room: BodyAllocation) -> bytes | bytearray:
        if request.content.is_eof():  # most small ones: there is no wait to be evicted in
            body = request.content.take()
            room.take(len(body))
            if len(body) > self._most:
                raise self._too_large()
            return body
        try:
            return await within(self._read(request, room), BODY_S)
        except TimeoutError:
            late = f"the request body was not complete within {BODY_S:g} seconds"
            raise HttpError(408, late) from None
        except asyncio.CancelledError:
            if not room.lost:
                raise
            raise Busy(SLOW, 1) from None

    async def _read(self, request: HttpRequest, room: BodyAllocation) -> bytearray:
        with FreedFrames():  # the connection keeps its error, and that the frames
            return await self._pieces(request, room)

    async def _pieces(self, request: HttpRequest, room: BodyAllocation) -> bytearray:
        body = bytearray()
        with room.arriving(asyncio.current_task()):
            while piece := await request.content.readany():
                room.take(len(piece))
                body += piece
                if len(body) > self._most:
                    raise self._too_large()
        return body

    def _too_large(self) -> HttpError:
        limit = f"{self._most / 2**20:g} MiB, what --max-body of the router allows"
        return HttpError(413, f"the request body has more than {limit}")


def _refuse_encoded(request: HttpRequest) -> None:
    """Refuse an encoded body, which could expand a thousandfold."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "send the body without Content-Encoding")
