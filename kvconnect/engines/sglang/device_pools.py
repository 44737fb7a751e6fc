"""SGLang's device pools for offloading: which pools a cache has, and where their pages lie.

Written against SGLang 0.5.23. SGLang assembles the pools of DeepSeek V4, DSA and some hybrid models
for its own linkers. This module assembles plain MHA and MLA, sliding windows, MHA and MLA with
Mamba, DSA whose layers share an index, and the pools of draft models beside all but the last.

A class that is not named here is refused: subclasses keep other bytes in the same attributes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as hybrid
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler as linker
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_parallel

from kvconnect.cache.layout import SLOT_ALIGNMENT, ByteRun, Geometry, GroupGeometry
from kvconnect.disaggregation.piecewise_memory import spanning_view
from kvconnect.errors import Incompatible, Misuse

_MOST_STAGES = 16  # each is a separate job; the first layer waits for one stage
_MOST_PADDING = 0.125  # as a fraction of a page

_KINDS = (
    *(MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool, DeepSeekV4TokenToKVPool),
    *(SWAKVPool, HybridLinearKVPool),
)
_KEPT_WITH_DRAFTS = (DSATokenToKVPool, DeepSeekV4TokenToKVPool)  # by SGLang, their own layers
_FULL = frozenset({ComponentType.FULL})
_SWA = frozenset({ComponentType.FULL, ComponentType.SWA})
_MAMBA = frozenset({ComponentType.FULL, ComponentType.MAMBA})


def device_pools(params: Any, components: Iterable[ComponentType]) -> DevicePoolGroup:
    """Return the physical pools of an engine's cache.

    Raises:
        Incompatible: the KV cannot be stored page by page; the message says why.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    kind, wanted = type(kvcache), frozenset(components)
    try:
        _check_kinds(kvcache)
        if kind in (MHATokenToKVPool, MLATokenToKVPool) and wanted == _FULL:
            group = _plain(kvcache, params)
        elif kind is SWAKVPool and wanted == _SWA:
            group = _windowed(kvcache, params)
        elif kind is HybridLinearKVPool and wanted == _MAMBA:
            group = _with_mamba(kvcache, params)
        elif kind is DSATokenToKVPool and wanted == _FULL and any(kvcache.skip_topk_layers):
            group = _with_shared_index(kvcache, params)
        elif params.mtp_draft_device_pools and kind not in _KEPT_WITH_DRAFTS:
            raise ValueError("SGLang leaves out the KV of the model's own draft layers")
        else:
            group = linker.resolve_hybrid_device_pool_group(
                kvcache=kvcache, page_size=params.page_size, params=params, components=set(wanted)
            )
    except (ValueError, AssertionError) as error:
        names = ", ".join(sorted(component.name for component in wanted))
        raise Incompatible(
            f"{kind.__name__} ({names}) cannot be offloaded: {error}: start without the linker"
        ) from error
    return group


def _check_kinds(kvcache: Any) -> None:
    """Refuse a pool, or a part of one, whose class is not known."""
    kind = type(kvcache)
    if kind not in _KINDS:
        raise ValueError("its layout is not known")
    if kind in (SWAKVPool, HybridLinearKVPool):
        for part in (kvcache.full_kv_pool, getattr(kvcache, "swa_kv_pool", kvcache.full_kv_pool)):
            if type(part) not in (MHATokenToKVPool, MLATokenToKVPool):
                raise ValueError(f"the layout of its {type(part).__name__} is not known")


def _plain(kvcache: Any, params: Any) -> DevicePoolGroup:
    layers = {layer: layer for layer in range(kvcache.layer_num)}
    entries = [_entry(PoolName.KV, kvcache, layers, params), *_drafts(params)]
    return DevicePoolGroup(
        entries,
        kvcache.layer_num,
        params.page_size,
        rank_replicated=type(kvcache) is MLATokenToKVPool and len(entries) == 1,
    )


def _windowed(kvcache: Any, params: Any) -> DevicePoolGroup:
    full, windowed = hybrid._swa_layer_mappings(kvcache)
    entries = [
        _entry(PoolName.KV, kvcache.full_kv_pool, full, params),
        _entry(PoolName.SWA, kvcache.swa_kv_pool, windowed, params),
        *_drafts(params),
    ]
    return DevicePoolGroup(entries, _layers_of(entries), params.page_size)


