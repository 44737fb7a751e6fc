"""The relay in C: every byte of an engine's reaches the client once and in order, or comes back."""

from __future__ import annotations

import itertools
import os
import random
import select
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect._native import Relay
from kvconnect.router.connections.relay import Returned
from kvconnect.router.requests.event_form import EventForm
from tests.unit.native.relay_line import LAST, MANY, Line, chunk, line, whole_chunks


def passed(line: Line, pieces: list[bytes], *, forgets: bool = False) -> bytes:
    """Send pieces as an engine, be the owner of what comes back, and return what the client got.

    The owner collects what comes back until it ends a chunk, and then leaves the stream to the
    relay again. ``forgets``: it loses what comes back.
    """
    client = owned = b""
    key = None
    for piece in filter(None, pieces):
        if owned:
            owned += piece
            if whole_chunks(owned) == len(owned):
                client, owned = client + owned, b""
            continue
        if key is None:
            key = line.add()
        line.engine.sendall(piece)
        found, record = line.settle(len(piece))
        client += found
        if record is not None:
            key = None
            assert (record.reason, record.unsent) == ("bytes", b"")
            assert whole_chunks(record.rest) == 0, "the relay kept less than it could pass"
            owned = b"" if forgets else record.rest
    return client + owned


contents = st.binary(min_size=1, max_size=40)


def in_pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[begin:end] for begin, end in itertools.pairwise(at)]


@given(st.lists(contents, min_size=1, max_size=8), st.lists(st.integers(0, 400), max_size=6))
def test_a_stream_in_any_pieces_passes_whole(said: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(chunk, said)) + LAST
    with line() as ends:
        assert passed(ends, in_pieces(stream, cuts)) == stream


def test_control_an_owner_that_loses_what_comes_back_is_seen() -> None:
    stream = chunk(b"hello") + chunk(b"world") + LAST
    with line() as ends:
        assert passed(ends, in_pieces(stream, [])) == stream
        assert passed(ends, in_pieces(stream, []), forgets=True) != stream


@given(st.lists(contents, max_size=4), st.binary(min_size=1, max_size=60))
def test_what_is_no_chunk_comes_back_untouched(said: list[bytes], odd: bytes) -> None:
    """Whatever an engine sends, a client gets whole chunks, and the owner all the rest."""
    sent = b"".join(map(chunk, said)) + odd
    with line() as ends:
        ends.add()
        ends.engine.sendall(sent)
        found, record = ends.settle(len(sent))
        assert found + (record.rest if record else b"") == sent
        for content in said:  # each is there, and nothing else is
            assert found.startswith(chunk(content))
            found = found.removeprefix(chunk(content))


@pytest.mark.parametrize(
    "odd",
    [
        *(
            b"0\r\n\r\n",
            b"5;a=b\r\nhello\r\n",
            b"5\nhello\r\n",
            b"5\r\nhello\n\n",
            b" 5\r\nhello\r\n",
        ),
        *(
            b"-5\r\nhello\r\n",
            b"0x5\r\nhello\r\n",
            b"00000005\r\nhello\r\n",
            b"fffffff\r\nhello\r\n",
        ),
        *(b"\r\n", b"g\r\n", b"5\r\nhelloo\r\n", b"00\r\n\r\n", b"HTTP/1.1 200 OK\r\n"),
    ],
)
def test_what_a_parser_must_judge_comes_back(odd: bytes) -> None:
    with line() as ends:
        ends.add()
        ends.engine.sendall(chunk(b"a") + odd)
        record = ends.back()
        assert (record.reason, record.rest) == ("bytes", odd)
        assert ends.reads(6) == chunk(b"a")
        assert (record.chunks, record.nbytes) == (1, 1)


def test_a_chunk_over_the_buffer_comes_back_and_the_rest_stays_with_the_engine() -> None:
    large = chunk(bytes(200_000))
    with line() as ends:
        ends.engine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sending = threading.Thread(target=ends.engine.sendall, args=(large,))
        sending.start()
        ends.add()
        record = ends.back()
        assert (record.reason, record.chunks) == ("bytes", 0)
        rest = b""
        while len(record.rest) + len(rest) < len(large):
            rest += ends.from_engine.recv(1 << 20)
        assert record.rest + rest == large
        sending.join()


