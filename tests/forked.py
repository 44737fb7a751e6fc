"""A command that a fork server runs in its place: ``python -m tests.forked SOCKET MODULE ...``.

The command lives as long as the process that was forked for it. Signals that end it are handed on;
one that is killed takes the process with it. What would be printed goes to the same file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.fork_server import ForkServer

_LOOK_S = 0.05


class _Handler(socketserver.StreamRequestHandler):
    """One command, as long as its process runs."""

    server: _Listener

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        child = self.server.fork_server.start(request["argv"], request["env"], request["log"])
        self.wfile.write(b"%d\n" % child.pid)
        while child.poll() is None:
            if select.select([self.connection], [], [], _LOOK_S)[0]:
                break  # the command was killed
        _signal(child.pid, signal.SIGKILL)  # also what its leader left


class _Listener(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, fork_server: ForkServer) -> None:
        super().__init__(str(path), _Handler)
        self.fork_server = fork_server


@contextmanager
def listening(path: Path, fork_server: ForkServer) -> Iterator[None]:
    """Run commands that name the socket ``path``."""
    with _Listener(path, fork_server) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown()
            thread.join()


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def main() -> None:
    """Have a process forked and wait for its end."""
    path, *argv = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as stream:
        connection.connect(path)
        log = os.readlink("/proc/self/fd/1")
        stream.write(json.dumps({"argv": argv, "env": dict(os.environ), "log": log}) + "\n")
        stream.flush()
        pid = int(stream.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: _signal(pid, number))
        stream.read()


if __name__ == "__main__":
    main()