def _with_mamba(kvcache: Any, params: Any) -> DevicePoolGroup:
    start: int = kvcache.start_layer
    full = {
        layer - start: number for layer, number in kvcache.full_attention_layer_id_mapping.items()
    }
    entries = [
        _entry(PoolName.KV, kvcache.full_kv_pool, full, params),
        linker._mamba_device_pool_entry(params.req_to_token_pool, start),
        *_drafts(params),
    ]
    return DevicePoolGroup(entries, _layers_of(entries), params.page_size)


def _with_shared_index(kvcache: Any, params: Any) -> DevicePoolGroup:
    """DSA some of whose layers use the index of another one, and have none."""
    if kvcache.page_size != params.page_size:
        raise ValueError(f"its pages have {kvcache.page_size} tokens, not {params.page_size}")
    rows = {n: index for n, index in enumerate(kvcache.index_k_with_scale_buffer) if len(index)}
    layers = {layer: layer for layer in range(kvcache.layer_num)}
    entries = [
        _rows_entry(PoolName.KV, kvcache, kvcache.kv_buffer, layers, params),
        _rows_entry(
            PoolName.INDEXER,
            kvcache,
            list(rows.values()),
            {layer: place for place, layer in enumerate(rows)},
            params,
            rows_are_pages=True,
        ),
    ]
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise ValueError("layers that share an index cannot be kept with the KV of a draft model")
    return DevicePoolGroup(entries, kvcache.layer_num, params.page_size, rank_replicated=True)


def _drafts(params: Any) -> list[DevicePoolEntry]:
    """Describe the pools of a draft model as one. They share the target's page numbers; their
    layers are loaded with the target's first ones, and read after its last one."""
    pools = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    if params.mtp_draft_mamba_pools:
        raise ValueError("the states of a draft model cannot be kept beside it")
    if not pools:
        return []
    kinds = {type(pool) for pool in pools}
    if len(kinds) > 1 or not kinds <= {MHATokenToKVPool, MLATokenToKVPool}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"the KV of a draft model in {names} cannot be kept beside it")
    entries = [
        _entry(PoolName.DRAFT, pool, {n: n for n in range(pool.layer_num)}, params)
        for pool in pools
    ]
    sides = zip(*(_sides(entry) for entry in entries), strict=True)
    buffers = [[buffer for part in side for buffer in part] for side in sides]
    count = len(buffers[0])
    return [
        DevicePoolEntry(
            name=PoolName.DRAFT,
            indices_from_pool=PoolName.KV,
            device_pool=pools[0],
            components=[[buffer for side in buffers for buffer in side]],
            layer_mapping={
                n: tuple(n + side * count for side in range(len(buffers))) for n in range(count)
            },
            page_size=params.page_size,
            rows_are_pages=False,
        )
    ]


def _sides(entry: DevicePoolEntry) -> list[list[torch.Tensor]]:
    """Return a pool's buffers: one list of MLA, K and then V of MHA."""
    pool = entry.device_pool
    return [pool.kv_buffer] if type(pool) is MLATokenToKVPool else [pool.k_buffer, pool.v_buffer]


def _layers_of(entries: Iterable[DevicePoolEntry]) -> int:
    """Return the number of layers in a forward of this pipeline stage."""
    last: int = max(layer for entry in entries for layer in entry.layer_mapping)
    return last + 1


def _entry(name: PoolName, pool: Any, layers: dict[int, int], params: Any) -> DevicePoolEntry:
    """Describe one MHA or MLA pool; ``layers`` maps a forward's layers to the pool's."""
    if get_parallel().attn_dcp_size > 1:
        raise ValueError("decode context parallelism spreads a page over ranks")
    if pool.page_size != params.page_size:
        raise ValueError(f"its pages have {pool.page_size} tokens, the tree's {params.page_size}")
    if type(pool) is MHATokenToKVPool:
        if pool.kv_cache_layout != "nhd":
            raise ValueError(f"KV layout {pool.kv_cache_layout!r} is not known, only 'nhd'")
        return linker._mha_device_pool_entry(name, pool, layers, params.page_size)
    if pool.kv_scale_buffer is not None:
        raise ValueError("its scales are kept apart")
    return _rows_entry(name, pool, pool.kv_buffer, layers, params)


def _rows_entry(
    name: PoolName,
    pool: Any,
    buffers: list[torch.Tensor],
    layers: dict[int, int],
    params: Any,
    rows_are_pages: bool = False,
) -> DevicePoolEntry:
    return DevicePoolEntry(
        name=name,
        indices_from_pool=PoolName.KV if name is PoolName.INDEXER else name,
        device_pool=pool,
        components=[buffers],
        layer_mapping=layers,
        page_size=params.page_size,
        rows_are_pages=rows_are_pages,
    )


