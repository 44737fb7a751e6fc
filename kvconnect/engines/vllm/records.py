"""Which of vLLM's blocks any engine can use, and how their bytes become records for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect.engines.model_files import model_name
from kvconnect.engines.vllm import translate
from kvconnect.errors import Incompatible
from kvconnect.format import RecordFormat
from kvconnect.geometry import Geometry
from kvconnect.slices import Unit, unit_heads, units


def records_for_all(
    config: VllmConfig,
    cache: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    geometry: Geometry,
) -> tuple[RecordFormat, Sequence[Unit]]:
    """Return the format of this worker's blocks as SGLang has it too, and their units.

    Raises:
        Incompatible: only engines of vLLM can use them. The message says why.
    """
    model = config.model_config
    overrides = model.hf_overrides
    for what, there in (
        ("quantized weights", model.quantization),
        ("a draft model", config.speculative_config),
        ("overrides made by a function", callable(overrides)),
        ("a configuration from elsewhere", model.hf_config_path),
        ("weights without files", config.load_config.load_format == "dummy"),
    ):
        if there:
            raise Incompatible(what)
    plain = translate.plain_rows(config, cache, kv_caches)
    parallel = config.parallel_config
    total = model.get_total_num_kv_heads()
    own = plain.rows[0][0].heads
    tp = parallel.tensor_parallel_size
    first = parallel.rank % tp * total // tp
    form = RecordFormat(
        model=model_name(str(model.model), model.revision, dict(overrides)),
        dtype=plain.dtype,
        layers=plain.layers,
        tokens=cache.kv_cache_groups[0].kv_cache_spec.block_size,
        heads=total,
        unit=unit_heads(total, own),
        row=plain.row,
    )
    return form, units(geometry.groups[0], plain.rows, (first, first + own), total)
