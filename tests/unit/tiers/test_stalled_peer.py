"""A source whose messages arrive and whose pages stand still on their way: others are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from kvconnect.tiers.peers.fetching import STOP_S
from tests.unit.tiers.sharing_world import WAIT_S, WHOLE, Engine, World, replaced


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch)


def until(world: World, fact: Callable[[], object]) -> None:
    """Go on until a fact is true; no time passes."""
    for _ in range(3000):
        if fact():
            return
        possible = list(world.possible())
        assert possible, "nothing happens any more"
        world.rng.choice(possible)()
    raise AssertionError("it did not come true")


def loads(reader: Engine, name: str) -> int:
    """Return how many blocks of a prompt a request loads: one or none."""
    reader.ask(name, "", name, 1)
    until(reader.world, lambda: name not in reader.asked)
    return len(reader.index.ready_slots(0, reader.hashes("", name, 1)))


def test_a_source_whose_pages_stand_still_keeps_nobody_from_another_one() -> None:
    world = World([WHOLE] * 3, "off", "network", Counter())
    world.play()
    stalled, good, reader = world.engines
    for engine, names in ((stalled, "abc"), (good, "def")):
        for name in names:
            engine.compute("", name, 1)
    world.play(stalled, good)
    sources, _, reads = reader.agent.reader
    stalled.stalls = True
    for name in "ab":
        reader.ask(name, "", name, 1)
    until(world, lambda: len(reads._open) == 2)
    (source,) = {read.source for read in reads._open.values()}
    assert loads(reader, "d")

    world.pass_time(WAIT_S)  # both are late
    until(world, lambda: all(read.stopped for read in reads._open.values()))
    assert loads(reader, "e")
    assert len(reader.reads) == 2, "they have not stopped"

    world.pass_time(STOP_S)
    until(world, lambda: not reader.reads)
    assert world.seen[f"hung up: a read took longer than {WAIT_S:g} s, and does not stop"] == 1
    assert world.seen["read: failed"] == 2
    assert loads(reader, "f")
    world.check()

    stalled.stalls = False
    world.pass_time(1.0)  # the first pause: what was late together is one failure
    until(world, lambda: len(sources) == 2)
    assert not source.read_breaker.closed, "it is known by its next connection"
    assert loads(reader, "c")
    assert source.read_breaker.closed
    world.check()
    world.end()
