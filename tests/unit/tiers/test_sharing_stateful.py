"""Engines that share host memory, in any order of events: no engine loads a wrong block, every read
ends, and a peer that dies costs a miss."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Literal
from unittest.mock import ANY

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from kvconnect.errors import Misuse
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.index import PENDING, HostIndex
from kvconnect.peers.dialling import Dialler
from kvconnect.peers.sessions import HELLO_TIMEOUT_S
from kvconnect.settings import DigestMode
from kvconnect.tiers import LookupRequest, TierPlan
from kvconnect.tiers.offers import Offers
from kvconnect.tiers.peers.fetching import Reads, _OpenRead
from kvconnect.tiers.peers.same_machine import OwnMemory, SourceMemory
from kvconnect.tiers.peers.served import ServedBlock, ServedBlocks
from kvconnect.tiers.peers.serving import SendLimit, Serving
from kvconnect.tiers.worker import TierWorker
from kvconnect.transport.base import PagesReceived, PeerId
from tests.unit.tiers.sharing_world import (
    BLOCKS,
    SWAPPED,
    TOKENS,
    WHOLE,
    Asked,
    Engine,
    World,
    replaced,
)

EVENTS = ["compute"] * 6 + ["ask"] * 8 + ["go"] * 8 + ["wait"] * 3 + ["thaw"] * 3
EVENTS += ["garble", "overwrite", "hurry", "swap", "cut", "kill"] * 2
EVENTS += ["drop", "reset", "freeze", "rot", "slow"]
EVENTS_ON_ONE_MACHINE = [*EVENTS, "rot", "reset", "close", "close"]
LAYOUTS = {
    "two alike": [WHOLE, WHOLE],
    "two with other layouts": [WHOLE, SWAPPED],
    "three": [WHOLE, WHOLE, SWAPPED],
}
SameMachine = Literal["memory", "network"]


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch)


class Sharing(RuleBasedStateMachine):
    """Each event takes an engine at random, and what it does is played by a seed. Stories of
    another ``series`` are others, with the same events."""

    series: ClassVar[int] = 0
    layouts: ClassVar[str]
    same_machine: ClassVar[SameMachine]
    seen: ClassVar[Counter[str]]

    @initialize(seed=st.integers(0, 1 << 32))
    def start(self, seed: int) -> None:
        seed += self.series
        self.first, self.steps = seed, 0
        self.recent: list[tuple[str, str]] = []
        digest: DigestMode = "full" if seed % 2 else "off"
        self.world = World(LAYOUTS[self.layouts], digest, self.same_machine, self.seen)
        self.world.rng = random.Random(seed)
        self.world.go(100)
        self.sound = True

    @rule(seed=st.integers(0, 1 << 32))
    def happens(self, seed: int) -> None:
        self.sound = False
        self.steps += 1
        rng = self.world.rng = random.Random(f"{self.first} {self.steps} {seed}")
        events = EVENTS if self.same_machine == "network" else EVENTS_ON_ONE_MACHINE
        event, engine = rng.choice(events), rng.choice(self.world.engines)
        note(f"{event} at engine {engine.place}")
        if not engine.alive and not rng.randrange(3):
            self.world.restart(engine, same_pid=bool(rng.randrange(2)))
        getattr(self, event)(engine, rng)
        self.world.go(rng.choice([0, 5, 15]))
        self.world.check()
        self.sound = True

    def compute(self, engine: Engine, rng: random.Random) -> None:
        if engine.runs:
            self.recent = [*self.recent[-1:], ("", rng.choice("abc"))]
            engine.compute(*self.recent[-1])

    def ask(self, engine: Engine, rng: random.Random) -> None:
        """A prompt is asked for that was computed a short time ago, perhaps under another salt."""
        if engine.runs and self.recent and len(engine.asked) < 4:
            self.world.requests += 1
            tenant, name = rng.choice(self.recent)
            tenant = rng.choice([tenant] * 7 + ["salt"])
            engine.ask(f"r{self.world.requests}", tenant, name, rng.randint(1, BLOCKS))

    def overwrite(self, engine: Engine, rng: random.Random) -> None:
        """Other prompts are computed where blocks are being read."""
        for each in [*self.world.sources(), engine]:
            if each.runs:
                each.compute("salt", rng.choice("ab"))

    def hurry(self, engine: Engine, rng: random.Random) -> None:
        """One step hears of new blocks, and already gives their slots to others."""
        self.compute(engine, rng)
        self.world.go_until(lambda: engine.copying)
        for job in list(engine.copying) if engine.runs else ():
            for _ in range(2 - job.halves):
                engine.copy(job)
        if engine.runs:
            engine.compute("", rng.choice("de"))
        for other in self.world.engines:
            self.ask(other, rng)

    def swap(self, engine: Engine, rng: random.Random) -> None:
        """Engines read from one another, into the slots of what the others ask for."""
        self.recent = []
        for other in self.world.engines:
            self.compute(other, rng)
        self.world.go(80)
        for other in self.world.engines:
            self.ask(other, rng)

    def rot(self, engine: Engine, rng: random.Random) -> None:
        """A byte of a stored block changes before others ask for it."""
        self.compute(engine, rng)
        self.world.go(40)
        if engine.runs:
            engine.rot(rng)
        for other in self.world.engines:
            self.ask(other, rng)

    def slow(self, engine: Engine, rng: random.Random) -> None:
        """The network stands still with blocks on their way, perhaps for longer than anybody
        waits."""
        self.world.go_until(self.world.frames)
        self.world.slow = True
        for _ in range(rng.choice([1, 3, 6])):
            self.world.pass_time(0.9)
            self.world.go(10)
            if engine.runs:
                engine.compute("", rng.choice("abcde"))
        self.world.slow = False

    def go(self, engine: Engine, rng: random.Random) -> None:
        self.world.go(rng.choice([10, 30, 80]))

    def wait(self, engine: Engine, rng: random.Random) -> None:
        self.world.pass_time(rng.choice([0.1, 0.3, 0.3, 1.0, 1.0, 5.0]))

    def drop(self, engine: Engine, rng: random.Random) -> None:
        if engine.runs:
            engine.drop(rng)

    def reset(self, engine: Engine, rng: random.Random) -> None:
        if engine.runs and not rng.randrange(3):
            engine.reset()

    def garble(self, engine: Engine, rng: random.Random) -> None:
        self.world.garble()

    def cut(self, engine: Engine, rng: random.Random) -> None:
        """A connection is lost, perhaps one with blocks on their way."""
        engine = rng.choice([engine, *self.world.sources()])
        if ends := list(engine.network.ends.values()):
            self.world.cut(rng.choice(ends))

    def kill(self, engine: Engine, rng: random.Random) -> None:
        engine = rng.choice([engine, *self.world.sources()])
        if engine.alive:
            self.world.kill(engine)

    def close(self, engine: Engine, rng: random.Random) -> None:
        engine = rng.choice([engine, *self.world.sources()])
        if engine.runs:
            self.world.close(engine)

    def freeze(self, engine: Engine, rng: random.Random) -> None:
        """An engine stands still, perhaps for longer than others wait for it."""
        engine = rng.choice([engine, *self.world.sources()])
        engine.frozen = True
        for _ in range(rng.randrange(4)):
            self.world.pass_time(1.0)
            self.world.go(10)

    def thaw(self, engine: Engine, rng: random.Random) -> None:
        self.world.thaw(engine)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self.sound:
                self.sound = False
                self.world.settle()
                self.world.check_rest()
                if not self.first % 3:
                    self.world.share()
        finally:
            self.world.end()


def run(
    layouts: str, same_machine: SameMachine, examples: int = 80, series: int = 0
) -> Counter[str]:
    """Play so many stories; return what happened in them."""

    class One(Sharing):
        seen: ClassVar[Counter[str]] = Counter()

    One.layouts, One.same_machine, One.series = layouts, same_machine, series
    run_state_machine_as_test(
        One,
        settings=settings(
            max_examples=examples,
            stateful_step_count=80,
            deadline=None,
            derandomize=True,  # the negative controls have to find something
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return One.seen


def check_all_happens(
    layouts: str, same_machine: SameMachine, wanted: set[str], examples: int = 80
) -> Counter[str]:
    """Play until all that is wanted has happened; return what has. Which stories Hypothesis draws
    depends on what is imported, and some events are rare: so there are up to three series."""
    seen = Counter[str]()
    for series in range(3):
        seen += run(layouts, same_machine, examples, series)
        if all(seen[what] for what in wanted):
            return seen
    missing = {what for what in wanted if not seen[what]}
    raise AssertionError(f"{missing} never happened: {seen}")


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_any_order_of_events(layouts: str) -> None:
    wanted = {"from a peer", "a miss", "overwritten while it is sent"}
    wanted |= {"killed while it reads", "killed while it sends"}
    wanted |= {f"read: {outcome}" for outcome in ("ok", "absent", "corrupt", "failed")}
    wanted |= {"landed late", "read: unavailable"} if layouts == "three" else set()
    assert not check_all_happens(layouts, "network", wanted)["copied from memory"]


@pytest.mark.parametrize("layouts", ["two alike", "three"])
def test_any_order_of_events_on_one_machine(layouts: str) -> None:
    wanted = {"from a peer", "a miss", "copied from memory", "overwritten while it is copied"}
    wanted |= {"another block in memory", "memory that is not there"}
    wanted |= {"killed while it is copied"}
    wanted |= {f"read: {outcome}" for outcome in ("ok", "absent", "failed")}
    check_all_happens(layouts, "memory", wanted)


def test_control_what_never_happens_is_missed() -> None:
    with pytest.raises(AssertionError, match="no such event"):
        check_all_happens("two alike", "memory", {"a miss", "no such event"}, examples=8)


# By hand, what chance takes long to find ----------------------------------------------------------


def two(digest: DigestMode, same_machine: SameMachine = "network") -> tuple[World, Engine, Engine]:
    world = World([WHOLE, WHOLE], digest, same_machine, Counter())
    world.play()
    source, reader = world.engines
    return world, source, reader


@pytest.mark.parametrize("still", [True, False])
def test_who_stands_still_may_say_no_hello(still: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control runs, and says nothing."""
    world = World([WHOLE, WHOLE], "off", "network", Counter())
    source, _ = world.engines
    source.frozen = still
    if not still:
        monkeypatch.setattr(source.network, "submit", lambda _: None)
    for _ in range(9):
        world.pass_time(HELLO_TIMEOUT_S / 4)
        world.go(100)
    monkeypatch.undo()
    said = f"hung up: no hello within {HELLO_TIMEOUT_S:g} s"
    assert world.seen[said]
    assert {str(error) for error in world.errors} == (set() if still else {f"it {said}"})
    world.end()


