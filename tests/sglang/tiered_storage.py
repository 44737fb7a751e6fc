"""A storage backend over lower tiers: a server under the test's control, and what is where."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName

from kvconnect.engines.sglang.storage import KVConnectStorage
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.backends.memory import MemoryStore
from kvconnect.types import Tier
from tests.sglang.linker_bench import names, slots_of

KEYS = names(12)  # more than host memory has slots
REMOTE = {"remote": {"kind": "memory", "capacity": "1GiB"}}
WAIT_S = 20.0


class Shared(MemoryStore):
    """A server: whoever connects gets this one. It raises, or holds calls back, when told to."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        self._pass()
        return super().put(keys, payloads)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        self._pass()
        return super().get(keys, buffers)

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        if self.broken:
            raise OSError("told to")
        return super().exists(keys)

    def close(self) -> None:
        """Others may be connected."""

    def _pass(self) -> None:
        self.gate.wait(WAIT_S)
        if self.broken:
            raise OSError("told to")


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"disk": {"path": str(folder), "capacity": "64MiB", "min_free": 0, **more}}


def fill(storage: KVConnectStorage, count: int = len(KEYS)) -> None:
    """Store the pages of the pool's first places, each when the one before is written back."""
    for number in range(count):
        assert storage.batch_set_v1(KEYS[number : number + 1], slots_of([number])) == [True]
        settle(storage)


def settle(storage: KVConnectStorage) -> None:
    tiers, deadline = storage.pages.store.tiers, time.monotonic() + WAIT_S
    while tiers and tiers.jobs:
        assert time.monotonic() < deadline, "it goes on and on"
        time.sleep(0.002)


def where(storage: KVConnectStorage, keys: Sequence[str] = KEYS) -> list[Tier | None]:
    return storage.pages.where(PoolName.KV, keys)


def counted(storage: KVConnectStorage) -> Mapping[str, float]:
    taken = storage.pages.store.take_stats()
    assert taken is not None
    return taken.reduce()
