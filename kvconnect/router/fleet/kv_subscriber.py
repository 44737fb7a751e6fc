"""Subscribes to the KV events of an engine, of all its ranks. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import zmq
import zmq.asyncio

from kvconnect.errors import Refused
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.fleet.kv_events import RankEvents, receipts_in
from kvconnect.router.fleet.receipts import OwedReceipts
from kvconnect.router.fleet.watch import wait
from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.prefixes import PrefixIndex
from kvconnect.router.supervisor import Supervisor, TaskKind

logger = logging.getLogger(__name__)

REPLAY_S = 5.0  # limit of a whole replay
LOOK_S = 1.0  # between two checks of the number of ranks
HEARTBEAT_MS = 5000
"""How often a publisher is asked whether it is there; three times as long without anything from it,
and the connection is made anew. Otherwise, one that was cut without a word would wait for ever."""
_REPLAY_END = (-1).to_bytes(8, "big", signed=True)  # message number that ends a replay
_MOST_BYTES = 64 * 2**20  # limit of a message; one step's events are a few MB at most

Count = Callable[..., None]
"""Increments a counter: its name and labels, such as role, URL and outcome."""


class Subscriber:
    """Applies the KV events of one engine, of all its ranks, to the index of its role, and hands
    over the receipts that it owes. ``index``, ``owed``: None if not needed."""

    def __init__(
        self,
        engine: Engine,
        index: PrefixIndex | None,
        count: Count,
        owed: OwedReceipts | None = None,
    ) -> None:
        self._engine = engine
        self._index, self._owed = index, owed
        self._count = count
        self._tasks = Supervisor(count)
        self._context = zmq.asyncio.Context.instance()

    async def run(self) -> None:
        """Follow the engine's ranks while it is up, until cancelled."""
        while True:
            await self._engine.signals.up.wait()
            await self._follow_until_down()

    async def _follow_until_down(self) -> None:
        """Follow the engine's ranks as they become known. An engine that comes back may have
        restarted, and its blocks and message numbers with it."""
        tasks: dict[int | None, asyncio.Task[None]] = {}
        try:
            went_down = False
            while not went_down:
                ranks = self._ranks()
                for rank in [rank for rank in tasks if rank not in ranks]:
                    await self._end(rank, tasks.pop(rank))
                for rank in ranks:
                    if rank not in tasks:
                        url, work = self._engine.url, partial(self._follow, rank)
                        tasks[rank] = self._tasks.keep(TaskKind.EVENTS, url, work)
                went_down = await wait(self._engine.signals.down, LOOK_S)
        finally:
            for rank, task in tasks.items():
                await self._end(rank, task)

    async def _end(self, rank: int | None, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._index is not None:
            self._index.cleared(Target(self._engine.index, rank))

    def _ranks(self) -> list[int | None]:
        ranks = len(self._engine.loads.at(time.monotonic()))
        return [None] if ranks == 1 else list(range(ranks))

    async def _follow(self, rank: int | None) -> None:
        spec = self._engine.spec
        target, index = Target(self._engine.index, rank), self._index
        feed = None if index is None else RankEvents(target, index)
        with self._context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.maxmsgsize = _MOST_BYTES
            socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, 3 * HEARTBEAT_MS
            socket.subscribe(b"")
            socket.connect(f"tcp://{spec.host}:{spec.events + (rank or 0)}")
            while True:
                frames = await socket.recv_multipart()
                try:
                    _, number, payload = frames
                    if self._owed is not None:
                        for published in receipts_in(payload):
                            self._owed.arrived(published.nonce, published.receipt)
                    await self._receive(feed, rank, _number(number), payload)
                except (Refused, ValueError) as error:
                    logger.warning("KV events of %s: %s", self._engine.url, error)
                    self._count_outcome("refused")
                await asyncio.sleep(0)  # what is queued is received without a pause otherwise

    async def _receive(
        self, feed: RankEvents | None, rank: int | None, number: int, payload: bytes
    ) -> None:
        if feed is None or feed.receive(number, payload):
            self._count_outcome("ok")
            return
        known, whole = feed.next_number > 0, True
        if self._engine.spec.replay:
            whole = await self._replay(feed, rank)
        whole = feed.recover(number, payload) and whole
        self._count_outcome("replayed" if whole else "lost" if known else "late")

    async def _replay(self, feed: RankEvents, rank: int | None) -> bool:
        """Request the lost messages; return whether the replay had no gap."""
        spec, whole, loop = self._engine.spec, True, asyncio.get_running_loop()
        # Not REQ, which accepts only one reply per request.
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.maxmsgsize = _MOST_BYTES
            socket.connect(f"tcp://{spec.host}:{spec.replay + (rank or 0)}")
            await socket.send_multipart([b"", feed.next_number.to_bytes(8, "big")])
            end = loop.time() + REPLAY_S
            while (left := end - loop.time()) > 0 and await socket.poll(int(1000 * left)):
                *_, number, payload = await socket.recv_multipart()
                if number == _REPLAY_END:
                    return whole
                whole = feed.recover(_number(number), payload) and whole
        logger.warning("no whole replay from %s in time", self._engine.url)
        return False

    def _count_outcome(self, outcome: str) -> None:
        self._count("kv_events", self._engine.role.value, self._engine.url, outcome)


def _number(frame: bytes) -> int:
    if len(frame) != len(_REPLAY_END) or frame[0] >= 128:
        raise Refused("events", "a message without a number")
    return int.from_bytes(frame, "big")
