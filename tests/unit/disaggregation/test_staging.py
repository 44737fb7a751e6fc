"""The staging ring, on CPU tensors: every byte to its place, and never more room than there is."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import TransferFailed
from kvconnect.testing.page_memory import PageMemory, plain_unit, split_unit
from kvconnect.transport.base import PageChunk, PageUser, PeerId, Unit

torch = pytest.importorskip("torch")

from kvconnect import copy  # noqa: E402
from kvconnect.copy.wire_blocks import BlockCopier  # noqa: E402
from kvconnect.disaggregation import bandwidth_probe, staging  # noqa: E402
from kvconnect.disaggregation.staging import BUFFERS, HostMemory, StagedMemory, make_memory  # noqa: E402
from kvconnect.errors import Incompatible  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402

PAGES = 6
BLOCK = 64
PEER, OTHER = PeerId(1), PeerId(2)


def staged(pages: PageMemory, share_bytes: int = BLOCK) -> StagedMemory:
    area = torch.frombuffer(pages.data, dtype=torch.uint8)
    return StagedMemory(area, 2 * BUFFERS * share_bytes)


def staged_by_kernel(pages: PageMemory, share_bytes: int, driver: FakeDriver) -> StagedMemory:
    area = torch.frombuffer(pages.data, dtype=torch.uint8)
    copier = BlockCopier(area, driver)
    return StagedMemory(area, 2 * BUFFERS * share_bytes, copier)


def runs_of(piece: PageChunk) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the runs of a piece, none of them outside it."""
    triples = len(piece.unit.segments) // piece.unit.phases
    for number in piece.ids:
        page, phase = divmod(number, piece.unit.phases)
        for i in range(phase * triples, (phase + 1) * triples, 3):
            offset, stride, length = piece.unit.segments[i : i + 3]
            start = offset + page * stride
            assert 0 <= start <= start + length <= piece.nbytes
            yield piece.address + start, length


def read(piece: PageChunk) -> bytes:
    return b"".join(ctypes.string_at(address, length) for address, length in runs_of(piece))


def fill(piece: PageChunk, content: bytes) -> bytes:
    """Put the start of ``content`` into a piece; return what is left."""
    for address, length in runs_of(piece):
        ctypes.memmove(address, content[:length], length)
        content = content[length:]
    return content


