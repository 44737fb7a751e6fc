"""Copies and hand-offs in every order that streams, events and threads allow, and that taking out
any wait would be noticed."""

from __future__ import annotations

from collections.abc import Callable
from linecache import getline
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("xxhash")

import kvconnect
from tests.emulated import handoff, numbers, offload, tables
from tests.emulated.device import Emulator, Site
from tests.emulated.handoff import Style
from tests.emulated.mutants import Play, lines_of, sites_of, unnoticed, waits_in
from tests.emulated.world import World
from tests.kernels import host_library

MODELS: dict[str, Play] = {
    "offload": offload.play,
    "handoff": handoff.play,
    "tables": tables.play,
    "numbers": numbers.play,
}
PACKAGE = Path(kvconnect.__file__).parent
SEEDS = st.integers(0, 1 << 32)
RUNS = 200  # of a model without a wait; most are noticed within five
TIMING = "events.start.record()"  # nothing waits for the start of a copy: it tells the time
ELSEWHERE = ("CudaCopier.__init__", "BlockCopier._made")
"""Tables are waited for because any stream may read them. In these models what reads them comes
behind what made them for other reasons too, so ``tables`` has a model of its own."""


@pytest.fixture(autouse=True)
def kernels() -> None:
    host_library()  # here: threads of a model can skip no test


# The models -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(seed=SEEDS)
def test_blocks_are_loaded_and_stored_right_in_every_order(seed: int) -> None:
    offload.play(Random(seed))


@settings(max_examples=60)
@given(seed=SEEDS)
def test_prompts_are_handed_off_right_in_every_order(seed: int) -> None:
    handoff.play(Random(seed))


@settings(max_examples=20)
@given(seed=SEEDS)
def test_tables_are_there_for_every_stream(seed: int) -> None:
    tables.play(Random(seed))


@settings(max_examples=20)
@given(seed=SEEDS)
def test_numbers_are_read_when_they_have_come(seed: int) -> None:
    numbers.play(Random(seed))


@pytest.mark.parametrize("model", MODELS)
def test_every_wait_is_needed(model: str) -> None:
    play = MODELS[model]
    sites = [site for site in sites_of(play, 40) if not is_exempt(site)]
    assert len(sites) >= 3
    assert unnoticed(play, sites, RUNS) == []


def is_exempt(site: Site) -> bool:
    ((file, line),) = lines_of([site])
    text, callers = getline(str(PACKAGE / file), line).strip(), "".join(site[2:])
    if "EngineStreams.mark" in callers and "current_stream" in text:
        return True  # a forward comes after what its scheduler launched before
    if "_launch_digest" in callers and "synchronize stream" in site:
        return True  # without it, memory that torch took back would be written; the model's stays
    staged = "_launch_staged" in callers
    if staged and "CudaStreams.launch:" in site[1] and "(fence)" in text:
        return True  # the work ahead of the copy waits for it, and this only tells the time
    if staged and "CudaStreams.launch:" in site[2] and "synchronize stream" in site:
        return True  # what breaks off is that work, and its stream is waited for, too
    return text == TIMING or (
        ("offload/" in callers or "disaggregation/" in callers)
        and any(n in site[1] for n in ELSEWHERE)
    )


def test_the_models_pass_every_wait_there_is() -> None:
    sites = [site for play in MODELS.values() for site in sites_of(play, 40)]
    files = (
        "offload/streams.py",
        "disaggregation/staging.py",
        "copy/cuda.py",
        "copy/wire_blocks.py",
    )
    files += ("engines/sglang/layerwise.py", "engines/sglang/device_numbers.py")
    there = {line for file in files for line in waits_in(file)}
    assert len(there) >= 20
    assert there - lines_of(sites) == set()


def wrong(style: Style, runs: int = 60) -> list[str]:
    """Return what goes wrong with engines of a style."""
    found = []
    for seed in range(runs):
        try:
            handoff.play(Random(seed), style=style)
        except AssertionError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("two_streams", [False, True])
def test_layers_of_micro_batches_cannot_be_followed_one_by_one(two_streams: bool) -> None:
    """The first call of a hook says nothing of the second half of the batch."""
    found = wrong(Style(two_streams, micro_batches=2, layerwise=True))
    assert found and all("is not" in what for what in found)
    assert not wrong(Style(two_streams, micro_batches=2, layerwise=False))  # the end of the step


def test_pages_land_behind_forwards_on_a_stream_of_their_own() -> None:
    """A request that has ended may have its forward on its way still."""
    found = wrong(Style(two_streams=True, joined=False))
    assert found and all("is not" in what for what in found)
    assert not wrong(Style(two_streams=True))


# The emulator -----------------------------------------------------------------------------------


def played(body: Callable[[Emulator, list[str]], None], runs: int = 40) -> set[tuple[str, ...]]:
    """Return the orders of events in which something can happen."""
    found = set()
    for seed in range(runs):
        world = World(Random(seed))
        emulator, seen = Emulator(world), []

        def run(emulator: Emulator = emulator, seen: list[str] = seen) -> None:
            body(emulator, seen)
            streams = emulator.streams
            emulator.world.block(lambda: all(stream.query() for stream in streams))

        world.run(run)
        found.add(tuple(seen))
    return found


def launch_two(emulator: Emulator, seen: list[str], ordered: bool) -> None:
    first, second, event = emulator.stream(), emulator.stream(), emulator.event()
    first.put([lambda: seen.append("a"), lambda: seen.append("b")])
    event.record(first)
    if ordered:
        second.wait_event(event)
    second.put([lambda: seen.append("c")])
    first.put([lambda: seen.append("d")])


def test_streams_are_as_free_as_events_leave_them() -> None:
    free = played(lambda *it: launch_two(*it, ordered=False))
    assert {order.index("c") for order in free} == {0, 1, 2, 3}
    bound = played(lambda *it: launch_two(*it, ordered=True))
    assert {order.index("c") for order in bound} == {2, 3}
    for order in free | bound:
        assert order.index("d") > max(order.index("a"), order.index("b"))
    assert {order.index("a") < order.index("b") for order in bound} == {True, False}


def test_an_event_stands_for_its_last_record_when_it_is_waited_for() -> None:
    def body(emulator: Emulator, seen: list[str]) -> None:
        event, other = emulator.event(), emulator.stream()
        event.synchronize()  # it was never recorded
        emulator.launch(lambda: seen.append("a"))
        event.record()
        other.wait_event(event)
        other.put([lambda: seen.append("b")])
        emulator.launch(lambda: seen.append("c"))
        event.record()
        event.synchronize()
        assert "c" in seen

    assert played(body) == {("a", "b", "c"), ("a", "c", "b")}


def test_waiting_for_what_never_comes_is_noticed() -> None:
    world = World(Random(0))
    with pytest.raises(AssertionError, match="nobody can go on"):
        world.run(lambda: world.threading.Event().wait())


def test_the_same_numbers_give_the_same_run() -> None:
    orders = []
    for _ in range(2):
        random = Random(5)
        offload.play(random)
        orders.append(random.getstate())
    assert orders[0] == orders[1]
