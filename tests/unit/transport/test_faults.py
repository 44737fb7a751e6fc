"""TCP when the other side, or what lies between, misbehaves: never wrong, never hung."""

from __future__ import annotations

import os
import socket
import struct
from array import array
from contextlib import suppress

import pytest

from kvconnect.protocol.auth import NONCE_BYTES, ClientAuth, Opening
from kvconnect.protocol.codec import MessageReader, pack_message
from kvconnect.testing.proxy import FaultProxy
from kvconnect.testing.transport import ConnectedPair
from kvconnect.transport.base import (
    IncomingPages,
    MessageReceived,
    PagesReceived,
    PeerDown,
    PeerMessage,
    PeerUp,
)
from kvconnect.transport.tcp import listener
from kvconnect.transport.tcp.control_connection import MAX_QUEUED_BYTES
from tests.links import outcome, result, side, threads_after_close, through_proxy
from tests.raw_peer import UNIT, RawPeer, frame, raw_peer, reason, wait_for

PAGES = 64  # 4 MiB


def move(pair: ConnectedPair, read_id: int = 1) -> None:
    """Ask for all pages and have them sent."""
    pair.expect(read_id, [UNIT], [range(PAGES)])
    pair.send(read_id, 0, UNIT, range(PAGES))


def ended(pair: ConnectedPair, read_id: int = 1) -> bool:
    return bool(pair.reader.of(PeerDown)) or pair.arrived(read_id) == PAGES


def good_pages(pair: ConnectedPair) -> list[bool]:
    """Which pages in the reader's memory are right."""
    reader, source = pair.reader.memory, pair.source.memory
    return [reader.read(UNIT, [i]) == source.read(UNIT, [i]) for i in range(PAGES)]


# Between the two ----------------------------------------------------------------------------------


def check_what_is_called_good(pair: ConnectedPair) -> set[int]:
    """Check that no wrong page was received as a good one; return those that were called bad."""
    good = good_pages(pair)
    bad: set[int] = set()
    for event in pair.reader.of(PagesReceived):
        bad.update(event.bad)
        blocks = range(event.first, event.first + event.count)
        assert all(good[block] for block in blocks if block not in event.bad)
    return bad


@pytest.mark.parametrize("offset", [5000, 1_000_000, 3_333_333])
@pytest.mark.parametrize("connections", [1, 3])
def test_a_flipped_bit_is_never_taken_for_good(offset: int, connections: int) -> None:
    with through_proxy(connections=connections) as (pair, proxy):
        proxy.corrupt(offset)
        move(pair)
        pair.until(lambda: ended(pair), "the end of a corrupt transfer")
        assert check_what_is_called_good(pair) or pair.reader.of(PeerDown)


def test_without_digests_a_flipped_bit_goes_unseen() -> None:
    """The control of the test above: its fault does reach pages."""
    with through_proxy(connections=1, digest="off") as (pair, proxy):
        proxy.corrupt(1_000_000)
        move(pair)
        pair.until(lambda: ended(pair), "the end of a corrupt transfer")
        assert good_pages(pair).count(False) == 1
        assert not any(e.bad for e in pair.reader.of(PagesReceived))


def test_sampled_digests_see_what_they_sample() -> None:
    with through_proxy(connections=1, digest="sampled") as (pair, proxy):
        proxy.corrupt(16 * UNIT.block_bytes + 1000)  # one heartbeat may pass before the header
        move(pair)
        pair.until(lambda: ended(pair), "the end of a corrupt transfer")
        assert [e.bad for e in pair.reader.of(PagesReceived)] == [(16,)]


@pytest.mark.parametrize("offset", [0, 30, 100_000, 4_000_000])
def test_a_cut_connection_ends_the_peer(offset: int) -> None:
    with through_proxy() as (pair, proxy):
        proxy.truncate(offset)
        move(pair)
        pair.until_down()


def test_a_duplicated_chunk_is_never_taken_for_good() -> None:
    with through_proxy(connections=1) as (pair, proxy):
        proxy.duplicate(1_000_000)
        move(pair)
        pair.until(lambda: ended(pair), "the end of a spoilt transfer")
        assert check_what_is_called_good(pair) or pair.reader.of(PeerDown)


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_a_stalled_link_is_noticed_by_both_sides(direction: str) -> None:
    with through_proxy() as (pair, proxy):
        proxy.stall(direction)  # type: ignore[arg-type]
        move(pair)
        pair.until_down()
        reasons = [side.of(PeerDown)[0].reason for side in (pair.reader, pair.source)]
        assert any("no sign of life" in reason or "stalled" in reason for reason in reasons)


def test_a_reset_ends_the_peer_and_a_new_one_can_come() -> None:
    with through_proxy() as (pair, proxy):
        proxy.reset()
        pair.until_down()
        pair.of_reader, pair.of_source = pair.connect()
        pair.check_works(1)


