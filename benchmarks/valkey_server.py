"""A Valkey or Redis server of a benchmark's own."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.servers import free_port


def start_server(stack: ExitStack, folder: Path) -> dict[str, Any] | None:
    """Start a server on loopback; return the settings of the tier, None if none is installed."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        return None
    port = free_port()
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return {"kind": "valkey", "address": f"127.0.0.1:{port}"}
