"""The thread of an agent: what ends it, and what does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvconnect import threads
from kvconnect.peers.loop import PeerLoop
from kvconnect.testing.inproc import InprocTransport
from kvconnect.transport.base import Event, MessageReceived, PeerId

WAIT_S = 60.0
EVENT = MessageReceived(PeerId(1), b"")


class Polled(InprocTransport):
    """Gives out one event at a time, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Event] = [EVENT]
        self.closed = threading.Event()

    def poll(self, timeout: float) -> list[Event]:
        return [self.waiting.pop()] if self.waiting else super().poll(timeout)

    def close(self) -> None:
        self.closed.set()
        super().close()


@contextmanager
def looping(
    on_event: Callable[[Event], None], tick: Callable[[float], None], *, again: bool = False
) -> Iterator[tuple[PeerLoop, Polled]]:
    transport = Polled()
    loop = PeerLoop(threads.ThreadKind.DOCTOR, transport, on_event, tick, again=again)
    loop.start()
    try:
        yield loop, transport
    finally:
        loop.stop()
        transport.close()
        loop.join()
        assert not loop.alive
        threads.take_failures()


def test_events_and_ticks_go_on_until_it_is_stopped() -> None:
    events, ticked = [], threading.Semaphore(0)
    with looping(events.append, lambda _: ticked.release()) as (loop, transport):
        for _ in range(3):
            assert ticked.acquire(timeout=WAIT_S)
        assert events == [EVENT]
        assert loop.alive and not loop.closed and not transport.closed.is_set()
        loop.stop()
        loop.join()
        assert not loop.alive and loop.closed and transport.closed.is_set()


def fails(_: Event) -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("again", [False, True])
def test_an_error_ends_a_thread_and_its_connections_or_is_survived(again: bool) -> None:
    """Peers of one whose thread has ended would wait for it."""
    went_on = threading.Event()
    with looping(fails, lambda _: went_on.set(), again=again) as (loop, transport):
        assert (went_on if again else transport.closed).wait(WAIT_S)
        if again:
            assert loop.alive and not transport.closed.is_set()
        else:
            loop.join()
            assert not loop.alive and not loop.closed and not went_on.is_set()