def test_a_block_whose_bytes_changed_is_not_read() -> None:
    world, source, reader = two("full")
    source.compute("", "a")
    world.play(source)
    source.rot(random.Random(0))
    reader.ask("r", "", "a", BLOCKS)
    world.play(reader)
    world.check()
    assert world.seen["read: absent"] == 1
    world.end()


def test_one_step_hears_of_blocks_and_gives_their_slots_to_others() -> None:
    world, source, reader = two("off")
    source.compute("", "a")
    source.schedule()
    source.execute()
    for job in 2 * source.copying:
        source.copy(job)
    source.compute("", "b")
    source.schedule()
    source.execute()
    for job in source.copying:
        source.copy(job)  # half of it
    source.copying, later = [], source.copying
    reader.ask("r", "", "a", BLOCKS)
    world.play(reader)
    world.check()
    source.copying = later
    world.settle()
    world.check_rest()
    world.end()


def test_slots_that_a_read_fills_are_not_served() -> None:
    world, first, second = two("off")
    first.compute("", "a")
    second.compute("", "b")
    world.play(first, second)
    first.ask("r", "", "b", BLOCKS)
    while not first.reading.total():
        world.rng.choice(list(world.possible()))()
    while first.steps:
        first.execute()
    world.play()  # the blocks are here, and the scheduler does not know it
    assert world.seen["read: ok"] == BLOCKS
    second.ask("r", "", "a", BLOCKS)
    world.play(second)
    world.check()
    world.settle()
    world.check_rest()
    world.end()


