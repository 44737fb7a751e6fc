"""Names of HiCache's pages, and copies between its host pools and the store."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import (
    MHATokenToKOnlyPoolHost,
    MHATokenToKVPoolHost,
)

from kvconnect.engines.sglang import weights
from kvconnect.engines.sglang.rank_agreement import of_all_ranks
from kvconnect.engines.sglang.storage_pages import PageStore
from kvconnect.types import Tier

logger = logging.getLogger(__name__)

MOST_WAIT_S = 8.0
"""Seconds that one step of HiCache's threads may wait for tiers. A flush joins these threads, and
SGLang's server ends if one of them takes 10 seconds."""


class _Form(NamedTuple):
    """Format of a pool's pages; ``text`` distinguishes it from the formats of other pools."""

    nbytes: int
    dtype: torch.dtype
    text: str


class HostPages:
    """Copies pages between HiCache's host pools and a store. Thread-safe.

    A page's name covers its pool, the pool's layout and the rank whose part it is. The format of
    the store's tiers covers what else its bytes depend on. ``by_tokens``: there is one pool, its
    pages have HiCache's own names, which any engine knows, and the format covers all the rest.
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
        self._pools = pools  # HiCache may add pools later
        self._ranks = ranks
        self._forms: dict[PoolName, _Form] = {}
        self._generation = b""
        # All ranks look for pages that the first one has named; their parameters are others.
        self._alike = ranks.is_mla_model and ranks.tp_size > 1
        self._weights = b""  # the generation of all ranks' weights then

    def agree(self) -> Callable[[], None]:
        """Name pages as the other ranks do, from now on; return a function that ends this. For the
        scheduler's thread, at the same point on all ranks; so are updates of weights."""
        if not self._alike:
            return lambda: None
        self._on_weights()
        return weights.listen(self._on_weights)

    def _on_weights(self) -> None:
        found = of_all_ranks(weights.generation())
        self._weights = found[0] if len(set(found)) == 1 else weights.joined(*found)

    def deadline(self) -> float:
        """Return until when, in monotonic seconds, a call of HiCache's that starts now may wait."""
        calls = 2 if len(self._pools) > 1 else 1  # that one step makes before it looks up
        return min(self.store.deadline(), time.monotonic() + MOST_WAIT_S / calls)

    def where(
        self, name: PoolName, keys: Sequence[str], deadline: float | None = None
    ) -> list[Tier | None]:
        """Return the tier that has each page, None for absent ones. Waits until ``deadline``, at
        most until :meth:`deadline`; once it is over, only host memory is looked at."""
        until = self.deadline() if deadline is None else deadline
        return self.store.where(self._names(name, keys), self._form(name).nbytes, until)

    def put(self, name: PoolName, key: str, page: torch.Tensor) -> bool:
        """Store a page; return whether it is stored now."""
        return self.store.put(self._names(name, [key])[0], page)

    def parts(self, count: int) -> Iterator[slice]:
        """Divide ``count`` pages into slices that one :meth:`reading` should ask for."""
        for start in range(0, count, self.store.most):
            yield slice(start, min(count, start + self.store.most))

    @contextmanager
    def reading(
        self, name: PoolName, keys: Sequence[str], deadline: float | None = None
    ) -> Iterator[list[torch.Tensor | None]]:
        """Yield flat pages, valid inside the context; None for a page that is absent, damaged, or
        not read by ``deadline``, that of :meth:`deadline` if not given."""
        form = self._form(name)
        until = self.deadline() if deadline is None else deadline
        with self.store.reading(self._names(name, keys), form.nbytes, until) as contents:
            yield [None if content is None else content.view(form.dtype) for content in contents]

    def write(self, transfer: PoolTransfer) -> list[bool]:
        """Store the pages of a transfer; return which are stored now."""
        pool = self._pools[transfer.name]
        return [
            start is not None and self.put(transfer.name, key, pool.get_data_page(start, flat=True))
            for key, start in self._starts(transfer)
        ]

    def read(self, transfer: PoolTransfer, deadline: float) -> list[bool]:
        """Read the pages of a transfer until ``deadline``; return which were read."""
        pool, right = self._pools[transfer.name], []
        starts = self._starts(transfer)
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
        """Forget every stored page. Lower tiers keep theirs under names that this process does not
        use any more. For the scheduler's thread, at the same point on all ranks."""
        own = os.urandom(16)
        self._generation = of_all_ranks(own)[0] if self._alike else own
        self.store.clear()

    def _starts(self, transfer: PoolTransfer) -> list[tuple[str, int | None]]:
        """Return each key with the first token of its page in the host pool; None, with a log line,
        if the tokens are not whole pages."""
        keys, tokens = transfer.keys or [], self._pools[transfer.name].page_size or 1
        indices = [] if transfer.host_indices is None else transfer.host_indices.tolist()
        if len(indices) == len(keys) * tokens:
            return list(zip(keys, indices[::tokens], strict=True))
        logger.error("%d tokens of pool %s for %d pages", len(indices), transfer.name, len(keys))
        return [(key, None) for key in keys]

    def _names(self, name: PoolName, keys: Sequence[str]) -> list[bytes]:
        generations = (self._weights if self._alike else weights.generation()) + self._generation
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
            if name is PoolName.MAMBA:  # its other type is that of convolutions
                part += f"|{getattr(pool, 'temporal_dtype', None)}"
            form = self._forms[name] = _Form(page.nbytes, page.dtype, f"{name}|{part}")
        return form

    def _share(self, name: PoolName, pool: Any) -> str:
        """Return which rank's part a pool has. Latent attention is the same on all ranks, and one
        of them writes it; pools beside it are divided."""
        divided = name is PoolName.MAMBA or has_heads(pool)
        if self._ranks.is_mla_model and not divided:
            return "all"
        return f"{self._ranks.tp_rank} of {self._ranks.tp_size}"


def has_heads(pool: Any) -> bool:
    """Whether a host pool has K and V by head, which ranks divide."""
    return isinstance(pool, MHATokenToKVPoolHost | MHATokenToKOnlyPoolHost)
