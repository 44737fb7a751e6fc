"""Zeroes what a hand-off leaves of the blocks that it is received into.

Models with states and caches of several precisions want new blocks to be zero: bytes of a former
owner may be no numbers in another precision. vLLM does not zero the blocks of a load, which it
expects to fill them. A hand-off does not: it ends at a token, and begins at one that a window
reaches, and the prefill engine's blocks may be smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect.disaggregation.messages import Receive
from kvconnect.engines.vllm import translate


class ReceivedBlocks:
    """For the thread that launches a worker's steps."""

    def __init__(self, cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._needed: bool = cache.needs_kv_cache_zeroing
        self._groups = translate.cache_groups(cache)
        groups = cache.kv_cache_groups if self._needed else ()
        self._views = [[kv_caches[layer] for layer in group.layer_names] for group in groups]
        self._num_blocks = cache.num_blocks

    def zero(self, receives: Iterable[Receive]) -> None:
        """Zero the blocks that receives fill in part, if the cache needs it. Call this before the
        agent takes the receives: it writes nothing before what is launched by then."""
        for receive in receives if self._needed else ():
            for span, (first, end) in zip(receive.spans, receive.tokens, strict=True):
                group = self._groups[span.group]
                if group.states is not None:
                    continue  # a state is received whole
                for token in (first, end):
                    number = token // group.block_tokens - span.first
                    if token % group.block_tokens and number < len(span.block_ids):
                        self._zero(span.group, span.block_ids[number])

    def _zero(self, group: int, block_id: int) -> None:
        for view in self._views[group]:
            rows = view.shape[0] // self._num_blocks  # of the attention kernel, for each block
            view[block_id * rows : (block_id + 1) * rows].zero_()
