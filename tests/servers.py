"""Servers of shared tiers, as processes of their own, and ports for servers."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PASSWORD = "s3cret"
_PORTS = range(20_000, 32_768)  # which Linux gives to nobody who asks for any


def free_port(ports: range = _PORTS) -> int:
    """Return a loopback port nobody listens on now; a server may bind it seconds later."""
    while True:
        port = secrets.choice(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Valkey:
    """A server process on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port(_PORTS[:2_768])  # a cluster's nodes also need the one 10,000 above
        (folder / "password").write_text(PASSWORD + "\n")

    def start(self, *options: str) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            import pytest  # which the demo does without

            pytest.skip("neither valkey-server nor redis-server is installed")
        plain = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)]
        secret = ["--requirepass", PASSWORD, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [program, *plain, *secret, *options], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def settings(self, **more: object) -> dict[str, object]:
        address = f"127.0.0.1:{self.port}"
        return {"address": address, "password_file": str(self._folder / "password")} | more
