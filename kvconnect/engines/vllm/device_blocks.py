"""vLLM's pool of device blocks, as those that copy from it hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool


class DeviceBlocks:
    """Keeps blocks from reuse, whatever becomes of their request. Owned by the scheduler's thread.

    What stores read is held only while requests live: without one nothing is computed, and nobody
    is given a block. So the pool can be reset as soon as the engine has nothing to do, also where
    it is stepped for requests alone (in the caller's process) and the last stores go unanswered.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._stores: dict[int, None] = {}  # in the order in which they came
        self._rests = False

    def hold(self, block_ids: Iterable[int]) -> None:
        """Keep blocks until :meth:`release`."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        """Undo :meth:`hold`. The last blocks of a prefix are reused first."""
        if block_ids:
            self._pool.free_blocks(self._pool.blocks[block_id] for block_id in reversed(block_ids))

    def hold_stored(self, block_ids: Sequence[int]) -> None:
        """A store reads blocks from now on."""
        self._stores.update(dict.fromkeys(block_ids))
        if not self._rests:
            self.hold(block_ids)

    def release_stored(self, block_ids: Sequence[int]) -> None:
        """It does not, any more."""
        for block_id in block_ids:
            del self._stores[block_id]
        if not self._rests:
            self.release(block_ids)

    def rest(self) -> None:
        """No request is alive."""
        if not self._rests:
            self.release(list(self._stores))
            self._rests = True

    def wake(self) -> None:
        """A request is there, and the engine has not scheduled it yet."""
        if self._rests:
            self.hold(self._stores)
            self._rests = False
