"""The book of held device blocks: one owner each, a deadline each, and sums that add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Misuse
from kvconnect.offload.ledger import Hold, Ledger, Owner
from kvconnect.types import JobId


def hold(job: int, *blocks: int, owner: Owner = Owner.STORE, since: float = 0.0) -> Hold:
    return Hold(JobId(job), owner, blocks, since, since + 10.0)


def test_blocks_are_held_until_settled() -> None:
    ledger = Ledger()
    ledger.grant(hold(1, 5, 6))
    ledger.grant(hold(2, 7, owner=Owner.LOAD))
    assert ledger.holds_block(6) and not ledger.holds_block(8)
    assert (ledger.held, ledger.held_by(Owner.STORE), ledger.held_by(Owner.LOAD)) == (3, 2, 1)
    assert ledger.settle(JobId(1)) == hold(1, 5, 6)
    assert not ledger.holds_block(6)
    assert (ledger.granted, ledger.returned, ledger.held) == (3, 2, 1)
    ledger.grant(hold(3, 6))  # free again
    ledger.check()


def test_settling_twice_returns_nothing_the_second_time() -> None:
    ledger = Ledger()
    ledger.grant(hold(1, 5))
    assert ledger.settle(JobId(1)) is not None
    assert ledger.settle(JobId(1)) is None
    assert ledger.settle(JobId(9)) is None
    assert (ledger.granted, ledger.returned) == (1, 1)
    ledger.check()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (hold(1, 8), "job 1 is granted blocks twice"),
        (hold(2, 8, 6), "block 6 is held by job 1, not free for 2"),
        (hold(2, 8, 8), "block 8 is held by job 2"),
    ],
)
def test_a_block_has_one_owner(second: Hold, message: str) -> None:
    ledger = Ledger()
    ledger.grant(hold(1, 5, 6))
    with pytest.raises(Misuse, match=message):
        ledger.grant(second)


def test_the_oldest_hold_has_an_age() -> None:
    ledger = Ledger()
    ledger.grant(hold(1, 5, since=0.0))
    ledger.grant(hold(2, 6, since=3.0))
    assert (ledger.oldest_age(13.0), Ledger().oldest_age(13.0)) == (13.0, 0.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.booleans(), st.lists(st.integers(0, 9), max_size=4)),
        max_size=30,
    )
)
def test_granted_is_returned_and_held(events: list[tuple[int, bool, list[int]]]) -> None:
    ledger = Ledger()
    model: dict[int, tuple[int, ...]] = {}
    for job, settle, wanted in events:
        taken = {block for blocks in model.values() for block in blocks}
        if settle:
            done = ledger.settle(JobId(job))
            assert (done.blocks if done else None) == model.pop(job, None)
        elif job not in model:
            model[job] = tuple(set(wanted) - taken)
            ledger.grant(hold(job, *model[job]))
        ledger.check()
        assert ledger.held == sum(map(len, model.values()))
        assert ledger.granted == ledger.returned + ledger.held


def forget_owner(ledger: Ledger) -> None:
    del ledger._owner_of[5]


def change_owner(ledger: Ledger) -> None:
    ledger._owner_of[5] = JobId(2)


def forget_hold(ledger: Ledger) -> None:
    del ledger._holds[JobId(1)]


def lose_a_return(ledger: Ledger) -> None:
    ledger.returned -= 1


def count_twice(ledger: Ledger) -> None:
    ledger.granted += 1


def drop_deadline(ledger: Ledger) -> None:
    ledger._holds[JobId(1)] = hold(1, 5, 6)._replace(deadline=0.0)


@pytest.mark.parametrize(
    "damage",
    [forget_owner, change_owner, forget_hold, lose_a_return, count_twice, drop_deadline],
)
def test_check_sees_damage(damage: Callable[[Ledger], None]) -> None:
    ledger = Ledger()
    for job, blocks in ((1, (5, 6)), (2, (7,)), (3, (8,))):
        ledger.grant(hold(job, *blocks))
    ledger.settle(JobId(3))
    ledger.check()
    damage(ledger)
    with pytest.raises(Misuse):
        ledger.check()
