"""Records of SGLang's pages that vLLM reads too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import (
    MHATokenToKVPoolHost,
)
from sglang.srt.runtime_context import get_lora, get_model, get_server_args, get_spec

from kvconnect.cache.head_shards import HeadUnit, Rows, unit_heads, units
from kvconnect.cache.layout import ByteRun, GroupGeometry
from kvconnect.cache.model_identity import model_name
from kvconnect.cache.pages import LayerPages
from kvconnect.cache.record_format import RecordFormat
from kvconnect.engines.sglang import weights
from kvconnect.errors import Incompatible


class Records(NamedTuple):
    """How this rank's pages become records of ``form``, which is the same in all engines. ``units``
    say where a page of the host pool's ``layout`` has their parts."""

    form: RecordFormat
    units: Sequence[HeadUnit]
    layout: str


_AXES = {"layer_first": "LNH", "page_first_direct": "LNH", "page_first": "NLH", "page_head": "HNL"}
"""Layers (L), tokens (N) and heads (H) of a page's K, and then of its V, outermost first."""


def records_for_all(pools: Mapping[PoolName, Any], ranks: HiCacheStorageConfig) -> Records:
    """Return this rank's pages as records that vLLM reads too.

    Raises:
        Incompatible: only servers like this one can read its pages; the message says why.
    """
    pool, model = pools[PoolName.KV], get_model()
    for what, there in (
        ("several pools", len(pools) > 1),
        (f"a pool of {type(pool).__name__}", type(pool) is not MHATokenToKVPoolHost),
        (f"layout {pool.layout}", pool.layout not in _AXES),
        ("quantized weights", model.quantization),
        ("a draft model", get_spec().speculative_algorithm),
        ("adapters, whose pages go by their names", get_lora().enable_lora),
        ("weights without files", model.load_format == "dummy"),
        ("weights of other files or servers", not weights.are_of_files(model.load_format)),
        ("context parallelism", ranks.attn_cp_size > 1 or ranks.dcp_size > 1),
    ):
        if there:
            raise Incompatible(what)
    overrides = json.loads(model.json_model_override_args or "{}")
    name = model_name(
        str(model.model_path),
        model.revision,
        overrides,
        cache=model.download_dir,
        consolidated=model.load_format == "mistral",
    )
    config = ModelConfig.from_server_args(get_server_args())
    if "longrope" in config.hf_config.to_json_string():
        raise Incompatible("LongRoPE, which rotates the same tokens in two ways")
    if pool.dtype != config.dtype:
        raise Incompatible(f"K and V are kept as {pool.dtype}, computed as {config.dtype}")
    total = config.get_total_num_kv_heads()
    width = pool.head_dim * pool.dtype.itemsize
    form = RecordFormat(
        model=name,
        dtype=str(pool.dtype).removeprefix("torch."),
        layers=tuple(range(pool.start_layer, pool.end_layer)),
        tokens=pool.page_size,
        heads=total,
        unit=unit_heads(total, pool.head_num),
        row=(width, width),
    )
    rows = _rows(pool, width)
    nbytes = pool.get_data_page(0, flat=True).nbytes
    first = ranks.tp_rank * total // ranks.tp_size
    group = GroupGeometry((ByteRun(0, nbytes, nbytes),), 1)
    found = units(group, rows, (first, first + pool.head_num), total)
    return Records(form, found, str(pool.layout))


def _rows(pool: Any, width: int) -> list[Rows]:
    """Return the rows of a flat page, layer by layer. All K lies before all V."""
    sizes = {"L": pool.layer_num, "N": pool.page_size, "H": pool.head_num}
    steps, step = {}, width
    for axis in reversed(_AXES[pool.layout]):
        steps[axis] = step
        step *= sizes[axis]
    return [
        tuple(
            LayerPages(
                name=f"{part} of layer {layer}",
                offset=number * step + layer * steps["L"],
                page_stride=2 * step,
                head_stride=steps["H"],
                token_stride=steps["N"],
                heads=pool.head_num,
                tokens=pool.page_size,
                row_bytes=width,
            )
            for number, part in enumerate("KV")
        )
        for layer in range(pool.layer_num)
    ]
