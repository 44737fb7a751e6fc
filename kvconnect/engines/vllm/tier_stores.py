"""Makes the stores of a vLLM worker's secondary tiers, and the formats of the blocks in them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect.cache.head_shards import HeadUnit, page_units, unit_heads, units
from kvconnect.cache.keys import group_of
from kvconnect.cache.layout import Geometry
from kvconnect.cache.model_identity import weights_name
from kvconnect.cache.record_format import fingerprint
from kvconnect.engines.vllm import handoff_pages, translate
from kvconnect.engines.vllm.block_names import named_by_tokens, shared_pages
from kvconnect.engines.vllm.shared_records import records_for_all
from kvconnect.engines.vllm.weights import FILE_FORMATS, draft_loader, prefers_consolidated
from kvconnect.errors import ConfigError, Incompatible, Refused
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.topology import head_range
from kvconnect.settings import Settings
from kvconnect.settings.stores import DiskSettings, RemoteSettings
from kvconnect.tiers.backends import Store, make_disk, make_remote, make_tiers
from kvconnect.tiers.peers.peer_agent import SharedBlocks, start_agent
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.tiers.worker import TierWorker
from kvconnect.transport.security import record_keys
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.types import Tier

if TYPE_CHECKING:
    from kvconnect.tiers.backends.record_seals import RecordKeys

logger = logging.getLogger(__name__)


class _Cache(NamedTuple):
    """Everything that determines the bytes of a block."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    kv_caches: Mapping[str, torch.Tensor]
    geometry: Geometry


def make_lower_tiers(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    kv_caches: Mapping[str, torch.Tensor],
    host: tuple[HostArena, Geometry],
    port: SharedPort,
) -> TierWorker | None:
    """Return a worker's secondary tiers; None if none is configured. ``port``: the process's own.

    Raises:
        ConfigError: a tier cannot be used with its settings.
    """
    if not settings.has_tiers:
        return None
    store, geometry = host
    cache = _Cache(vllm_config, kv_cache_config, kv_caches, geometry)
    fields = stored_format(vllm_config, kv_cache_config, kv_caches)
    parallel = vllm_config.parallel_config
    rank = parallel.rank

    def peers() -> PeerSource:
        pages = shared_pages(settings, translate.cache_groups(kv_cache_config))
        shared = _shared_form(cache, fields, pages)
        layout = fingerprint(_own_fields(cache, fields))
        blocks = SharedBlocks(store, shared.pages(geometry, pages), shared.fingerprint, layout)
        first = parallel.data_parallel_index * parallel.world_size
        return PeerSource(start_agent(settings, blocks, first + rank, port), blocks)

    makers: dict[Tier, Callable[[], Store]] = {}
    if settings.disk is not None:
        makers[Tier.DISK] = partial(_make_disk, cache, fields, settings.disk)
    if settings.remote is not None:
        keys = record_keys(settings)
        makers[Tier.REMOTE] = partial(_make_remote, cache, fields, settings.remote, keys)
    stores, others = make_tiers(makers, peers if settings.cache_peers is not None else None)
    return TierWorker(stores, store, geometry, rank == 0, settings.wait_s, peers=others)


