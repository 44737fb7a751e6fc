"""The tiers below a storage backend's host memory: under which formats a rank's pages are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_lora, get_model, get_parallel, get_spec

from kvconnect import versions
from kvconnect.cache.keys import group_of
from kvconnect.cache.model_identity import model_folder, weights_name
from kvconnect.cache.record_format import fingerprint
from kvconnect.config import Config
from kvconnect.engines.sglang.records import Records
from kvconnect.errors import ConfigError
from kvconnect.tiers.backends import Store, make_remote, make_store, make_tiers
from kvconnect.transport.security import record_keys
from kvconnect.types import Tier

_SETTINGS = ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args")
"""Of SGLang, that change what the same weights make of the same tokens."""


def make_stores(
    config: Config, ranks: HiCacheStorageConfig, records: Records | None
) -> dict[Tier, Store]:
    """Return this rank's tiers below host memory, the fastest first. ``records``: as which any
    engine can read the pages of the remote tier, if they go by their tokens.

    Raises:
        ConfigError: a tier cannot be used as it is set.
    """
    if not (config.tiers.disk or config.tiers.remote):
        return {}
    if config.tiers.spill != "all":
        fix = 'use "all": HiCache says what is stored, with --hicache-write-policy'
        raise ConfigError("spill", config.tiers.spill, fix)
    fields = stored_format(ranks)
    if records:  # the names of pages do not say it then
        fields["page"] = f"{records.form.fingerprint.hex()} {records.layout}"
        fields["share"] = f"{ranks.tp_rank} of {ranks.tp_size}"
    name = fingerprint(fields)
    makers: dict[Tier, Callable[[], Store]] = {}
    if config.tiers.disk:
        makers[Tier.DISK] = partial(
            make_store, "disk", _disk_settings(config.tiers.disk, fields), name
        )
    if config.tiers.remote:
        makers[Tier.REMOTE] = partial(_make_remote, config, name, records)
    return make_tiers(makers)


def _make_remote(config: Config, name: bytes, records: Records | None) -> Store:
    from kvconnect.tiers.backends.head_sharded import HeadShardedStore

    make = partial(make_remote, config.tiers.remote, keys=record_keys(config.network))
    if records is None:
        return make(name)
    remote = make(records.form.fingerprint)
    return HeadShardedStore(remote, [records.units], group_of)


def stored_format(ranks: HiCacheStorageConfig) -> dict[str, Any]:
    """Return what stored pages depend on beside their tokens, their pool and how tensor-parallel
    ranks divide it.

    It outlives the engine, so models and adapters are told apart by their weights, not by their
    names. How a host pool arranges a page is SGLang's own affair, so its version is part of it.
    """
    model = get_model()
    path, revision = str(model.model_path), model.revision
    settings: dict[str, Any] = {name: str(getattr(model, name)) for name in _SETTINGS}
    return {
        **settings,
        "model": path.rstrip("/").rpartition("/")[2],
        "record": 1,
        "sglang": versions.installed("sglang"),
        "weights": weights_name(path, revision, model.load_format == "dummy"),
        "configuration": _digest(model_folder(path, revision), "config.json"),
        "scales": _digest(Path(), model.quantization_param_path or ""),
        "draft": _draft(),
        "adapters": _adapters(),
        "pp": f"{ranks.pp_rank} of {ranks.pp_size}",
        "cp": f"{ranks.attn_cp_rank} of {ranks.attn_cp_size}",
        "dcp": f"{ranks.dcp_rank} of {ranks.dcp_size}",
    }


def _disk_settings(settings: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Each rank has a folder of its own."""
    for name in ("owner", "about"):
        if name in settings:
            raise ConfigError(name, settings[name], "each rank sets its own: leave it out")
    parallel = get_parallel()
    about = {name: str(value) for name, value in fields.items()}
    # Ranks of the attention, which HiCache counts by, come again in every data-parallel group.
    owner = f"dp{parallel.dp_rank or 0}-tp{parallel.tp_rank}-pp{parallel.pp_rank}"
    return {**settings, "owner": owner, "about": about}


def _draft() -> str:
    """Return the weights of the draft model, whose pages are stored like the model's own."""
    spec = get_spec()
    path = spec.speculative_draft_model_path
    if not path:
        return str(spec.speculative_algorithm or "")
    dummy = spec.speculative_draft_load_format == "dummy"
    weights = weights_name(str(path), spec.speculative_draft_model_revision, dummy)
    return f"{spec.speculative_algorithm} {weights}"


def _adapters() -> list[list[str]]:
    """Return the adapters given at the start: SGLang names their pages by name and path. One that
    is loaded later gets a name that no other process knows."""
    lora = get_lora()
    found = []
    for adapter in (lora.lora_paths or ()) if lora.enable_lora else ():
        path = str(adapter.lora_path)
        configuration = _digest(model_folder(path, None), "adapter_config.json")
        weights = weights_name(path, None, dummy=False)
        found.append([str(adapter.lora_name), path, weights, configuration])
    return sorted(found)


def _digest(folder: Path | None, name: str) -> str:
    """Return a digest of a file's bytes, "" if there is no such file."""
    if folder is None or not (folder / name).is_file():
        return ""
    return blake2b((folder / name).read_bytes(), digest_size=16).hexdigest()
