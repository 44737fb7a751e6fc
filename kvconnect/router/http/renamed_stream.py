"""Streams of SGLang with the ids that a client chose. Event loop only."""

from __future__ import annotations

from kvconnect.router.http.reply import Reply
from kvconnect.router.requests.request_ids import ClientIds


class RenamedStream:
    """Passes a stream on to a client, with its own ids in place of the router's."""

    def __init__(self, reply: Reply, ids: ClientIds) -> None:
        self._reply, self._ids = reply, ids

    async def write(self, chunk: bytes) -> None:
        """See :meth:`Reply.write`."""
        if passed := self._ids.feed(chunk):
            await self._reply.write(passed)

    def forward(self, chunk: bytes) -> bool:  # noqa: ARG002
        """See :meth:`Reply.forward`: ids are replaced in the request's task."""
        return False

    def relay(self, *_: object) -> None:
        """See :meth:`Reply.relay`: for the same reason, never."""

    async def end(self) -> None:
        """Send what was held back."""
        if rest := self._ids.rest():
            await self._reply.write(rest)
