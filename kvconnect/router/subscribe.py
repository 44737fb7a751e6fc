"""Subscriptions to engines' KV events over ZMQ. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import zmq
import zmq.asyncio

from kvconnect.errors import Refused
from kvconnect.router.kvevents import Feed
from kvconnect.router.prefixes import PrefixIndex
from kvconnect.router.supervise import Supervisor, TaskKind
from kvconnect.router.upstreams import Upstream
from kvconnect.router.view import Target

logger = logging.getLogger(__name__)

REPLAY_S = 5.0  # for a whole replay
LOOK_S = 1.0  # between two looks at how many ranks there are
_END = (-1).to_bytes(8, "big", signed=True)  # number of the message that ends a replay
_MOST_BYTES = 64 * 2**20  # of a message: one step's events are a few MB at most

Note = Callable[..., None]
"""Counts in a metric: its name and labels, such as role, URL and what became of a message."""


class Subscriber:
    """Keeps the index of a role true to what one engine publishes, all its ranks."""

    def __init__(self, upstream: Upstream, index: PrefixIndex, note: Note) -> None:
        self._upstream = upstream
        self._index = index
        self._note = note
        self._tasks = Supervisor(note)
        self._context = zmq.asyncio.Context.instance()

    async def run(self) -> None:
        """Follow the engine for ever: its ranks as they become known."""
        tasks: dict[int | None, asyncio.Task[None]] = {}
        try:
            while True:
                ranks = self._ranks()
                for rank in [rank for rank in tasks if rank not in ranks]:
                    await self._end(rank, tasks.pop(rank))
                for rank in ranks:
                    if rank not in tasks:
                        url, work = self._upstream.url, partial(self._follow, rank)
                        tasks[rank] = self._tasks.keep(TaskKind.EVENTS, url, work)
                await asyncio.sleep(LOOK_S)
        finally:
            for rank, task in tasks.items():
                await self._end(rank, task)

    async def _end(self, rank: int | None, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._index.cleared(Target(self._upstream.index, rank))

    def _ranks(self) -> list[int | None]:
        ranks = len(self._upstream.loads.own)
        return [None] if ranks == 1 else list(range(ranks))

    async def _follow(self, rank: int | None) -> None:
        worker = self._upstream.worker
        feed = Feed(Target(self._upstream.index, rank), self._index)
        with self._context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.maxmsgsize = _MOST_BYTES
            socket.subscribe(b"")
            socket.connect(f"tcp://{worker.host}:{worker.events + (rank or 0)}")
            while True:
                frames = await socket.recv_multipart()
                try:
                    _, number, payload = frames
                    await self._message(feed, rank, _number(number), payload)
                except (Refused, ValueError) as error:
                    logger.warning("KV events of %s: %s", self._upstream.url, error)
                    self._say("refused")

    async def _message(self, feed: Feed, rank: int | None, number: int, payload: bytes) -> None:
        if feed.message(number, payload):
            self._say("ok")
            return
        known, whole = feed.wanted > 0, True
        if self._upstream.worker.replay:
            whole = await self._replay(feed, rank)
        whole = feed.settle(number, payload) and whole
        self._say("replayed" if whole else "lost" if known else "late")

    async def _replay(self, feed: Feed, rank: int | None) -> bool:
        """Ask for what was lost; return whether what came had no gap."""
        worker, whole, loop = self._upstream.worker, True, asyncio.get_running_loop()
        # Not REQ, which takes but one reply to a request.
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.maxmsgsize = _MOST_BYTES
            socket.connect(f"tcp://{worker.host}:{worker.replay + (rank or 0)}")
            await socket.send_multipart([b"", feed.wanted.to_bytes(8, "big")])
            end = loop.time() + REPLAY_S
            while (left := end - loop.time()) > 0 and await socket.poll(int(1000 * left)):
                *_, number, payload = await socket.recv_multipart()
                if number == _END:
                    return whole
                whole = feed.settle(_number(number), payload) and whole
        logger.warning("no whole replay from %s in time", self._upstream.url)
        return False

    def _say(self, outcome: str) -> None:
        self._note("kv_events", self._upstream.role.value, self._upstream.url, outcome)


def _number(frame: bytes) -> int:
    if len(frame) != len(_END) or frame[0] >= 128:
        raise Refused("events", "a message without a number")
    return int.from_bytes(frame, "big")


async def subscribe(upstream: Upstream, index: PrefixIndex, note: Note) -> None:
    """Keep ``index`` true to what an engine publishes, for ever."""
    await Subscriber(upstream, index, note).run()
