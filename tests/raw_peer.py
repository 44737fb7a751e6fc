"""A peer that speaks the protocol by hand, and may go on wrongly: what a victim makes of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvconnect.protocol.auth import NONCE_BYTES, ClientAuth, Opening
from kvconnect.protocol.codec import pack_greeting, pack_message
from kvconnect.protocol.frames import FrameHeader, pack_header
from kvconnect.testing.page_memory import plain_unit
from kvconnect.testing.transport import Side
from kvconnect.transport.base import PeerDown, PeerId, PeerUp
from tests.links import side

UNIT = plain_unit(64 << 10)


class RawPeer:
    """A client that may go on wrongly once both sides have authenticated."""

    def __init__(self, address: tuple[str, int], connections: int = 1, key: bytes = b"") -> None:
        session = os.urandom(16)
        self.control = self.dial(address, Opening("control", session, 0, connections), key)
        self.data = [
            self.dial(address, Opening("data", session, number, connections), key)
            for number in range(connections)
        ]

    def dial(self, address: tuple[str, int], opening: Opening, key: bytes) -> socket.socket:
        sock = socket.create_connection(address, timeout=10)
        auth = ClientAuth(key, opening, os.urandom(NONCE_BYTES))
        sock.sendall(auth.start())
        while not auth.done:
            got = sock.recv(1)
            assert got, "rejected"
            sock.sendall(auth.feed(got))
        return sock

    def greet(self) -> None:
        self.control.sendall(pack_message(pack_greeting(0)))

    def beat(self) -> None:
        self.control.sendall(pack_message(b""))

    def is_cut_off(self) -> bool:
        """Wait until the other side has closed the control connection."""
        try:
            while self.control.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        return True

    def close(self) -> None:
        for sock in (self.control, *self.data):
            sock.close()


@contextmanager
def raw_peer(connections: int = 1, **options: object) -> Iterator[tuple[RawPeer, Side, PeerId]]:
    """A victim that has one raw peer, both up; frames have no digests."""
    with side(digest="off", **options) as victim:
        raw = RawPeer(victim.transport.listen("127.0.0.1", 0), connections)
        raw.greet()
        wait_for(victim, lambda: victim.of(PeerUp))
        try:
            yield raw, victim, victim.of(PeerUp)[0].peer
        finally:
            raw.close()


def wait_for(victim: Side, done: Callable[[], object]) -> None:
    for _ in range(1000):
        if done():
            return
        victim.poll()
    raise AssertionError(f"still waiting, seen: {victim.seen}")


def reason(victim: Side) -> str:
    wait_for(victim, lambda: victim.of(PeerDown))
    (down,) = victim.of(PeerDown)
    return down.reason


def frame(**changes: int) -> bytes:
    sound = FrameHeader(
        0, read_id=1, unit=0, first=0, count=1, nbytes=UNIT.block_bytes, digest_period=0
    )
    return pack_header(sound._replace(**changes))
