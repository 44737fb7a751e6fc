"""Blocks that requests asked to keep: pinned until a time, or evicted after all others.

:class:`Retention` wraps an eviction policy. A kept block that the wrapped policy would evict is
set aside, and evicted only if it is retained and nothing else is left. So each kept block costs the
wrapped policy one step, not one in every eviction.

Pinned blocks take at most a share of the slots, and retained blocks as many again. One tenant may
have half of each. So blocks of others always find slots.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.offload.eviction import EvictionPolicy
from kvconnect.protocol.cache_hints import CacheHint

_SPARE_ENDS = 1024  # stale entries that a rebuild of the heap would not pay for


class KeepOutcome(StrEnum):
    """What :meth:`Retention.keep` did with a block. Values are metric labels."""

    PINNED = "pinned"
    RETAINED = "retained"
    EXPIRED = "expired"
    NO_SHARE = "refused_share"
    NO_TENANT_SHARE = "refused_tenant"


class KeepTimes(NamedTuple):
    """How long to keep blocks, for which tenant. Times in seconds of one clock; 0: not at all."""

    tenant: bytes
    pinned_until: float
    retained_until: float


class KeptSlots:
    """Which slots are kept, why and until when. Owned by the scheduler's thread.

    ``limit`` slots may be pinned, and as many retained. Time is an argument.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tenant_limit = -(-limit // 2)
        self.kinds: dict[int, CacheHint] = {}  # PIN or RETAIN
        self._keeps: dict[int, KeepTimes] = {}
        self._used: Counter[CacheHint] = Counter()
        self._used_by: Counter[tuple[CacheHint, bytes]] = Counter()
        self._ends: list[tuple[float, int, int]] = []  # heap of (time, number, slot)
        self._numbers = count()

    def used(self, kind: CacheHint) -> int:
        """Return how many slots are pinned or retained."""
        return self._used[kind]

    def keep(self, slot: int, wanted: KeepTimes, now: float) -> KeepOutcome:
        """Keep a slot. A time that was granted before is never shortened.

        A pin beyond the share becomes retention, if ``wanted`` asks for that too.
        """
        known = self._keeps.get(slot)
        if known is not None:
            pinned = max(known.pinned_until, wanted.pinned_until)
            wanted = KeepTimes(
                known.tenant, pinned, max(known.retained_until, wanted.retained_until)
            )
        refused = KeepOutcome.EXPIRED
        for kind, until in ((CacheHint.PIN, wanted[1]), (CacheHint.RETAIN, wanted[2])):
            if until <= now:
                continue
            if self.kinds.get(slot) is not kind:
                if (reason := self._refusal(kind, wanted.tenant)) is not None:
                    refused = reason
                    continue
                self.forget(slot)
                self._used[kind] += 1
                self._used_by[kind, wanted.tenant] += 1
            self.kinds[slot], self._keeps[slot] = kind, wanted
            self._end_at(until, slot)
            return KeepOutcome.PINNED if kind is CacheHint.PIN else KeepOutcome.RETAINED
        return refused

    def forget(self, slot: int) -> None:
        """Keep a slot no longer."""
        kind = self.kinds.pop(slot, None)
        if kind is None:
            return
        owner = kind, self._keeps.pop(slot).tenant
        self._used[kind] -= 1
        self._used_by[owner] -= 1
        if not self._used_by[owner]:
            del self._used_by[owner]  # tenants come and go

    def expire(self, now: float) -> tuple[list[int], list[int]]:
        """Return the slots whose time is over, in the order in which they were kept, and those that
        are retained from now on, after their pins."""
        over: dict[int, None] = {}
        retained = []
        while self._ends and self._ends[0][0] <= now:
            slot = heapq.heappop(self._ends)[2]
            if slot not in self.kinds or slot in over or self._until(slot) > now:
                continue
            if self.keep(slot, self._keeps[slot], now) is KeepOutcome.RETAINED:
                retained.append(slot)
            else:
                over[slot] = None
        for slot in over:
            self.forget(slot)
        return list(over), retained

    def clear(self) -> None:
        """Keep nothing."""
        for slot in list(self.kinds):
            self.forget(slot)
        self._ends.clear()

    def check(self) -> None:
        """Raise :class:`Misuse` unless the counts agree with the slots, and the limits hold."""
        by_kind = Counter(self.kinds.values())
        by_tenant = Counter((kind, self._keeps[slot].tenant) for slot, kind in self.kinds.items())
        if by_kind != +self._used or by_tenant != self._used_by:
            raise Misuse(f"{by_tenant} slots are kept, counted {self._used_by}")
        if max(by_kind.values(), default=0) > self.limit:
            raise Misuse(f"{by_kind} slots are kept; the limit is {self.limit}")
        if max(by_tenant.values(), default=0) > self.tenant_limit:
            raise Misuse(f"{by_tenant} slots are kept; a tenant's limit is {self.tenant_limit}")

    def _until(self, slot: int) -> float:
        keep = self._keeps[slot]
        return keep.pinned_until if self.kinds[slot] is CacheHint.PIN else keep.retained_until

    def _refusal(self, kind: CacheHint, tenant: bytes) -> KeepOutcome | None:
        if self._used[kind] >= self.limit:
            return KeepOutcome.NO_SHARE
        if self._used_by[kind, tenant] >= self.tenant_limit:
            return KeepOutcome.NO_TENANT_SHARE
        return None

    def _end_at(self, until: float, slot: int) -> None:
        """Note when to look at a slot again. Equal times end in the order of these calls."""
        if len(self._ends) > 2 * len(self.kinds) + _SPARE_ENDS:
            self._ends = sorted((self._until(at), next(self._numbers), at) for at in self.kinds)
        heapq.heappush(self._ends, (until, next(self._numbers), slot))


class Retention(EvictionPolicy):
    """Eviction policy that keeps some blocks. Owned by the scheduler's thread.

    ``share`` of ``capacity`` slots may be pinned, and as many retained. ``hash_of`` returns the
    hash of a slot's block. Time is an argument.
    """

    def __init__(
        self, inner: EvictionPolicy, capacity: int, share: float, hash_of: Callable[[int], bytes]
    ) -> None:
        self.kept = KeptSlots(int(capacity * share))
        self._inner = inner
        self._hash_of = hash_of
        # Kept slots that the inner policy has evicted, in its order.
        self._aside: dict[CacheHint, OrderedDict[int, None]] = {
            kind: OrderedDict() for kind in (CacheHint.PIN, CacheHint.RETAIN)
        }

    def keep(self, slot: int, wanted: KeepTimes, now: float) -> KeepOutcome:
        """Keep the block of an inserted slot, as :meth:`KeptSlots.keep`."""
        outcome = self.kept.keep(slot, wanted, now)
        if self._take_back(slot):
            self._set_aside(slot)  # with those of its present kind
        return outcome

    def expire(self, now: float) -> int:
        """Keep no longer what was kept until ``now``; return the number of those blocks."""
        over, retained = self.kept.expire(now)
        for slot in retained:
            if self._take_back(slot):
                self._set_aside(slot)
        self._release(over)
        return len(over)

    def demote(self, slots: Sequence[int]) -> None:
        self._release(slots)
        self._inner.demote(slots)

    def insert(self, slots: Sequence[int], hashes: Sequence[int]) -> None:
        self._inner.insert(slots, hashes)

    def touch(self, slots: Sequence[int]) -> None:
        retained = self._aside[CacheHint.RETAIN]
        for slot in reversed(slots) if retained else ():  # a prompt's tail is evicted first
            if slot in retained:
                retained.move_to_end(slot)
        self._inner.touch(self._inside(slots))

    def settle(self, slots: Sequence[int]) -> None:
        self._inner.settle(self._inside(slots))

    def remove(self, slot: int) -> None:
        if not self._take_back(slot):
            self._inner.remove(slot)
        self.kept.forget(slot)

    def evict(self, pins: Sequence[int]) -> int | None:
        while (victim := self._inner.evict(pins)) is not None:
            if victim not in self.kept.kinds:
                return victim
            self._set_aside(victim)
        retained = self._aside[CacheHint.RETAIN]
        for _ in range(len(retained)):
            slot = next(iter(retained))
            if not pins[slot]:
                self._take_back(slot)
                self.kept.forget(slot)
                return slot
            retained.move_to_end(slot)  # else each eviction would meet it again
        return None

    def clear(self) -> None:
        self._inner.clear()
        self.kept.clear()
        for aside in self._aside.values():
            aside.clear()

    def check(self) -> None:
        """Raise :class:`Misuse` unless the kept slots add up."""
        self.kept.check()
        for kind, aside in self._aside.items():
            for slot in aside:
                if self.kept.kinds.get(slot) is not kind:
                    raise Misuse(f"slot {slot} is set aside, but not kept by {kind.value}")

    def _set_aside(self, slot: int) -> None:
        self._aside[self.kept.kinds[slot]][slot] = None

    def _take_back(self, slot: int) -> bool:
        """Set a slot aside no longer; return whether it was."""
        pinned, retained = self._aside.values()
        return pinned.pop(slot, slot) is None or retained.pop(slot, slot) is None

    def _inside(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots that the inner policy knows."""
        pinned, retained = self._aside.values()
        if not pinned and not retained:
            return slots
        return [slot for slot in slots if slot not in pinned and slot not in retained]

    def _release(self, slots: Sequence[int]) -> None:
        """Keep these slots no longer."""
        back = [slot for slot in slots if self._take_back(slot)]
        for slot in slots:
            self.kept.forget(slot)
        if back:
            self._inner.insert(back, [hash(self._hash_of(slot)) for slot in back])
