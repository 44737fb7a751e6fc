"""Which blocks of a request to ask the secondary tiers for, round by round.

The first rounds ask for the blocks of the leading group, those of full attention, up to the first
that no tier has. The next ones ask for what the prefix found so far needs of the other groups. So a
prompt of any length is looked up, and nothing is asked that could not be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kvconnect.cache.groups import CacheGroup, leading_group, longest_prefix
from kvconnect.offload.index import HostIndex
from kvconnect.tiers.lookup import LookupRequest, RecentMisses
from kvconnect.types import Block

MAX_KEYS = 1 << 14  # of one round
FEW_KEYS = 8
"""Of a first round where each key costs a request: most prompts lack their first block or have
many."""
_WIDER = 8  # times as many keys has the next round, also where a window lacks a block


class TierSearch:
    """The search for one request's blocks. Owned by the scheduler's thread.

    Attributes:
        found: the blocks found so far, with what a :class:`TierAnswer` says of them.
    """

    def __init__(
        self,
        index: HostIndex,
        groups: Sequence[CacheGroup],
        request: LookupRequest,
        misses: RecentMisses,
        first_keys: int = MAX_KEYS,
    ) -> None:
        """``first_keys``: of the first round; each further one has several times as many."""
        self.found: dict[Block, int] = {}
        self._absent: set[Block] = set()
        self._index = index
        self._groups = groups
        self._request = request
        self._misses = misses
        self._lead = leading_group(groups)
        self._next = request.local_tokens // groups[self._lead].block_tokens  # block of the lead
        self._most = first_keys  # of the next round
        self._width = 1  # how many times as much as a prefix needs is asked for

    def next_round(self) -> tuple[Block, ...]:
        """Return the blocks to ask for next; () if all is known that decides what to load."""
        lead = self._groups[self._lead]
        if lead.is_full and (blocks := self._next_of_lead(lead)):
            return blocks
        if lead.is_full and len(self._groups) == 1:
            return ()
        return self._next_of_others()

    def take(self, blocks: Sequence[Block], found: Iterable[int]) -> None:
        """Take the answer to a round."""
        for block, tier in zip(blocks, found, strict=True):
            if tier:
                self.found[block] = tier
            else:
                self._absent.add(block)
                if block.group == self._lead:
                    self._next = len(self._request.hashes[self._lead])  # the rest is of no use
        if any(group != self._lead for group, _ in self._absent.intersection(blocks)):
            self._width *= _WIDER

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        """Return 0 for a block that may be used: it is in host memory, found, or not asked for yet.
        In the leading group, only what is known to be there counts."""
        block = Block(group, block_hash)
        if block in self.found or self._index.slot_of(group, block_hash) is not None:
            return 0
        lead = group == self._lead and self._groups[group].is_full
        return None if lead or not self._is_unknown(block) else 0

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return 0 for each leading block that may be used."""
        slots = []
        for block_hash in hashes:
            if self.slot_of(group, block_hash) is None:
                break
            slots.append(0)
        return slots

    def _next_of_lead(self, lead: CacheGroup) -> tuple[Block, ...]:
        row, end = self._request.hashes[self._lead], self._request.max_tokens // lead.block_tokens
        blocks: list[Block] = []
        for number in range(self._next, min(end, len(row))):
            if self._index.has(self._lead, row[number]):
                continue
            block = Block(self._lead, row[number])
            if block in self.found:
                continue
            if not self._is_unknown(block):
                self._next = end  # what follows is of no use
                break
            if len(blocks) == self._most:
                self._next, self._most = number, min(self._most * _WIDER, MAX_KEYS)
                break
            blocks.append(block)
        else:
            self._next = end
        return tuple(blocks)

    def _next_of_others(self) -> tuple[Block, ...]:
        """Return the unknown blocks that the longest prefix needs which may be there. If some that
        were asked for were absent, blocks before those that it needs are asked for, too: else
        there would be a round for each prefix."""
        request, hashes = self._request, self._request.hashes
        most = longest_prefix(self, self._groups, hashes, request.local_tokens, request.max_tokens)
        needed: list[Block] = []
        wider: list[Block] = []
        for number, group in enumerate(self._groups):
            end, local = most // group.block_tokens, request.local_tokens // group.block_tokens
            first = max(local, group.first_block(most))
            start = max(local, end - self._width * (end - first))
            row = hashes[number]
            needed += self._unknown(number, row[first:end])
            if start < first:
                wider += self._unknown(number, row[start:first][::-1])
        if not needed:
            return ()
        return tuple(islice([*needed, *wider], MAX_KEYS))

    def _unknown(self, number: int, row: Sequence[bytes]) -> list[Block]:
        blocks = (
            Block(number, block_hash)
            for block_hash in row
            if not self._index.has(number, block_hash)
        )
        return [block for block in blocks if self._is_unknown(block)]

    def _is_unknown(self, block: Block) -> bool:
        """Return whether nobody has said of a block whether a tier has it. If a source is named, it
        may have what others lacked."""
        if block in self.found or block in self._absent:
            return False
        return (
            bool(self._request.source)
            or self._request.key(block.group, block.block_hash) not in self._misses
        )
