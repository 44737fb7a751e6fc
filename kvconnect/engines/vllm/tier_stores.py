"""A vLLM worker's tiers below host memory: under which formats and names its blocks are kept."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.head_shards import HeadUnit, unit_heads, units
from kvconnect.cache.keys import group_of, scope_of, seed_of, tenant_of
from kvconnect.cache.layout import Geometry
from kvconnect.cache.model_identity import model_name, weights_name
from kvconnect.cache.record_format import fingerprint, page_names
from kvconnect.config import Config
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.records import records_for_all
from kvconnect.engines.vllm.translate import is_of_tokens
from kvconnect.errors import ConfigError, Incompatible, Refused
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.topology import head_range
from kvconnect.tiers import LookupRequest
from kvconnect.tiers.backends import Store, make_remote, make_store, make_tiers
from kvconnect.tiers.worker import TierWorker
from kvconnect.transport.security import record_keys
from kvconnect.types import Tier

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class _Cache(NamedTuple):
    """All that says what a block's bytes are."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    kv_caches: Mapping[str, torch.Tensor]
    geometry: Geometry


def make_lower_tiers(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: Config,
    kv_caches: Mapping[str, torch.Tensor],
    host: tuple[HostArena, Geometry],
) -> TierWorker | None:
    """Return a worker's tiers below its host tier, None if there are none.

    Raises:
        ConfigError: a tier cannot be used as it is set.
    """
    if not (config.tiers.disk or config.tiers.remote):
        return None
    store, geometry = host
    cache = _Cache(vllm_config, kv_cache_config, kv_caches, geometry)
    fields = stored_format(vllm_config, kv_cache_config, kv_caches)
    makers: dict[Tier, Callable[[], Store]] = {}
    if config.tiers.disk:
        makers[Tier.DISK] = partial(_make_disk, cache, fields, config.tiers.disk)
    if config.tiers.remote:
        makers[Tier.REMOTE] = partial(_make_remote, cache, fields, config)
    stores = make_tiers(makers)
    speaks = vllm_config.parallel_config.rank == 0
    return TierWorker(stores, store, geometry, speaks, config.tiers.wait_s)