def test_a_client_that_takes_no_more_is_its_owners() -> None:
    with line() as ends:
        ends.to_client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ends.add()
        ends.engine.setblocking(False)
        one, sent, returned = chunk(bytes(1000)), 0, None
        while returned is None:
            with suppress(BlockingIOError):
                sent += ends.engine.send(one) == len(one)
            if select.select([ends.relay.fileno()], [], [], 0)[0]:
                returned = ends.back()
        assert returned.reason == "full"
        stream = one * sent
        left = len(stream) - len(returned.unsent) - len(returned.rest)
        ends.from_engine.setblocking(False)
        later = b""
        with pytest.raises(BlockingIOError):
            while True:
                later += ends.from_engine.recv(1 << 20)
        found = ends.reads(left - len(later))
        assert found + returned.unsent + returned.rest + later == stream
        # What is left of chunks that count as passed needs no frame any more.
        assert whole_chunks(found + returned.unsent) == len(found + returned.unsent)
        assert returned.nbytes == returned.chunks * 1000


def test_a_client_that_is_gone_is_its_owners() -> None:
    with line() as ends:
        ends.add()
        ends.client.close()
        ends.engine.sendall(chunk(b"abc"))
        record = ends.back()
        assert (record.reason, record.unsent) == ("full", chunk(b"abc"))


def test_an_engine_that_ends_is_its_owners() -> None:
    with line() as ends:
        ends.add()
        ends.engine.sendall(chunk(b"abc") + chunk(b"d"))
        assert len(ends.reads(14)) == 14
        ends.engine.close()
        record = ends.back()
        assert (record.reason, record.unsent, record.rest) == ("ended", b"", b"")
        assert (record.nbytes, record.chunks, record.tail) == (4, 2, b"cd")


def test_with_events_only_other_chunks_come_back() -> None:
    event, done = chunk(b'data: {"a":1}\n\n'), chunk(b"data: [DONE]\n\n")
    with line() as ends:
        ends.add(events_only=True)
        ends.engine.sendall(event + event + done + LAST)
        assert ends.back().rest == done + LAST
        assert ends.reads(2 * len(event)) == event + event
        ends.add(events_only=False)
        ends.engine.sendall(done)
        assert ends.reads(len(done)) == done, "the control"


def test_a_number_that_is_given_out_again_is_never_served() -> None:
    with line() as ends:
        ends.add()
        number = ends.to_client.fileno()
        ends.to_client.close()
        stranger, other = socket.socketpair()
        assert number in (stranger.fileno(), other.fileno())
        ends.engine.sendall(chunk(b"secret"))
        assert ends.reads(11) == chunk(b"secret")
        for end in (stranger, other):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(1)
        stranger.close()
        other.close()


def test_what_was_taken_away_is_served_no_more() -> None:
    with line() as ends:
        key = ends.add()
        ends.engine.sendall(chunk(b"a"))
        assert ends.reads(6)
        record = ends.relay.remove(key)
        assert record is not None and Returned(*record).reason == "removed"
        assert Returned(*record).heard > 0
        ends.engine.sendall(chunk(b"b"))
        assert ends.relay.remove(key) is None
        assert ends.relay.heard(key) == 0
        assert ends.from_engine.recv(6) == chunk(b"b"), "the relay has not read it"
        assert ends.add() != key, "its place has another key"


def test_what_came_back_can_be_removed_before_it_is_taken() -> None:
    with line() as ends:
        key = ends.add()
        ends.engine.sendall(LAST)
        assert select.select([ends.relay.fileno()], [], [], 60)[0]
        record = ends.relay.remove(key)
        assert record is not None and Returned(*record).rest == LAST
        assert ends.relay.take() is None


def test_what_cannot_be_told_for_want_of_memory_stays() -> None:
    """Each allocation in turn fails, until none does: the record is made last."""
    memory = pytest.importorskip("_testcapi")
    short, enough = memory.set_nomemory, memory.remove_mem_hooks
    with line() as ends:
        key, remove, record = ends.add(), ends.relay.remove, None
        ends.engine.sendall(chunk(b"a"))
        assert ends.reads(6) == chunk(b"a")
        for allowed in range(100):
            try:
                short(allowed)
                record = remove(key)
                break
            except MemoryError:
                continue
            finally:
                enough()
        assert record is not None and allowed > 0
        assert Returned(*record).reason == "removed" and Returned(*record).chunks == 1


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left() -> None:
    before = descriptors()
    with line() as ends:
        for _ in range(3):
            ends.add()  # and is not taken back
        ends.engine.sendall(LAST)
    assert descriptors() == before