def test_a_link_that_answers_nothing_is_given_up_in_time() -> None:
    with through_proxy() as (pair, proxy):
        proxy.drop_new_connections()
        down = outcome(pair.reader, pair.address)
        assert "not connected within 2 s" in down.reason
        proxy.clear()
        pair.connect()


def test_a_slow_link_is_only_slow() -> None:
    with through_proxy() as (pair, proxy):
        proxy.delay(0.05)
        proxy.rate(20e6)
        move(pair)
        pair.until(lambda: ended(pair), "a slow transfer")
        assert all(good_pages(pair))
        assert not pair.reader.of(PeerDown)


# The other side -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"garbage " * 8, "no frame starts with"),
        (frame()[:10] + b"\xff" + frame()[11:], "checksum"),
        (frame(sequence=1), "frame 1, expected 0"),
        (frame(read_id=2), "read 2, which is not known"),
        (frame(unit=3), "unit 3 of read 1"),
        (frame(first=PAGES), "expected are 0 to 63"),
        (frame(nbytes=100), "100 bytes for 1 blocks"),
        (frame(nbytes=1 << 62), "bytes for 1 blocks"),
        (frame(count=1 << 30, nbytes=1 << 62), "a frame of"),
        (frame(digest_period=1), "digest period 1, agreed was 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_frame_ends_the_peer(sent: bytes, text: str) -> None:
    with raw_peer() as (raw, victim, peer):
        ids = array("q", range(PAGES))
        victim.transport.submit(IncomingPages(peer, 1, [UNIT], [(0, ids)]))
        before = bytes(victim.memory.data)
        raw.data[0].sendall(sent + bytes(1000))
        assert text in reason(victim)
        assert raw.is_cut_off()
        assert victim.memory.data == before


def test_a_repeated_frame_is_refused() -> None:
    with raw_peer(nbytes=8 << 20) as (raw, victim, peer):
        ids = array("q", range(PAGES))
        victim.transport.submit(IncomingPages(peer, 1, [UNIT], [(0, ids)]))
        page = frame() + bytes(UNIT.block_bytes)
        raw.data[0].sendall(page)
        wait_for(victim, lambda: victim.of(PagesReceived))
        raw.data[0].sendall(page)
        assert "frame 0, expected 1" in reason(victim)


def test_an_oversized_note_ends_the_peer() -> None:
    with raw_peer() as (raw, victim, _):
        raw.control.sendall(struct.pack("<I", 1 << 30) + bytes(100))
        assert "a message of 1073741824 bytes" in reason(victim)


def test_a_silent_peer_is_dead() -> None:
    with raw_peer() as (raw, victim, _):
        assert "no sign of life for 2 s" in reason(victim)
        assert raw.is_cut_off()


def test_heartbeats_keep_a_peer_alive_and_are_sent() -> None:
    with raw_peer() as (raw, victim, _):
        reader, heard = MessageReader(), 0
        while heard < 30:  # three seconds' worth; dead after two
            heard += reader.feed(raw.control.recv(4)).count(b"")
            raw.beat()
        victim.poll()
        assert not victim.of(PeerDown)
        assert not victim.of(MessageReceived)


def test_a_peer_that_does_not_read_its_notes_is_given_up() -> None:
    with raw_peer(dead_after_s=30.0, silent_s=30.0) as (_, victim, peer):
        for _ in range(MAX_QUEUED_BYTES // (1 << 20) + 20):
            victim.transport.submit(PeerMessage(peer, bytes(1 << 20)))
        assert "does not read its messages" in reason(victim)


def test_notes_that_nobody_polls_end_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.transport.event_queue.MAX_UNREAD_BYTES", 1 << 20)
    with raw_peer() as (raw, victim, _):
        with suppress(ConnectionError):
            for _ in range(100):
                raw.control.sendall(pack_message(bytes(1 << 18)))
        assert raw.is_cut_off()
        assert "faster than they are read" in reason(victim)


@pytest.mark.parametrize("first", [b"hello", b"", b"\x02"])
def test_a_first_note_that_is_no_greeting_ends_the_peer(first: bytes) -> None:
    with side() as victim:
        raw = RawPeer(victim.transport.listen("127.0.0.1", 0))
        raw.control.sendall(pack_message(first))
        assert raw.is_cut_off()
        assert victim.transport.poll(0) == []
        raw.close()


def test_pages_before_the_greeting_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with side() as victim:
        address = victim.transport.listen("127.0.0.1", 0)
        opening = Opening("data", os.urandom(16), 0, 1)
        auth = ClientAuth(b"", opening, os.urandom(NONCE_BYTES))
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(auth.start())
            proof = auth.feed(sock.recv(1 << 16))
            sock.sendall(proof + frame())
            while sock.recv(1 << 16):
                pass
    assert "pages before the greeting" in caplog.text


def test_a_second_connection_of_the_same_number_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with raw_peer() as (raw, victim, _):
        address = raw.control.getpeername()
        opening = Opening("control", os.urandom(16), 0, 1)
        with raw.dial(address, opening, b""), raw.dial(address, opening, b"") as second:
            assert second.recv(1) == b""
        assert not victim.of(PeerDown)
    assert "does not fit its session" in caplog.text


def test_too_many_connections_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with side() as victim:
        address = victim.transport.listen("127.0.0.1", 0)
        raw = RawPeer.__new__(RawPeer)
        with raw.dial(address, Opening("control", os.urandom(16), 0, 17), b"") as sock:
            assert sock.recv(1) == b""
    assert "peer requested 17 connections; limit is 16" in caplog.text


def test_a_session_that_is_never_complete_is_dropped() -> None:
    with side() as victim:
        address = victim.transport.listen("127.0.0.1", 0)
        raw = RawPeer.__new__(RawPeer)
        with raw.dial(address, Opening("control", os.urandom(16), 0, 2), b"") as sock:
            while sock.recv(1 << 16):
                pass
        assert victim.transport.poll(0) == []


# Strangers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\x16\x03\x01" + bytes(200), b"KVCO\xff"]
)
def test_garbage_is_turned_away_and_others_go_on(said: bytes) -> None:
    with side() as reader, side() as source:
        pair = ConnectedPair(reader, source)
        with socket.create_connection(pair.address, timeout=10) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                assert stranger.recv(1 << 16) == b""
        pair.check_works(1)
        pair.connect()


def test_strangers_that_say_nothing_do_not_lock_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MAX_IN_AUTH", 16)
    patient = {"dead_after_s": 10.0, "silent_s": 600.0}
    with side(**patient) as reader, side(**patient) as source:
        address = source.transport.listen("127.0.0.1", 0)
        strangers = [socket.create_connection(address, timeout=10) for _ in range(50)]
        source.transport.listen = lambda *_: address  # type: ignore[method-assign]
        ConnectedPair(reader, source).check_works(1)
        assert strangers[0].recv(1) == b""  # the oldest had to go
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)
        for stranger in strangers:
            stranger.close()