@st.composite
def units(draw: st.DrawFn) -> tuple[Unit, int]:
    """A unit of any runs that do not overlap, in ``PAGES`` pages, and the bytes of its area."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    phases = draw(st.integers(1, 3))
    segments, end = [], 0
    for _ in range(phases):
        for length in draw(st.permutations(lengths)):
            stride = length + draw(st.integers(0, 9))
            segments += [end, stride, length]
            end += PAGES * stride
    return Unit(array("q", segments), phases, sum(lengths)), end


@settings(max_examples=60)
@given(unit_and_size=units(), share_bytes=st.integers(1, 300), data=st.data())
def test_every_byte_gets_to_its_place(
    unit_and_size: tuple[Unit, int], share_bytes: int, data: st.DataObject
) -> None:
    unit, nbytes = unit_and_size
    blocks = range(PAGES * unit.phases)
    ids = array("q", data.draw(st.lists(st.sampled_from(blocks), min_size=1, unique=True)))
    source, target, expected = PageMemory(nbytes, 1), PageMemory(nbytes, 2), PageMemory(nbytes, 2)
    content = b"".join(read(p) for p in staged(source, share_bytes).outgoing(unit, ids))
    assert content == source.read(unit, ids)

    rest = content
    for piece in staged(target, share_bytes).incoming(unit, ids):
        assert 1 <= len(piece.ids) <= max(1, share_bytes // unit.block_bytes)
        rest = fill(piece, rest)
    assert rest == b""
    expected.write(unit, ids, content)
    assert target.data == expected.data  # and nothing was written beside it
    expected.data[data.draw(st.integers(0, nbytes - 1))] ^= 1
    assert target.data != expected.data  # negative control


@settings(max_examples=40)
@given(
    case=units(),
    ids=st.lists(st.integers(0, 3 * PAGES - 1), unique=True, max_size=9),
    share_bytes=st.sampled_from([1, 200, 1000]),
)
def test_kernels_bring_the_same_bytes_to_the_same_places(
    case: tuple[Unit, int], ids: list[int], share_bytes: int
) -> None:
    unit, size = case
    numbers = array("q", (number for number in ids if number < PAGES * unit.phases))
    source, target, expected = (
        PageMemory(size, seed=1),
        PageMemory(size, seed=2),
        PageMemory(size, seed=2),
    )
    content = source.read(unit, numbers)
    outgoing = staged_by_kernel(source, share_bytes, FakeDriver()).outgoing(unit, numbers)
    assert b"".join(map(read, outgoing)) == content
    rest = content
    for piece in staged_by_kernel(target, share_bytes, FakeDriver()).incoming(unit, numbers):
        rest = fill(piece, rest)
    expected.write(unit, numbers, content)
    assert (target.data, rest) == (expected.data, b"")


def test_a_kernel_that_fails_is_a_failed_transfer_and_gives_the_share_back() -> None:
    unit, ids = plain_unit(BLOCK), array("q", range(3))
    healthy = FakeDriver()
    list(staged_by_kernel(PageMemory(PAGES * BLOCK), BLOCK, healthy).outgoing(unit, ids))
    assert healthy.calls.count("pack_blocks") == 3
    for number in range(len(healthy.calls)):
        driver = FakeDriver(number)
        memory = staged_by_kernel(PageMemory(PAGES * BLOCK, seed=1), BLOCK, driver)
        for _ in range(BUFFERS + 1):
            driver.fail_at = len(driver.calls) if driver.fail_at is None else driver.fail_at
            with pytest.raises(TransferFailed, match="call"):
                list(memory.outgoing(unit, ids))
            driver.fail_at = None
        assert len(list(memory.outgoing(unit, ids))) == 3


def test_a_device_without_kernels_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    area = torch.frombuffer(PageMemory(BLOCK).data, dtype=torch.uint8)
    assert copy.make_block_copier(area) is None  # CPU memory needs none

    class OnDevice:
        device = torch.device("cuda:0")

        def data_ptr(self) -> int:
            return 0

    def missing(device: object) -> None:
        raise Incompatible("CuPy is not installed")

    copy._warn_once.cache_clear()
    monkeypatch.setattr(copy, "open_driver", missing)
    assert copy.make_block_copier(OnDevice()) is None
    assert caplog.text.count("CuPy is not installed") == 1
    monkeypatch.setattr(copy, "open_driver", lambda device: FakeDriver())
    assert isinstance(copy.make_block_copier(OnDevice()), BlockCopier)


def test_a_block_larger_than_a_share_makes_it_grow() -> None:
    unit, small = split_unit(5 * BLOCK, 2, PAGES), plain_unit(BLOCK)
    source = PageMemory(PAGES * unit.block_bytes, 1)
    memory = staged(source)
    ids = array("q", [4, 0, 5])
    for _ in range(BUFFERS + 1):
        pieces = memory.outgoing(unit, ids)
        assert b"".join(map(read, pieces)) == source.read(unit, ids)
    counts = [len(piece.ids) for piece in memory.outgoing(small, array("q", range(12)))]
    assert counts == [10, 2]  # what has grown is used by others too


def test_a_block_too_large_for_any_memory_fails_and_takes_no_room() -> None:
    memory = staged(PageMemory(BLOCK))
    for _ in range(BUFFERS + 1):
        with pytest.raises(TransferFailed, match="no memory for"):
            next(memory.outgoing(plain_unit(1 << 60), array("q", [0])))
    assert list(memory.outgoing(plain_unit(BLOCK), array("q", [0])))


def test_closing_early_copies_nothing_more_and_gives_the_share_back() -> None:
    target = PageMemory(PAGES * BLOCK)
    memory = staged(target)
    unit, ids = plain_unit(BLOCK), array("q", range(PAGES))
    for _ in range(BUFFERS + 1):
        with closing(memory.incoming(unit, ids)) as pieces:
            fill(next(pieces), b"1" * BLOCK)
            fill(next(pieces), b"2" * BLOCK)  # the first is moved, this one must not be
    assert target.data == b"1" * BLOCK + bytes((PAGES - 1) * BLOCK)
    for piece in memory.incoming(unit, ids):  # negative control: to the end, all are
        fill(piece, b"3" * BLOCK)
    assert target.data == b"3" * PAGES * BLOCK


@pytest.fixture
def full() -> Iterator[tuple[StagedMemory, list[Generator[PageChunk, None, None]]]]:
    """A memory none of whose shares for sending is free, and the calls that hold them."""
    memory = staged(PageMemory(PAGES * BLOCK, 1))
    with ExitStack() as stack:
        calls = [memory.outgoing(plain_unit(BLOCK), array("q", range(3))) for _ in range(BUFFERS)]
        for call in calls:
            stack.enter_context(closing(call))
            next(call)
        yield memory, calls


Full = tuple[StagedMemory, list[Generator[PageChunk, None, None]]]


def asked_by(memory: StagedMemory, peer: PeerId, gone: bool) -> list[PageChunk]:
    return list(memory.outgoing(plain_unit(BLOCK), array("q", [0]), PageUser(peer, lambda: gone)))


def test_who_is_gone_waits_for_no_room(full: Full) -> None:
    memory, calls = full
    assert asked_by(memory, PEER, gone=True) == []
    calls[0].close()
    assert asked_by(memory, PEER, gone=False)  # negative control: who was gone keeps nothing


def test_the_last_room_is_for_a_peer_that_has_none() -> None:
    memory = staged(PageMemory(PAGES * BLOCK, 1))
    unit, ids = plain_unit(BLOCK), array("q", [0, 1])
    with ExitStack() as stack:
        for _ in range(BUFFERS - 1):
            call = memory.outgoing(unit, ids, PageUser(PEER, lambda: True))
            assert next(stack.enter_context(closing(call)))
        assert asked_by(memory, PEER, gone=True) == []
        assert asked_by(memory, OTHER, gone=True)
    assert asked_by(memory, PEER, gone=True)  # negative control: it keeps none of them


def test_a_receiver_has_room_for_one_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sender that stops midway it would keep the room for the rest of its frame."""
    monkeypatch.setattr(staging, "BUFFERS", 1)
    target = PageMemory(PAGES * BLOCK)
    memory = StagedMemory(torch.frombuffer(target.data, dtype=torch.uint8), 2 * BLOCK)
    unit, order = plain_unit(BLOCK), []

    def receive(name: int, ids: list[int]) -> Iterator[None]:
        for piece in memory.incoming(unit, array("q", ids)):
            order.append(name)
            fill(piece, bytes([name]) * BLOCK)
            yield

    first = receive(1, [0, 1])
    next(first)
    thread = threading.Thread(target=lambda: list(receive(2, [2, 3])))
    thread.start()
    with memory._receiving._room:
        assert memory._receiving._room.wait_for(lambda: memory._receiving._waiting, 60)
    list(first)
    thread.join(60)
    assert order == [1, 2, 1, 2]
    assert target.data == b"".join(bytes([n]) * BLOCK for n in (1, 1, 2, 2, 0, 0))


