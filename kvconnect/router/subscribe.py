"""Subscriptions to engines' KV events over ZMQ. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from kvconnect.errors import Refused
from kvconnect.router.kvevents import Feed
from kvconnect.router.prefixes import PrefixIndex
from kvconnect.router.upstreams import Upstream
from kvconnect.router.view import Role, Target

logger = logging.getLogger(__name__)

REPLAY_S = 5.0  # for a whole replay
_END = -1  # number of the message that ends a replay

Note = Callable[[Role, str, str], None]
"""Told role, URL and what became of a message or replay: see ``kv_events`` in the metrics."""


class Subscriber:
    """Keeps the index of a role true to what one engine publishes, all its ranks."""

    def __init__(self, upstream: Upstream, index: PrefixIndex, note: Note) -> None:
        self._upstream = upstream
        self._index = index
        self._note = note
        self._context = zmq.asyncio.Context.instance()

    async def run(self) -> None:
        """Follow the engine for ever: its ranks as they become known."""
        tasks: dict[int | None, asyncio.Task[None]] = {}
        try:
            while True:
                for rank in self._ranks():
                    if rank not in tasks:
                        tasks[rank] = asyncio.create_task(self._follow(rank))
                await asyncio.sleep(1.0)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            for rank in tasks:
                self._index.cleared(Target(self._upstream.index, rank))

    def _ranks(self) -> list[int | None]:
        ranks = len(self._upstream.loads.own)
        return [None] if ranks == 1 else list(range(ranks))

    async def _follow(self, rank: int | None) -> None:
        worker = self._upstream.worker
        feed = Feed(Target(self._upstream.index, rank), self._index)
        with self._context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(f"tcp://{worker.host}:{worker.events + (rank or 0)}")
            while True:
                frames = await socket.recv_multipart()
                try:
                    _, number, payload = frames
                    await self._message(feed, rank, int.from_bytes(number, "big"), payload)
                except (Refused, ValueError) as error:
                    logger.warning("KV events of %s: %s", self._upstream.url, error)
                    self._say("refused")

    async def _message(self, feed: Feed, rank: int | None, number: int, payload: bytes) -> None:
        if feed.message(number, payload):
            self._say("ok")
            return
        known = feed.wanted > 0
        if self._upstream.worker.replay:
            await self._replay(feed, rank)
        whole = feed.settle(number, payload) or number < feed.wanted - 1
        self._say("replayed" if whole else "lost" if known else "late")

    async def _replay(self, feed: Feed, rank: int | None) -> None:
        worker = self._upstream.worker
        with self._context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect(f"tcp://{worker.host}:{worker.replay + (rank or 0)}")
            await socket.send(feed.wanted.to_bytes(8, "big"))
            end = asyncio.get_running_loop().time() + REPLAY_S
            while (left := end - asyncio.get_running_loop().time()) > 0:
                if not await socket.poll(int(1000 * left)):
                    break
                *_, number, payload = await socket.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == _END:
                    return
                feed.repeated(int.from_bytes(number, "big"), payload)
        logger.warning("no whole replay from %s in time", self._upstream.url)

    def _say(self, outcome: str) -> None:
        self._note(self._upstream.role, self._upstream.url, outcome)
