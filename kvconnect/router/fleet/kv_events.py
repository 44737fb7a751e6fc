"""What engines publish about their caches, read into a prefix index. Pure.

vLLM and SGLang publish alike: messages numbered from 0 on, each a msgpack array ``[time, events,
rank]``; an event is a map with ``type``, or, from older versions, an array that begins with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio
from msgspec import Meta, Raw

from kvconnect.errors import Refused
from kvconnect.router.fleet.upstreams import Upstream
from kvconnect.router.policy.loads import Target
from kvconnect.router.policy.prefixes import MEDIA, CacheTier, Hash, PrefixIndex, Stored
from kvconnect.router.supervisor import Supervisor, TaskKind

_FULL_ATTENTION = (None, "full_attention", "mla_attention")
_Token = int | Annotated[list[int], Meta(min_length=1)]
"""SGLang with EAGLE tells each token with the next one, as its cache is keyed by both."""


class _Batch(msgspec.Struct, array_like=True):
    time: Raw
    events: list[Raw]


class _Kind(msgspec.Struct):
    type: str


class _KindFirst(msgspec.Struct, array_like=True):
    type: str


class _BlockStored(msgspec.Struct):
    """A map's fields; those that have no place in an array come last."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[_Token]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None

    @property
    def plain(self) -> bool:
        """Whether the blocks follow from their tokens alone."""
        named = (self.lora_id, self.lora_name, self.cache_salt)
        return all(name is None for name in named) and not any(self.extra_keys or ())


class _BlockRemoved(msgspec.Struct):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _StoredInOrder(_BlockStored, array_like=True, tag="BlockStored"):
    """The same, from older versions."""


class _RemovedInOrder(_BlockRemoved, array_like=True, tag="BlockRemoved"):
    """The same, from older versions."""


_Event = _BlockStored | _BlockRemoved
_KINDS: dict[str, tuple[type[_Event], type[_Event]]] = {
    "BlockStored": (_BlockStored, _StoredInOrder),
    "BlockRemoved": (_BlockRemoved, _RemovedInOrder),
}
_CLEARED = "AllBlocksCleared"
_MOST_GROUPS = 64  # of layers


class Feed:
    """The messages of one rank, in order, into the index. Not thread-safe.

    A lost message may have told of blocks that are gone, so when one cannot be had again, all that
    is known of the rank is dropped.
    """

    def __init__(self, target: Target, index: PrefixIndex) -> None:
        self.wanted = 0  # number of the next message
        self._target = target
        self._index = index
        self._live = -1  # number of the last one that came live
        self._partial: set[int] = set()  # groups of layers that keep less than the whole prefix

    def message(self, number: int, payload: bytes) -> bool:
        """A message came; return False if others were lost before it: then ask for those from
        :attr:`wanted` on, and pass these and this one to :meth:`settle`.

        Raises:
            Refused: it cannot be read.
        """
        if number <= self._live:  # another incarnation, that counts from 0 again
            self._index.cleared(self._target)
            self._partial.clear()
            self.wanted = 0
        self._live = number
        if number > self.wanted:
            return False
        if number == self.wanted:  # else a replay had it
            self._take(number, payload)
        return True

    def settle(self, number: int, payload: bytes) -> bool:
        """Go on with a message that came again, or live after that, whatever lies before it;
        return whether nothing was lost.

        Raises:
            Refused: it cannot be read.
        """
        if number < self.wanted:
            return True
        whole = number == self.wanted
        if not whole:
            self._index.cleared(self._target)
        self._take(number, payload)
        return whole

    def _take(self, number: int, payload: bytes) -> None:
        self.wanted = number + 1
        try:
            self._apply(payload)
        except Refused:  # it may have told of blocks that are gone
            self._index.cleared(self._target)
            raise

    def _apply(self, payload: bytes) -> None:
        for event in _events(payload):
            if event is None:
                self._index.cleared(self._target)
            elif self._is_partial(event):
                continue
            elif isinstance(event, _BlockRemoved):
                self._index.removed(self._target, event.block_hashes, _tier(event))
            elif event.plain:
                self._index.stored(self._target, _stored(event))

    def _is_partial(self, event: _Event) -> bool:
        """Whether blocks are of a group without full attention. Its blocks have the same hashes as
        those of the others and go earlier, and only what is stored tells the group's kind."""
        group, partial = event.group_idx, event.kv_cache_spec_kind not in _FULL_ATTENTION
        if group is None:
            return partial
        if partial and len(self._partial) < _MOST_GROUPS:
            self._partial.add(group)
        return partial or group in self._partial


_NONE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What bytes that are no batch of events may raise."""


def _events(payload: bytes) -> Iterator[_Event | None]:
    """Yield the events that are known; None: all blocks are gone."""
    try:
        for event in msgspec.msgpack.decode(payload, type=_Batch).events:
            kind, place = _kind_of(event)
            if kind == _CLEARED:
                yield None
            elif kind in _KINDS:
                yield msgspec.msgpack.decode(event, type=_KINDS[kind][place])
    except _NONE as error:
        raise Refused("events", f"a message that is none: {error!r}") from error


def _kind_of(event: Raw) -> tuple[str, int]:
    """Return an event's kind, empty if it is none, and whether it is an array."""
    forms: tuple[type[_Kind | _KindFirst], ...] = (_Kind, _KindFirst)
    for place, form in enumerate(forms):
        try:
            return msgspec.msgpack.decode(event, type=form).type, place
        except _NONE:
            continue
    return "", 0


def _stored(event: _BlockStored) -> Stored:
    tokens = [token[0] if isinstance(token, list) else token for token in event.token_ids]
    hashes, parent = event.block_hashes, event.parent_block_hash
    return Stored(hashes, parent, tokens, event.block_size, _tier(event))


def _tier(event: _Event) -> CacheTier:
    """Return where blocks are; a tier of an unknown name is taken for the farthest."""
    return MEDIA.get(event.medium, CacheTier.REMOTE)


# Subscriptions to engines' KV events over ZMQ. Everything here runs on the event loop.


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
