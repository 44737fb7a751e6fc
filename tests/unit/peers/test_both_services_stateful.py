"""Hand-offs and sharing of one process at one port, both at work, in one world: parts of it are
killed, links freeze, slow down and break, and a greedy peer asks for all there is. What arrives is
right or has failed, and both work again as soon as all is there."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from kvconnect.disaggregation.messages import OfferBlocks, PrefillSource, Receive  # noqa: E402
from kvconnect.protocol.cache_messages import WHOLE, Ask, Fetch, encode  # noqa: E402
from kvconnect.testing.proxy import FaultProxy  # noqa: E402
from kvconnect.tiers.backends import BlockOutcome  # noqa: E402
from kvconnect.tiers.peers.arena_memory import ArenaMemory  # noqa: E402
from kvconnect.tiers.peers.served import ServedBlock, ServedBlocks  # noqa: E402
from kvconnect.transport import ConnectionOptions, Security, make_transport  # noqa: E402
from kvconnect.transport.base import PeerMessage, Transport  # noqa: E402
from kvconnect.transport.tcp.shared_port import SharedPort  # noqa: E402
from kvconnect.types import Endpoint, Span, TransferId  # noqa: E402
from tests.fakes.handoff_engine import EPOCH, Engine, finished, receive, table  # noqa: E402
from tests.unit.tiers import peer_engines  # noqa: E402
from tests.unit.tiers.peer_engines import SLOTS, content, key, until  # noqa: E402

KEY = b"k" * 16
LOOP = "127.0.0.1"
TOKENS = 150
BLOCKS = [1, 2, 3]  # that are shared
QUICK = settings(
    max_examples=5,
    stateful_step_count=6,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Process:
    """A prefill engine that shares its host tier: two agents at one port."""

    def __init__(self) -> None:
        self.port = SharedPort()
        self.number = 0
        self.start_handoffs()
        self.start_sharing()

    def start_handoffs(self) -> None:
        self.prefill = Engine(sends=True, key=KEY, port=self.port, listen=self.number)
        self.prefill.__enter__()
        address = self.prefill.agents[0].address
        assert address is not None
        self.number = address[1]
        self.table = table(TOKENS, self.prefill.block)
        self.prefill.fill(self.table, seed=1)

    def start_sharing(self) -> None:
        where = f"{LOOP}:{self.number}"
        self.tier = peer_engines.Engine(port=self.port, listen=where)
        for slot, number in enumerate(BLOCKS):
            self.tier.keep(number, slot)

    def stop_handoffs(self) -> None:
        self.prefill.__exit__()

    def stop_sharing(self) -> None:
        self.tier.close()


class World(RuleBasedStateMachine):
    """A process, and a decode engine and a reader of shared blocks that reach it over one link."""

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        self.transfers = count(1)
        self.process = Process()
        self.stack.callback(lambda: self.process.stop_handoffs())
        self.stack.callback(lambda: self.process.stop_sharing())
        self.link = self.stack.enter_context(FaultProxy(LOOP, self.process.number))
        self.decode = self.stack.enter_context(Engine(key=KEY))
        self.reader = peer_engines.Engine(["{}:{}".format(*self.link.address)])
        self.stack.callback(self.reader.close)
        self.again()

    def teardown(self) -> None:
        self.stack.close()

    def both(self, disturb: Callable[[], None] = lambda: None) -> bool:
        """Hand off a prompt and read shared blocks at once; return whether both came. What came is
        compared with what was sent."""
        self.decode.caches[0].zero_()
        for slot in range(SLOTS):
            self.reader.host.view(slot)[:] = bytes(self.reader.host.slot_bytes)
        outcomes: list[BlockOutcome] = []
        reading = threading.Thread(target=lambda: outcomes.extend(self.reader.get(BLOCKS)))
        reading.start()
        here = table(TOKENS, self.decode.block)
        transfer = TransferId(next(self.transfers).to_bytes(16, "big"))
        span = Span(0, 0, array("q", self.process.table))
        self.process.prefill.step(offers=[OfferBlocks(transfer, (span,))])
        sent = self.process.prefill.content(self.process.table, TOKENS)
        self.decode.step(receives=[self.wanted(here, transfer)])
        disturb()
        (report,) = finished(self.decode)
        reading.join()
        if not report.failures:
            assert torch.equal(self.decode.content(here, TOKENS), sent), "other KV was handed off"
        for slot, (number, outcome) in enumerate(zip(BLOCKS, outcomes, strict=True)):
            if outcome is BlockOutcome.OK:
                data = content(number)
                assert bytes(self.reader.host.view(slot, len(data))) == data, "another block"
        return not report.failures and set(outcomes) == {BlockOutcome.OK}

    def wanted(self, here: array[int], transfer: TransferId) -> Receive:
        source = PrefillSource("sender", EPOCH, (Endpoint(0, 0, *self.link.address),), 1, 1)
        return replace(receive(source, here, TOKENS), transfer=transfer)

    def again(self) -> None:
        """Everything is there: both work, once all have heard of it."""
        until(self.both)

    @rule()
    def nothing_happens(self) -> None:
        assert self.both()

    @rule()
    def the_link_freezes(self) -> None:
        self.link.stall()
        assert self.both(self.link.clear)

    @rule()
    def the_link_is_slow(self) -> None:
        self.link.rate(2e6)
        assert self.both()
        self.link.clear()

    @rule()
    def the_link_breaks(self) -> None:
        self.both(self.link.reset)
        self.again()

    @rule()
    def the_sharing_ends(self) -> None:
        """The port may be its: the agent of hand-offs goes on with it."""
        self.both(self.process.stop_sharing)
        self.process.start_sharing()
        self.again()

    @rule()
    def the_hand_offs_end(self) -> None:
        self.both(self.process.stop_handoffs)
        self.process.start_handoffs()
        self.again()

    @rule()
    def the_process_ends(self) -> None:
        def end() -> None:
            self.process.stop_handoffs()
            self.process.stop_sharing()

        self.both(end)
        self.process.start_handoffs()
        self.process.start_sharing()
        self.again()

    @rule()
    def somebody_is_greedy(self) -> None:
        """It asks for all there is many times over, takes none of it, and ends with nonsense."""
        greedy: Transport = make_transport("tcp", Security(KEY), ConnectionOptions(service="share"))
        greedy.register(ArenaMemory(self.reader.host))
        try:
            assert self.both(lambda: self.ask_for_all(greedy))
        finally:
            greedy.close()

    def ask_for_all(self, greedy: Transport) -> None:
        peer = greedy.connect(LOOP, self.process.number)
        keys = [key(number) for number in BLOCKS]
        said = [msgspec.structs.replace(self.reader.agent._hello, engine=os.urandom(16))]
        for number in range(1, 200):
            said += [Ask(number, keys * 100), Fetch(number, 0, [WHOLE], keys)]
        for message in said:
            greedy.submit(PeerMessage(peer, encode(message)))
        greedy.submit(PeerMessage(peer, b"\xc1"))


def test_both_services_in_any_order() -> None:
    run_state_machine_as_test(World, settings=QUICK)


def _of_the_next_slot(self: ServedBlocks, wanted: bytes) -> ServedBlock | None:
    slot, page = self._places.get(wanted, (0, 0))
    return ServedBlock((slot + 1) % len(BLOCKS), self._versions[slot], page)


FAULTS: dict[str, tuple[type, str, Callable[..., Any], Callable[[World], None], str]] = {
    "nobody accepts any more": (
        SharedPort,
        "leave",
        lambda _self, _member, listener: listener and listener.close(),
        World.the_hand_offs_end,
        "did not come true",
    ),
    "another block is sent": (
        ServedBlocks,
        "find",
        _of_the_next_slot,
        World.nothing_happens,
        "another block",
    ),
}


@pytest.mark.parametrize(("owner", "name", "broken", "act", "seen"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(
    owner: type,
    name: str,
    broken: Callable[..., Any],
    act: Callable[[World], None],
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.begin()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            patch.setattr(peer_engines, "WAIT_S", 5.0)
            with pytest.raises(Exception, match=seen):
                act(world)
    finally:
        world.teardown()
