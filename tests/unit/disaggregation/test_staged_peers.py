"""Peers that share staging buffers: one that is slow ends no other, and leaves room for it."""

from __future__ import annotations

import importlib.util
import math
import threading
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvconnect.testing.page_memory import PageMemory, plain_unit
from kvconnect.testing.transport import ConnectedPair, Side
from kvconnect.transport import make_transport
from kvconnect.transport.base import (
    Drained,
    MemoryRegion,
    PageChunk,
    PagesReceived,
    PageUser,
    PeerDown,
    Transport,
    Unit,
)
from kvconnect.transport.tcp.send_queue import MAX_STAGED_FRAME_BYTES
from tests.links import NIXL_QUICK, OPEN, tcp

torch = pytest.importorskip("torch")

from kvconnect.disaggregation.staging import BUFFERS, RING_BYTES, StagedMemory  # noqa: E402

BLOCK = 64 << 10
UNIT = Unit(array("q", [0, 0, BLOCK]), 1, BLOCK)  # always the same bytes: orders of any size
LARGE = range(2048)  # 128 MiB, more than sockets keep
PATIENT = {"dead_after_s": 60.0, "silent_s": 60.0, "stall_s": 60.0, "digest": "off"}

needs_nixl = pytest.mark.skipif(
    not importlib.util.find_spec("nixl_cu12"), reason="nixl-cu12 is not installed"
)


class OnDevice(StagedMemory):
    """Says that its pages lie on a device."""

    def regions(self) -> tuple[MemoryRegion, ...]:
        return tuple(region._replace(device=0) for region in super().regions())


def staged(kind: type[StagedMemory] = StagedMemory) -> StagedMemory:
    return kind(torch.full((BLOCK,), 7, dtype=torch.uint8), 2 * BUFFERS * BLOCK)


