"""Loads that several requests with the same prefix share.

The engine names the blocks of a load when the load has ended. Until then no other request finds
them on the device, and each one would load the prefix into blocks of its own. So the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvconnect.cache.groups import CacheGroup, leading_group


class _Load(NamedTuple):
    """The blocks of the leading group that are loaded, by their numbers in a prefix."""

    hashes: Sequence[bytes]
    numbers: range


@dataclass
class _Wait:
    """A request that waits, or has waited. ``load``: the request that loads. ``local_tokens``: what
    the device had then; -1 if that load brought nothing."""

    load: str
    local_tokens: int
    until: float


class SharedLoads:
    """Owned by the scheduler's thread; time is an argument. Requests wait only for loads under way,
    never for one that waits, and ``wait_s`` seconds at most."""

    def __init__(self, groups: Sequence[CacheGroup], wait_s: float) -> None:
        self._group = leading_group(groups)
        # A model that embeds may have no KV cache, and so no loads.
        self._tokens = groups[self._group].block_tokens if groups else 0
        self._is_full = all(each.is_full for each in groups)
        self._wait_s = wait_s
        self._loads: dict[str, _Load] = {}  # by request
        self._waits: dict[str, _Wait] = {}  # by request

    def began(
        self, req_id: str, hashes: Sequence[Sequence[bytes]], local_tokens: int, total_tokens: int
    ) -> None:
        """A load of tokens [local, total) begins, whose blocks get their names when it ends."""
        numbers = range(local_tokens // self._tokens, total_tokens // self._tokens)
        if numbers:
            self._loads[req_id] = _Load(hashes[self._group], numbers)

    def ended(self, req_id: str, failed: bool) -> None:
        """The load of a request has ended, if it had one."""
        if self._loads.pop(req_id, None) is not None and failed:
            for wait in self._waits.values():
                if wait.load == req_id:
                    wait.local_tokens = -1

    def finish(self, req_id: str) -> None:
        """A request is over. If its load is under way, the engine will not name the blocks."""
        self.ended(req_id, failed=True)
        self._waits.pop(req_id, None)

    def clear(self) -> None:
        """Have nobody wait for the loads under way: a reset made their blocks stale."""
        self._loads.clear()

    def awaits(
        self,
        req_id: str,
        hashes: Sequence[Sequence[bytes]],
        local_tokens: int,
        num_tokens: int,
        now: float,
    ) -> bool:
        """Return whether a request of ``num_tokens`` waits for a load to bring it more than the
        device has. It asks again at each step.

        It waits for a second load only if the first one brought something, or failed. Otherwise
        requests that never find their last block on the device would load it one after the other.
        """
        if not self._loads:
            return False
        row, wait = hashes[self._group], self._waits.get(req_id)
        load = wait and self._loads.get(wait.load)
        if wait and load and self._serves(load, row, local_tokens, num_tokens):
            return now < wait.until  # no other load needs to be looked at
        owner = self._serving(req_id, row, local_tokens, num_tokens)
        if owner is None:
            return False
        if wait is None:
            wait = self._waits[req_id] = _Wait(owner, local_tokens, now + self._wait_s)
        elif wait.load != owner:
            if local_tokens <= wait.local_tokens:
                return False
            wait.load, wait.local_tokens = owner, local_tokens
        return now < wait.until

    def _serving(
        self, req_id: str, row: Sequence[bytes], local_tokens: int, num_tokens: int
    ) -> str | None:
        """Return the request whose load brings blocks that another one will find on the device."""
        for owner, load in self._loads.items():
            if owner != req_id and self._serves(load, row, local_tokens, num_tokens):
                return owner
        return None

    def _serves(
        self, load: _Load, row: Sequence[bytes], local_tokens: int, num_tokens: int
    ) -> bool:
        first = local_tokens // self._tokens
        end = min(len(row), (num_tokens - 1) // self._tokens)  # the engine computes the last token
        # What a window or a state needs is there at the end of the load only. Else half of what the
        # load could bring must be of this prefix: a name tells all blocks before it.
        last = min(end, load.numbers.stop) - 1
        number = first + (last - first) // 2 if self._is_full else load.numbers[-1]
        found = first <= number < end and (not self._is_full or first in load.numbers)
        return found and load.hashes[number] == row[number]
