"""Pages through a socket: the C loop and the Python one, alone and against each other."""

from __future__ import annotations

import ctypes
import random
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.transport import page_io
from kvconnect.transport.base import PageChunk, Unit

xxhash = pytest.importorskip("xxhash")

RUNNING = b"\0"
STALL_MS = 10_000
NO_DIGEST, EVERY = page_io.DigestRule(0, 0), page_io.DigestRule(1, 0)

needs_native = pytest.mark.skipif(page_io._native is None, reason="the extension was not built")
kinds = pytest.mark.parametrize("kind", ["python", pytest.param("native", marks=needs_native)])


def use(kind: str) -> pytest.MonkeyPatch:
    """Choose the loop until the patch is undone."""
    patch = pytest.MonkeyPatch()
    if kind == "python":
        patch.setattr(page_io, "_native", None)
    return patch


@pytest.fixture
def loop(kind: str) -> Iterator[None]:
    patch = use(kind)
    yield
    patch.undo()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def int64(*numbers: int) -> array[int]:
    return array("q", numbers)


def piece_of(
    memory: bytearray, segments: array[int], phases: int, block_bytes: int, ids: array[int]
) -> PageChunk:
    """Describe pages in ``memory``, which the caller must keep."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return PageChunk(address, len(memory), Unit(segments, phases, block_bytes), ids)


def page_bytes(memory: bytes, piece: PageChunk) -> list[bytes]:
    """The wire blocks' bytes, the slow way."""
    unit = piece.unit
    triples = [tuple(unit.segments[i : i + 3]) for i in range(0, len(unit.segments), 3)]
    count = len(triples) // unit.phases
    return [
        b"".join(
            memory[o + w // unit.phases * s :][:n]
            for o, s, n in triples[w % unit.phases * count :][:count]
        )
        for w in piece.ids
    ]


def digests_of(pages: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(page)) for page in pages)


def random_memory(nbytes: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(nbytes))


def scattered(memory: bytearray, blocks: int, length: int, seed: int = 2) -> PageChunk:
    """Two runs per block and two phases: ``memory`` holds at least 5 * length * blocks bytes."""
    segments = int64(
        *(0, 5 * length, length, 4 * length, 5 * length, 7),
        *(length, 5 * length, 7, 2 * length, 5 * length, length),
    )
    ids = list(range(2 * blocks))
    random.Random(seed).shuffle(ids)
    return piece_of(memory, segments, 2, length + 7, int64(*ids[:blocks]))


