"""Which of HiCache's pages any engine can use, and how their bytes become records for them all."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import (
    MHATokenToKOnlyPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.runtime_context import get_lora, get_model, get_server_args, get_spec

from kvconnect.cache.head_shards import HeadUnit, Rows, unit_heads, units
from kvconnect.cache.layout import ByteRun, GroupGeometry
from kvconnect.cache.model_identity import model_name
from kvconnect.cache.pages import LayerPages
from kvconnect.cache.record_format import RecordFormat
from kvconnect.engines.sglang import plugin
from kvconnect.engines.sglang.page_store import PageStore
from kvconnect.errors import Incompatible
from kvconnect.types import Tier


class Records(NamedTuple):
    """How this rank's pages become records: what all engines know them by, and where their parts
    are in a page of its host pool's ``layout``."""

    form: RecordFormat
    units: Sequence[HeadUnit]
    layout: str


_AXES = {"layer_first": "LNH", "page_first_direct": "LNH", "page_first": "NLH", "page_head": "HNL"}
"""Layers, tokens and heads of a page's K, and then of its V, outermost first, by layout."""


def records_for_all(pools: Mapping[PoolName, Any], ranks: HiCacheStorageConfig) -> Records:
    """Return this rank's pages as vLLM has them too.

    Raises:
        Incompatible: only servers like this one can use them. The message says why.
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
        ("context parallelism", ranks.attn_cp_size > 1 or ranks.dcp_size > 1),
    ):
        if there:
            raise Incompatible(what)
    overrides = json.loads(model.json_model_override_args or "{}")
    name = model_name(str(model.model_path), model.revision, overrides)
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
    """Return the rows of a flat page, layer by layer: a token's K lies apart from its V."""
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


# Pages of HiCache's host pools by name: what their bytes depend on, and moving them.


logger = logging.getLogger(__name__)


class _Form(NamedTuple):
    """What a pool's pages are like; ``text`` is all that tells them from those of other pools."""

    nbytes: int
    dtype: torch.dtype
    text: str


class HostPages:
    """Moves pages between HiCache's host pools and a store. Any thread may call.

    A page's name stands for its pool, how that arranges it, and the rank whose part it is; what
    else its bytes depend on is the format of the store's tiers. ``by_tokens``: pages of the only
    pool go by HiCache's own names, which any engine knows, and all else is in the format.
    """

    def __init__(
        self,
        store: PageStore,
        pools: Mapping[PoolName, Any],
        ranks: HiCacheStorageConfig,
        by_tokens: bool = False,
    ) -> None:
        self.store = store
        self._by_tokens = by_tokens
        self._pools = pools  # HiCache may add to it
        self._ranks = ranks
        self._forms: dict[PoolName, _Form] = {}
        self._generation = b""

    def where(self, name: PoolName, keys: Sequence[str]) -> list[Tier | None]:
        """Return which tier, if any, has each page."""
        return self.store.where(self._names(name, keys), self._form(name).nbytes)

    def put(self, name: PoolName, key: str, page: torch.Tensor) -> bool:
        """Store a page; return whether it is there now."""
        return self.store.put(self._names(name, [key])[0], page)

    def parts(self, count: int) -> Iterator[slice]:
        """Cut so many pages into what :meth:`reading` should be asked for at a time."""
        for start in range(0, count, self.store.most):
            yield slice(start, min(count, start + self.store.most))

    @contextmanager
    def reading(
        self, name: PoolName, keys: Sequence[str], deadline: float | None = None
    ) -> Iterator[list[torch.Tensor | None]]:
        """Give pages, flat, for as long as the block lasts; None for one that is not there, broken,
        or has not come up by the ``deadline`` of :meth:`PageStore.deadline`."""
        form = self._form(name)
        until = self.store.deadline() if deadline is None else deadline
        with self.store.reading(self._names(name, keys), form.nbytes, until) as contents:
            yield [None if content is None else content.view(form.dtype) for content in contents]

    def write(self, transfer: PoolTransfer) -> list[bool]:
        """Store the pages of a transfer; return which are there now."""
        pool = self._pools[transfer.name]
        return [
            start is not None and self.put(transfer.name, key, pool.get_data_page(start, flat=True))
            for key, start in self._starts(transfer)
        ]

    def read(self, transfer: PoolTransfer) -> list[bool]:
        """Read the pages of a transfer; return which are right."""
        pool, right = self._pools[transfer.name], []
        starts, deadline = self._starts(transfer), self.store.deadline()
        for part in self.parts(len(starts)):
            keys = [key for key, _ in starts[part]]
            with self.reading(transfer.name, keys, deadline) as pages:
                for page, (_, start) in zip(pages, starts[part], strict=True):
                    there = page is not None and start is not None
                    if there:
                        pool.set_from_flat_data_page(start, page)
                    right.append(there)
        return right

    def forget(self) -> None:
        """Find nothing that was stored so far. Tiers below keep it, under names that this process
        uses no more."""
        self._generation = os.urandom(16)
        self.store.clear()

    def _starts(self, transfer: PoolTransfer) -> list[tuple[str, int | None]]:
        """Return each key with the first token of its page in the host pool; None, said in the
        log, if the tokens are not those of whole pages."""
        keys, tokens = transfer.keys or [], self._pools[transfer.name].page_size or 1
        indices = [] if transfer.host_indices is None else transfer.host_indices.tolist()
        if len(indices) == len(keys) * tokens:
            return list(zip(keys, indices[::tokens], strict=True))
        logger.error("%d tokens of pool %s for %d pages", len(indices), transfer.name, len(keys))
        return [(key, None) for key in keys]

    def _names(self, name: PoolName, keys: Sequence[str]) -> list[bytes]:
        generations = plugin.generation() + self._generation
        if self._by_tokens and name is PoolName.KV and not generations:
            return [bytes.fromhex(key) for key in keys]
        text = f"{generations.hex()}|{self._form(name).text}|"
        return [blake2b((text + key).encode(), digest_size=32).digest() for key in keys]

    def _form(self, name: PoolName) -> _Form:
        form = self._forms.get(name)
        if form is None:
            pool = self._pools[name]
            page = pool.get_data_page(0, flat=True)
            layers = getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)
            shape = pool.dtype, pool.layout, pool.page_size, pool.storage_format_tag, page.nbytes
            part = f"{type(pool).__name__}|{shape}|{layers}|{self._share(name, pool)}"
            form = self._forms[name] = _Form(page.nbytes, page.dtype, f"{name}|{part}")
        return form

    def _share(self, name: PoolName, pool: Any) -> str:
        """Return which rank's part a pool has. Of latent attention all ranks have the same, which
        one of them writes, but not of other pools beside it."""
        divided = name is PoolName.MAMBA or isinstance(
            pool, MHATokenToKVPoolHost | MHATokenToKOnlyPoolHost
        )
        if self._ranks.is_mla_model and not divided:
            return "all"
        return f"{self._ranks.tp_rank} of {self._ranks.tp_size}"