def stored_format(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return what stored blocks depend on beside their tokens and how ranks divide them.

    It outlives the engine, so models are told apart by their weights, not by their name.
    """
    model = vllm_config.model_config
    dummy = vllm_config.load_config.load_format == "dummy"
    return {
        **translate.handoff_format(vllm_config, kv_cache_config, kv_caches),
        "record": 1,
        "weights": weights_name(str(model.model), model.revision, dummy),
        "quantization": str(model.quantization),
        "draft": _draft(vllm_config.speculative_config),
        "names": _names(vllm_config, kv_cache_config),
        "blocks": [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
    }


def _names(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return what blocks are called by: their tokens, or vLLM's hashes."""
    if named_by_tokens(translate.cache_groups(kv_cache_config)):
        return "tokens"
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def _draft(config: Any) -> str:
    """Return the weights of the draft model, whose layers may be cached with the model's own."""
    model = getattr(config, "draft_model_config", None)
    if model is None:
        return ""
    return f"{config.method} {weights_name(str(model.model), model.revision, dummy=False)}"


def _make_disk(cache: _Cache, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> Store:
    """Each worker has a folder of its own, with slots as they are."""
    for name in ("owner", "about"):
        if name in settings:
            raise ConfigError(name, settings[name], "each worker sets its own: leave it out")
    parallel = cache.vllm_config.parallel_config
    own = {**fields, "rank": _rank(cache.vllm_config), "layout": _layout(cache)}
    about = {name: str(value) for name, value in fields.items()}
    owner = f"dp{parallel.data_parallel_index}-rank{parallel.rank}"
    return make_store("disk", {**settings, "owner": owner, "about": about}, fingerprint(own))


def _make_remote(cache: _Cache, fields: Mapping[str, Any], config: Config) -> Store:
    """Records that ranks of other tensor parallelism read, if the cache can be cut into them; and
    SGLang, if there is nothing in it but K and V."""
    from kvconnect.tiers.backends.head_sharded import HeadShardedStore

    make = partial(make_remote, config.tiers.remote, keys=record_keys(config.network))
    try:
        form, layout = records_for_all(
            cache.vllm_config, cache.kv_cache_config, cache.kv_caches, cache.geometry
        )
        return HeadShardedStore(make(form.fingerprint), [layout], group_of)
    except Incompatible as error:
        logger.info("SGLang cannot use what is stored here: %s", error)
    try:
        layouts, format_of_units = _units(cache)
    except (Incompatible, Refused) as error:
        logger.info("only engines with the same ranks share blocks: %s", error)
        own = {**fields, "rank": _rank(cache.vllm_config), "layout": _layout(cache)}
        return make(fingerprint(own))
    shared = {**fields, "stage": _stage(cache.vllm_config), "units": format_of_units}
    return HeadShardedStore(make(fingerprint(shared)), layouts, group_of)


def _units(cache: _Cache) -> tuple[list[Sequence[HeadUnit]], list[list[Any]]]:
    """Return the units of a block of each group, and what their bytes depend on."""
    pages = translate.handoff_pages(cache.kv_cache_config, cache.kv_caches)
    apart = translate.can_split_pages(cache.vllm_config, cache.kv_caches)
    parallel = cache.vllm_config.parallel_config
    tp = parallel.tensor_parallel_size
    layouts: list[Sequence[HeadUnit]] = []
    formats = []
    groups = cache.kv_cache_config.kv_cache_groups
    for group, layers, geometry in zip(groups, pages, cache.geometry.groups, strict=True):
        total = translate.total_kv_heads(cache.vllm_config, group.kv_cache_spec)
        heads = head_range(parallel.rank % tp, tp, total)  # also where ranks share a head
        layouts.append(units(geometry, [(layer,) for layer in layers], heads, total, apart))
        unit = unit_heads(total, layers[0].heads)
        page = 1 if apart else layers[0].tokens
        names = [layer.name for layer in layers]
        rows = layers[0].row_bytes
        formats.append([group.kv_cache_spec.block_size, total, unit, page, rows, names])
    return layouts, formats


def _layout(cache: _Cache) -> list[Any]:
    """Return how a slot's bytes come from the device's, layer by layer."""
    there = sorted(cache.kv_caches.items(), key=lambda item: item[1].storage_offset())
    views = [[name, list(view.shape[1:]), list(view.stride()[1:])] for name, view in there]
    runs = [[run.length for run in group.segments] for group in cache.geometry.groups]
    return [views, runs]


def _rank(config: VllmConfig) -> str:
    parallel = config.parallel_config
    return f"{parallel.rank} of {parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size}"


def _stage(config: VllmConfig) -> str:
    """Return which layers a worker has; the names of layers say it, but for MLA's one head."""
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return f"{parallel.rank // tp % pp} of {pp}"


# What vLLM's blocks are called below the host tier: by their tokens, so that others find them.


MOST_ADAPTERS = 4096  # remembered; far more than an engine has loaded
_NONE: Mapping[bytes, bytes] = MappingProxyType({})


def named_by_tokens(groups: Sequence[CacheGroup]) -> bool:
    """Whether blocks go by their tokens: where there is one size of them. Others, and prompts with
    images or embeddings, go by vLLM's hashes."""
    return len(groups) == 1 and groups[0].is_full


class Names:
    """Names of live requests' blocks. Owned by the scheduler's thread."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._tokens = groups[0].block_tokens if named_by_tokens(groups) else 0
        self._prefixes: dict[str, bytes] = {}
        self._names: dict[str, dict[bytes, bytes]] = {}
        # What tells them apart, by name, number and path: vLLM numbers what it loads anew.
        # Only those used last. The files of one that was forgotten may be others by now than those
        # that were loaded, so from then on its blocks are for this engine alone.
        self._forgotten = 0  # the highest number of one
        self._adapters: OrderedDict[tuple[str, int, str], bytes] = OrderedDict()
        self._generation = b""

    def wanted(
        self, request: Request, hashes: Sequence[Sequence[bytes]], tokens: tuple[int, int]
    ) -> LookupRequest:
        """Return what a request could use of its tokens [start, end)."""
        return LookupRequest(
            hashes, *tokens, self._prefix(request), self._chain(request, hashes[0])
        )

    def forget(self, req_id: str) -> None:
        """The request is over."""
        self._prefixes.pop(req_id, None)
        self._names.pop(req_id, None)

    def reset(self, generation: bytes) -> None:
        """Blocks have names of another ``generation`` from now on."""
        self._generation = generation
        self._prefixes.clear()

    def _prefix(self, request: Request) -> bytes:
        """Return tenant and scope of a request, which its keys begin with."""
        known = self._prefixes.get(request.request_id)
        if known is None:
            lora = request.lora_request
            adapter = self._adapter(lora) if lora else b""
            known = tenant_of(request.cache_salt or "") + scope_of(adapter, self._generation)
            self._prefixes[request.request_id] = known
        return known

    def _adapter(self, lora: LoRARequest) -> bytes:
        """Return what tells an adapter from others: its files. Without any that can be read, it is
        told from all that other engines have."""
        loaded = lora.lora_name, lora.lora_int_id, lora.lora_path
        known = self._adapters.get(loaded)
        if known is None:
            try:
                if lora.lora_int_id <= self._forgotten:
                    raise Incompatible("it was not used for long")
                known = model_name(lora.lora_path, None, {}, "adapter_config.json").encode()
            except (Incompatible, OSError) as error:
                logger.warning("blocks of adapter %s are for this engine alone: %s", loaded, error)
                known = os.urandom(16)
            self._adapters[loaded] = known
            if len(self._adapters) > MOST_ADAPTERS:
                (_, number, _), _ = self._adapters.popitem(last=False)
                self._forgotten = max(self._forgotten, number)
        self._adapters.move_to_end(loaded)
        return known

    def _chain(self, request: Request, hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the names of a request's full blocks, by vLLM's hash."""
        if not self._tokens or request.mm_features or not is_of_tokens(request):
            return _NONE
        known = self._names.setdefault(request.request_id, {})
        done = len(known)
        if done < len(hashes):
            if done and hashes[done - 1] not in known:  # it has other tokens now
                known.clear()
                done = 0
            parent = known[hashes[done - 1]] if done else seed_of(request.cache_salt or "")
            tokens = request.all_token_ids[done * self._tokens : len(hashes) * self._tokens]
            known.update(zip(hashes[done:], page_names(tokens, self._tokens, parent), strict=True))
        return known
