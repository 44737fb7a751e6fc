"""Engines that share blocks compare their weights when they meet, and again when these change."""

from __future__ import annotations

import pytest

from kvconnect.protocol.identity import Identity, Weights
from kvconnect.tiers.backends import BlockOutcome
from tests.unit.tiers.peer_engines import Engine, engines, until

ONE, TWO = (Identity(weights=Weights(version=name)) for name in ("1", "2"))


def test_engines_share_blocks_while_their_weights_are_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engines(Engine) as [source]:
        source.keep(1, slot=0)
        source.agent.set_identity(ONE)
        with engines(lambda: Engine([source.where])) as [reader]:
            reader.agent.set_identity(ONE)
            reader.sources(1)
            assert reader.get([1]) == [BlockOutcome.OK]
            source.agent.set_identity(TWO)
            said = "has other weights, 'version 2' there and 'version 1' here: nothing is shared"
            until(lambda: any(said in line for line in caplog.messages))
            assert len(reader.agent.reader.sources) == 0
            reader.agent.set_identity(TWO)
            reader.sources(1)
            assert reader.get([1]) == [BlockOutcome.OK]