def test_where_descriptors_are_short_nothing_is_relayed() -> None:
    with line(most_fd=4) as ends:
        before = descriptors()
        with pytest.raises(OSError, match="Too many open files"):
            ends.add()
        with pytest.raises(OSError, match="Bad file descriptor"):
            ends.relay.add(-1, ends.to_client.fileno(), False, None)
        assert descriptors() == before


def test_a_file_is_no_stream(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    with line() as ends:
        before = descriptors()
        with pytest.raises(OSError, match="not permitted"):
            ends.relay.add(file, ends.to_client.fileno(), False, None)
        assert descriptors() == before
    os.close(file)


def test_a_closed_relay_takes_nothing() -> None:
    with line() as ends:
        ends.relay.close()
        ends.relay.close()
        assert ends.relay.take() is None
        with pytest.raises(ValueError, match="closed"):
            ends.add()


class Crowd:
    """Streams whose engines send, until told to end, while their owner takes them away and gives
    them back."""

    def __init__(self, streams: int, form: EventForm | None) -> None:
        self.form = form
        self.relay = Relay(MANY)
        self.ends = threading.Event()
        self.sent = [b""] * streams
        self.lines = [(socket.socketpair(), socket.socketpair()) for _ in range(streams)]
        self.got = [b""] * streams
        self.away: dict[int, int] = {}  # key -> line
        self.threads = [
            threading.Thread(target=work, args=(at,))
            for at in range(streams)
            for work in (self._send, self._read)
        ]

    def _send(self, at: int) -> None:
        number = 0
        while not self.ends.is_set():
            piece = chunk(b"%d" % number if self.form is None else b'"%d":[1];' % number)
            self.lines[at][0][0].sendall(piece)
            self.sent[at] += piece
            number += 1
        self.lines[at][0][0].sendall(LAST)

    def _read(self, at: int) -> None:
        while not self.got[at].endswith(LAST):
            self.got[at] += self.lines[at][1][0].recv(1 << 16)

    def leave(self, at: int) -> None:
        (_, source), (_, target) = self.lines[at]
        self.away[self.relay.add(source.fileno(), target.fileno(), False, self.form)] = at

    def own(self, record: Returned) -> None:
        """Go on as a parser would, to the end of a chunk."""
        at = self.away.pop(record.key)
        (_, source), (_, target) = self.lines[at]
        rest = record.rest
        while whole_chunks(rest) != len(rest) and not rest.endswith(LAST):
            rest += source.recv(1)
        target.sendall(record.unsent + rest)
        if not rest.endswith(LAST):
            self.leave(at)

    def close(self) -> None:
        self.relay.close()
        for end in itertools.chain(*itertools.chain(*self.lines)):
            end.close()


@pytest.mark.parametrize("form", [None, EventForm(b"", b":", b";", 1 << 10, True)])
def test_streams_that_come_and_go_beside_traffic_lose_nothing(form: EventForm | None) -> None:
    """What TSan looks at: streams are taken away while their engines send."""
    draw, removed = random.Random(3), 0
    crowd = Crowd(8, form)
    for at in range(len(crowd.lines)):
        crowd.leave(at)
    for thread in crowd.threads:
        thread.start()
    while crowd.away:
        if (found := crowd.relay.take()) is not None:
            crowd.own(Returned(*found))
        elif removed < 200:
            key = draw.choice(list(crowd.away))
            assert crowd.relay.heard(key) > 0
            found = crowd.relay.remove(key)
            assert found is not None
            removed += 1
            crowd.own(Returned(*found))
        else:
            crowd.ends.set()
            select.select([crowd.relay.fileno()], [], [], 60)
    for thread in crowd.threads:
        thread.join(60)
        assert not thread.is_alive()
    assert crowd.got == [sent + LAST for sent in crowd.sent]
    crowd.close()
