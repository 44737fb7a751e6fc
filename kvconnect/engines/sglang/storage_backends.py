"""Lower tiers of the storage backend, and the formats of a rank's pages in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.runtime_context import get_lora, get_model, get_parallel, get_spec

from kvconnect import engine_versions
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.cache.keys import group_of
from kvconnect.cache.model_identity import model_folder, weights_name
from kvconnect.cache.record_format import fingerprint
from kvconnect.engines.sglang import model_format, weights
from kvconnect.engines.sglang.runtime_context import PORT, rank_number
from kvconnect.engines.sglang.shared_records import Records
from kvconnect.errors import ConfigError
from kvconnect.offload.host_arena import HostArena
from kvconnect.settings import Settings
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import RemoteSettings
from kvconnect.tiers.backends import Store, make_disk, make_remote, make_tiers
from kvconnect.tiers.peers.peer_agent import SharedBlocks, start_agent
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.transport.security import record_keys
from kvconnect.types import Tier

if TYPE_CHECKING:
    from kvconnect.tiers.backends.record_seals import RecordKeys

_SETTINGS = ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args")
"""SGLang's settings that change the KV of the same weights and tokens."""


def make_stores(
    settings: Settings,
    ranks: HiCacheStorageConfig,
    records: Records | None,
    memory: HostArena,
    pools: Mapping[PoolName, Any],
) -> tuple[dict[Tier, Store], PeerSource | None]:
    """Return this rank's lower tiers, and other engines to read from. ``records``: the shared
    tiers' pages as any engine can read them, None if only servers like this one can. ``memory``:
    the slots for the pages of ``pools``.

    Raises:
        ConfigError: a tier cannot be used as it is set.
    """
    if not settings.has_tiers:
        return {}, None
    if settings.spill != "all":
        fix = 'use "all": HiCache says what is stored, with --hicache-write-policy'
        raise ConfigError("spill", settings.spill, fix)
    fields = stored_format(ranks)
    if records:  # page names do not cover these then
        fields["page"] = f"{records.form.fingerprint.hex()} {records.layout}"
        fields["share"] = f"{ranks.tp_rank} of {ranks.tp_size}"
    name = fingerprint(fields)

    def peers(sharing: PeerSettings) -> PeerSource:
        blocks = _shared_blocks(sharing, fields, records, memory, pools)
        return PeerSource(start_agent(settings, blocks, rank_number(), PORT), blocks)

    makers: dict[Tier, Callable[[], Store]] = {}
    if settings.disk is not None:
        makers[Tier.DISK] = partial(make_disk, settings.disk, _owner(), fields, name)
    if settings.remote is not None:
        keys = record_keys(settings)
        makers[Tier.REMOTE] = partial(_make_remote, settings.remote, keys, name, records)
    sharing = settings.cache_peers
    return make_tiers(makers, None if sharing is None else partial(peers, sharing))


def check_one_pool(sharing: PeerSettings, pools: Mapping[PoolName, Any]) -> None:
    """Raise :class:`ConfigError` if there are several pools."""
    if len(pools) > 1:
        fix = "remove it: of a model with several pools, peers cannot read all that it needs"
        raise ConfigError("cache_peers", msgspec.to_builtins(sharing), fix)


def _shared_blocks(
    sharing: PeerSettings,
    fields: Mapping[str, Any],
    records: Records | None,
    memory: HostArena,
    pools: Mapping[PoolName, Any],
) -> SharedBlocks:
    """Return what other engines may read: records, or the first pool's pages as they are.

    Raises:
        ConfigError: there are several pools, or ``page_tokens`` is another page size.
    """
    check_one_pool(sharing, pools)
    asked = sharing.page_tokens
    if asked not in (0, page := pools[PoolName.KV].page_size):
        fix = f"remove it or use the page size, {page}: SGLang has no names for parts of pages"
        raise ConfigError("page_tokens", asked, fix)
    layout = fingerprint(fields)
    if records is not None:
        units, form = [[records.units]], records.form.fingerprint
        return SharedBlocks(memory, units, form, layout, weights.identity())
    nbytes = pools[PoolName.KV].get_data_page(0, flat=True).nbytes
    whole = (HeadUnit(0, ((0, nbytes),)),)
    form = fingerprint({**fields, "bytes": nbytes})
    return SharedBlocks(memory, [[whole]], form, layout, weights.identity())