@pytest.mark.parametrize(("salt", "found"), [("b", 0), ("", 0), ("a", BLOCKS)])
def test_the_same_blocks_under_another_salt_are_not_read(salt: str, found: int) -> None:
    """The last salt is the control: it is the source's own."""
    world, source, reader = two("full")
    source.compute("a", "x")
    world.play(source)
    hashes = source.hashes("a", "x", BLOCKS)
    asked = LookupRequest([hashes], 0, TOKENS * BLOCKS, reader.prefix(salt))
    reader.asked["r"] = Asked(asked, world.now)
    reader.look("r")
    world.play(reader)
    assert world.seen["read: ok"] == len(reader.index.ready_slots(0, hashes)) == found
    world.check()
    world.end()


def nothing_happens(world: World, source: Engine) -> None:
    """The control of the stories below."""


def others_are_stored(world: World, source: Engine) -> None:
    source.compute("", "b")
    world.play(source)


def one_is_dropped(world: World, source: Engine) -> None:
    source.drop(random.Random(0))
    world.play(source)


def weights_change(world: World, source: Engine) -> None:
    source.reset()
    world.play(source)


def a_byte_changes(world: World, source: Engine) -> None:
    source.rot(random.Random(0))


def another_process_has_its_number(world: World, source: Engine) -> None:
    """It has its memory at the same addresses, and has written as often into each slot."""
    world.kill(source)
    world.restart(source, same_pid=True)
    other = world.engines[source.place]
    other.compute("", "b")
    world.play(other)


