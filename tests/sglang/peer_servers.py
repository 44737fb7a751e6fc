"""SGLang servers that share host memory with other engines."""

from __future__ import annotations

from typing import Any

from tests.engines.models import BLOCK_SIZE
from tests.sglang.server import SglangServer
from tests.sglang.storage_server import server


def peers(listen: int, *ask: str) -> dict[str, Any]:
    addresses = [f"127.0.0.1:{ports}" for ports in ask]
    return {"listen": f"127.0.0.1:{listen}", "ask": addresses, "ask_s": 5.0}


def sglang(settings: dict[str, Any], tp: int = 1, *, texts: bool = False) -> SglangServer:
    running = server(cache_peers=settings)
    running.args += ("--page-size", str(BLOCK_SIZE))
    running.tokens = 4096  # room for all: HiCache reads only as much as it has room for
    running.tp, running.texts = tp, texts
    return running
