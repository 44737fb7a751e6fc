"""What a step costs the scheduler's thread as the host tier grows: operations, not time.

    python -m benchmarks.scheduler_ops [--decades N]

Full host tiers of 1,000 slots up to a million, with either eviction policy. Every fourth slot is
pinned, as by write-backs to a slow disk, and as many blocks as there are slots have been evicted
since, so that queues are as in a tier that has been in use. Each kind of work is then done for the
same number of blocks in all of them: a step that stores blocks and evicts as many, a prompt whose
blocks are dropped, demoted or pinned by a hint, a prompt that is looked up and prefetched from a
secondary tier, the write-back of blocks, and a step while requests wait.

An operation is an instruction of Python's interpreter, or an entry of a queue that is looked at.
What runs inside one instruction, such as the copy of a list, counts as one.

``growth``: the operations of each kind in a tier over those in one with a tenth of its slots, the
largest. ``growth_KIND_POLICY`` is the largest of one kind, and ``ops_KIND_POLICY`` the operations
for each block in the largest tier.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, get_args

from benchmarks.common import emit, progress
from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.keys import block_key
from kvconnect.offload.eviction import lru, make_policy, s3fifo
from kvconnect.offload.index import HostIndex
from kvconnect.offload.planner import OffloadLimits, OffloadPlan
from kvconnect.protocol.cache_hints import read_hints
from kvconnect.settings import PolicyName
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import SHARED, LookupRequest, PrefetchDecision, TierLimits, TierPlan, writeback
from kvconnect.tiers.messages import LookupBlocks, PrefetchBlocks, TierAnswer

BLOCKS = 64  # of each prompt and step
BLOCK_TOKENS = 16
ROUNDS = 20  # over which the operations of a kind are added up
WAITING = 16  # requests
FIRST = 1000  # slots of the smallest tier
GROUPS = (CacheGroup(BLOCK_TOKENS),)


class Counter:
    """Counts operations while it is entered."""

    def __init__(self) -> None:
        self.operations = 0

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, *_: object) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._ran

    def _ran(self, _: FrameType, event: str, __: object) -> Callable[..., Any]:
        self.operations += event == "opcode"
        return self._ran


class CountedQueue(deque[Any]):
    """Counts an operation for each entry that is looked at, also where C code does it."""

    counter = Counter()

    def __iter__(self) -> Iterator[Any]:
        CountedQueue.counter.operations += len(self)
        return super().__iter__()

    def remove(self, entry: Any) -> None:
        CountedQueue.counter.operations += self.index(entry)
        super().remove(entry)


class Tier:
    """The plans of an engine whose host tier is full."""

    def __init__(self, policy: PolicyName, slots: int) -> None:
        self.stats = OffloadingConnectorStats()
        self.index = HostIndex(slots, 1, make_policy(policy, slots), 0.25)
        limits = OffloadLimits(workers=1, deadline_s=30.0, held_blocks=slots)
        self.plan = OffloadPlan(GROUPS, self.index, self.stats, limits)
        self.tiers = TierPlan(
            self.index,
            GROUPS,
            self.stats,
            TierLimits(workers=1, deadline_s=30.0, wait_s=5.0, slots=slots // 4, reused=False),
            lambda offer: PrefetchDecision(len(offer.tiers)),
            lambda *_: None,
        )
        self._blocks = 0
        self._requests = 0
        self._hinted: list[bytes] = []
        for _ in range(slots // BLOCKS + 1):
            self.store()
        self.index.pin(range(0, slots, 4))
        for _ in range(slots // BLOCKS):  # now, each store evicts
            self.store()

    def prompt(self) -> list[bytes]:
        """Return the hashes of new blocks."""
        self._blocks += BLOCKS
        return [(self._blocks + number).to_bytes(32, "big") for number in range(BLOCKS)]

    def store(self) -> list[bytes]:
        """Have the blocks of a new prompt stored; return their hashes."""
        hashes = self.prompt()
        slots = [self.index.reserve(0, block_hash) for block_hash in hashes]
        self.index.commit([slot for slot in slots if slot is not None])
        self.index.take_removed(self.stats)
        return hashes

    def hint(self, name: str, value: object) -> None:
        """A request comes and ends whose hint concerns stored blocks."""
        hints, tokens = self.plan.hints, BLOCKS * BLOCK_TOKENS
        hints.add("r", read_hints({name: value}), b"t", [self._hinted], tokens, 0.0)
        hints.finish("r", 1.0)
        hints.expire(10.0)

    def look_up(self) -> None:
        """A request comes whose blocks a secondary tier has; they are prefetched, and it ends."""
        self._requests += 1
        name, hashes = f"r{self._requests}", self.prompt()
        self.tiers.lookup(name, self.request(hashes), 0.0)
        for _ in range(2):
            work = self.tiers.take(0.0)
            jobs: list[LookupBlocks | PrefetchBlocks] = [*work.lookups, *work.prefetches]
            for job in jobs:
                self.tiers.on_answer(TierAnswer(job.job, b"\1" * len(job.keys)), 0.0)
        self.tiers.on_load_planned(name)
        self.tiers.forget(name)
        self.index.take_removed(self.stats)

    def write_back(self) -> None:
        """Blocks that were stored are written to a secondary tier."""
        for block_hash in self._hinted:
            self.tiers.write_backs.stored(0, block_hash, block_key(SHARED, 0, block_hash))
        for job in self.tiers.take(0.0).write_backs:
            self.tiers.on_answer(TierAnswer(job.job, b"\1" * len(job.keys)), 0.0)

    def wait(self) -> None:
        """A step passes while requests wait for one prefetch."""
        for name, request in self.waiting.items():
            self.tiers.lookup(name, request, 0.1)
        self.tiers.take(0.1)
        self.plan.take(0.1)

    def request(self, hashes: list[bytes]) -> LookupRequest:
        return LookupRequest([hashes], 0, BLOCKS * BLOCK_TOKENS)

    def begin_to_wait(self) -> None:
        """Have requests wait: the first for its prefetch, the others for the same one."""
        request = self.request(self.prompt())
        self.waiting = {f"w{number}": request for number in range(WAITING)}
        self.tiers.lookup("w0", request, 0.0)
        (lookup,) = self.tiers.take(0.0).lookups
        self.tiers.on_answer(TierAnswer(lookup.job, b"\1" * BLOCKS), 0.0)
        self.wait()

    def measure(self, kind: str, work: Callable[[], object]) -> float:
        """Return the operations for each block."""
        counter = CountedQueue.counter
        counter.operations = 0
        for _ in range(ROUNDS):
            self._hinted = self.store() if kind in NEEDS_BLOCKS else []
            with counter:
                work()
        return counter.operations / ROUNDS / BLOCKS


NEEDS_BLOCKS = ("drop", "demote", "pin", "write_back")


def measure(policy: PolicyName, slots: int) -> dict[str, float]:
    """Return the operations of each kind of work for each block."""
    tier = Tier(policy, slots)
    found = {
        "store": tier.measure("store", tier.store),
        "look_up": tier.measure("look_up", tier.look_up),
        "write_back": tier.measure("write_back", tier.write_back),
        "demote": tier.measure("demote", lambda: tier.hint("demote", True)),
        "drop": tier.measure("drop", lambda: tier.hint("drop", True)),
        "pin": tier.measure("pin", lambda: tier.hint("pin", 5)),
    }
    tier.begin_to_wait()
    found["wait"] = tier.measure("wait", tier.wait)
    tier.plan.check()
    return found


def count_queues() -> None:
    """Have the plans use queues that count."""
    for module in (lru, s3fifo, writeback):
        vars(module)["deque"] = CountedQueue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decades", type=int, default=3, help="from 1,000 slots on")
    decades = parser.parse_args().decades
    count_queues()
    figures: dict[str, float] = {}
    for policy in get_args(PolicyName):
        before: dict[str, float] = {}
        for decade in range(decades + 1):
            slots = FIRST * 10**decade
            found = measure(policy, slots)
            progress(f"{policy}, {slots} slots: { ({k: round(v, 1) for k, v in found.items()}) }")
            for kind, operations in found.items():
                name = f"{kind}_{policy}"
                figures[f"ops_{name}"] = operations
                if before:
                    growth = operations / before[kind]
                    figures[f"growth_{name}"] = max(growth, figures.get(f"growth_{name}", 0.0))
            before = found
    growth = max(value for name, value in figures.items() if name.startswith("growth_"))
    emit("scheduler_ops", {"growth": growth, **figures})


if __name__ == "__main__":
    main()
