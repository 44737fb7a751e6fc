"""The index of the host tier: states of slots, pins, quarantine, and a check that sees damage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Misuse
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import CONDEMNED, FREE, PENDING, READY, HostIndex
from kvconnect.offload.retention import KeepOutcome, KeepTimes
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Block, FailureCause

A, B, C, D = b"a", b"b", b"c", b"d"
STATS = OffloadingConnectorStats()  # of tests that do not look at it


def make_index(num_slots: int = 3, num_groups: int = 2) -> HostIndex:
    return HostIndex(num_slots, num_groups, make_policy("lru", num_slots))


def put(index: HostIndex, *hashes: bytes, group: int = 0) -> list[int]:
    """Store blocks and return their slots."""
    slots = [index.reserve(group, block_hash) for block_hash in hashes]
    assert None not in slots
    found = [slot for slot in slots if slot is not None]
    index.commit(found)
    return found


def test_a_block_can_be_loaded_once_it_is_stored() -> None:
    index = make_index()
    slot = index.reserve(0, A)
    assert slot is not None
    assert index.has(0, A) and index.slot_of(0, A) is None and len(index.ready_slots(0, [A])) == 0
    assert (index.slots.state(slot), index.slots.busy, index.slots.used) == (PENDING, 1, 1)
    index.commit([slot])
    assert index.slot_of(0, A) == slot and index.hash_of(slot) == A
    assert (index.slots.state(slot), index.slots.busy, index.slots.used) == (READY, 0, 1)
    assert not index.has(1, A)  # the same hash in another group is another block
    index.check()


def test_an_abandoned_block_leaves_no_trace() -> None:
    index = make_index()
    slot = index.reserve(0, A)
    assert slot is not None
    index.abandon([slot])
    assert not index.has(0, A)
    assert (index.slots.state(slot), index.slots.busy, index.slots.used) == (FREE, 0, 0)
    assert index.take_removed(STATS) == []  # it never was there
    index.check()


def test_leading_blocks_are_found_up_to_the_first_that_cannot_be_loaded() -> None:
    index = make_index()
    a, c = put(index, A, C)
    index.reserve(0, B)
    assert index.ready_slots(0, [A, B, C]) == [a]  # B is being stored
    assert index.ready_slots(0, [A, C]) == [a, c]
    assert index.ready_slots(0, [D, A]) == []
    assert index.ready_slots(1, [A]) == []
    assert index.ready_slots(0, []) == []


PROMPTS = [[b"%d" % (n % 4), *(b"%d-%d" % (n, k) for k in range(4))] for n in range(6)]


def differs(index: HostIndex) -> bool:
    """Whether a lookup of prefixes finds anything but what one of single blocks finds."""
    for group in (0, 1):
        for hashes in PROMPTS:
            one_by_one = takewhile(
                lambda slot: slot is not None, map(partial(index.slot_of, group), hashes)
            )
            if index.ready_slots(group, hashes) != list(one_by_one):
                return True
    return False


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "fail", "quarantine", "clear"]),
            st.integers(0, 1),
            st.sampled_from(PROMPTS),
            st.integers(1, 5),
        ),
        max_size=30,
    )
)
def test_a_lookup_by_prefix_finds_what_a_lookup_by_block_finds(
    events: list[tuple[str, int, list[bytes], int]],
) -> None:
    index = make_index(num_slots=7)
    for event, group, hashes, count in events:
        if event in ("put", "fail"):
            new = [key for key in hashes[:count] if not index.has(group, key)]
            slots = [slot for key in new if (slot := index.reserve(group, key)) is not None]
            (index.commit if event == "put" else index.abandon)(slots)
        elif event == "quarantine" and (slots := index.ready_slots(group, hashes)):
            index.quarantine(slots[-1], FailureCause.COPY, STATS)
        elif event == "clear" and count == 5:
            index.clear()
        index.check()
        assert not differs(index)


def test_the_comparison_of_lookups_tells_a_wrong_hint() -> None:
    index = make_index(num_slots=7)
    slots = put(index, *PROMPTS[0])
    assert not differs(index)
    index._next[slots[1]] = slots[4]  # only slower
    assert not differs(index)
    index._next[slots[1]], index._readable[slots[4]] = slots[4], PROMPTS[0][2]
    assert differs(index)
    with pytest.raises(Misuse, match="wrongly readable"):
        index.check()


def test_a_full_tier_evicts_and_says_what() -> None:
    index = make_index(num_slots=2)
    put(index, A)
    put(index, B, group=1)
    put(index, C)
    stats = OffloadingConnectorStats()
    assert index.take_removed(stats) == [Block(0, A)] and index.evictions == 1
    assert index.take_removed(stats) == []
    assert stats.data["counters"] == {"evicted_blocks": {"host": 1}}
    assert not index.has(0, A) and index.has(1, B) and index.has(0, C)
    index.check()


def test_slots_in_use_are_not_evicted() -> None:
    index = make_index(num_slots=2)
    (slot,) = put(index, A)
    index.pin([slot])
    assert index.reserve(0, B) is not None  # pending from now on
    assert index.reserve(0, C) is None
    assert not index.has(0, C) and index.evictions == 0
    index.unpin([slot])
    assert index.reserve(0, C) == slot
    index.check()


def test_pins_are_counted() -> None:
    index = make_index(num_slots=1)
    (slot,) = put(index, A)
    index.pin([slot])
    index.pin([slot])
    index.unpin([slot])
    assert index.slots.busy == 1 and index.reserve(0, B) is None
    index.unpin([slot])
    assert index.slots.busy == 0 and index.reserve(0, B) == slot


@pytest.mark.parametrize("remove", ["quarantine", "clear"])
def test_a_block_that_goes_while_read_keeps_its_slot_until_read(remove: str) -> None:
    index = make_index(num_slots=1)
    (slot,) = put(index, A)
    index.pin([slot])
    index.pin([slot])
    if remove == "quarantine":
        index.quarantine(slot, FailureCause.COPY, STATS)
        assert index.take_removed(STATS) == [Block(0, A)]
    else:
        index.clear()
        assert index.take_removed(STATS) == []  # the caller cleared everything and knows
    assert not index.has(0, A)
    assert index.slots.state(slot) == CONDEMNED
    index.check()
    index.unpin([slot])
    assert index.reserve(0, B) is None  # one reader is left
    index.unpin([slot])
    assert index.slots.state(slot) == FREE
    assert index.reserve(0, B) == slot
    index.check()


def test_quarantine_happens_once_and_only_to_what_can_be_loaded() -> None:
    index, stats = make_index(), OffloadingConnectorStats()
    (slot,) = put(index, A)
    pending = index.reserve(0, B)
    assert pending is not None
    index.quarantine(slot, FailureCause.DEADLINE, stats)  # says nothing about the copy
    assert index.has(0, A)
    for each in (slot, slot, pending, -1):
        index.quarantine(each, FailureCause.DIGEST, stats)
    assert not index.has(0, A) and index.has(0, B)
    assert stats.data["counters"] == {"quarantined_blocks": {"digest": 1}}
    assert index.take_removed(stats) == [Block(0, A)] and index.evictions == 0
    index.check()


def test_clear_leaves_pending_blocks_to_their_jobs() -> None:
    index = make_index()
    put(index, A, group=1)
    slot = index.reserve(0, B)
    assert slot is not None
    index.clear()
    index.check()
    assert not index.has(1, A) and index.has(0, B)
    index.commit([slot])
    assert index.slot_of(0, B) == slot
    put(index, C, D)  # the policy forgot A's slot, so that only free ones are given
    assert index.evictions == 0
    index.check()


def test_misuse_is_refused() -> None:
    index = make_index()
    (ready,) = put(index, A)
    pending = index.reserve(0, B)
    assert pending is not None
    free = next(slot for slot in range(3) if slot not in (ready, pending))
    refused: list[tuple[str, Callable[[], object]]] = [
        ("reserved twice", lambda: index.reserve(0, A)),
        ("reserved twice", lambda: index.reserve(0, B)),
        ("state", lambda: index.commit([ready])),
        ("state", lambda: index.commit([free])),
        ("state", lambda: index.abandon([ready])),
        ("state", lambda: index.pin([pending])),
        ("state", lambda: index.pin([free])),
        ("unpinned more often", lambda: index.unpin([ready])),
    ]
    for message, call in refused:
        with pytest.raises(Misuse, match=message):
            call()
        index.check()


def lose_ready(index: HostIndex) -> None:
    index._ready[0].pop(A)


def lose_pending(index: HostIndex) -> None:
    index._pending[0].pop(B)


def share_slot(index: HostIndex) -> None:
    index._ready[1][D] = index._ready[0][A]


def read_half_a_block(index: HostIndex) -> None:
    index._ready[0][B] = index._pending[0].pop(B)


def free_twice(index: HostIndex) -> None:
    index.slots._free.append(index.slots._free[0])


def free_in_use(index: HostIndex) -> None:
    index.slots._free.append(index._ready[0][A])


def lose_free(index: HostIndex) -> None:
    index.slots._free.pop()


def lose_pin_count(index: HostIndex) -> None:
    index.slots.busy -= 1


def pin_pending(index: HostIndex) -> None:
    index.slots.pins[index._pending[0][B]] += 1


def condemn_unread(index: HostIndex) -> None:
    index.slots._state[index._ready[0].pop(A)] = CONDEMNED


@pytest.mark.parametrize(
    "damage",
    [
        lose_ready,
        lose_pending,
        share_slot,
        read_half_a_block,
        free_twice,
        free_in_use,
        lose_free,
        lose_pin_count,
        pin_pending,
        condemn_unread,
    ],
)
def test_check_sees_damage(damage: Callable[[HostIndex], None]) -> None:
    index = make_index(num_slots=4)
    put(index, A)
    index.reserve(0, B)
    index.pin(put(index, C))
    index.check()
    damage(index)
    with pytest.raises(Misuse):
        index.check()


def test_a_policy_is_asked_alone_until_a_block_is_kept() -> None:
    policy = make_policy("lru", 4)
    index = HostIndex(4, 1, policy, 0.5)
    slot = index.reserve(0, b"a")
    assert slot is not None
    index.commit([slot])
    assert index.policy is policy and index.retention is None
    assert index.keep(slot, KeepTimes(b"t", 9.0, 0.0), 0.0) is KeepOutcome.PINNED
    assert index.policy is index.retention is not None
    assert index.policy.evict(index.slots.pins) is None
    index.check()
    # Control: the check sees kept slots that do not add up.
    index.retention.kept.limit = 0
    with pytest.raises(Misuse):
        index.check()
