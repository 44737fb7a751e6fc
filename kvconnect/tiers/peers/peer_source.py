"""The host memory of other engines as a secondary tier."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from kvconnect.bounded import remember
from kvconnect.cache.keys import group_of
from kvconnect.errors import Misuse
from kvconnect.protocol.addresses import Addresses
from kvconnect.protocol.identity import Identity
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends.base import (
    BlockOutcome,
    BlockSource,
    StoreMeter,
    Usage,
    check_buffers,
    check_keys,
)
from kvconnect.tiers.peers.asking import Holders
from kvconnect.tiers.peers.fetching import Wanted
from kvconnect.tiers.peers.pages import PageKeys
from kvconnect.tiers.peers.peer_agent import PeerAgent, SharedBlocks
from kvconnect.tiers.peers.served import ServedBlocks
from kvconnect.types import TransferType

_MOST_REMEMBERED = 1 << 16


class PeerSource(BlockSource):
    """Blocks that other engines have. Buffers of ``get`` must be slots of the host tier.

    A block is there if, of each of its pages, some peers together have all of this worker's units.
    Attributes:
        page_keys: by which keys peers know the pages of blocks.
    """

    def __init__(self, agent: PeerAgent, blocks: SharedBlocks) -> None:
        self._agent = agent
        self._host = blocks.host
        self._sizes = [sum(unit.nbytes for unit in chain(*pages)) for pages in blocks.layouts]
        self.page_keys = PageKeys([len(pages) for pages in blocks.layouts])
        self._meter = StoreMeter()
        self._lock = threading.Lock()
        self._holders: dict[bytes, Holders] = {}  # of pages that were looked up

    @property
    def served(self) -> ServedBlocks:
        """What other engines may read."""
        return self._agent.served

    def set_identity(self, identity: Identity) -> None:
        """See :meth:`PeerAgent.set_identity`."""
        self._agent.set_identity(identity)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where other engines read it; None if they cannot."""
        return self._agent.address

    def block_bytes(self, key: bytes) -> int:
        """Return the bytes of a block of a key's group; 0 if there is no such group."""
        group = group_of(key)
        return self._sizes[group] if group < len(self._sizes) else 0

    def __repr__(self) -> str:
        return f"PeerSource({self._agent!r})"

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        started = time.perf_counter()
        unknown = [key for key in keys if not self._holders.keys() >= set(self.page_keys.of(key))]
        if unknown:
            self.exists(unknown)
        by_group: dict[int, list[int]] = defaultdict(list)
        outcomes = [BlockOutcome.SIZE] * len(keys)
        for place, key in enumerate(keys):
            if buffers[place].nbytes == self.block_bytes(key):
                by_group[group_of(key)].append(place)
        for group, places in by_group.items():
            blocks = [self._wanted(keys[place], self._slot(buffers[place])) for place in places]
            found = iter(self._agent.reader.reads.read(group, list(chain(*blocks))))
            for place, block in zip(places, blocks, strict=True):
                read = [next(found) for _ in block] or [BlockOutcome.ABSENT]
                failed = (outcome for outcome in read if outcome is not BlockOutcome.OK)
                outcomes[place] = next(failed, BlockOutcome.OK)
        good = zip(outcomes, buffers, strict=True)
        nbytes = sum(buffer.nbytes for outcome, buffer in good if outcome is BlockOutcome.OK)
        self._meter.moved(TransferType.PEER_TO_CPU, nbytes, time.perf_counter() - started)
        self._meter.count_failed(outcomes)
        return outcomes

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        return self.exists_at(keys, ())

    def exists_at(self, keys: Sequence[bytes], engines: Addresses) -> list[int]:
        """See :class:`BlockSource`. Without ``engines``, those of the configuration are asked."""
        check_keys(keys)
        pages = [self.page_keys.of(key) if self.block_bytes(key) else () for key in keys]
        known = list(dict.fromkeys(chain(*pages)))
        found = self._agent.find(known, [group_of(key) for key in known], engines)
        holders = dict(zip(known, found, strict=True))
        with self._lock:
            for key, peers in holders.items():
                if peers:
                    remember(self._holders, key, peers, _MOST_REMEMBERED)
        blocks = zip(keys, pages, strict=True)
        return [
            self.block_bytes(key) if names and all(holders[name] for name in names) else 0
            for key, names in blocks
        ]

    def usage(self) -> Usage:
        return Usage(-1, 0, 0, self._agent.available)

    def take_stats(self) -> OffloadingConnectorStats | None:
        taken = OffloadingConnectorStats()
        for part in (self._meter.take(), self._agent.take_stats()):
            if part is not None:
                taken.aggregate(part)
        return taken.take()

    def close(self) -> None:
        self._agent.close()

    def _wanted(self, key: bytes, slot: int) -> list[Wanted]:
        """Return the pages of a block to read into a slot; none if one of them is nowhere."""
        names = self.page_keys.of(key)
        with self._lock:
            holders = [self._holders.pop(name, frozenset()) for name in names]
        pages = zip(names, holders, strict=True)
        wanted = [Wanted(name, slot, peers, page) for page, (name, peers) in enumerate(pages)]
        return wanted if all(holders) else []

    def _slot(self, buffer: memoryview) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        slot, rest = divmod(address - self._host.address, self._host.slot_bytes)
        if rest or not 0 <= slot < self._host.num_slots:
            raise Misuse("a buffer is not a slot of the host tier")
        return slot
