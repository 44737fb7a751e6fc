"""Workers that share the blocks of their host tiers: real agents on loopback."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TypeVar

import pytest

from kvconnect.cache.head_shards import HeadUnit
from kvconnect.cache.keys import block_key
from kvconnect.offload.host_arena import HostArena
from kvconnect.settings import DigestMode, check_struct
from kvconnect.settings.sharing import PeerSettings
from kvconnect.tiers import SHARED
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.peers.arena_memory import ArenaMemory
from kvconnect.tiers.peers.peer_agent import PeerAgent, SharedBlocks
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.transport import ConnectionOptions, Security, make_transport
from kvconnect.transport.tcp.shared_port import SharedPort

xxhash = pytest.importorskip("xxhash")

BLOCK = 8192
HALF = BLOCK // 2
SLOTS = 8
WAIT_S = 30.0
FORMAT = b"format"
WHOLE = [[[HeadUnit(0, ((0, HALF),)), HeadUnit(1, ((HALF, HALF),))]]]
"""One rank has both heads."""
SWAPPED = [[[HeadUnit(0, ((HALF, HALF),)), HeadUnit(1, ((0, HALF),))]]]
"""The same heads, in another order in the slot."""
LEFT, RIGHT = [[[HeadUnit(0, ((0, HALF),))]]], [[[HeadUnit(1, ((0, HALF),))]]]
"""Two ranks have one head each."""


def key(number: int) -> bytes:
    return block_key(SHARED, 0, b"hash %d" % number)


def content(number: int) -> bytes:
    return bytes((number * 31 + i * 7) % 251 for i in range(BLOCK))


E = TypeVar("E", bound="Engine")


class Engine:
    """A worker's host tier, its agent and its tier of peers."""

    def __init__(
        self,
        ask: Sequence[str] = (),
        layouts: Sequence[Sequence[Sequence[HeadUnit]]] = WHOLE,
        name: bytes = FORMAT,
        transport: str = "tcp",
        key: bytes = b"k" * 16,
        port: SharedPort | None = None,
        slots: int = SLOTS,
        digest: DigestMode = "full",
        **settings: object,
    ) -> None:
        nbytes = sum(unit.nbytes for unit in chain(*layouts[0]))
        slot_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.host = HostArena(slots, slot_bytes, digest)
        layout = xxhash.xxh3_128_digest(repr(layouts).encode())
        blocks = SharedBlocks(self.host, layouts, name, layout)
        here = {"listen": "127.0.0.1:0", "same_machine": "network"}
        options = {"ask": list(ask), "ask_s": 10.0, **here, **settings}
        connection = ConnectionOptions(dead_after_s=WAIT_S, local=True, service="share", port=port)
        made = make_transport(transport, Security(key), connection)
        made.register(ArenaMemory(self.host))
        self.agent = PeerAgent(
            check_struct(PeerSettings, options),
            made,
            blocks,
            WAIT_S,
            nixl=transport == "nixl",
        )
        self.store = PeerSource(self.agent, blocks)

    @property
    def where(self) -> str:
        assert self.agent.address is not None
        host, port = self.agent.address
        return f"{host}:{port}"

    def keep(self, number: int, slot: int, data: bytes | None = None) -> None:
        """Store a block in a slot and offer it."""
        data = content(number) if data is None else data
        self.host.view(slot, len(data))[:] = data
        self.host.seal(slot, len(data))
        self.agent.served.offer([(key(number), slot)])

    def get(self, numbers: Sequence[int], first_slot: int = 0) -> list[BlockOutcome]:
        slots = range(first_slot, first_slot + len(numbers))
        return self.store.get([key(n) for n in numbers], [self.host.view(slot) for slot in slots])

    def close(self) -> None:
        self.store.close()

    def sources(self: E, count: int) -> E:
        """Wait until as many sources can be asked."""
        until(lambda: len(self.agent.reader.sources) == count)
        return self


def until(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@contextmanager
def engines(*made: Callable[[], E]) -> Iterator[list[E]]:
    with ExitStack() as stack:
        found = []
        for make in made:
            engine = make()
            stack.callback(engine.close)
            found.append(engine)
        yield found