def it_loses_the_reader_and_closes(world: World, source: Engine) -> None:
    for end in list(source.network.ends.values()):
        world.cut(end)
        world.end_down(end)
    world.play()
    world.close(source)


Happens = Callable[[World, Engine], None]


def answered_then(digest: DigestMode, happens: Happens, copied: int) -> None:
    """Something happens at a source that has said where its blocks are, before they are copied. The
    network is slow, so that the reader does not hear of it."""
    world, source, reader = two(digest, "memory")
    source.compute("", "a")
    world.play(source)
    reader.ask("r", "", "a", BLOCKS)
    reader.schedule()
    world.play()
    assert reader.told
    world.slow = True
    happens(world, source)
    for _ in range(3):  # the answer, the read, what came of it
        reader.schedule()
        world.play()
        world.check()
    assert world.seen["copied from memory"] == copied
    world.settle()
    world.check_rest()
    world.end()


STORIES: dict[str, tuple[DigestMode, Happens, int]] = {
    "nothing happens": ("off", nothing_happens, BLOCKS),
    "others are stored": ("off", others_are_stored, 1),
    "one is dropped": ("off", one_is_dropped, BLOCKS - 1),
    "weights change": ("off", weights_change, 0),
    "a byte changes": ("full", a_byte_changes, BLOCKS - 1),
    "another process has its number": ("off", another_process_has_its_number, 0),
    "it loses the reader and closes": ("off", it_loses_the_reader_and_closes, 0),
}


@pytest.mark.parametrize("name", STORIES)
def test_between_an_answer_and_the_copy(name: str) -> None:
    answered_then(*STORIES[name])


# Negative controls --------------------------------------------------------------------------------


def _does_nothing(*_: object) -> None:
    """Takes the place of what must not be left out."""


_on_received, _submit, _abandon = Reads.on_received, TierWorker.submit, HostIndex.abandon
_take = Offers.take
_read, _lookup = Reads.read, TierPlan.lookup
_source_memory, _versions = SourceMemory.__init__, SourceMemory._versions
_read_memory = SourceMemory.read


def _believes_pages(self: Reads, event: PagesReceived) -> None:
    _on_received(self, event._replace(bad=()))


def _trusts_outcomes(self: Any) -> None:
    self.ended = self.outcomes is not None and not self.stopped


def _stopped_is_ended(self: Reads, reads: Any) -> bool:
    return all(read.ended or read.stopped for read in reads)


def _any_block(self: ServedBlocks, key: bytes) -> ServedBlock | None:
    found = next((slot for known, (slot, _) in self._places.items() if known != key), None)
    return None if found is None else ServedBlock(found, self._versions[found])


def _offers_last(self: TierWorker, work: Any, overwritten: Any) -> None:
    assert self._served is not None
    self._served.withdraw(overwritten)
    if work.withdraw:
        self._served.clear()
    self._served.drop(work.dropped)
    self._served.offer(work.served)


def _offers_what_has_left(self: Offers, work: Any) -> None:
    offered = [(offer.key, offer.slot) for offer in self._blocks]
    _take(self, work)
    work.served = offered


def _serves_prefetched(self: TierWorker, jobs: Any) -> None:
    served, self._served = self._served, None
    _submit(self, jobs)
    self._served = served


def _frees_at_once(self: HostIndex, slots: Any, held: bool = False) -> Any:
    return _abandon(self, [slot for slot in slots if self.slots.state(slot) == PENDING])


def _counts_for_ever(self: Reads, group: int, wanted: Any) -> Any:
    outcomes = _read(self, group, wanted)
    for source in self._sources._sources.values():
        source.reading += 1
    return outcomes


def _waits_for_ever(self: TierPlan, req_id: str, request: LookupRequest, now: float) -> bool:
    waits = _lookup(self, req_id, request, now)
    if waits:
        self._waiting[req_id].deadline = math.inf
    return waits


def _any_version(self: SourceMemory, slots: Any) -> Any:
    return [ANY for _ in _versions(self, slots)]


def _checks_before(self: Any, blocks: Any, nbytes: int) -> list[bool]:
    before = _versions(self, [place.slot for place, _ in blocks])
    return _read_memory(_Before(self, before), blocks, nbytes)


class _Before:
    """A source's memory whose versions were read before."""

    def __init__(self, memory: Any, before: Any) -> None:
        self._memory, self._versions = memory, lambda _: before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def _any_nonce(self: SourceMemory, told: Any, nonce: bytes, host: HostArena) -> None:
    _source_memory(self, told, ANY, host)


def _frees_the_nonce(self: OwnMemory, peer: PeerId) -> None:
    self._nonces.pop(peer, None)


