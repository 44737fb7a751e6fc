"""What a step costs the scheduler does not grow with the host tier: operations are counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scheduler_ops
from kvconnect.offload.eviction import lru, s3fifo
from kvconnect.settings import PolicyName
from kvconnect.tiers import writeback
from tests.small import smoke

SMALL, LARGE = 2_000, 20_000


@pytest.fixture(autouse=True)
def counted_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lru, s3fifo, writeback):
        monkeypatch.setattr(module, "deque", scheduler_ops.CountedQueue)


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_no_kind_of_work_grows_with_the_tier(policy: PolicyName) -> None:
    small, large = (scheduler_ops.measure(policy, slots) for slots in (SMALL, LARGE))
    grown = {kind: large[kind] / small[kind] for kind in small}
    assert max(grown.values()) <= 1.2, grown


@pytest.mark.smokes("scheduler_ops")
def test_the_benchmark_reports_the_growth_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = smoke(monkeypatch, tmp_path, "scheduler_ops", "--decades", "1", FIRST=100)
    assert {"growth", "growth_drop_lru", "ops_store_s3fifo"} <= found.keys()


@pytest.mark.parametrize("broken", ["removal", "eviction"])
def test_work_that_grows_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a queue is searched for what is removed; each eviction looks at all slots."""
    remove, evict = s3fifo.S3FIFO.remove, s3fifo.S3FIFO.evict

    def searches(self: Any, slot: int) -> None:
        for queue in (self._small, self._main):
            any(entry[0] == slot for entry in queue.entries)
        remove(self, slot)

    def scans(self: Any, pins: Sequence[int]) -> int | None:
        any(entry is None for entry in self._main.entries)
        return evict(self, pins)

    changed = ("remove", searches) if broken == "removal" else ("evict", scans)
    kind = "drop" if broken == "removal" else "store"

    def operations(slots: int) -> float:
        tier = scheduler_ops.Tier("s3fifo", slots)
        with monkeypatch.context() as patch:
            patch.setattr(s3fifo.S3FIFO, *changed)
            work = tier.store if kind == "store" else lambda: tier.hint("drop", True)
            return tier.measure(kind, work)

    assert operations(900) > 1.5 * operations(300)
