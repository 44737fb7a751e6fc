"""Frames of hand-offs go before those of shared blocks, and never stop them."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvconnect.testing.page_memory import plain_unit
from kvconnect.testing.transport import ConnectedPair
from kvconnect.transport.base import OutgoingPages, PeerId
from kvconnect.transport.event_queue import EventQueue
from kvconnect.transport.tcp import frame_priority
from kvconnect.transport.tcp.frame_priority import FramePriority
from kvconnect.transport.tcp.send_queue import MIN_FRAME_BYTES, SendQueue
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.transport.tcp.stall_watchdog import StallWatchdog
from tests.links import side

PEER = PeerId(1)
UNIT = plain_unit(1 << 20)


class HeldFence:
    """A fence that passes when it is told to."""

    def __init__(self) -> None:
        self.waited, self.passed = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.waited.set()
        self.passed.wait(60)


def queue(priority: FramePriority | None, *, first: bool) -> SendQueue:
    watch = StallWatchdog(60.0, lambda: 0.0)
    return SendQueue(PEER, EventQueue(), 1, watch, lambda: None, priority, first=first)


def pages(read_id: int = 1, count: int = 1) -> OutgoingPages:
    return OutgoingPages(PEER, read_id, 0, UNIT, 0, array("q", range(count)))


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def taking(share: SendQueue, taken: list[Any]) -> threading.Thread:
    """A data connection's thread that takes one frame."""

    def take() -> None:
        with share.next_frame() as frame:
            taken.append(frame)

    thread = threading.Thread(target=take)
    thread.start()
    return thread


def test_a_shared_frame_waits_for_those_of_hand_offs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_priority, "LONGEST_WAIT_S", 600.0)
    priority = FramePriority()
    handoff, share = queue(priority, first=True), queue(priority, first=False)
    handoff.submit(pages())
    share.submit(pages())
    taken: list[Any] = []
    thread = taking(share, taken)
    until(lambda: priority._changed._waiters)  # type: ignore[attr-defined]
    with handoff.next_frame() as frame:  # queued, then being sent
        assert frame is not None and not taken
    thread.join(60)
    assert len(taken) == 1


def test_without_the_priority_it_is_taken_at_once() -> None:
    """The negative control of the test above."""
    handoff, share = queue(None, first=True), queue(None, first=False)
    handoff.submit(pages())
    share.submit(pages())
    with share.next_frame() as frame:
        assert frame is not None


def test_hand_offs_that_never_end_do_not_stop_the_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_priority, "LONGEST_WAIT_S", 0.0)
    priority = FramePriority()
    handoff, share = queue(priority, first=True), queue(priority, first=False)
    handoff.submit(pages())
    share.submit(pages(count=2 * MIN_FRAME_BYTES // UNIT.block_bytes))
    for _ in range(2):
        with share.next_frame() as frame:
            assert frame is not None


def test_a_closed_queue_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FramePriority, "wait", lambda _: pytest.fail("it waits"))
    priority = FramePriority()
    share = queue(priority, first=False)
    priority.add(1)
    share.submit(pages())
    share.close()
    with share.next_frame() as frame:
        assert frame is None


@pytest.mark.parametrize("end", ["sent", "cancelled", "closed", "closed while one is sent"])
def test_frames_count_until_they_are_sent_or_dropped(end: str) -> None:
    priority = FramePriority()
    handoff = queue(priority, first=True)
    handoff.submit(pages(1))
    handoff.submit(pages(2))
    assert priority._frames == 2
    if end == "sent":
        for left in (2, 1):
            with handoff.next_frame():
                assert priority._frames == left
    elif end == "cancelled":
        handoff.cancel(1)
        assert priority._frames == 1
        handoff.cancel(2)
    elif end == "closed":
        handoff.close()
    else:
        with handoff.next_frame():
            handoff.close()
            assert priority._frames == 1
    assert priority._frames == 0


def test_frames_that_wait_for_the_device_do_not_count() -> None:
    priority = FramePriority()
    handoff = queue(priority, first=True)
    handoff.submit(pages(1))
    handoff.submit(pages(2))
    with handoff.next_frame():
        with handoff.at_fence():
            assert priority._frames == 0  # a shared frame may go meanwhile
        assert priority._frames == 2
    assert priority._frames == 1


def test_a_data_connection_waits_for_a_fence_without_counting() -> None:
    """Pages of a hand-off whose fence has not passed do not hold shared pages up."""
    port, fence = SharedPort(), HeldFence()
    with side(port=port) as source, side() as reader:
        pair = ConnectedPair(reader, source)
        unit = plain_unit(64)
        pair.expect(1, [unit], [[0]])
        peer = pair.of_source
        source.transport.submit(OutgoingPages(peer, 1, 0, unit, 0, array("q", [1]), fence))
        until(fence.waited.is_set)
        until(lambda: not port.priority._frames)
        fence.passed.set()
        pair.until(lambda: pair.arrived(1), "the page")


def test_shared_frames_are_small_beside_hand_offs() -> None:
    count = 16 * MIN_FRAME_BYTES // UNIT.block_bytes
    small = MIN_FRAME_BYTES // UNIT.block_bytes
    for priority, most in ((FramePriority(), small), (None, count)):
        share = queue(priority, first=False)
        share.submit(pages(count=count))
        with share.next_frame() as frame:
            assert frame is not None and len(frame.ids) == most
    handoff = queue(FramePriority(), first=True)
    handoff.submit(pages(count=count))
    with handoff.next_frame() as frame:
        assert frame is not None and len(frame.ids) == count