@dataclass(frozen=True)
class PoolMap:
    """Where the pages of one physical pool lie, and in which stages they are loaded.

    Attributes:
        entry: SGLang's description of the pool.
        area: uint8 ``[bytes]``, from the first to the last byte of the pool.
        geometry: one group per stage; its blocks are the pool's pages.
        stages: per stage, the layers of a forward that can run once the stage is loaded.
        rows_per_page: SGLang's row number divided by this is the page number.
    """

    entry: DevicePoolEntry
    area: torch.Tensor
    geometry: Geometry
    stages: tuple[tuple[int, ...], ...]
    rows_per_page: int

    @property
    def name(self) -> str:
        """SGLang's name of the pool, unique among the pools."""
        return str(self.entry.name)

    @property
    def num_pages(self) -> int:
        """Pages on the device."""
        return self.geometry.groups[0].num_blocks

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in the host tier: one whole slot per stage."""
        return len(self.stages) * self.geometry.slot_bytes

    def pages(self, transfer: PoolTransfer) -> list[int]:
        """Return the device page of each key of a transfer.

        Raises:
            ValueError: the indices are not one page of this pool per key.
        """
        rows = self.entry.prepare_locations(transfer.host_indices)
        if len(rows) != len(transfer.keys or ()):
            raise ValueError(f"{len(rows)} pages of pool {self.name} for {transfer.keys}")
        return [row // self.rows_per_page for row in rows]

    def stage_slots(self, slots: Iterable[int], stage: int) -> array[int]:
        """Convert slots of the index to host slots of one stage; -1 (not stored) stays -1."""
        count = len(self.stages)
        return array("q", (slot * count + stage if slot >= 0 else -1 for slot in slots))


def map_pool(entry: DevicePoolEntry) -> PoolMap:
    """Find where the pages of a pool lie, and divide its layers into stages.

    A stage is one layer. It is several if there are many layers, or if one layer's part of a page
    is so small that a slot, a multiple of 4 KiB, would be padded too much.

    Raises:
        Incompatible: the buffers have gaps, or a buffer does not belong to exactly one layer.
    """
    try:
        area = spanning_view(entry.kv_buffer)
    except Misuse as error:
        raise Incompatible(f"pool {entry.name} cannot be offloaded: {error}") from error
    first = entry.kv_buffer[0]
    rows_per_page = entry.buffer_meta[0][0][2] * first.shape[0] // first.nbytes
    num_pages = min(buffer.shape[0] for buffer in entry.kv_buffer) // rows_per_page
    layers = _layer_segments(entry, area.data_ptr())
    stages = _stages(layers)
    groups = [
        GroupGeometry(tuple(run for layer in stage for run in layers[layer]), num_pages)
        for stage in stages
    ]
    return PoolMap(entry, area, Geometry(tuple(groups)), stages, rows_per_page)


def _layer_segments(entry: DevicePoolEntry, start: int) -> dict[int, list[ByteRun]]:
    """Return each layer's byte runs of a page, in the order in which layers run."""
    found: dict[int, list[ByteRun]] = {}
    for layer, mapped in sorted(entry.layer_mapping.items()):
        numbers = (mapped,) if isinstance(mapped, int) else mapped
        metas = [component[number] for component in entry.buffer_meta for number in numbers]
        found[layer] = [ByteRun(address - start, size, size) for address, _, size in metas]
    if sum(map(len, found.values())) != len(entry.kv_buffer):
        raise Incompatible(f"pool {entry.name} has buffers that do not belong to one layer")
    return found


def _stages(layers: dict[int, list[ByteRun]]) -> tuple[tuple[int, ...], ...]:
    numbers = tuple(layers)
    sizes = [sum(run.length for run in layers[layer]) for layer in numbers]
    for together in range(-(-len(numbers) // _MOST_STAGES), len(numbers) + 1):
        starts = range(0, len(numbers), together)
        largest = max(sum(sizes[start : start + together]) for start in starts)
        slot = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if len(starts) * slot <= (1 + _MOST_PADDING) * sum(sizes):
            break
    return tuple(numbers[start : start + together] for start in starts)


def window_ends(there: Iterable[bool], window: int) -> set[int]:
    """Return the prefix lengths, in pages, whose last ``window`` pages (or all) are stored.

    A sliding window or a Mamba state is needed only at the end of a prefix. It is stored only where
    a node of the tree ended, so the lengths have gaps.
    """
    ends: set[int] = set()
    run = 0
    for length, is_there in enumerate(there, start=1):
        run = run + 1 if is_there else 0
        if run >= min(window, length):
            ends.add(length)
    return ends
