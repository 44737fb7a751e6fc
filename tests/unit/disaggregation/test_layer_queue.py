"""Layers that a thread of their own takes: in order, and never after what must come later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvconnect.disaggregation.layer_queue import LayerQueue
from kvconnect.errors import TransferFailed
from kvconnect.transport.base import Fence

WAIT_S = 20.0


class Taker:
    """Takes layers; remembers their names, and whether the lock was held each time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.names: list[str | None] = []
        self.held: list[bool] = []
        self.errors: list[Exception] = []
        self.behind = LayerQueue(self.lock, self.take, self.errors.append)

    def take(self, name: str | None, fence: Fence | None) -> None:
        if name == "bad":
            raise ValueError(name)
        if name == "end":
            raise SystemExit
        self.held.append(self.lock.locked())
        self.names.append(name)


@pytest.fixture
def taker() -> Iterator[Taker]:
    made = Taker()
    yield made
    made.behind.close(WAIT_S)


def until(over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not over():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_layers_are_taken_in_order_with_the_lock_held(taker: Taker) -> None:
    names = [str(number) for number in range(500)]
    for name in names:
        taker.behind.put(name, None)
    until(lambda: len(taker.names) == len(names))
    assert taker.names == names
    assert all(taker.held)
    taker.behind.check()


def test_nothing_is_taken_after_a_catch_up(taker: Taker) -> None:
    """However the thread is timed: what follows under the lock comes after all that was put."""
    expected: list[str] = []
    for number in range(300):
        names = [f"{number}.{layer}" for layer in range(3)]
        expected += [*names, "the step is over"]
        for name in names:
            taker.behind.put(name, None)
        with taker.lock:
            taker.behind.catch_up()
            taker.names.append("the step is over")
    taker.behind.close(WAIT_S)
    assert taker.names == expected


def test_without_a_catch_up_layers_come_late(taker: Taker) -> None:
    """The control of the test above."""
    with taker.lock:
        taker.behind.put("late", None)
        taker.names.append("the step is over")
    until(lambda: len(taker.names) == 2)
    assert taker.names == ["the step is over", "late"]


def test_a_layer_that_cannot_be_sent_ends_nothing_else(taker: Taker) -> None:
    taker.behind.put("bad", None)
    taker.behind.put("good", None)
    until(lambda: taker.names == ["good"])
    assert [str(error) for error in taker.errors] == ["bad"]
    taker.behind.check()
    with taker.lock:  # neither on the engine's thread
        taker.behind.put("bad", None)
        taker.behind.catch_up()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_of_the_thread_is_seen(taker: Taker) -> None:
    taker.behind.check()
    taker.behind.put("end", None)
    with pytest.raises(TransferFailed, match="ended"):
        until(lambda: taker.behind.check() or False)
