"""Streams with a receipt: where the tokens of the prompt came from. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvconnect.router.connections.relay import RelayedStream, Returned
from kvconnect.router.fleet.receipts import AwaitedReceipt
from kvconnect.router.http.reply import Reply
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.engine_bodies import Receipt

_DONE = b"data: [DONE]\n\n"
_EVENT_TAIL = b"}\n\n"  # of any other event


class ReceiptStream:
    """Passes a stream on to a client, and puts the receipt before its last event, ``[DONE]``."""

    def __init__(self, reply: Reply, awaited: AwaitedReceipt) -> None:
        self._reply, self._awaited = reply, awaited
        self._beginning = self._held = b""

    async def write(self, chunk: bytes) -> None:
        """See :meth:`Reply.write`. What may be the last event, or a part of it, is held back."""
        self._beginning = self._beginning or chunk
        text = self._held + chunk
        sizes = range(min(len(_DONE), len(text)), 0, -1)
        held = next((size for size in sizes if text.endswith(_DONE[:size])), 0)
        passed, self._held = text[: len(text) - held], text[len(text) - held :]
        if passed:
            await self._reply.write(passed)

    def forward(self, chunk: bytes) -> bool:
        """See :meth:`Reply.forward`."""
        return not self._held and chunk.endswith(_EVENT_TAIL) and self._reply.forward(chunk)

    def relay(
        self, engine: asyncio.Transport, back: Callable[[Returned], None]
    ) -> RelayedStream | None:
        """See :meth:`Reply.relay`. What may be the last event comes back."""
        return None if self._held else self._reply.relay(engine, back, events_only=True)

    async def end(self) -> Receipt:
        """Send the receipt and what was held back. Return the receipt, empty if it did not come, or
        if the stream does not end with ``[DONE]``."""
        receipt = await self._awaited.get() if self._held == _DONE else {}
        if receipt:
            await self._reply.write(engine_bodies.receipt_event(self._beginning, receipt))
        if self._held:
            await self._reply.write(self._held)
        return receipt
