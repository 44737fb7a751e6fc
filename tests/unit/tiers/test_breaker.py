"""When a disk or a server is left alone, and how much is written."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvconnect.circuit_breaker import CircuitBreaker
from kvconnect.errors import TransferFailed
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.backends.base import WriteBudget
from kvconnect.tiers.backends.disk import store as disk_store
from kvconnect.tiers.backends.disk.transfers import BlockWrite
from kvconnect.tiers.backends.remote import RemoteStore, Server
from tests.stores import Clock, opening, put

TOGETHER = 6


def test_it_is_left_alone_after_failures_in_a_row() -> None:
    breaker = CircuitBreaker(3, trial_factor=2)
    for _ in range(2):
        assert breaker.enter(0.0)
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(3):
        assert breaker.enter(0.0)
        breaker.failed(0.0)
    assert not breaker.allows(0.9) and not breaker.enter(0.9)
    assert repr(breaker) == "CircuitBreaker(open, 3 failures)"


def test_one_probe_goes_through_per_delay_and_success_ends_it() -> None:
    breaker = CircuitBreaker(1, trial_factor=2)
    breaker.failed(0.0)
    assert [breaker.enter(1.0), breaker.enter(1.0), breaker.allows(1.0)] == [True, False, False]
    assert breaker.allows(9.0) and not breaker.closed  # a trial may be made, none has succeeded
    breaker.succeeded()
    assert breaker.closed
    assert [breaker.enter(1.0), breaker.enter(1.0)] == [True, True]


def test_the_delay_doubles_up_to_a_minute() -> None:
    breaker, now, delays = CircuitBreaker(1, trial_factor=2), 0.0, []
    for _ in range(9):
        breaker.failed(now)
        delay = next(s for s in range(1, 100) if breaker.allows(now + s))
        assert not breaker.allows(now + delay - 0.5)
        delays.append(delay)
        now += delay
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    breaker.succeeded()
    breaker.failed(now)
    assert breaker.allows(now + 1)


def test_a_probe_that_nobody_reports_on_is_not_the_last() -> None:
    breaker = CircuitBreaker(1, trial_factor=2)
    breaker.failed(0.0)
    assert breaker.enter(1.0)
    assert not breaker.enter(2.9)
    assert breaker.enter(3.0)


def test_a_budget_bounds_a_day() -> None:
    per_day = 24 * 3600 * 100
    budget = WriteBudget(per_day, 0.0)
    written = sum(1000 for second in range(86_400) if budget.spend(1000, float(second)))
    assert 0.99 * per_day < written <= per_day * 25 / 24 + 1000
    # Control: without a bound everything goes.
    assert all(WriteBudget(0, 0.0).spend(1 << 40, 0.0) for _ in range(3))


def test_a_batch_may_overdraw_a_budget_once() -> None:
    budget = WriteBudget(24 * 100, 0.0)  # an hour's is 100
    assert budget.spend(1000, 0.0)
    assert not budget.spend(1, 3600.0 * 8)
    assert budget.spend(1, 3600.0 * 9.1)


class Ticking(Clock):
    """Each look at it is a little later."""

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Down(Server):
    """Fails all calls; those that wait for each other at the same time."""

    def __init__(self) -> None:
        self.together = threading.Barrier(TOGETHER)
        self.asked = 0

    def sizes(self, names: Sequence[str]) -> list[int]:
        self.together.wait(30.0)
        self.asked += len(names)
        raise TransferFailed("the server restarts")

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        raise TransferFailed("the server restarts")

    def load(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        raise TransferFailed("the server restarts")

    def delete(self, names: Sequence[str]) -> list[bool]:
        raise TransferFailed("the server restarts")

    def close(self) -> None:
        pass


def at_once(call: Callable[[], object]) -> None:
    """Make calls that are under way at the same time; return when all have ended."""
    threads = [threading.Thread(target=call, daemon=True) for _ in range(TOGETHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)


def test_calls_to_a_server_that_fail_together_are_one_failure() -> None:
    server, clock = Down(), Ticking()
    store = RemoteStore(server, "p", b"f", clock)
    at_once(lambda: store.exists([b"key"]))
    assert server.asked == TOGETHER
    server.together = threading.Barrier(1)
    store.exists([b"key"])
    assert server.asked == TOGETHER, "it is left alone"
    clock.now += 1.0
    store.exists([b"key"])
    assert server.asked == TOGETHER + 1, "and tried again after the first pause"
    store.close()


def test_writes_to_a_disk_that_fail_together_are_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, clock = threading.Barrier(TOGETHER), Ticking()

    class Failing(BlockWrite):
        def run(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
            together.wait(30.0)
            self.error = OSError(errno.EIO, "the disk is gone")
            return [BlockOutcome.FAILED] * len(keys)

    with opening(tmp_path, clock) as make:
        store = make()
        with monkeypatch.context() as patch:
            patch.setattr(disk_store, "BlockWrite", Failing)
            at_once(lambda: put(store, [b"key"]))
        assert put(store, [b"key"]) == [BlockOutcome.UNAVAILABLE]
        clock.now += 1.0
        assert put(store, [b"key"]) == [BlockOutcome.OK]
