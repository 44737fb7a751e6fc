"""Frames that stop, trickle or are cancelled: each ends in time, and keeps no page for longer."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvconnect.protocol.frames import HEADER_BYTES, unpack_header
from kvconnect.testing.transport import Side
from kvconnect.transport.base import (
    Drained,
    IncomingPages,
    OutgoingPages,
    PagesReceived,
    PeerDown,
    PeerId,
)
from kvconnect.transport.tcp import stall_watchdog
from kvconnect.transport.tcp.stall_watchdog import StallWatchdog
from tests.links import through_proxy
from tests.raw_peer import UNIT, RawPeer, frame, raw_peer, reason, wait_for

IDS = array("q", range(64))  # 4 MiB
PATIENT = {"dead_after_s": 60.0, "silent_s": 60.0, "stall_s": 60.0}


def watch_of(victim: Side, peer: PeerId) -> StallWatchdog:
    return victim.transport._peers[peer].send_queue.watch  # type: ignore[attr-defined]


@contextmanager
def watched(nbytes: int = 8 << 20) -> Iterator[tuple[RawPeer, Side, PeerId]]:
    """As ``raw_peer``, where frames have a second. Sockets have a minute: a link does not stall
    because a thread of the test gets no time."""
    with raw_peer(nbytes=nbytes, **PATIENT) as (raw, victim, peer):
        watch_of(victim, peer)._stall_s = 1.0
        yield raw, victim, peer


class HeldFence:
    """A fence that passes when it is told to."""

    def __init__(self) -> None:
        self.waited, self.passed = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.waited.set()
        assert self.passed.wait(60)


class Trickle:
    """Sends what keeps a raw peer's data connection from stalling, and no more."""

    def __init__(self, raw: RawPeer) -> None:
        self._raw = raw
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):
            while not self._over.wait(0.05):
                self._raw.data[0].sendall(b"x")
                self._raw.beat()


def test_a_frame_that_stops_half_way_is_given_up() -> None:
    with raw_peer(dead_after_s=30.0, silent_s=30.0, nbytes=8 << 20) as (raw, victim, peer):
        victim.transport.submit(IncomingPages(peer, 1, [UNIT], [(0, IDS)]))
        raw.data[0].sendall(frame() + bytes(1000))
        assert "stalled" in reason(victim)
        assert not victim.of(PagesReceived)


def test_a_reader_that_does_not_read_is_given_up() -> None:
    with raw_peer(dead_after_s=30.0, silent_s=30.0, nbytes=64 << 20) as (_, victim, peer):
        ids = array("q", range(1024))
        victim.transport.submit(OutgoingPages(peer, 1, 0, UNIT, 0, ids))
        assert "stalled" in reason(victim)


def test_a_frame_that_trickles_in_is_given_up() -> None:
    with watched() as (raw, victim, peer):
        victim.transport.submit(IncomingPages(peer, 1, [UNIT], [(0, IDS)]))
        raw.data[0].sendall(frame())
        with Trickle(raw):
            assert "a frame, or the end of a cancelled one" in reason(victim)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_cancelled_frame_that_trickles_in_ends_soon(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_watchdog, "MIN_BYTES_PER_S", 1000)  # a minute for this frame
    with watched() as (raw, victim, peer):
        victim.transport.submit(IncomingPages(peer, 1, [UNIT], [(0, IDS)]))
        raw.data[0].sendall(frame() + b"\7" * 1000)
        wait_for(victim, lambda: victim.memory.data[999] == 7)
        if cancelled:
            victim.transport.cancel(peer, 1)
        with Trickle(raw):
            if cancelled:
                assert "the end of a cancelled one" in reason(victim)
            else:  # negative control: it has its minute
                for _ in range(300):
                    victim.poll()
                assert not victim.of(PeerDown)


def test_a_frame_that_trickles_in_and_was_cancelled_at_its_fence_ends_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stall_watchdog, "MIN_BYTES_PER_S", 1000)
    fence = HeldFence()
    with watched() as (raw, victim, peer):
        before = bytes(victim.memory.data)
        victim.transport.submit(IncomingPages(peer, 1, [UNIT], [(0, IDS)], fence))
        raw.data[0].sendall(frame() + b"\7" * 1000)
        assert fence.waited.wait(60)
        victim.transport.cancel(peer, 1)
        fence.passed.set()
        with Trickle(raw):
            assert "the end of a cancelled one" in reason(victim)
        assert victim.memory.data == before


