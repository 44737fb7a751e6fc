"""Which blocks of the host tier the workers may serve to other engines."""

from __future__ import annotations

from collections.abc import Iterable

from kvconnect.offload.index import HostIndex
from kvconnect.tiers.messages import TierInstructions


class Offers:
    """Blocks that are complete in the host tier and that the workers do not know of yet. Without
    ``serves`` there are none."""

    def __init__(self, index: HostIndex, serves: bool) -> None:
        self._index = index
        self._serves = serves
        self._blocks: list[tuple[bytes, int]] = []
        self._withdraw = False

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` has something to tell."""
        return bool(self._blocks) or self._withdraw

    def stored(self, group: int, block_hash: bytes, key: bytes) -> None:
        """Note a block that was copied from the device."""
        slot = self._index.slot_of(group, block_hash) if self._serves else None
        if slot is not None:
            self._blocks.append((key, slot))

    def promoted(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Note blocks, as (key, slot), that came from a secondary tier."""
        if self._serves:
            self._blocks += blocks

    def withdraw(self) -> None:
        """Serve none of the blocks so far."""
        self._blocks.clear()
        self._withdraw = self._serves

    def take(self, work: TierInstructions) -> None:
        """Add what there is to the instructions of a step."""
        work.served, self._blocks = self._blocks, []
        work.withdraw, self._withdraw = self._withdraw, False