class Worker:
    """Runs one call in a thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except OSError as error:
            self._result = error

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._result


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(10_000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it did not happen")


def stop_byte() -> bytearray:
    return bytearray(RUNNING)


# Bytes and digests ------------------------------------------------------------------------------


@needs_native
@given(data=st.data())
def test_pages_arrive_whatever_their_runs(data: st.DataObject) -> None:
    """Any runs and ids, other ones on each side: bytes, neighbours and digests are right."""
    draw = data.draw
    sides = []
    lengths = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
    period = draw(st.sampled_from([0, 1, 3, 16]))
    digest = page_io.DigestRule(period, draw(st.integers(0, 20)))
    for _ in range(2):
        phases, pages = draw(st.integers(1, 3)), draw(st.integers(1, 8))
        cut = list(lengths)
        numbers, end = [], 0
        for _ in range(phases):
            for length in cut:
                stride = length + draw(st.integers(0, 5))
                numbers += [end, stride, length]
                end += pages * stride
            cut.reverse()  # same sum
        ids = draw(st.permutations(range(phases * pages)))
        sides.append((random_memory(end, len(sides)), int64(*numbers), phases, ids))
    count = draw(st.integers(0, min(len(ids) for *_, ids in sides)))
    pieces = [
        piece_of(memory, segments, phases, sum(lengths), int64(*ids[:count]))
        for memory, segments, phases, ids in sides
    ]
    source, target = sides[0][0], sides[1][0]
    before = bytes(target)
    expected = page_bytes(source, pieces[0])

    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # forces partial sends
        patch = use(draw(st.sampled_from(["python", "native"])))
        sender = Worker(
            lambda: page_io.send_pages(left, b"head", pieces[0], digest, STALL_MS, stop_byte())
        )
        assert right.recv(4, socket.MSG_WAITALL) == b"head"
        result = page_io.recv_pages(right, pieces[1], digest, STALL_MS, stop_byte())
        digests = [sender.result(), result[0]]
        patch.undo()
    assert result[1] == count
    assert page_bytes(target, pieces[1]) == expected
    hashed = [
        page for i, page in enumerate(expected) if period and (digest.phase + i) % period == 0
    ]
    assert digests == [digests_of(hashed)] * 2
    # Nothing else was written.
    untouched = bytearray(target)
    for (start, length), page in zip(places(pieces[1]), runs_of(before, pieces[1]), strict=True):
        untouched[start : start + length] = page
    assert untouched == before


def places(piece: PageChunk) -> list[tuple[int, int]]:
    unit = piece.unit
    count = len(unit.segments) // unit.phases
    found = []
    for w in piece.ids:
        page, phase = divmod(w, unit.phases)
        for i in range(phase * count, (phase + 1) * count, 3):
            offset, stride, length = unit.segments[i : i + 3]
            found.append((offset + page * stride, length))
    return found


def runs_of(memory: bytes, piece: PageChunk) -> list[bytes]:
    return [memory[start : start + length] for start, length in places(piece)]


@kinds
@pytest.mark.parametrize("digest", [NO_DIGEST, EVERY])
@pytest.mark.usefixtures("loop")
def test_more_runs_and_bytes_than_one_batch_holds(
    digest: page_io.DigestRule, pair: tuple[socket.socket, socket.socket]
) -> None:
    small = random_memory(5 * 64 * 1500)
    large = random_memory(3 << 20)
    pieces = [
        (small, scattered(small, 1500, 64)),
        (large, piece_of(large, int64(0, 0, len(large)), 1, len(large), int64(0, 0))),
    ]
    for source, piece in pieces:
        target = bytearray(len(source))
        place = piece_of(target, piece.unit.segments, piece.unit.phases, 0, piece.ids)
        place = place._replace(unit=piece.unit)
        sender = Worker(
            lambda p=piece: page_io.send_pages(pair[0], b"", p, digest, STALL_MS, stop_byte())
        )
        received = page_io.recv_pages(pair[1], place, digest, STALL_MS, stop_byte())
        pages = page_bytes(source, piece)
        assert page_bytes(target, place) == pages
        assert received == (sender.result(), len(pages))
        assert received[0] == (digests_of(pages) if digest == EVERY else b"")


@kinds
@pytest.mark.usefixtures("loop")
def test_a_flipped_byte_changes_that_blocks_digest_alone(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    source = random_memory(5 * 100 * 8)
    piece = scattered(source, 8, 100)
    sent = page_io.send_pages(pair[0], b"", piece, EVERY, STALL_MS, stop_byte())
    stream = bytearray(pair[1].recv(8 * 107, socket.MSG_WAITALL))
    stream[3 * 107 + 50] ^= 1
    pair[0].sendall(stream)
    found, landed = page_io.recv_pages(pair[1], piece, EVERY, STALL_MS, stop_byte())
    differing = [i for i in range(8) if sent[8 * i : 8 * i + 8] != found[8 * i : 8 * i + 8]]
    assert (differing, landed) == ([3], 8)


@needs_native
def test_digest_pages_hashes_every_block() -> None:
    memory = random_memory(5 * 100 * 8)
    piece = scattered(memory, 8, 100)
    request = ((piece.address, piece.nbytes), piece.unit.segments, 2)
    expected = digests_of(page_bytes(memory, piece))
    assert page_io._native.digest_pages(*request, piece.ids) == expected
    assert page_io._native.digest_pages(*request, int64()) == b""
    start, _ = places(piece)[0]
    memory[start] ^= 1
    found = page_io._native.digest_pages(*request, piece.ids)
    assert (found[:8] != expected[:8], found[8:]) == (True, expected[8:])


# What can go wrong on the way --------------------------------------------------------------------


@kinds
@pytest.mark.usefixtures("loop")
def test_a_peer_that_makes_no_progress_is_given_up(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    memory = random_memory(4 << 20)
    piece = piece_of(memory, int64(0, 0, len(memory)), 1, len(memory), int64(0))
    with pytest.raises(TimeoutError, match="no byte moved for 60 ms"):
        page_io.send_pages(pair[0], b"", piece, NO_DIGEST, 60, stop_byte())
    with pytest.raises(TimeoutError, match="no byte moved for 60 ms"):
        page_io.recv_pages(pair[0], piece, NO_DIGEST, 60, stop_byte())


@kinds
@pytest.mark.usefixtures("loop")
def test_a_stream_that_ends_early_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    memory = bytearray(4096)
    piece = piece_of(memory, int64(0, 0, 4096), 1, 4096, int64(0))
    pair[0].sendall(b"x" * 4095)
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed in the middle"):
        page_io.recv_pages(pair[1], piece, NO_DIGEST, STALL_MS, stop_byte())
    with pytest.raises(BrokenPipeError):
        page_io.send_pages(pair[1], b"", piece, NO_DIGEST, STALL_MS, stop_byte())


@kinds
@pytest.mark.usefixtures("loop")
def test_after_a_stop_no_page_is_written_and_the_stream_stays_in_step(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    source = random_memory(16 * 1024)
    target = bytearray(16 * 1024)
    runs = int64(0, 1024, 1024)
    piece = piece_of(source, runs, 1, 1024, int64(*range(16)))
    place = piece_of(target, runs, 1, 1024, int64(*range(16)))
    stop = stop_byte()
    receiver = Worker(lambda: page_io.recv_pages(pair[1], place, EVERY, STALL_MS, stop))
    pair[0].sendall(source[:2500])
    assert source[2499]
    wait_until(lambda: target[2499] == source[2499])  # the receiver has taken what there was
    stop[0] = 1
    pair[0].sendall(source[2500:] + b"next")
    digests, landed = receiver.result()
    assert pair[1].recv(4, socket.MSG_WAITALL) == b"next"
    assert landed == 2
    assert digests == digests_of(page_bytes(source, piece)[:2])
    assert bytes(target) == bytes(source[:2500]) + bytes(len(target) - 2500)

    # Negative control: without the stop all of it is written.
    pair[0].sendall(source)
    assert page_io.recv_pages(pair[1], place, NO_DIGEST, STALL_MS, stop_byte()) == (b"", 16)
    assert target == source


@kinds
@pytest.mark.usefixtures("loop")
def test_a_stop_ends_a_send(pair: tuple[socket.socket, socket.socket]) -> None:
    memory = random_memory(4 << 20)
    piece = piece_of(memory, int64(0, 0, len(memory)), 1, len(memory), int64(0))
    stop = stop_byte()
    sender = Worker(lambda: page_io.send_pages(pair[0], b"head", piece, NO_DIGEST, STALL_MS, stop))
    assert pair[1].recv(4, socket.MSG_WAITALL) == b"head"  # it is under way
    stop[0] = 1
    assert isinstance(sender.result(), InterruptedError)


# Arguments --------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "nbytes": 64,
    "segments": int64(0, 16, 8, 8, 16, 8),
    "phases": 2,
    "ids": int64(0, 7),
    "digest": EVERY,
    "stall_ms": 60,
    "stop": b"\0",
}


@kinds
@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"nbytes": 63}, IndexError),
        ({"ids": int64(0, 8)}, IndexError),
        ({"ids": int64(0, -1)}, IndexError),
        ({"ids": int64(2**62)}, IndexError),
        ({"segments": int64(0, 16, 8, 9, 16, 8)}, IndexError),
        ({"segments": int64(0, 16, 8, 2**62, 2**62, 8)}, IndexError),
        ({"segments": int64(0, 2**62, 8, 0, 2**62, 8)}, IndexError),
        ({"segments": int64(-8, 16, 8, 8, 16, 8)}, ValueError),
        ({"segments": int64(0, -16, 8, 8, 16, 8)}, ValueError),
        ({"segments": int64(0, 16, 0, 8, 16, 0)}, ValueError),
        ({"segments": int64(0, 16, 8, 8, 16, 7)}, ValueError),
        ({"segments": int64(0, 16, 8)}, ValueError),
        ({"segments": int64()}, ValueError),
        ({"phases": 0}, ValueError),
        ({"phases": -1}, ValueError),
        ({"phases": 2**62}, ValueError),
        ({"stall_ms": 0}, ValueError),
        ({"stop": b""}, ValueError),
    ],
)
def test_everything_is_checked_before_a_byte_moves(
    change: dict[str, Any], error: type[Exception], pair: tuple[socket.socket, socket.socket]
) -> None:
    def call(values: dict[str, Any], move: Callable[..., Any], *head: bytes) -> None:
        piece = piece_of(memory, values["segments"], values["phases"], 8, values["ids"])
        piece = piece._replace(nbytes=values["nbytes"])
        rest = values["digest"], values["stall_ms"], bytearray(values["stop"])
        move(pair[0], *head, piece, *rest)

    memory = random_memory(64)
    before = bytes(memory)
    pair[1].sendall(b"x" * 16)
    with pytest.raises(error):
        call(GOOD | change, page_io.send_pages, b"head")
    with pytest.raises(error):
        call(GOOD | change, page_io.recv_pages)
    assert memory == before
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)
    call(GOOD, page_io.send_pages, b"")  # negative control
    call(GOOD, page_io.recv_pages)
    assert pair[1].recv(64) == before[:8] + before[56:]
    assert memory == b"x" * 8 + before[8:56] + b"x" * 8


@needs_native
@pytest.mark.parametrize(
    "change",
    [
        {"segments": array("i", [0, 16, 8])},
        {"ids": b"12345678"},
        {"digest": page_io.DigestRule(-1, 0)},
        {"digest": page_io.DigestRule(2**40, 0)},
        {"digest": page_io.DigestRule(1, -1)},
        {"nbytes": -1},
        {"segments": int64(0, 0, 2**62, 0, 0, 2**62)},
    ],
)
def test_native_refuses_what_python_could_not_even_say(change: dict[str, Any]) -> None:
    values = GOOD | change
    with pytest.raises(ValueError, match=r"must be int64|malformed|larger than any memory"):
        page_io._native.recv_pages(
            *(-1, (0, values["nbytes"]), values["segments"], values["phases"]),
            *(values["ids"], values["digest"], values["stall_ms"], values["stop"]),
        )


def test_digests_in_python_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    monkeypatch.setattr(page_io, "_native", object())
    page_io.check_digests("full", tls=False)
    page_io.check_digests("off", tls=True)
    with pytest.raises(ConfigError, match=r"digest='full'.*install xxhash"):
        page_io.check_digests("full", tls=True)
    monkeypatch.setattr(page_io, "_native", None)
    with pytest.raises(ConfigError, match="install xxhash"):
        page_io.check_digests("sampled", tls=False)


# Threads ----------------------------------------------------------------------------------------


@needs_native
def test_native_gives_up_the_gil(pair: tuple[socket.socket, socket.socket]) -> None:
    """Sender and receiver both need the processor; with the GIL held neither could finish."""
    memory = random_memory(4 << 20)
    piece = piece_of(memory, int64(0, 1 << 20, 1 << 20), 1, 1 << 20, int64(0, 1, 2, 3))
    target = bytearray(len(memory))
    place = piece_of(target, piece.unit.segments, 1, 1 << 20, piece.ids)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody takes the GIL, it has to be given
    try:
        sender = Worker(
            lambda: page_io.send_pages(pair[0], b"", piece, EVERY, STALL_MS, stop_byte())
        )
        received = page_io.recv_pages(pair[1], place, EVERY, STALL_MS, stop_byte())
        assert (received, target) == ((sender.result(), 4), memory)
    finally:
        sys.setswitchinterval(interval)
