"""The servers that all tests with SGLang share, and their logs where a test fails.

Five servers serve every combination: a prefill server talks to any decode server. They start at
the same time, once; a test that kills one starts it again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.fork_server import SGLANG, ForkServer
from tests.fork_server import VLLM as VLLM_MODULES
from tests.sglang.pd import LAYERWISE, decode_server, prefill_server, side_by_side
from tests.sglang.scenario import Fleet
from tests.sglang.server import SglangServer, plugin_path
from tests.sglang.vllm_server import VLLM, Vllm

_STATUS = pytest.StashKey[int]()
FAULTY = Path(__file__).with_name("faulty")


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Fork servers from a process that has imported SGLang."""
    with ForkServer(SGLANG, {**os.environ, "OMP_NUM_THREADS": "1"}) as SglangServer.fork_server:
        yield
    SglangServer.fork_server = None


@pytest.fixture(scope="session")
def vllm_fork_server() -> Iterator[None]:
    """Fork vLLM's servers from a process that has imported vLLM, by that environment's Python."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1"}
    with ForkServer(VLLM_MODULES, environment, str(VLLM)) as Vllm.fork_server:
        yield
    Vllm.fork_server = None


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    shift = tmp_path_factory.mktemp("fault") / "shift"
    faulty = {**plugin_path(FAULTY), "KVCONNECT_FAULTY": str(shift)}
    servers = (
        SglangServer(),
        prefill_server(env={**faulty, **LAYERWISE}),
        prefill_server(env=faulty, args=("--disable-overlap-schedule",)),
        decode_server("tcp"),
        decode_server("nixl", tp=2),
    )
    with side_by_side(*servers):
        yield Fleet(*servers, shift)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave as soon as all is said: what SGLang imports without a GPU crashes when the interpreter
    takes it down, and the status would be the crash's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(_STATUS, pytest.ExitCode.INTERNAL_ERROR))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every running server's log with a test that failed."""
    report = yield
    if report.failed:
        for server in SglangServer.running:
            report.sections.append((f"log of {server}", server.tail()))
    return report
