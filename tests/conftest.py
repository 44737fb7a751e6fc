"""Settings that every test shares. Folders decide markers: nobody marks test by test."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.servers import Valkey
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401

HERE = Path(__file__).parent

# Read by vLLM when it is imported and by the processes it starts: a small KV cache, no core pinning
# (test machines share cores), and no word to the network.
for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)

# Where these are set, pytest says everything of an unequal comparison, which takes hours for a
# megabyte of bytes; elsewhere it says the first lines.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# In the background of a shell it is ignored, by everything that a test starts, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run and no deadline: a shared machine must not decide a verdict.
settings.register_profile("kvconnect", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("kvconnect")


# Tests of an engine import it.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["engines", "schedulers"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what tests import out of garbage collections, which would look at all of it again and
    again: nothing of it is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries would report at exit that it was leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder, and skip those whose device this machine lacks."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        parts = item.path.relative_to(HERE).parts
        if parts[0] == "engines":
            item.add_marker("engine")
        elif parts[0] == "gpu":
            item.add_marker("gpu")
            if not _has_cuda():
                item.add_marker(no_gpu)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which files take longest: what to mend first where the whole takes too long."""
    took: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for file, seconds in took.most_common(25):
        terminalreporter.line(f"{seconds:7.1f} {file}")


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test enters, left at its end."""
    with ExitStack() as held:
        yield held


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    pytest.importorskip("valkey")
    server = Valkey(tmp_path)
    server.start()
    yield server
    server.kill()