class Slow(PageMemory):
    """Gives or takes the first page of a frame and then none before it may go on."""

    def __init__(self) -> None:
        super().__init__(BLOCK, seed=1)
        self.may_go_on = threading.Event()

    def _halting(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        yield PageChunk(self.address, BLOCK, unit, ids[:1])
        assert self.may_go_on.wait(60)
        yield PageChunk(self.address, BLOCK, unit, ids[1:])

    outgoing = incoming = _halting


@contextmanager
def made(
    memory: object, connections: int = 1, make: Callable[..., Transport] = tcp
) -> Iterator[Side]:
    """A side that listens once, also if several connect to it."""
    transport = make(connections=connections, **PATIENT)
    try:
        yield Side(transport, memory)
    finally:
        if isinstance(memory, Slow):
            memory.may_go_on.set()
        transport.close()


def joined(reader: Side, source: Side) -> ConnectedPair:
    pair = ConnectedPair(reader, source)
    source.transport.listen = lambda *_: pair.address
    return pair


def move(pair: ConnectedPair, blocks: range = range(1), read_id: int = 1) -> None:
    pair.expect(read_id, [UNIT], [blocks])
    pair.send(read_id, 0, UNIT, blocks)


@contextmanager
def all_in_use(memory: StagedMemory) -> Iterator[ExitStack]:
    """No buffer for sending is free before the stack is closed."""
    with ExitStack() as stack:
        for _ in range(BUFFERS):
            call = memory.outgoing(UNIT, array("q", [0, 0]))
            next(stack.enter_context(closing(call)))
        yield stack


def test_a_reader_that_takes_nothing_leaves_room_for_others() -> None:
    memory, halted = staged(), Slow()
    ring = memory._sending
    with made(memory) as source, made(halted, BUFFERS) as reader, made(PageMemory(BLOCK)) as other:
        slow = joined(reader, source)
        move(slow, LARGE)
        slow.until(lambda: len(ring._free) == 1 and len(ring._waiting) == 1, "a slow reader")
        quick = joined(other, source)
        move(quick)
        quick.until(lambda: quick.arrived(1), "a page for the other reader")
        assert other.memory.data == b"\7" * BLOCK
        assert not slow.arrived(1)  # control: it has taken nothing yet
        halted.may_go_on.set()
        slow.until(lambda: slow.arrived(1) == len(LARGE), "the slow reader's pages")
        assert not any(each.of(PeerDown) for each in (source, reader, other))


def test_a_source_that_stops_midway_leaves_room_for_others() -> None:
    memory, halted = staged(), Slow()
    ring = memory._receiving
    with (
        made(memory, BUFFERS) as reader,
        made(halted) as source,
        made(PageMemory(BLOCK, seed=2)) as other,
    ):
        slow, quick = joined(reader, source), joined(reader, other)
        move(slow, LARGE)
        slow.until(lambda: len(ring._free) == 1 and len(ring._waiting) == 1, "a slow source")
        move(quick)
        quick.until(lambda: of(quick), "a page of the other source")
        assert not of(slow)  # control: none of its frames is complete yet
        halted.may_go_on.set()
        slow.until(lambda: of(slow) == len(LARGE), "the slow source's pages")
        assert not any(each.of(PeerDown) for each in (source, reader, other))


def of(pair: ConnectedPair) -> int:
    """How many blocks have come from this pair's source alone."""
    events = pair.reader.of(PagesReceived)
    return sum(event.count for event in events if event.peer == pair.of_reader)


def test_a_frame_waits_for_room_until_it_is_cancelled() -> None:
    memory = staged()
    with made(memory) as source, made(PageMemory(BLOCK)) as reader, all_in_use(memory) as held:
        pair = joined(reader, source)
        move(pair)
        pair.until(lambda: memory._sending._waiting, "a frame that waits")
        queue = source.transport._peers[pair.of_source].send_queue  # type: ignore[attr-defined]
        assert {frame.due for frame in queue.watch._frames} == {math.inf}  # it is not the reader
        source.transport.cancel(pair.of_source, 1)
        pair.until(lambda: source.of(Drained), "the end of a cancelled frame")
        move(pair, read_id=2)
        pair.until(lambda: memory._sending._waiting, "another frame that waits")
        held.close()
        pair.until(lambda: pair.arrived(2), "its page")
        assert not source.of(PeerDown) and not reader.of(PeerDown)
        assert not pair.arrived(1)


@pytest.mark.parametrize("kind", [StagedMemory, OnDevice])
def test_a_device_sends_short_frames(kind: type[StagedMemory]) -> None:
    """A frame keeps its buffer for as long as its reader takes. Memory that a reader's pace holds
    nothing in is the negative control."""
    with made(staged(kind)) as source, made(PageMemory(BLOCK)) as reader:
        pair = joined(reader, source)
        move(pair, LARGE)
        pair.until(lambda: pair.arrived(1) == len(LARGE), "all pages")
        largest = max(event.nbytes for event in reader.of(PagesReceived))
        short = largest == MAX_STAGED_FRAME_BYTES
        assert short == (kind is OnDevice)


def test_a_short_frame_fits_into_a_buffer() -> None:
    assert RING_BYTES // (2 * BUFFERS) >= MAX_STAGED_FRAME_BYTES


@contextmanager
def over_nixl(of_reader: object, of_source: object) -> Iterator[ConnectedPair]:
    with ExitStack() as stack:
        sides = []
        for memory in (of_reader, of_source):
            transport = make_transport("nixl", OPEN, NIXL_QUICK)
            stack.callback(transport.close)
            sides.append(Side(transport, memory))
        reader, source = sides
        yield ConnectedPair(reader, source, "nixl")


@needs_nixl
def test_a_write_waits_for_room_to_compute_its_digests() -> None:
    memory, unit = staged(), plain_unit(BLOCK)
    with over_nixl(PageMemory(BLOCK), memory) as pair, all_in_use(memory) as held:
        for read_id in (1, 2):
            pair.expect(read_id, [unit], [[0]])
            pair.send(read_id, 0, unit, [0])
            pair.until(lambda: memory._sending._waiting, "a write that waits")
            if read_id == 1:
                pair.source.transport.cancel(pair.of_source, 1)
                pair.until(lambda: pair.source.of(Drained), "the end of a cancelled write")
        held.close()
        pair.until(lambda: pair.arrived(2), "its page")
        assert not pair.arrived(1)
        assert not pair.source.of(PeerDown) and not pair.reader.of(PeerDown)


@needs_nixl
def test_a_cancelled_read_waits_for_no_room_to_compare_digests() -> None:
    memory, unit = staged(), plain_unit(BLOCK)
    with over_nixl(memory, PageMemory(BLOCK, seed=1)) as pair, all_in_use(memory):
        pair.expect(1, [unit], [[0]])
        pair.send(1, 0, unit, [0])
        pair.until(lambda: memory._sending._waiting, "a read that waits")
        pair.reader.transport.cancel(pair.of_reader, 1)
        pair.until(lambda: pair.reader.of(Drained), "the end of a cancelled read")
        assert not pair.source.of(PeerDown) and not pair.reader.of(PeerDown)
