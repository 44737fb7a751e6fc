"""The socket test of ``doctor transport``: measured, and only for who knows the word."""

from __future__ import annotations

import threading

import pytest

from kvconnect.doctor.plain_sockets import SocketTestServer, measure_sockets

LOOP = "127.0.0.1"


def test_plain_sockets_are_measured() -> None:
    server = SocketTestServer(LOOP, 2, 3_000_000)
    try:
        address = (LOOP, server.port)
        assert measure_sockets(address, server.word, [3_000_000, 3_000_000], 2) > 0
    finally:
        server.close()


def test_plain_sockets_serve_only_who_knows_the_word() -> None:
    server = SocketTestServer(LOOP, 1, 1000)
    try:
        with pytest.raises(OSError):
            measure_sockets((LOOP, server.port), bytes(16), [1000], 1)
    finally:
        server.close()


def test_plain_sockets_that_nobody_uses_end_when_told() -> None:
    before = threading.active_count()
    server = SocketTestServer(LOOP, 2, 1000)
    assert threading.active_count() == before + 2
    server.close()
    assert threading.active_count() == before