def test_a_frame_that_was_cancelled_at_its_fence_is_not_sent() -> None:
    fence = HeldFence()
    with raw_peer(**PATIENT) as (raw, victim, peer):
        victim.transport.submit(OutgoingPages(peer, 1, 0, UNIT, 0, IDS[:1], fence))
        assert fence.waited.wait(60)
        victim.transport.cancel(peer, 1)
        fence.passed.set()
        wait_for(victim, lambda: victim.of(Drained))
        victim.transport.submit(OutgoingPages(peer, 2, 0, UNIT, 0, IDS[:1]))
        with raw.data[0].makefile("rb") as stream:
            first = unpack_header(stream.read(HEADER_BYTES))
        assert (first.sequence, first.read_id) == (0, 2)


@contextmanager
def cancelled_midway() -> Iterator[tuple[RawPeer, Side, PeerId]]:
    """A victim that has cancelled a read in the middle of its frame on one of two connections;
    where no deadline passes."""
    with raw_peer(connections=2, nbytes=8 << 20, **PATIENT) as (raw, victim, peer):
        victim.transport.submit(IncomingPages(peer, 1, [UNIT], [(0, IDS)]))
        raw.data[0].sendall(frame() + b"\7" * 1000)
        wait_for(victim, lambda: victim.memory.data[999] == 7)
        victim.transport.cancel(peer, 1)
        yield raw, victim, peer


def test_a_frame_begun_after_a_cancel_does_not_hold_its_pages() -> None:
    with cancelled_midway() as (raw, victim, peer):
        raw.data[1].sendall(frame(first=1) + bytes(1000))  # and no more
        watch = watch_of(victim, peer)
        wait_for(victim, lambda: len(watch._frames) == 2)
        raw.data[0].sendall(bytes(UNIT.block_bytes - 1000))
        wait_for(victim, lambda: victim.of(Drained))
        assert not victim.of(PeerDown)


def test_an_endless_frame_begun_after_a_cancel_ends_the_peer() -> None:
    with cancelled_midway() as (raw, victim, _):
        raw.data[1].sendall(frame(first=1, nbytes=1 << 60) + bytes(1000))
        assert f"a frame of {1 << 60} bytes in 1 blocks" in reason(victim)


def test_a_cancelled_frame_that_trickles_out_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watchdog, "MIN_BYTES_PER_S", 1000)
    with watched(nbytes=64 << 20) as (raw, victim, peer):
        victim.transport.submit(OutgoingPages(peer, 1, 0, UNIT, 0, array("q", range(1024))))
        over = threading.Event()

        def sip() -> None:
            with suppress(OSError):
                while not over.wait(0.05):
                    raw.data[0].recv(64 << 10)
                    raw.beat()

        assert raw.data[0].recv(1, socket.MSG_PEEK) == b"K"  # it is under way
        reader = threading.Thread(target=sip)
        reader.start()
        victim.transport.cancel(peer, 1)
        assert "the end of a cancelled one" in reason(victim)
        over.set()
        reader.join()


def test_a_cancelled_transfer_over_a_slow_link_lands_nowhere_after_quiet() -> None:
    half = len(IDS) // 2
    with through_proxy(connections=1, **PATIENT) as (pair, proxy):
        proxy.rate(10e6, "down")
        pair.expect(1, [UNIT], [IDS])
        for first in (0, half):  # two frames: the second one comes after Drained
            pair.send(1, 0, UNIT, IDS[first : first + half], first)
        pair.until(lambda: any(pair.reader.memory.data[:64]), "the first page")
        pair.reader.transport.cancel(pair.of_reader, 1)
        pair.until(lambda: pair.reader.of(Drained), "the reader's Drained")
        pair.reader.memory.data[:] = bytes(len(pair.reader.memory.data))
        proxy.clear()
        pair.check_works(2)  # on the same connection, so behind the second frame
        assert not any(pair.reader.memory.data[64:])
