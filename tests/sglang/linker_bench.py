"""A linker over real pools in CPU memory, and SGLang's real tree over it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvconnect.copy import Copier, make_copier
from kvconnect.engines.sglang.linker import KVConnectLinker
from kvconnect.engines.sglang.linker_host_tier import PoolTier

PAGE, LAYERS, PAGES = 16, 3, 32
DSA_PAGE = 64  # the only one DSA has
STATE_TYPES = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
WAIT_S = 20.0  # a bound for a test that would hang, not a time that is measured


def mha_pool(
    pages: int = PAGES, layers: int = LAYERS, heads: int = 2, page: int = PAGE
) -> MHATokenToKVPool:
    """K and V of a layer take 4 KiB of a page each, so that every layer is a stage of its own."""
    return MHATokenToKVPool(
        size=pages * page,
        page_size=page,
        dtype=torch.float32,
        head_num=heads,
        head_dim=32,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def mla_pool() -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.float32,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def swa_pool() -> SWAKVPool:
    """Layers 0 and 2 see everything, layer 1 a window."""
    return SWAKVPool(
        size=PAGES * PAGE,
        size_swa=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=2,
        head_dim=32,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0, 2],
        device="cpu",
        swa_head_num=2,
        swa_head_dim=32,
    )


def dsa_pool() -> DSATokenToKVPool:
    return DSATokenToKVPool(
        size=8 * DSA_PAGE,
        page_size=DSA_PAGE,
        kv_lora_rank=512,
        dtype=torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        kv_cache_dim=576,
        index_head_dim=128,
    )


def mamba2_state() -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=4,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, dtype=STATE_TYPES, layers=[0, 2])


def mamba_pools(
    state: Any = None, heads: int = 2
) -> tuple[HybridLinearKVPool, HybridReqToTokenPool]:
    """Layers 1 and 3 attend, layers 0 and 2 have a state per request."""
    requests = HybridReqToTokenPool(
        size=8,
        mamba_size=16,
        mamba_spec_state_size=8,
        max_context_len=PAGES * PAGE,
        device="cpu",
        enable_memory_saver=False,
        cache_params=state or mamba2_state(),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )
    kvcache = HybridLinearKVPool(
        size=PAGES * PAGE,
        dtype=torch.float32,
        page_size=PAGE,
        head_num=heads,
        head_dim=32,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=requests.mamba_pool,
    )
    return kvcache, requests


def params_for(kvcache: Any, components: Sequence[ComponentType]) -> CacheInitParams:
    allocator = PagedTokenToKVPoolAllocator(
        PAGES * PAGE, PAGE, torch.float32, "cpu", kvcache, need_sort=False
    )
    requests = ReqToTokenPool(
        size=8, max_context_len=PAGES * PAGE, device="cpu", enable_memory_saver=False
    )
    return CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        tree_components=tuple(components),
    )


def buffers_of(kvcache: Any) -> dict[PoolName, list[torch.Tensor]]:
    """Return every tensor with pages in it, by pool, in SGLang's order."""
    if isinstance(kvcache, SWAKVPool):
        swa = buffers_of(kvcache.swa_kv_pool)[PoolName.KV]
        return buffers_of(kvcache.full_kv_pool) | {PoolName.SWA: swa}
    if isinstance(kvcache, MHATokenToKVPool):
        return {PoolName.KV: [*kvcache.k_buffer, *kvcache.v_buffer]}
    return {PoolName.KV: list(kvcache.kv_buffer)}


class Spy(Copier):
    """Passes copies on and notes their groups; a ``gate`` holds each back until released, and
    ``broken`` ones raise."""

    def __init__(self, inner: Copier) -> None:
        self.inner = inner
        self.calls: list[tuple[str, int]] = []
        self.entered = threading.Semaphore(0)
        self.gate: threading.Semaphore | None = None
        self.broken: str | None = None

    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.note("store", group, lambda: self.inner.store(group, block_ids, slots))

    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.note("load", group, lambda: self.inner.load(group, block_ids, slots))

    def note(self, name: str, group: int, copy: Callable[[], None]) -> None:
        self.calls.append((name, group))
        self.entered.release()
        if self.gate is not None:
            assert self.gate.acquire(timeout=WAIT_S)
        if self.broken == name:
            raise RuntimeError("broken on purpose")
        copy()


