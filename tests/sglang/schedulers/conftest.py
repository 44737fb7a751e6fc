"""Engines that tests share: those of each shape are started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sglang.schedulers import model
from tests.sglang.schedulers.engine import Engines
from tests.sglang.schedulers.modes import MODES
from tests.sglang.schedulers.pair import Pair
from tests.sglang.server import SglangServer


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    assert SglangServer.fork_server is not None
    checkpoint = model.write(tmp_path_factory.mktemp("fingerprint") / "model")
    with Engines(SglangServer.fork_server, checkpoint) as running:
        yield running


@pytest.fixture
def pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    """A pair of the mode that the test names as its parameter; others come after a failure."""
    mode = MODES[request.param]
    with Pair(*engines.get(mode.prefill, mode.decode)) as found:
        yield found
    if found.spoilt:
        engines.discard(mode.prefill)
        engines.discard(mode.decode)
