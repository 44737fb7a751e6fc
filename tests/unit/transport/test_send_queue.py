"""Queue, expectations and what is under way: cut into frames, checked, and quiet in the end."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvconnect.errors import Misuse, ProtocolError
from kvconnect.protocol.frames import FrameHeader
from kvconnect.testing.page_memory import plain_unit
from kvconnect.transport.base import (
    Drained,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PagesSent,
    PeerId,
)
from kvconnect.transport.event_queue import MAX_UNREAD_BYTES, EventQueue
from kvconnect.transport.tcp.send_queue import (
    MAX_FRAME_BYTES,
    MAX_STAGED_FRAME_BYTES,
    MIN_FRAME_BYTES,
    OutboundFrame,
    SendQueue,
)
from kvconnect.transport.tcp.stall_watchdog import MIN_BYTES_PER_S, StallWatchdog

PEER = PeerId(7)
KIB64 = 64 << 10


class Fixture:
    def __init__(self, connections: int = 2, most_bytes: int = MAX_FRAME_BYTES) -> None:
        self.events = EventQueue()
        self.now = 100.0
        self.monotonic = 1000.0
        self.watch = StallWatchdog(30.0, lambda: self.now, lambda: self.monotonic)
        self.starts: list[int] = []  # number of frames when sending was to start
        self.queue = SendQueue(
            *(PEER, self.events, connections, self.watch, self.on_first),
            most_bytes=lambda: most_bytes,
        )

    def on_first(self) -> None:
        self.starts.append(len(self.queue._queue))

    def send(self, blocks: int, block_bytes: int = KIB64, read_id: int = 1, first: int = 0) -> None:
        unit = plain_unit(block_bytes)
        ids = array("q", range(100, 100 + blocks))
        self.queue.submit(OutgoingPages(PEER, read_id, 0, unit, first, ids))

    def frames(self) -> Iterator[OutboundFrame]:
        while self.queue._queue:
            with self.queue.next_frame() as frame:
                assert frame is not None
                self.queue.sent(frame)
                yield frame

    def expect(self, read_id: int = 1, first: int = 10, blocks: int = 5) -> None:
        span = (first, array("q", range(blocks)))
        self.queue.submit(IncomingPages(PEER, read_id, [plain_unit(KIB64)], [span]))


def header(**changes: int) -> FrameHeader:
    sound = FrameHeader(0, read_id=1, unit=0, first=10, count=5, nbytes=5 * KIB64, digest_period=0)
    return sound._replace(**changes)


@pytest.mark.parametrize(
    ("connections", "nbytes", "frames"),
    [
        (1, KIB64, 1),
        (2, MIN_FRAME_BYTES, 1),
        (2, 3 * MIN_FRAME_BYTES // 2, 2),
        (2, 16 * MIN_FRAME_BYTES, 2),  # each connection has its share
        (4, 16 * MIN_FRAME_BYTES, 4),
        (1, 3 * MAX_FRAME_BYTES, 3),
    ],
)
def test_orders_are_cut_so_that_every_connection_has_work(
    connections: int, nbytes: int, frames: int
) -> None:
    fixture = Fixture(connections)
    fixture.send(nbytes // KIB64, first=3)
    got = list(fixture.frames())
    assert len(got) == frames
    assert [block for frame in got for block in frame.ids] == list(
        range(100, 100 + nbytes // KIB64)
    )
    assert [frame.first for frame in got] == [3 + frame.ids[0] - 100 for frame in got]
    (sent,) = fixture.events.drain(0)
    assert isinstance(sent, PagesSent)
    assert (sent.read_id, sent.nbytes) == (1, nbytes)


@pytest.mark.parametrize(("most", "frames"), [(MAX_STAGED_FRAME_BYTES, 3), (MAX_FRAME_BYTES, 1)])
def test_what_is_staged_is_sent_in_short_frames(most: int, frames: int) -> None:
    fixture = Fixture(connections=1, most_bytes=most)
    fixture.send(3 * MAX_STAGED_FRAME_BYTES // KIB64)
    assert len(list(fixture.frames())) == frames


def test_a_frame_of_odd_blocks_keeps_to_its_limit() -> None:
    """Otherwise a staging buffer would lack room for the last block, which takes another turn."""
    fixture, block_bytes = Fixture(1, MAX_STAGED_FRAME_BYTES), 640 << 10
    fixture.send(39, block_bytes)
    counts = [len(frame.ids) for frame in fixture.frames()]
    assert counts == [12, 12, 12, 3]
    assert 12 * block_bytes <= MAX_STAGED_FRAME_BYTES < 13 * block_bytes


def test_a_block_larger_than_a_frame_goes_alone() -> None:
    fixture = Fixture()
    fixture.send(3, block_bytes=2 * MAX_FRAME_BYTES)
    assert [len(frame.ids) for frame in fixture.frames()] == [1, 1, 1]


def test_an_empty_order_is_a_mistake() -> None:
    with pytest.raises(Misuse, match="nothing to send"):
        Fixture().send(0)


def test_sending_starts_with_the_first_pages_and_once() -> None:
    fixture = Fixture()
    fixture.expect()
    assert fixture.starts == []
    fixture.send(1)
    fixture.queue.cancel(1)
    fixture.send(1, read_id=2)
    assert fixture.starts == [1]


def test_an_expected_frame_finds_its_pages() -> None:
    fixture = Fixture()
    fixture.expect()
    with fixture.queue.receive(header(first=12, count=2, nbytes=2 * KIB64)) as target:
        assert target is not None
        assert list(target.ids) == [2, 3]
        assert target.stop == b"\0"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"read_id": 2}, "read 2, which is not known"),
        ({"unit": 1}, "unit 1 of read 1, of 1"),
        ({"first": 9}, "blocks 9 to 13 .* expected are 10 to 14"),
        ({"first": 11}, "blocks 11 to 15"),
        ({"count": 6, "nbytes": 6 * KIB64}, "blocks 10 to 15"),
        ({"nbytes": 5 * KIB64 - 1}, "bytes for 5 blocks"),
        ({"count": 4}, "bytes for 4 blocks"),
        ({"nbytes": 2 * MAX_FRAME_BYTES}, "a frame of"),
    ],
)
def test_a_frame_that_nobody_asked_for_is_refused(changes: dict[str, int], text: str) -> None:
    fixture = Fixture()
    fixture.expect()
    with pytest.raises(ProtocolError, match=text), fixture.queue.receive(header(**changes)):
        raise AssertionError("it was let in")


def test_a_cancelled_want_falls_quiet_when_its_last_frame_has_ended() -> None:
    fixture = Fixture()
    fixture.expect()
    with fixture.queue.receive(header(count=1, nbytes=KIB64)) as first:
        with fixture.queue.receive(header(first=11, count=1, nbytes=KIB64)):
            fixture.queue.cancel(1)
            assert first is not None
            assert first.stop == b"\1"
        assert fixture.events.drain(0) == []
    assert fixture.events.drain(0) == [Drained(PEER, 1)]
    with fixture.queue.receive(header()) as late:
        assert late is None  # read and thrown away
    assert fixture.events.drain(0) == []


def test_a_frame_that_comes_after_a_cancel_does_not_hold_up_its_end() -> None:
    """It is written nowhere, and the source decides how long it takes."""
    fixture = Fixture()
    fixture.expect()
    with ExitStack() as stack:
        with fixture.queue.receive(header(count=1, nbytes=KIB64)):
            fixture.queue.cancel(1)
            late = fixture.queue.receive(header(first=11, count=1, nbytes=KIB64))
            assert stack.enter_context(late) is None
            assert fixture.events.drain(0) == []
        assert fixture.events.drain(0) == [Drained(PEER, 1)]
    assert fixture.events.drain(0) == []
    assert not fixture.queue._busy


def test_a_frame_of_a_cancelled_want_is_not_larger_than_others() -> None:
    fixture = Fixture()
    fixture.expect()
    fixture.queue.cancel(1)
    largest = MAX_FRAME_BYTES + KIB64
    with fixture.queue.receive(header(count=1, nbytes=largest)) as late:
        assert late is None
    with (
        pytest.raises(ProtocolError, match=f"a frame of {largest + 1} bytes"),
        fixture.queue.receive(header(count=1, nbytes=largest + 1)),
    ):
        raise AssertionError("it was let in")


def test_only_so_many_cancelled_wants_are_remembered() -> None:
    fixture = Fixture()
    for read_id in range(5000):
        fixture.expect(read_id)
        fixture.queue.cancel(read_id)
    with fixture.queue.receive(header(read_id=4999)) as late:
        assert late is None
    with pytest.raises(ProtocolError), fixture.queue.receive(header(read_id=0)):
        raise AssertionError("it was let in")


def test_cancelling_drops_what_is_queued_and_lets_the_rest_finish() -> None:
    fixture = Fixture()
    fixture.send(2 * MIN_FRAME_BYTES // KIB64)
    fixture.send(1, read_id=2)
    with fixture.queue.next_frame() as frame:
        assert frame is not None
        fixture.queue.cancel(1)
        assert fixture.events.drain(0) == []
        fixture.queue.sent(frame)
    assert fixture.events.drain(0) == [Drained(PEER, 1)]  # and no Sent: half of it was not sent
    assert [frame.request.order.read_id for frame in fixture.frames()] == [2]


def test_cancelling_an_unknown_want_is_quiet_at_once() -> None:
    fixture = Fixture()
    fixture.queue.cancel(3)
    assert fixture.events.drain(0) == [Drained(PEER, 3)]


def test_nothing_happens_after_close() -> None:
    fixture = Fixture()
    fixture.expect()
    fixture.send(1)
    with fixture.queue.receive(header()) as target:
        fixture.queue.close()
        assert target is not None
        assert target.stop == b"\1"
        fixture.queue.cancel(1)
        fixture.expect(2)
        fixture.send(1)
    with fixture.queue.next_frame() as frame:
        assert frame is None
    assert not fixture.queue._queue
    assert fixture.starts == [1]
    assert fixture.events.drain(0) == []


def test_a_mailbox_says_when_too_much_is_unread() -> None:
    events = EventQueue()
    message = MessageReceived(PEER, bytes(1 << 20))
    assert all(events.put(message) for _ in range(MAX_UNREAD_BYTES >> 20))
    assert not events.put(message)
    assert events.put(MessageReceived(PeerId(8), b"x"))  # another peer is not to blame
    assert len(events.drain(0)) == (MAX_UNREAD_BYTES >> 20) + 2
    assert events.put(message)


def test_a_mailbox_is_not_filled_by_tiny_notes_either() -> None:
    events = EventQueue()
    message = MessageReceived(PEER, b"x")
    assert all(events.put(message) for _ in range(MAX_UNREAD_BYTES // 256))
    assert not events.put(message)


def test_a_frame_has_its_time_by_size_and_no_more() -> None:
    fixture = Fixture()
    with fixture.watch.over(1, 10 * MIN_BYTES_PER_S), fixture.watch.over(2, 0):
        assert not fixture.watch.overdue(130.0)
        assert fixture.watch.overdue(130.1)
    with fixture.watch.over(1, 10 * MIN_BYTES_PER_S):
        assert not fixture.watch.overdue(140.0)
        assert fixture.watch.overdue(140.1)
    assert not fixture.watch.overdue(1e9)


def test_a_frame_that_waits_for_this_side_keeps_its_time() -> None:
    fixture = Fixture()
    with fixture.watch.over(1, 0) as moving:
        fixture.now = 120.0
        with fixture.watch.paused(moving):
            fixture.now = 500.0
            assert not fixture.watch.overdue(500.0)
        assert not fixture.watch.overdue(510.0)
        assert fixture.watch.overdue(510.1)


def test_a_cancelled_frame_has_less_time() -> None:
    fixture = Fixture()
    with fixture.watch.over(1, 500 * MIN_BYTES_PER_S):
        fixture.now = 200.0
        fixture.queue.cancel(2)
        assert not fixture.watch.overdue(300.0)  # that was another read
        fixture.queue.cancel(1)
        fixture.queue.cancel(1)
        fixture.monotonic = 1030.0
        assert not fixture.watch.overdue(230.0)
        # The loop's own clock has stood still: engines reuse the pages all the same.
        fixture.monotonic = 1030.1
        assert fixture.watch.overdue(200.0)
