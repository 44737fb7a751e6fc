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

from kvconnect.router.requests.engine_bodies import Receipt

WAIT_S = 0.2  # for a receipt whose stream has ended; usually it came with the first token


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
