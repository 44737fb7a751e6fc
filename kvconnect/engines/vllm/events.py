"""KV events of the host tier, as vLLM's event types with medium ``CPU``, and of receipts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from kvconnect.cache.groups import CacheGroup
from kvconnect.types import Block

if TYPE_CHECKING:
    from vllm.v1.request import Request


class KVConnectReceipt(KVCacheEvent, msgspec.Struct):
    """A request's receipt, for the subscriber that gave the request this nonce. The class's name is
    the event's type, ``RECEIPT_EVENT``."""

    nonce: str
    receipt: dict[str, Any]


_LOCAL = "LOCAL"  # to the engine that publishes the event


class EventLog:
    """Collects events until vLLM takes them; collects none if the user has not enabled them.

    A stored event is made when its block is planned, since the request may be gone later. It is
    published when the block can be loaded.
    """

    def __init__(
        self, config: VllmConfig, groups: Sequence[CacheGroup], cache: KVCacheConfig
    ) -> None:
        events = config.kv_events_config
        self._enabled = events is not None and events.enable_kv_cache_events
        self._groups = groups
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        self._kinds = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for spec in specs
        ]
        self._planned: dict[Block, BlockStored] = {}
        self._ready: list[KVCacheEvent] = []

    def planned(
        self,
        request: Request,
        hashes: Sequence[Sequence[bytes]],
        blocks: Iterable[tuple[int, int]],
    ) -> None:
        """Prepare the events of a request's blocks (group, block number) that are being stored."""
        if not self._enabled:
            return
        for group, block in blocks:
            size = self._groups[group].block_tokens
            start, end = block * size, (block + 1) * size
            # The hash covers more than tokens: adapter, images, salt and embeddings.
            extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
            kind, window = self._kinds[group]
            lora = request.lora_request
            parent = hashes[group][block - 1] if block else None
            self._planned[Block(group, hashes[group][block])] = BlockStored(
                block_hashes=[_external(hashes[group][block])],
                parent_block_hash=None if parent is None else _external(parent),
                token_ids=list(request.all_token_ids[start:end]),
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
                extra_keys=to_event_extra_keys([extra]),
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                locality=_LOCAL,
            )

    def promoted(
        self,
        request: Request,
        hashes: Sequence[Sequence[bytes]],
        blocks: Sequence[Block],
    ) -> None:
        """Publish a request's blocks that were prefetched into the host tier."""
        if self._enabled:
            places = [{name: place for place, name in enumerate(row)} for row in hashes]
            # The prefetching request may be gone and its id reused, so skip unknown hashes.
            known = [Block(group, name) for group, name in blocks if name in places[group]]
            self.planned(request, hashes, ((group, places[group][name]) for group, name in known))
            self.settled(known)

    def settled(self, stored: Iterable[Block], dropped: Iterable[Block] = ()) -> None:
        """Publish planned blocks that can be loaded now; forget those not stored."""
        for key in stored:
            event = self._planned.pop(key, None)
            if event is not None:
                self._ready.append(event)
        for key in dropped:
            self._planned.pop(key, None)

    def removed(self, blocks: Iterable[Block]) -> None:
        """Publish that blocks left the host tier."""
        if self._enabled:
            self._ready.extend(
                BlockRemoved(
                    block_hashes=[_external(block.block_hash)],
                    medium=MEDIUM_CPU,
                    group_idx=block.group,
                    locality=_LOCAL,
                )
                for block in blocks
            )

    def cleared(self) -> None:
        """Forget planned events after a reset. vLLM's own reset event tells subscribers."""
        self._planned.clear()

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        ready, self._ready = self._ready, []
        return ready


def _external(block_hash: bytes) -> bytes | int:
    external: bytes | int = maybe_convert_block_hash(BlockHash(block_hash))
    return external