def _keeps_versions(self: ServedBlocks, slots: Any) -> None:
    for slot in slots:
        self._forget(slot)


def _clears_without_versions(self: ServedBlocks) -> None:
    _keeps_versions(self, range(len(self._keys)))


_LATE = "nobody's|a store|is in state"
WRONG = "a wrong block"
CONTROLS: dict[str, tuple[type, str, Any, str]] = {
    "a source does not notice what is overwritten": (
        *(ServedBlocks, "is_current", lambda *_: True),
        WRONG,
    ),
    "nothing is withdrawn": (ServedBlocks, "withdraw", _does_nothing, "a wrong|a dropped"),
    "a drop is not heard of": (ServedBlocks, "drop", _does_nothing, "a dropped block"),
    "another block is found": (ServedBlocks, "find", _any_block, "a wrong|a dropped"),
    "digests of pages are ignored": (Reads, "on_received", _believes_pages, WRONG),
    "a read ends before its pages arrive": (_OpenRead, "settle", _trusts_outcomes, "wrong|after"),
    "a stopped read ends at once": (Reads, "_have_ended", _stopped_is_ended, "after its read"),
    "slots of late jobs are free": (HostIndex, "abandon", _frees_at_once, _LATE),
    "a reader does not hear of a loss": (Reads, "on_down", _does_nothing, "never ends"),
    "a source does not hear of a loss": (Serving, "on_down", _does_nothing, "never ends"),
    "reads count for ever": (Reads, "read", _counts_for_ever, "miscounted"),
    "a request waits for ever": (TierPlan, "lookup", _waits_for_ever, "waits too long"),
    "who was lost is not dialled again": (Dialler, "lost", _does_nothing, "no longer share"),
    "bytes that were sent count for ever": (SendLimit, "ended", _does_nothing, "miscounted"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_negative_control(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, broken, error = CONTROLS[name]
    monkeypatch.setattr(where, what, broken)
    with pytest.raises((AssertionError, Misuse), match=error):
        run("two alike", "network", 400)


MEMORY_CONTROLS: dict[str, tuple[type, str, Any, tuple[str, ...]]] = {
    "versions are ignored": (
        *(SourceMemory, "_versions", _any_version),
        ("by chance", "others are stored", "one is dropped", "weights change"),
    ),
    "versions are read before the block": (SourceMemory, "read", _checks_before, ("by chance",)),
    "what is withdrawn keeps its version": (
        *(ServedBlocks, "withdraw", _keeps_versions),
        ("by chance", "others are stored", "one is dropped"),
    ),
    "what is cleared keeps its version": (
        *(ServedBlocks, "clear", _clears_without_versions),
        ("weights change",),
    ),
    "digests are ignored": (SourceMemory, "_matches", lambda *_: True, ("a byte changes",)),
    "nonces are ignored": (
        *(SourceMemory, "__init__", _any_nonce),
        ("another process has its number",),
    ),
    "a nonce that is freed stays": (
        *(OwnMemory, "forget", _frees_the_nonce),
        ("it loses the reader and closes",),
    ),
}


@pytest.mark.parametrize(
    ("name", "story"),
    [(name, story) for name, (*_, stories) in MEMORY_CONTROLS.items() for story in stories],
)
def test_negative_control_on_one_machine(
    name: str, story: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, what, broken, _ = MEMORY_CONTROLS[name]
    monkeypatch.setattr(where, what, broken)
    with pytest.raises(AssertionError, match=r"a wrong block|a dropped block"):
        if story == "by chance":
            run("two alike", "memory", 400)
        else:
            answered_then(*STORIES[story])
    World.played.end()


@pytest.mark.parametrize(
    ("where", "what", "broken", "story"),
    [
        (HostArena, "verify", _does_nothing, test_a_block_whose_bytes_changed_is_not_read),
        (TierWorker, "submit", _serves_prefetched, test_slots_that_a_read_fills_are_not_served),
    ],
)
def test_negative_control_by_hand(
    where: type, what: str, broken: Any, story: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, what, broken)
    with pytest.raises(AssertionError, match=WRONG):
        story()
    World.played.end()


def test_negative_control_of_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two things keep a slot's former block from being served; without both it is."""
    monkeypatch.setattr(TierWorker, "serve", _offers_last)
    test_one_step_hears_of_blocks_and_gives_their_slots_to_others()
    monkeypatch.setattr(Offers, "take", _offers_what_has_left)
    with pytest.raises(AssertionError, match=WRONG):
        test_one_step_hears_of_blocks_and_gives_their_slots_to_others()
    World.played.end()
