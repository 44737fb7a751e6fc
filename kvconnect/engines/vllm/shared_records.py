"""Records of vLLM's blocks that SGLang reads too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvconnect.cache.head_shards import HeadUnit, Rows, unit_heads, units
from kvconnect.cache.layout import Geometry
from kvconnect.cache.model_identity import model_name
from kvconnect.cache.record_format import RecordFormat, parts
from kvconnect.engines.vllm import handoff_pages, translate
from kvconnect.engines.vllm.weights import FILE_FORMATS, prefers_consolidated
from kvconnect.errors import Incompatible

_ROWS = {"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION"}
_PLANES = {"CPU_ATTN:vec", "CPU_ATTN:vec16"}
"""Attention kernels whose rows are K followed by V, and those that keep K in planes."""


class _PlainRows(NamedTuple):
    """A cache of only K and V as the model computed them: the layers' numbers and rows, the
    values' type, and the bytes of K and of V in a row."""

    layers: tuple[int, ...]
    rows: Sequence[Rows]
    dtype: str
    row: tuple[int, int]


def records_for_all(
    config: VllmConfig,
    cache: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    geometry: Geometry,
) -> tuple[RecordFormat, Sequence[HeadUnit]]:
    """Return the format of this worker's blocks that SGLang shares, and the units of a block.

    Raises:
        Incompatible: SGLang cannot use the blocks. The message says why.
    """
    model, loader = config.model_config, config.load_config
    overrides = model.hf_overrides
    for what, there in (
        ("quantized weights", model.quantization),
        ("a draft model", config.speculative_config),
        ("overrides made by a function", callable(overrides)),
        ("a configuration from elsewhere", model.hf_config_path),
        ("LongRoPE, which rotates the same tokens in two ways", translate.long_ropes(model)),
        ("weights without files", loader.load_format == "dummy"),
        ("weights of other files", loader.load_format not in FILE_FORMATS),
    ):
        if there:
            raise Incompatible(what)
    plain = _plain_rows(config, cache, kv_caches)
    parallel = config.parallel_config
    total = model.get_total_num_kv_heads()
    own = plain.rows[0][0].heads
    tp = parallel.tensor_parallel_size
    first = parallel.rank % tp * total // tp
    form = RecordFormat(
        model=model_name(
            str(model.model),
            model.revision,
            dict(overrides),
            cache=loader.download_dir,
            consolidated=prefers_consolidated(loader),
        ),
        dtype=plain.dtype,
        layers=plain.layers,
        tokens=cache.kv_cache_groups[0].kv_cache_spec.block_size,
        heads=total,
        unit=unit_heads(total, own),
        row=plain.row,
    )
    return form, units(geometry.groups[0], plain.rows, (first, first + own), total)


def _plain_rows(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> _PlainRows:
    """Return where K and V are in a cache of one full-attention group.

    Raises:
        Incompatible: the cache is of another kind. The message says why.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if len(specs) != 1 or type(spec := specs[0]) is not FullAttentionSpec:
        raise Incompatible(f"a cache of {', '.join(type(spec).__name__ for spec in specs)}")
    computed = config.model_config.dtype
    if {view.dtype for view in kv_caches.values()} != {computed} or not computed.is_floating_point:
        raise Incompatible(f"K and V are kept in another type than {computed}")
    kernels = translate.packings(config)
    in_planes = kernels <= _PLANES
    if not kernels <= _ROWS and not in_planes:
        raise Incompatible(f"the attention kernel {'+'.join(sorted(kernels))} packs pages")
    (pages,) = handoff_pages.handoff_pages(cache, kv_caches)
    if len(pages) != len(kv_caches):
        raise Incompatible("layers that share K and V")
    numbered = sorted((extract_layer_index(page.name), page) for page in pages)
    item = computed.itemsize
    row = (spec.head_size * item, spec.head_size_v * item)
    if sum(row) != pages[0].row_bytes:
        raise Incompatible(f"rows of {pages[0].row_bytes} bytes for K and V of {row}")
    planes = [*[item] * spec.head_size, row[1]]
    rows = [parts(page, planes, in_planes=True) if in_planes else (page,) for _, page in numbered]
    layers = tuple(number for number, _ in numbered)
    return _PlainRows(layers, rows, str(computed).removeprefix("torch."), row)
