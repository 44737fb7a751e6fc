"""Whose the other end of a TCP connection is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvconnect.tiers.peers import connection_owner
from kvconnect.tiers.peers.connection_owner import check_other_end
from kvconnect.transport.base import Ends

PEER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family) as sock:
    sock.connect((sys.argv[1], int(sys.argv[2])))
    input()
"""


@contextmanager
def connected(listen: str = "127.0.0.1", dial: str = "") -> Iterator[tuple[int, Ends]]:
    """Yield the process that connected, and the ends as this process sees them."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with ExitStack() as stack:
        both = listen == "::"
        server = socket.create_server((listen, 0), family=family, dualstack_ipv6=both)
        stack.enter_context(server)
        port = server.getsockname()[1]
        command = [sys.executable, "-c", PEER, dial or listen, str(port)]
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
        stack.callback(process.kill)
        sock = stack.enter_context(server.accept()[0])
        here, there = sock.getsockname(), sock.getpeername()
        yield process.pid, ((here[0], here[1]), (there[0], there[1]))


@pytest.mark.parametrize(
    ("listen", "dial"),
    [("127.0.0.1", ""), ("::1", ""), ("::", "127.0.0.1")],
    ids=["IPv4", "IPv6", "IPv4 in IPv6"],
)
def test_only_the_process_that_is_connected_holds_the_other_end(listen: str, dial: str) -> None:
    with connected(listen, dial) as (pid, ends), connected() as (other, _):
        check_other_end(pid, ends)
        for wrong in (os.getpid(), os.getppid(), other, (1 << 31) - 1):
            with pytest.raises(OSError, match=r"\w"):
                check_other_end(wrong, ends)
        with pytest.raises(OSError, match="does not hold"):  # this end is the process's own
            check_other_end(pid, ends[::-1])
        (here, there) = ends
        with pytest.raises(OSError, match="not in this network namespace"):
            check_other_end(pid, (here, (there[0], there[1] ^ 1)))


def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (pid, ends):
        check_other_end(pid, ends)  # control
        user = os.geteuid()
        monkeypatch.setattr(connection_owner.os, "geteuid", lambda: user + 1)
        with pytest.raises(PermissionError, match="another user"):
            check_other_end(pid, ends)


def test_without_a_tcp_connection_nobody_holds_it() -> None:
    with pytest.raises(OSError, match="no TCP connection"):
        check_other_end(os.getpid(), None)
