"""Threads whose errors are logged, counted, and mended or told."""

from __future__ import annotations

import threading

import pytest

from kvconnect import threads
from kvconnect.threads import ThreadKind

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE_FIRST_S", 0.001)
    threads.take_failures()


def test_an_error_is_logged_and_counted_and_ends_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = threads.make(ThreadKind.COPY, "a-name", lambda: 1 // 0)
    thread.start()
    thread.join(PATIENCE_S)

    assert not thread.is_alive()
    assert threads.take_failures() == {"copy": 1}
    assert threads.take_failures() == {}
    (said,) = caplog.records
    assert "a-name" in said.getMessage()
    assert said.exc_info and said.exc_info[0] is ZeroDivisionError


def test_work_is_begun_again_until_it_ends_by_itself() -> None:
    left = [ValueError("a"), ValueError("b")]

    def work() -> None:
        if left:
            raise left.pop()

    thread = threads.make(ThreadKind.METRICS, "x", work, again=True)
    thread.start()
    thread.join(PATIENCE_S)

    assert not left and not thread.is_alive()
    assert threads.take_failures() == {"metrics": 2}


def test_work_that_was_stopped_is_not_begun_again() -> None:
    stopped = threading.Event()

    def work() -> None:
        stopped.set()
        raise ValueError

    thread = threads.make(ThreadKind.TCP, "x", work, again=True, stopped=stopped.is_set)
    thread.start()
    thread.join(PATIENCE_S)

    assert not thread.is_alive()
    assert threads.take_failures() == {"tcp": 1}