def stored_format(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the fields that stored blocks depend on, besides their tokens and the ranks' division.

    Stored blocks outlive the engine, so the weights identify the model, not its name.
    """
    model, loader = vllm_config.model_config, vllm_config.load_config
    return {
        **translate.handoff_format(vllm_config, kv_cache_config, kv_caches),
        "record": 1,
        "weights": _weights(model, loader),
        "quantization": translate.online_quantization(model) or str(model.quantization),
        "draft": _draft(vllm_config),
        "names": _names(vllm_config, kv_cache_config),
        "blocks": [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
    }


def _names(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return how blocks are named: ``tokens``, or the algorithm of vLLM's hashes."""
    if named_by_tokens(translate.cache_groups(kv_cache_config)):
        return "tokens"
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def _draft(config: VllmConfig) -> str:
    """Return the draft model's identity: its layers may be cached with the model's own."""
    speculative = config.speculative_config
    model = getattr(speculative, "draft_model_config", None)
    if speculative is None or model is None:
        return ""
    return f"{speculative.method} {_weights(model, draft_loader(config))}"


def _weights(model: ModelConfig, loader: LoadConfig) -> str:
    """Return the identity of the weights that the engine loads for a model."""
    name = weights_name(
        str(model.model),
        model.revision,
        loader.load_format == "dummy",
        cache=loader.download_dir,
        consolidated=prefers_consolidated(loader),
    )
    if loader.load_format in FILE_FORMATS:
        return name
    extra = json.dumps(loader.model_loader_extra_config, sort_keys=True, default=str)
    source = hashlib.sha256(extra.encode()).hexdigest()[:16]  # it may hold a store's secrets
    return f"{name} {loader.load_format} {source}"


def _make_disk(cache: _Cache, fields: Mapping[str, Any], settings: DiskSettings) -> Store:
    """Return the worker's own disk store, which stores slots unchanged."""
    parallel = cache.vllm_config.parallel_config
    owner = f"dp{parallel.data_parallel_index}-rank{parallel.rank}"
    return make_disk(settings, owner, fields, fingerprint(_own_fields(cache, fields)))


def _make_remote(
    cache: _Cache, fields: Mapping[str, Any], settings: RemoteSettings, keys: RecordKeys | None
) -> Store:
    """Return the remote store, shared as widely as the cache allows: with SGLang if it has only K
    and V, else with vLLM of any tensor parallelism, else with engines of the same ranks."""
    from kvconnect.tiers.backends.head_sharded import HeadShardedStore

    shared = _shared_form(cache, fields)
    store = make_remote(settings, shared.fingerprint, keys=keys)
    return HeadShardedStore(store, shared.layouts, group_of) if shared.layouts else store


class _SharedForm(NamedTuple):
    """The form in which engines share blocks: the units of a block per group, empty for whole
    blocks. ``lengths``: bytes of a block of one head, per layer, where there is one group."""

    fingerprint: bytes
    layouts: Sequence[Sequence[HeadUnit]]
    lengths: Sequence[int] = ()

    def pages(self, geometry: Geometry, pages: int) -> Sequence[Sequence[Sequence[HeadUnit]]]:
        """Return, per group, the units of each page of a block; a whole block is one unit."""
        if pages > 1:
            return [page_units(self.layouts[0], self.lengths, pages)]
        blocks = (group.block_bytes for group in geometry.groups)
        whole = [(HeadUnit(0, ((0, nbytes),)),) for nbytes in blocks]
        return [[units] for units in self.layouts or whole]


def _shared_form(cache: _Cache, fields: Mapping[str, Any], pages: int = 1) -> _SharedForm:
    """Return the form that the most other engines can use. It is that of an engine whose blocks
    are one of ``pages`` pages of a block here.

    Raises:
        ConfigError: a block cannot be divided into pages.
    """
    config = cache.vllm_config
    tokens = cache.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size // pages
    try:
        form, layout = records_for_all(
            config, cache.kv_cache_config, cache.kv_caches, cache.geometry
        )
        lengths = [form.tokens * sum(form.row)] * len(form.layers)
        return _SharedForm(replace(form, tokens=tokens).fingerprint, [layout], lengths)
    except Incompatible as error:
        logger.info("SGLang cannot use what is stored here: %s", error)
    try:
        layouts, lengths, format_of_units = _units(cache, pages)
    except (Incompatible, Refused) as error:
        if pages > 1:
            raise ConfigError("page_tokens", tokens, f"remove it: {error}") from error
        logger.info("only engines with the same ranks share blocks: %s", error)
        return _SharedForm(fingerprint(_own_fields(cache, fields)), [])
    shared = {**fields, "stage": _stage(config), "units": format_of_units}
    if pages > 1:
        shared["blocks"] = [tokens]
    return _SharedForm(fingerprint(shared), layouts, lengths)


def _own_fields(cache: _Cache, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the bytes of a whole slot depend on."""
    return {**fields, "rank": _rank(cache.vllm_config), "layout": _layout(cache)}


def _units(
    cache: _Cache, pages_per_block: int
) -> tuple[list[Sequence[HeadUnit]], list[int], list[list[Any]]]:
    """Return, per group, the units of a block; the bytes of a block of one head, per layer; and per
    group the format of the units' bytes, of one page of a block if it has several."""
    if any(handoff_pages.whole_groups(cache.kv_cache_config, cache.kv_caches)):
        raise Incompatible("blocks are kept as a whole")
    pages = handoff_pages.handoff_pages(cache.kv_cache_config, cache.kv_caches)
    apart = translate.can_split_pages(cache.vllm_config, cache.kv_cache_config, cache.kv_caches)
    if pages_per_block > 1 and not apart:
        raise Incompatible("the tokens of a block cannot be told apart")
    parallel = cache.vllm_config.parallel_config
    tp = parallel.tensor_parallel_size
    layouts: list[Sequence[HeadUnit]] = []
    lengths: list[int] = []
    formats = []
    groups = cache.kv_cache_config.kv_cache_groups
    for group, layers, geometry in zip(groups, pages, cache.geometry.groups, strict=True):
        total = handoff_pages.total_kv_heads(cache.vllm_config, group.kv_cache_spec)
        heads = head_range(parallel.rank % tp, tp, total)  # ranks may share a head
        layouts.append(units(geometry, [(layer,) for layer in layers], heads, total, apart))
        unit = unit_heads(total, layers[0].heads)
        page = 1 if apart else layers[0].tokens
        names = [layer.name for layer in layers]
        rows = handoff_pages.row_bytes(layers)
        tokens = group.kv_cache_spec.block_size
        lengths += [tokens * layer.row_bytes for layer in layers]
        formats.append([tokens // pages_per_block, total, unit, page, rows, names])
    return layouts, lengths, formats


def _layout(cache: _Cache) -> list[Any]:
    """Return how a slot's bytes map to the device's: each layer's view, and the byte runs."""
    there = sorted(cache.kv_caches.items(), key=lambda item: item[1].storage_offset())
    views = [[name, list(view.shape[1:]), list(view.stride()[1:])] for name, view in there]
    runs = [[run.length for run in group.segments] for group in cache.geometry.groups]
    return [views, runs]


def _rank(config: VllmConfig) -> str:
    parallel = config.parallel_config
    return f"{parallel.rank} of {parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size}"


def _stage(config: VllmConfig) -> str:
    """Return a worker's pipeline stage. Layer names tell it too, except for MLA's single head."""
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return f"{parallel.rank // tp % pp} of {pp}"
