"""Blocks of vLLM's pool, as the scheduler's half holds, looks at and forgets them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
)

from kvconnect.offload.planner import KeptStates


class DeviceBlocks:
    """Holds blocks of vLLM's pool, independent of their requests. Owned by the scheduler's thread.

    Blocks that stores read are held only while a request is alive. Without requests, vLLM computes
    nothing and allocates no block. So an idle engine can reset its pool at once, even if it runs in
    the caller's process and is stepped for requests only, which leaves the last stores unanswered.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._stores: dict[int, None] = {}  # blocks that stores read, in order
        self._rests = False  # no request is alive

    def hold(self, block_ids: Iterable[int]) -> None:
        """Keep blocks until :meth:`release`."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        """Undo :meth:`hold`, last block first: so vLLM reuses the end of a prefix first."""
        if block_ids:
            self._pool.free_blocks(self._pool.blocks[block_id] for block_id in reversed(block_ids))

    def present(self, kept: KeptStates, hashes: Sequence[Sequence[bytes]]) -> KeptStates:
        """Return the states that their blocks still hold. vLLM may free a block that it offers
        before the step is built, and then another request writes to it."""
        return [
            (group, number, block_id)
            for group, number, block_id in kept
            if number < len(hashes[group])
            and self._pool.blocks[block_id].block_hash == _name(hashes[group][number], group)
        ]

    def forget(self, block_ids: set[int]) -> None:
        """Have no request find the KV of blocks. Those that use them go on."""
        self._pool.evict_blocks(block_ids)

    def hold_stored(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that a store reads."""
        self._stores.update(dict.fromkeys(block_ids))
        if not self._rests:
            self.hold(block_ids)

    def release_stored(self, block_ids: Sequence[int]) -> None:
        """Undo :meth:`hold_stored`."""
        for block_id in block_ids:
            del self._stores[block_id]
        if not self._rests:
            self.release(block_ids)

    def rest(self) -> None:
        """Release the blocks of stores: no request is alive."""
        if not self._rests:
            self.release(list(self._stores))
            self._rests = True

    def wake(self) -> None:
        """Hold the blocks of stores again. Call it before a new request is scheduled."""
        if self._rests:
            self.hold(self._stores)
            self._rests = False


def _name(block_hash: bytes, group: int) -> BlockHashWithGroupId:
    return make_block_hash_with_group_id(BlockHash(block_hash), group)
