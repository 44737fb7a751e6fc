"""Receipts of streamed answers, which vLLM's engines tell among their KV events.

vLLM passes no receipt on in streams. So the router gives such a request a nonce, the engine
publishes the receipt under it, and the router puts it before the stream's end. Event loop only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from kvconnect.router.http import engine_bodies
from kvconnect.router.http.engine_bodies import Receipt
from kvconnect.router.http.reply import Reply

WAIT_S = 0.2  # for a receipt whose stream has ended; usually it came with the first token
_DONE = b"data: [DONE]\n\n"
_EVENT_TAIL = b"}\n\n"  # of any other event


class AwaitedReceipt(NamedTuple):
    """The receipt of one stream.

    Attributes:
        nonce: what the engine is to publish it under.
        get: returns it, empty if it does not come in time.
    """

    nonce: str
    get: Callable[[], Awaitable[Receipt]]


class OwedReceipts:
    """Receipts that one engine has yet to publish: one for each open stream that asked for it.
    ``count`` counts the outcome of each wait: ``ok`` or ``missing``."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._awaited: dict[str, asyncio.Future[Receipt]] = {}
        self._publishes = True

    @contextmanager
    def awaited(self) -> Iterator[AwaitedReceipt]:
        """Expect a receipt, until the block is left."""
        nonce = secrets.token_hex(16)
        self._awaited[nonce] = future = asyncio.get_running_loop().create_future()
        try:
            yield AwaitedReceipt(nonce, partial(self._wait, future))
        finally:
            del self._awaited[nonce]

    def arrived(self, nonce: str, receipt: Receipt) -> None:
        """Take a receipt that the engine published; ignore it unless it is awaited."""
        self._publishes = True
        future = self._awaited.get(nonce)
        if future is not None and not future.done():
            future.set_result(receipt)

    async def _wait(self, future: asyncio.Future[Receipt]) -> Receipt:
        """Wait for a receipt. After one that did not come, no stream waits until the engine
        publishes another one."""
        await asyncio.wait({future}, timeout=WAIT_S if self._publishes else 0)
        self._publishes = future.done()
        self._count("ok" if future.done() else "missing")
        return future.result() if future.done() else {}


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

    async def end(self) -> Receipt:
        """Send the receipt and what was held back. Return the receipt, empty if it did not come, or
        if the stream does not end with ``[DONE]``."""
        receipt = await self._awaited.get() if self._held == _DONE else {}
        if receipt:
            await self._reply.write(engine_bodies.receipt_event(self._beginning, receipt))
        if self._held:
            await self._reply.write(self._held)
        return receipt
