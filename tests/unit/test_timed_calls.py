"""Calls that a disk can hold up."""

from __future__ import annotations

import threading
import time

import pytest

from kvconnect import threads, timed_calls
from kvconnect.timed_calls import TimedCalls

SHORT_S = 0.05


def test_a_call_returns_or_raises_what_its_work_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_calls, "_IDLE_S", 3.0)
    call = TimedCalls("test")
    assert call(lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        call(lambda: open("/nowhere").close())
    made = call(threading.current_thread)
    assert made is not threading.current_thread()
    assert call(threading.current_thread) is made
    made.join(30.0)
    assert not made.is_alive(), "no thread stays"
    assert call(lambda: 7) == 7


def test_a_late_call_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call, go_on = TimedCalls("test", SHORT_S), threading.Event()
    with pytest.raises(TimeoutError):
        call(go_on.wait)
    asked: list[int] = []
    with pytest.raises(TimeoutError, match="an earlier call"):
        call(lambda: asked.append(1))
    go_on.set()
    call._last.result()  # type: ignore[union-attr]
    with pytest.raises(TimeoutError, match="an earlier call"):
        call(lambda: asked.append(1))
    now = time.monotonic() + 1.0
    monkeypatch.setattr(timed_calls.time, "monotonic", lambda: now)
    assert call(lambda: 7) == 7
    assert not asked, "what was refused is not done later"


def test_pauses_grow_while_calls_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: after a call in time, the next pause is the first one again."""
    call, now = TimedCalls("test", SHORT_S), time.monotonic()
    monkeypatch.setattr(timed_calls.time, "monotonic", lambda: now)

    def late() -> int:
        """Make a late call, and go on until another one is made; return the seconds."""
        nonlocal now
        go_on, began = threading.Event(), now
        with pytest.raises(TimeoutError):
            call(go_on.wait)
        go_on.set()
        call._last.result()  # type: ignore[union-attr]
        while not call._breaker.allows(now):
            now += 1.0
        return round(now - began)

    assert [late() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert call(lambda: 7) == 7
    assert late() == 1


def test_without_a_thread_no_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    call = TimedCalls("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(TimeoutError, match="can't start new thread"):
            call(lambda: 7)
    assert call(lambda: 7) == 7


def test_an_error_of_a_call_is_none_of_its_thread() -> None:
    call = TimedCalls("test")
    threads.take_failures()
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 // 0)
    assert call(lambda: 7) == 7
    assert threads.take_failures() == {}