def _make_remote(
    settings: RemoteSettings, keys: RecordKeys | None, name: bytes, records: Records | None
) -> Store:
    from kvconnect.tiers.backends.head_sharded import HeadShardedStore

    make = partial(make_remote, settings, keys=keys)
    if records is None:
        return make(name)
    remote = make(records.form.fingerprint)
    return HeadShardedStore(remote, [records.units], group_of)


def stored_format(ranks: HiCacheStorageConfig) -> dict[str, Any]:
    """Return what stored pages depend on besides their tokens, their pool and its division among
    tensor-parallel ranks.

    The format outlives the engine, so it identifies models and adapters by their weights, not their
    names. It has SGLang's version because the layout of a host page is internal to SGLang.
    """
    model = get_model()
    path, revision = str(model.model_path), model.revision
    settings: dict[str, Any] = {name: str(getattr(model, name)) for name in _SETTINGS}
    return {
        **settings,
        "model": path.rstrip("/").rpartition("/")[2],
        "record": 1,
        "sglang": engine_versions.installed("sglang"),
        "weights": _weights(path, revision, model.load_format),
        "configuration": _digest(model_folder(path, revision), "config.json"),
        "scales": model_format.scales(),
        "draft": _draft(),
        "adapters": _adapters(),
        "pp": f"{ranks.pp_rank} of {ranks.pp_size}",
        "cp": f"{ranks.attn_cp_rank} of {ranks.attn_cp_size}",
        "dcp": f"{ranks.dcp_rank} of {ranks.dcp_size}",
    }


def _owner() -> str:
    """Return the name of this rank's folder on a disk."""
    parallel = get_parallel()
    # HiCache's numbers are those of attention ranks, which repeat in each data-parallel group.
    return f"dp{parallel.dp_rank or 0}-tp{parallel.tp_rank}-pp{parallel.pp_rank}"


def _draft() -> str:
    """Return the draft model's algorithm and weights: its pages are stored like the model's own."""
    spec = get_spec()
    path = spec.speculative_draft_model_path
    if not path:
        return str(spec.speculative_algorithm or "")
    name = _weights(str(path), spec.speculative_draft_model_revision, weights.draft_format())
    return f"{spec.speculative_algorithm} {name}"


def _weights(path: str, revision: str | None, load_format: Any) -> str:
    """Return a name for a model's weights, which SGLang may keep at a place of its own. Names of
    pages cover those that are not of the model's files."""
    if not weights.are_of_files(load_format):
        return f"not of files: {load_format}"
    dummy, mistral = load_format == "dummy", load_format == "mistral"
    cache = get_model().download_dir
    return weights_name(path, revision, dummy, cache=cache, consolidated=mistral)


def _adapters() -> list[list[str]]:
    """Return the adapters given at the start, by whose name and path SGLang names pages. An adapter
    loaded later gets a name that no other process knows."""
    lora = get_lora()
    found = []
    for adapter in (lora.lora_paths or ()) if lora.enable_lora else ():
        path = str(adapter.lora_path)
        configuration = _digest(model_folder(path, None), "adapter_config.json")
        weights = weights_name(path, None, dummy=False)
        found.append([str(adapter.lora_name), path, weights, configuration])
    return sorted(found)


def _digest(folder: Path | None, name: str) -> str:
    """Return a digest of a model's file, "" if there is none."""
    return "" if folder is None else model_format.file_digest(folder / name)