@dataclass
class Bench:
    """A linker, its pools' tensors, and the copiers under the test's control."""

    kvcache: Any
    components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    settings: dict[str, Any] = field(default_factory=dict)
    pages: int = PAGES  # room of the tier

    def __post_init__(self) -> None:
        self.spies: list[Spy] = []
        self.params = params_for(self.kvcache, self.components)
        self.buffers = buffers_of(self.kvcache)
        generator = torch.Generator().manual_seed(7)
        for buffer in self._all():
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
        page_bytes = sum(self.page_bytes(name) for name in self.buffers)
        extra = {"host_bytes": self.pages * page_bytes, "digest": "full", **self.settings}
        original = vars(PoolTier)["make_copier"]
        PoolTier.make_copier = staticmethod(self._spied)
        try:
            self.linker = KVConnectLinker(
                None, self.params, components=set(self.components), extra_config=extra
            )
        finally:
            PoolTier.make_copier = original
        self.kvcache.register_layer_transfer_counter(self.linker.layer_done_counter)

    def _spied(self, *args: Any) -> Copier:
        self.spies.append(Spy(make_copier(*args)))
        return self.spies[-1]

    def _all(self) -> Iterable[torch.Tensor]:
        return (buffer for pool in self.buffers.values() for buffer in pool)

    @property
    def tier(self) -> PoolTier:
        return self.linker.tiers[PoolName.KV]

    def page_bytes(self, name: PoolName) -> int:
        return sum(buffer[:PAGE].nbytes for buffer in self.buffers[name])

    def bytes_of(self, pages: Sequence[int], name: PoolName = PoolName.KV) -> list[bytes]:
        """Return the bytes of device pages, all layers of one pool."""
        return [
            b"".join(b[p * PAGE : (p + 1) * PAGE].numpy().tobytes() for b in self.buffers[name])
            for p in pages
        ]

    def wipe(self) -> None:
        for buffer in self._all():
            buffer.fill_(-1.0)

    def store(self, keys: Sequence[str], pages: Sequence[int], **more: Sequence[int]) -> None:
        """Offload pages and wait for it."""
        assert self.linker.offload(transfers(keys, pages, **more))
        self.drain()

    def drain(self) -> list[bool]:
        """Wait for every copy; return the results of the offloads that have ended."""
        for tier in self.linker.tiers.values():
            tier.drain()
        ended = self.linker.num_completed_offloads()
        return [self.linker.pop_completed_offload() for _ in range(ended)]

    def load(self, keys: Sequence[str], pages: Sequence[int], **more: Sequence[int]) -> bool:
        """Load pages as one batch; return whether all of it landed."""
        assert self.linker.load("req", transfers(keys, pages, **more))
        return self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading())

    def flip(self, key: str) -> None:
        """Damage one bit of the last stage of a stored page."""
        slot = self.tier.index.slot_of(0, key.encode())
        assert slot is not None
        last = (slot + 1) * len(self.tier.pool.stages) - 1
        self.tier.tier.store.view(last, 1)[0] ^= 1

    def found(self, keys: Sequence[str]) -> list[int]:
        return self.linker.lookup("req", [PoolTransfer(name=PoolName.KV, keys=list(keys))])

    def counted(self, name: str, label: str = "") -> float:
        """Return a counter's value so far."""
        return self.linker.stats.stats.data["counters"].get(name, {}).get(label, 0)

    def check(self) -> None:
        for tier in self.linker.tiers.values():
            tier.index.check()
            tier.jobs.ledger.check()

    def close(self) -> None:
        for spy in self.spies:
            spy.broken = None
            if spy.gate is not None:
                spy.gate.release(1000)
        self.linker.close()


def names(count: int, start: int = 0) -> list[str]:
    """Return page hashes as SGLang makes them: 64 hex digits."""
    return [f"{number:064x}" for number in range(start, start + count)]


def slots_of(pages: Sequence[int]) -> torch.Tensor:
    """Return the token slots of device pages."""
    starts = torch.tensor(array("q", pages), dtype=torch.int64) * PAGE
    return (starts[:, None] + torch.arange(PAGE)).flatten()


def transfers(
    keys: Sequence[str], pages: Sequence[int], swa: Sequence[int] = ()
) -> list[PoolTransfer]:
    """Return what SGLang hands over for pages of the full pool and, of its last keys, the
    window's."""
    found = [PoolTransfer(name=PoolName.KV, keys=list(keys), device_indices=slots_of(pages))]
    if swa:
        tail = PoolTransfer(
            name=PoolName.SWA,
            keys=list(keys[len(keys) - len(swa) :]),
            device_indices=slots_of(swa),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        found.append(tail)
    return found
