"""Hints take effect on the blocks of a prompt, whenever those are stored."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnect.cache.groups import CacheGroup
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.hints.plan import HintPlan
from kvconnect.offload.index import HostIndex
from kvconnect.offload.retention import Retention
from kvconnect.protocol.cache_hints import HintsRead, read_hints
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Block, FailureCause

SLOTS, TOKENS = 16, 4
PROMPT = [f"p{n}".encode() for n in range(4)]


class Bench:
    """A host tier with hints; blocks have 4 tokens."""

    def __init__(self, policy: Any = "lru", share: float = 0.5) -> None:
        self.index = HostIndex(SLOTS, 1, make_policy(policy, SLOTS), share)
        self.stats = OffloadingConnectorStats()
        self.hints = HintPlan(self.index, (CacheGroup(TOKENS),), self.stats)

    def add(self, options: Any, name: str = "r", now: float = 0.0, tenant: bytes = b"t") -> None:
        self.hints.add(name, read_hints(options), tenant, [PROMPT], 4 * TOKENS + 1, now)

    def begin(self, hashes: list[bytes]) -> list[int]:
        slots = [self.index.reserve(0, block_hash) for block_hash in hashes]
        return [slot for slot in slots if slot is not None]

    def end(self, hashes: list[bytes], slots: list[int], now: float = 0.0) -> None:
        self.index.commit(slots)
        self.hints.settled([Block(0, block_hash) for block_hash in hashes], [], now)

    def store(self, hashes: list[bytes]) -> None:
        self.end(hashes, self.begin(hashes))

    def press(self) -> set[bytes]:
        """Store as many other blocks as there are slots; return what is left of the prompt."""
        for number in range(2 * SLOTS):
            self.store([f"other{number}".encode()])
        self.index.check()
        return {block for block in PROMPT if self.index.slot_of(0, block) is not None}

    def outcomes(self) -> dict[str, float]:
        counters: dict[str, dict[str, float]] = self.stats.data["counters"]
        return counters.get("cache_hint_blocks", {})

    def gauge(self, hint: str) -> float:
        return {label: value for _, value, label in self.hints.gauges()}[hint]


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_pin_holds_whenever_the_blocks_are_stored(when: str, policy: str) -> None:
    bench = Bench(policy)
    if when == "before":
        bench.store(PROMPT)
    bench.add({"pin": 60})
    slots = [] if when == "before" else bench.begin(PROMPT)
    if when == "during":
        bench.end(PROMPT, slots)
    done = bench.hints.finish("r", 0.0)
    assert done == {"pending" if when == "after" else "pinned": 4}
    if when == "after":
        bench.end(PROMPT, slots)
    assert bench.outcomes() == {"pinned": 4} and bench.gauge("pin") == 4
    assert bench.press() == set(PROMPT)
    bench.hints.expire(60.0)
    assert bench.press() == set()
    assert bench.outcomes() == {"pinned": 4, "expired": 4} and bench.gauge("pin") == 0


def test_without_hints_the_policy_is_the_index_s_own_and_the_prompt_goes() -> None:
    bench = Bench()
    bench.add({"receipt": True})
    bench.store(PROMPT)
    assert bench.hints.finish("r", 0.0) is None
    assert bench.press() == set()
    assert not isinstance(bench.index.policy, Retention)
    bench.add({"pin": 1})
    bench.store(PROMPT)
    assert isinstance(bench.index.policy, Retention)


def test_the_time_of_a_pin_begins_when_the_request_ends() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.add({"pin": 10}, now=0.0)
    bench.hints.finish("r", 8.0)
    bench.hints.expire(17.0)
    assert bench.press() == set(PROMPT)
    bench.hints.expire(18.0)
    assert bench.press() == set()


def test_only_the_first_tokens() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.add({"pin": 60, "tokens": 3 * TOKENS - 1})
    assert bench.hints.finish("r", 0.0) == {"pinned": 2}
    assert bench.press() == set(PROMPT[:2])


def test_the_head_of_a_prompt_is_kept_where_the_share_is_too_small() -> None:
    bench = Bench(share=0.375)  # 6 slots, 3 for one tenant
    bench.store(PROMPT)
    bench.add({"pin": 60})
    assert bench.hints.finish("r", 0.0) == {"pinned": 3, "refused_tenant": 1}
    assert bench.press() == set(PROMPT[:3])
    bench.add({"pin": 60}, "r2", tenant=b"other")  # the blocks stay those of the first tenant
    bench.store(PROMPT[3:])
    assert bench.hints.finish("r2", 0.0) == {"pinned": 4}


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_demoted_blocks_go_first(policy: str) -> None:
    bench = Bench(policy)
    bench.store(PROMPT)
    bench.store([f"other{n}".encode() for n in range(SLOTS - 5)])
    bench.add({"demote": True})
    assert bench.hints.finish("r", 0.0) == {"demoted": 4}
    bench.store([f"new{n}".encode() for n in range(5)])
    assert {bench.index.slot_of(0, block) for block in PROMPT} == {None}
    assert bench.index.ready_slots(0, [f"other{n}".encode() for n in range(SLOTS - 5)])
    assert bench.index.evictions == 4


@pytest.mark.parametrize("pinned", [False, True])
def test_dropped_blocks_are_gone_also_if_they_were_pinned_or_are_being_stored(pinned: bool) -> None:
    bench = Bench()
    bench.store(PROMPT[:2])
    if pinned:
        bench.add({"pin": 60}, "first")
        bench.hints.finish("first", 0.0)
    bench.add({"drop": True})
    slots = bench.begin(PROMPT[2:3])
    assert bench.hints.finish("r", 0.0) == {"dropped": 2, "pending": 1, "missing": 1}
    bench.end(PROMPT[2:3], slots)
    bench.index.check()
    assert bench.index.slots.used == 0 and bench.gauge("pin") == 0
    removed = {block for _, block in bench.index.take_removed(bench.stats)}
    assert removed == set(PROMPT[:3]) and bench.index.evictions == 0


def test_a_dropped_block_that_a_load_reads_stays_until_it_has_ended() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.index.pin([0])
    bench.add({"drop": True})
    bench.hints.finish("r", 0.0)
    assert bench.index.slots.used == 1
    bench.index.unpin([0])
    assert bench.index.slots.used == 0
    bench.index.check()


def test_a_pin_is_not_in_the_way_of_quarantine_and_reset() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.add({"pin": 60})
    bench.hints.finish("r", 0.0)
    slot = bench.index.slot_of(0, PROMPT[0])
    assert slot is not None
    bench.index.quarantine(slot, FailureCause.DIGEST, bench.stats)
    assert bench.index.slot_of(0, PROMPT[0]) is None and bench.gauge("pin") == 3
    bench.index.clear()
    bench.hints.reset()
    assert bench.index.slots.used == bench.gauge("pin") == 0
    bench.index.check()
    assert bench.press() == set()


def test_what_is_not_stored_is_waited_for_no_longer() -> None:
    bench = Bench()
    bench.add({"pin": 60})
    slots = bench.begin(PROMPT[:1])
    assert bench.hints.finish("r", 0.0) == {"pending": 1, "missing": 3}
    bench.hints.settled([], [Block(0, PROMPT[0])], 1.0)
    bench.index.abandon(slots)
    assert bench.outcomes() == {"missing": 4}
    assert not bench.hints._waiting
    bench.store(PROMPT)
    assert bench.gauge("pin") == 0


def test_hints_are_counted() -> None:
    bench = Bench()
    bench.add({"pin": 60, "retain": 90, "drop": True, "hold": 1})
    bench.hints.add("r2", HintsRead(None), b"", [PROMPT], 17, 0.0)
    counters = bench.stats.data["counters"]
    assert counters["cache_hints"] == {"pin": 1, "retain": 1}
    assert counters["ignored_cache_hints"] == {"unknown": 1, "conflict": 1}
    assert bench.hints.finish("r2", 0.0) is None


@pytest.mark.parametrize(
    ("hints", "tokens"),
    [
        ({"prefetch": True}, 4 * TOKENS + 1),
        ({"prefetch": True, "tokens": 6}, 6),
        ({"prefetch": True, "tokens": 600, "pin": 60}, 4 * TOKENS + 1),
        ({"pin": 60}, 0),
    ],
)
def test_a_prefetch_is_asked_for_until_the_request_ends(hints: Any, tokens: int) -> None:
    bench = Bench()
    bench.add(hints)
    assert bench.hints.prefetch_tokens("r") == tokens
    assert bench.hints.prefetch_tokens("other") == 0
    outcomes = bench.hints.finish("r", 1.0)
    assert bench.hints.prefetch_tokens("r") == 0
    assert outcomes == ({"missing": 4} if "pin" in hints else None)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"pin": 60, "tokens": 10**400}, 4),
        ({"pin": 86_400, "retain": 5e-324}, 4),
        ({"pin": 60, **dict.fromkeys(map(str, range(100_000)), 0)}, 4),
        ({"pin": 1e308, "retain": float("nan")}, 0),
        ({"pin": True, "drop": 1, "demote": "yes", "prefetch": [[]] * 1000}, 0),
        ([{"pin": 60}] * 1000, 0),
        ("pin" * 100_000, 0),
    ],
)
def test_whatever_a_request_says_its_blocks_are_stored(options: Any, kept: int) -> None:
    bench = Bench()
    bench.add(options)
    bench.store(PROMPT)
    assert bench.index.ready_slots(0, PROMPT) == list(range(4))
    assert bench.hints.finish("r", 0.0) == ({"pinned": 4} if kept else None)
    assert bench.gauge("pin") == kept
    bench.index.check()
    assert len(bench.press()) == kept
    bench.hints.expire(86_400.0)
    assert not (bench.gauge("pin") or bench.hints._prompts or bench.hints._waiting)
