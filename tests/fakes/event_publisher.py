"""A publisher of KV events, as engines have it, for tests of the router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio


def batch(*events: Any) -> bytes:
    """Encode a message of events."""
    return msgspec.msgpack.encode([1.5, list(events), 0])


class Publisher:
    """Publishes as the engines do, and repeats; ``mute`` loses what is published."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.sent: list[bytes] = []
        self.repeated = 0

    async def publish(self, *events: Any, mute: bool = False) -> None:
        number = len(self.sent)
        self.sent.append(batch(*events))
        if not mute:
            await self.pub.send_multipart([b"kv", number.to_bytes(8, "big"), self.sent[-1]])

    async def repeat(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            self.repeated += 1
            for number in range(int.from_bytes(start, "big"), len(self.sent)):
                head = [client, b"", b"kv", number.to_bytes(8, "big")]
                await self.router.send_multipart([*head, self.sent[number]])
            end = (-1).to_bytes(8, "big", signed=True)
            await self.router.send_multipart([client, b"", b"", end, b""])

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publisher() -> AsyncIterator[Publisher]:
    found = Publisher()
    repeating = asyncio.create_task(found.repeat())
    try:
        yield found
    finally:
        repeating.cancel()
        await asyncio.gather(repeating, return_exceptions=True)
        found.close()
