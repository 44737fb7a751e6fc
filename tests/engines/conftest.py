"""What every test with an engine shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.engines.server import Server
from tests.fork_server import VLLM, ForkServer

# Threads and ranks spin while they wait for one another. Where they outnumber the cores, or share
# them with other work, a step takes a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Fork servers from a process that has imported vLLM."""
    with ForkServer(VLLM, {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}) as Server.fork_server:
        yield
    Server.fork_server = None
