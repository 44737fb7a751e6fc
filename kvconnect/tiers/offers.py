"""Which blocks of the host tier the workers may serve to other engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvconnect.offload.index import HostIndex
from kvconnect.tiers.messages import TierInstructions
from kvconnect.tiers.planner import Promoted
from kvconnect.types import Block


class _Offer(NamedTuple):
    """A block in a slot, and its key."""

    key: bytes
    slot: int
    block: Block


class Offers:
    """Blocks that are complete in the host tier and that the workers do not know of yet. Without
    ``serves`` there are none."""

    def __init__(self, index: HostIndex, serves: bool) -> None:
        self._index = index
        self._serves = serves
        self._blocks: list[_Offer] = []
        self._withdraw = False
        self._dropped: list[bytes] = []
        self._pages: dict[bytes, tuple[bytes, ...]] = {}

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` has something to tell."""
        return bool(self._blocks or self._dropped) or self._withdraw

    def name(self, pages: Iterable[tuple[bytes, tuple[bytes, ...]]]) -> None:
        """Note the keys of the pages of blocks that are about to be stored or dropped."""
        if self._serves:
            self._pages.update(pages)

    def stored(self, group: int, block_hash: bytes, key: bytes) -> None:
        """Note a block that host memory has now, unless it was dropped at once."""
        slot = self._index.slot_of(group, block_hash) if self._serves else None
        if slot is not None:
            self._blocks.append(_Offer(key, slot, Block(group, block_hash)))

    def promoted(self, came: Promoted) -> None:
        """Note blocks that came from a secondary tier."""
        for (group, block_hash), (key, _) in zip(came.blocks, came.places, strict=True):
            self.stored(group, block_hash, key)

    def drop(self, keys: Collection[bytes]) -> None:
        """Serve these blocks no longer, also where they have left the index before."""
        if self._serves:
            self._blocks = [offer for offer in self._blocks if offer.key not in keys]
            self._dropped += keys

    def withdraw(self) -> None:
        """Serve none of the blocks so far."""
        self._blocks.clear()
        self._withdraw = self._serves

    def take(self, work: TierInstructions) -> None:
        """Add what there is to the instructions of a step. Blocks that have left their slots since
        they were noted, for instance by a hint, are left out."""
        offers, self._blocks = self._blocks, []
        work.served = [
            (key, slot)
            for key, slot, (group, block_hash) in offers
            if self._index.slot_of(group, block_hash) == slot
        ]
        work.withdraw, self._withdraw = self._withdraw, False
        work.dropped, self._dropped = self._dropped, []
        work.pages.update(self._pages)
        self._pages.clear()