def test_only_so_many_peers_are_let_in(caplog: pytest.LogCaptureFixture) -> None:
    with side() as reader, side(max_peers=2) as source:
        pair = ConnectedPair(reader, source)
        pair.connect()
        assert outcome(reader, pair.address).peer not in (1, 2)
        assert len(source.of(PeerUp)) == 2
        pair.check_works(1)
    assert "rejected: 2 peers are connected already (max_peers)" in caplog.text


@pytest.mark.parametrize("greedy_at", ["10.0.0.1", "10.0.0.2"])
def test_one_address_cannot_use_up_the_places_of_others(
    greedy_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the addresses alike, the negative control: nobody has more than others would have."""
    at = ["10.0.0.1"]
    monkeypatch.setattr(listener, "source_of", lambda _: at[0])
    with side() as greedy, side() as honest, side(max_peers=2) as source:
        pair = ConnectedPair(greedy, source)
        pair.connect()  # two peers with the first one
        at[0] = "10.0.0.2" if greedy_at == "10.0.0.1" else at[0]
        found = result(honest, pair.address)
        if greedy_at == "10.0.0.1":
            assert isinstance(found, PeerUp)
            pair.until(lambda: greedy.of(PeerDown), "the end of the newest peer")
            assert len(greedy.of(PeerDown)) == 1
            pair.check_works(1)  # the older one goes on
        else:
            assert isinstance(found, PeerDown) and not greedy.of(PeerDown)


def test_a_stranger_is_turned_away_in_time() -> None:
    with side(silent_s=0.2) as victim:
        address = victim.transport.listen("127.0.0.1", 0)
        with socket.create_connection(address, timeout=10) as stranger:
            stranger.sendall(b"KV")  # slowly
            assert stranger.recv(1) == b""


def test_a_source_that_is_no_kvconnect_is_refused() -> None:
    with side() as reader, socket.create_server(("127.0.0.1", 0)) as server:
        number = reader.transport.connect(*server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            wait_for(reader, lambda: reader.of(PeerDown))
        (down,) = reader.of(PeerDown)
        assert down.peer == number
        assert "broke the protocol" in down.reason


def test_a_thread_that_dies_in_the_memory_ends_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug on this side of the seam must not look like silence."""
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    with side() as reader, side() as source:
        pair = ConnectedPair(reader, source)
        pair.expect(1, [UNIT], [[10_000]])  # outside its memory
        pair.send(1, 0, UNIT, [0])
        pair.until(lambda: reader.of(PeerDown), "the reader's PeerDown")
        (down,) = reader.of(PeerDown)
        assert "died" in down.reason
    assert threads_after_close() == set()


def test_the_proxy_alone_changes_nothing() -> None:
    with through_proxy() as (pair, proxy):
        assert isinstance(proxy, FaultProxy)
        move(pair)
        pair.until(lambda: ended(pair), "a transfer")
        assert all(good_pages(pair))
