"""KVConnect broken on purpose, in one place each. Every run must be able to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from kvconnect.engines.vllm import block_names, translate
from kvconnect.engines.vllm import scheduler as scheduler_half
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.device_blocks import DeviceBlocks
from kvconnect.engines.vllm.weights import EngineWeights
from kvconnect.offload.planner import OffloadPlan
from kvconnect.offload.shared_memory import MemoryOffer, SharedMemory
from kvconnect.transport import page_io
from tests.engines.faulty import send_swapped
from tests.schedulers import engine
from tests.schedulers.faults import FaultyCopier, FaultyStore


@contextmanager
def swapped_slots() -> Iterator[None]:
    """A load copies slots into the blocks of one another."""
    call = FaultyCopier.__getattr__

    def swap(copier: FaultyCopier, name: str) -> Any:
        found = call(copier, name)
        if name not in ("enqueue_load", "enqueue_runs"):
            return found
        return lambda group, ids, slots, *rest: found(group, ids, list(slots)[::-1], *rest)

    with patch.object(FaultyCopier, "__getattr__", swap):
        yield


@contextmanager
def swapped_keys() -> Iterator[None]:
    """A disk returns the blocks of a call in another order."""
    get = FaultyStore.get

    def swap(store: FaultyStore, keys: Any, buffers: Any) -> Any:
        return get(store, keys, list(buffers)[::-1])

    with patch.object(FaultyStore, "get", swap):
        yield


@contextmanager
def unshared_tier() -> Iterator[None]:
    """Ranks that leave stores to another one load from memory of their own."""

    def own(offer: MemoryOffer, nbytes: int, place: int, places: int) -> SharedMemory:
        memory = SharedMemory.make(nbytes, places)
        memory.place = place
        return memory

    with patch.object(SharedMemory, "open", own):
        yield


@contextmanager
def reset_clears_nothing() -> Iterator[None]:
    """A reset leaves the KV of the old weights where it is."""
    with patch.object(KVConnect, "reset_cache", lambda _: True):
        yield


@contextmanager
def updates_unseen() -> Iterator[None]:
    """The scheduler does not hear that weights have changed, but looks at them after a reset."""
    take = EngineWeights.on_reports

    def unseen(weights: EngineWeights, identities: Any) -> bool:
        take(weights, identities)
        return False

    with patch.object(EngineWeights, "on_reports", unseen):
        yield


@contextmanager
def nothing_held() -> Iterator[None]:
    """Blocks are given away while a store still reads them."""
    with (
        patch.object(DeviceBlocks, "hold", lambda *_: None),
        patch.object(DeviceBlocks, "release", lambda *_: None),
    ):
        yield


@contextmanager
def stored_early() -> Iterator[None]:
    """A block is stored before its last token is computed."""
    computed = translate.computed_tokens

    def early(output: Any) -> Iterator[tuple[str, int]]:
        return ((req_id, count + 1) for req_id, count in computed(output))

    with patch.object(translate, "computed_tokens", early):
        yield


@contextmanager
def salts_ignored() -> Iterator[None]:
    """Blocks of one tenant are found by another one."""
    with (
        patch.object(block_names, "seed_of", lambda _: b"the same for all"),
        patch.object(block_names, "tenant_of", lambda _: bytes(8)),
    ):
        yield


@contextmanager
def swapped_pages() -> Iterator[None]:
    """A hand-off's first and last page arrive in the place of each other."""
    with patch.object(page_io, "send_pages", send_swapped):
        yield


@contextmanager
def requests_stay() -> Iterator[None]:
    """The plan never forgets a request."""
    with patch.object(OffloadPlan, "finish_request", lambda *_: None):
        yield


@contextmanager
def never_idle() -> Iterator[None]:
    """The connector always has something to do."""
    always = property(lambda _: True)
    with (
        patch.object(scheduler_half.ConnectorScheduler, "busy", always),
        patch.object(engine, "DRAIN_S", 0.5),
    ):
        yield


Control = Callable[[], Any]