# Two workers that send to each other would wait in a circle without both of these.


def test_the_other_direction_has_room_of_its_own(full: Full) -> None:
    memory, _ = full
    for piece in memory.incoming(plain_unit(BLOCK), array("q", [0, 1])):
        fill(piece, bytes(BLOCK))


def test_a_call_under_way_asks_for_no_more_room(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, calls = full
    monkeypatch.setattr(memory._sending, "buffer", None)
    for call in calls:
        assert len(list(call)) == 2


def test_one_that_finds_no_room_waits_for_it() -> None:
    source = PageMemory(PAGES * BLOCK, 1)
    memory = staged(source)
    unit, ids = plain_unit(BLOCK), array("q", [3, 1])
    held = [memory.outgoing(unit, array("q", [0, 1])) for _ in range(BUFFERS)]
    for call in held:
        next(call)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.extend(map(read, memory.outgoing(unit, ids))))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert not got
    held.pop().close()
    waiting.join(60)
    assert b"".join(got) == source.read(unit, ids)
    for call in held:
        call.close()


def test_a_probe_moves_pieces_of_a_mebibyte() -> None:
    """Smaller ones would say less of what hand-offs get."""
    unit, ids = bandwidth_probe._UNIT, bandwidth_probe._ROUNDS[-1]
    area = torch.empty(unit.block_bytes, dtype=torch.uint8)
    memory = StagedMemory(area, bandwidth_probe._RING_BYTES)
    assert [len(piece.ids) for piece in memory.outgoing(unit, ids)] == [16] * 8


def test_only_a_device_needs_staging() -> None:
    assert isinstance(make_memory(torch.empty(BLOCK, dtype=torch.uint8)), HostMemory)
