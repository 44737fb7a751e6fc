"""The fault proxy does to a connection what it says, and nothing else."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvconnect.testing.proxy import FaultProxy
from tests.links import open_files

PAYLOAD = bytes(i % 251 for i in range(300_000))


@contextmanager
def echo_server() -> Iterator[tuple[str, int]]:
    """Sends back what it gets, until nothing more comes."""

    def serve() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(sock,), daemon=True).start()

    def echo(sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(1 << 16):
                    sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def proxied() -> Iterator[tuple[FaultProxy, socket.socket]]:
    with (
        echo_server() as target,
        FaultProxy(*target) as proxy,
        socket.create_connection(proxy.address, timeout=30) as sock,
    ):
        yield proxy, sock


def receive(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size and (data := sock.recv(size - len(got))):
        got += data
    return got


def echoed(sock: socket.socket, payload: bytes = PAYLOAD) -> bytes:
    """Send everything and the end of it; return everything that comes back."""
    sender = threading.Thread(target=lambda: (sock.sendall(payload), sock.shutdown(1)))
    sender.start()
    got = receive(sock, 1 << 30)
    sender.join()
    return got


def test_it_passes_everything_on_by_default() -> None:
    with proxied() as (_, sock):
        assert echoed(sock) == PAYLOAD


def test_one_bit_is_flipped_where_asked() -> None:
    with proxied() as (proxy, sock):
        proxy.corrupt(100_001)
        got = echoed(sock)
        assert len(got) == len(PAYLOAD)
        wrong = [i for i, (a, b) in enumerate(zip(got, PAYLOAD, strict=True)) if a != b]
        assert wrong == [100_001]
        assert (got[100_001] ^ PAYLOAD[100_001]).bit_count() == 1


def test_a_connection_is_cut_where_asked() -> None:
    with proxied() as (proxy, sock):
        proxy.truncate(1234, "down")
        sock.sendall(PAYLOAD[:5000])
        assert receive(sock, 5000) == PAYLOAD[:1234]


def test_a_chunk_arrives_twice() -> None:
    with proxied() as (proxy, sock):
        proxy.duplicate()
        assert echoed(sock, b"once") == b"onceonce"


def test_a_chunk_arrives_twice_where_asked() -> None:
    with proxied() as (proxy, sock):
        proxy.duplicate(6)
        for sent, got in ((b"once", b"once"), (b"twice", b"twicetwice"), (b"once", b"once")):
            sock.sendall(sent)
            assert receive(sock, len(got)) == got


def test_a_stall_holds_everything_until_it_is_cleared() -> None:
    with proxied() as (proxy, sock):
        proxy.stall()
        sock.sendall(b"hello")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(30)
        proxy.clear()
        assert receive(sock, 5) == b"hello"


def test_delay_and_rate_change_no_byte() -> None:
    with proxied() as (proxy, sock):
        proxy.delay(0.02)
        proxy.rate(5e6, "up")
        assert echoed(sock) == PAYLOAD


def test_a_reset_breaks_what_is_there_and_lets_new_ones_in() -> None:
    with proxied() as (proxy, sock):
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            receive(sock, 1)
        with socket.create_connection(proxy.address, timeout=30) as again:
            assert echoed(again, b"y") == b"y"


def test_dropped_connections_hear_nothing() -> None:
    with proxied() as (proxy, _):
        proxy.drop_new_connections()
        with socket.create_connection(proxy.address, timeout=0.2) as sock:
            sock.sendall(b"x")
            with pytest.raises(TimeoutError):
                sock.recv(1)
        proxy.clear()
        with socket.create_connection(proxy.address, timeout=30) as sock:
            assert echoed(sock, b"y") == b"y"


def test_a_target_that_is_not_there_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    with FaultProxy(*nobody) as proxy, socket.create_connection(proxy.address, timeout=30) as sock:
        try:
            assert sock.recv(1) == b""
        except ConnectionError:
            return


def test_it_leaves_nothing_behind() -> None:
    def use() -> None:
        with proxied() as (proxy, sock):
            proxy.stall()
            sock.sendall(b"x")

    use()
    before = open_files()
    for _ in range(5):
        use()
    deadline = time.monotonic() + 60
    while open_files() > before:  # the echo server closes its ends when its threads find out
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name == "fault-proxy"]


def test_the_command_relays() -> None:
    with echo_server() as (host, port):
        command = [sys.executable, "-m", "kvconnect.testing.proxy"]
        command += ["--listen", "127.0.0.1:0", "--target", f"{host}:{port}", "--delay-ms", "1"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        ) as process:
            assert process.stdout and process.stderr
            try:
                found = re.search(r"relaying 127\.0\.0\.1:(\d+)", process.stdout.readline())
                assert found
                address = ("127.0.0.1", int(found[1]))
                with socket.create_connection(address, timeout=30) as sock:
                    assert echoed(sock) == PAYLOAD
            finally:
                process.terminate()
            assert process.stderr.read() == ""


def test_the_command_names_a_wrong_address() -> None:
    command = [sys.executable, "-m", "kvconnect.testing.proxy", "--listen", "80", "--target", "x:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'80' is not HOST:PORT" in done.stderr
