"""Connectors that stand beside KVConnect under MultiConnector, around ``overlap.py``'s device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    from tests.engines.overlap import Engine

CLAIMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "192.0.2.1"}


@dataclass
class Orders(KVConnectorMetadata):
    """A step's loads: (prompt, number of the first token, blocks from there on)."""

    loads: list[tuple[tuple[int, ...], int, list[int]]] = field(default_factory=list)


class Sibling(KVConnectorBase_V1):
    """Loads inside the step and hands off, under names that others use; it knows one cache group
    only. What it has and what fails is set on the class, since both of its halves look there."""

    engine: ClassVar[Engine]
    has: ClassVar[int] = 0  # tokens of each prompt
    fails: ClassVar[bool] = False  # the second block of a load
    ended: ClassVar[int] = 0  # requests

    def __init__(self, config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(config, role, kv_cache_config)
        self._orders = Orders()
        self._failed: set[int] = set()
        self._size = config.cache_config.block_size

    def _whole(self, request: Any) -> int:
        """Return how many blocks of a request it has; one token is always computed."""
        return min(self.has, request.num_tokens - 1) // self._size

    # -- scheduler ----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return max(0, self._whole(request) * self._size - computed), False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            end = self._whole(request)
            first = end - tokens // self._size
            table = blocks.get_block_ids()[0][first:end]
            prompt = tuple(request.all_token_ids)
            self._orders.loads.append((prompt, first * self._size, table))

    def build_connector_meta(self, output: Any) -> KVConnectorMetadata:
        taken, self._orders = self._orders, Orders()
        return taken

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        type(self).ended += 1
        sends = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, dict(CLAIMS) if sends else None

    # -- worker -------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        for prompt, first, blocks in orders.loads:
            self.engine.load_inside(prompt, first, blocks)
            if self.fails:
                self._failed.add(blocks[1])
                self.engine.spoil(blocks[1])

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
