"""Rooms of a prefill engine, and peers that hold the key and say whatever they like.

What peers say is worked on in SGLang's scheduler thread, and SGLang ends its server when that
raises. So nothing may be raised there, and nobody else's room may suffer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvconnect.disaggregation.messages import DisaggregationInstructions, OfferBlocks, TransferEvent
from kvconnect.disaggregation.prefill_actions import (
    CancelRead,
    ReportNotice,
    ReportServed,
    SendPages,
)
from kvconnect.disaggregation.prefill_planner import PrefillPlanner
from kvconnect.disaggregation.prefill_reads import AcceptedRead
from kvconnect.disaggregation.wire_blocks import GroupView
from kvconnect.engines.sglang.rooms import PrefillRooms, transfer_of
from kvconnect.errors import ProtocolError
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Rank, Span, TransferId
from tests.hostile import Outcome

PLAYS = 2000
BLOCKS, LAYERS = 6, 2
KV, AUX = 0, 1
ROOMS = (3, 4)  # that peers know of
HONEST = 9
VIEWS = {
    KV: GroupView(1, LAYERS, tuple(range(LAYERS))),
    AUX: GroupView(1, LAYERS + 2, (LAYERS + 1,)),
}
Parts = list[tuple[int, int, int]]
RANKS = [Rank(0, 1, 0, 1), Rank(0, 2, 0, 1), Rank(1, 2, 0, 1), Rank(3, 4, 0, 2), Rank(0, 3, 0, 1)]
RANKS += [Rank(1023, 1024, 0, 1), Rank(31, 32, 31, 32)]  # as many as a peer may say


def run(limit: int | None = None) -> Outcome:
    """Play peers and SGLang against each other, at most ``limit`` times."""
    outcome = Outcome(cases=PLAYS if limit is None else min(limit, PLAYS))
    try:
        play(outcome.cases)
    except Exception as error:  # noqa: BLE001  # whatever it is, it was raised in that thread
        outcome.crashes += 1
        outcome.notes.append(repr(error))
    return outcome


class Agent:
    """The real sending machine, and a link on which events happen when a test says so."""

    def __init__(self) -> None:
        self.sender = PrefillPlanner([LAYERS, 1], 5.0, 1.0)
        self.counted = OffloadingConnectorStats()
        self.notices: dict[TransferEvent, None] = {}
        self.in_flight: list[tuple[int, int]] = []
        self.stopped: list[tuple[int, int]] = []

    def await_stopped(self, transfer: TransferId) -> None:
        """Nothing is ever under way here."""

    def run(self, work: DisaggregationInstructions, fence: object = None) -> None:
        for offer in work.offers:
            self.do(self.sender.offer(offer))
        for order in work.withdrawals:
            self.do(self.sender.withdraw(order))
        self.do(self.sender.step_written(fence))

    def step(self, offer: OfferBlocks) -> None:
        """Offer blocks before a step, of which the first layer goes ahead."""
        self.do(self.sender.offer(offer))
        self.do(self.sender.layer_written(KV, 0, None))
        self.do(self.sender.step_written(None))

    def do(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, ReportNotice | ReportServed):
                self.notices[action.notice] = None
            elif isinstance(action, SendPages):
                self.in_flight.append((action.peer, action.read_id))
            elif isinstance(action, CancelRead):
                self.in_flight = [w for w in self.in_flight if w != (action.peer, action.read_id)]
                self.stopped.append((action.peer, action.read_id))

    def take(self) -> list[TransferEvent]:
        found, self.notices = list(self.notices), {}
        return found

    def everything_leaves(self) -> None:
        for link in self.in_flight:
            self.do(self.sender.sent(*link))
        self.in_flight = []

    @contextmanager
    def stats(self) -> Iterator[OffloadingConnectorStats]:
        yield self.counted


class Request:
    """What SGLang does with one room: it reads the prefix once, and sends chunk after chunk."""

    def __init__(self, box: PrefillRooms, agent: Agent, room: int) -> None:
        self.box, self.agent, self.room = box, agent, room
        self.pages = array("q", range(10 * room, 10 * room + BLOCKS))
        self.next: int | None = None
        self.prefix = 0
        box.open(room)
        found = box.find(room)
        assert found is not None
        found.prompt_blocks = BLOCKS

    def begin(self) -> None:
        self.next = self.prefix = self.box.tell_prefix(self.room)
        assert 0 <= self.next <= BLOCKS

    def push(self, count: int) -> None:
        found = self.box.find(self.room)
        if self.next is None or found is None:
            return
        blocks = found.unoffered_until(min(BLOCKS, self.next + count))
        if blocks:
            ids = self.pages[blocks.start : blocks.stop]
            found.record_ahead(blocks.start, ids)
            self.agent.step(OfferBlocks(transfer_of(self.room), (Span(KV, blocks.start, ids),)))

    def send(self, count: int) -> None:
        if self.next is None or self.next > BLOCKS:
            return
        end = min(BLOCKS, self.next + count)
        rest = [Span(AUX, 0, array("q", [self.room]))] if end == BLOCKS else []
        self.box.send(self.room, self.next, self.pages[self.next : end], rest, None)
        self.next = end
        if end == BLOCKS:
            self.box.complete(self.room)
            self.next = BLOCKS + 1


class Peers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.agent = Agent()
        self.ready: set[int] = set()
        self.served: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.box = PrefillRooms(
            self.agent,  # type: ignore[arg-type]
            Rank(0, 1, 0, 1),
            [4, 1],
            self.ready.add,
            self.served.append,
            lambda room, why: self.failed.append((room, why)),
        )
        self.requests: dict[int, Request] = {}
        self.reads = 0

    # What peers do ---------------------------------------------------------------------------

    @rule(
        peer=st.integers(1, 3),
        room=st.sampled_from(ROOMS),
        early=st.booleans(),
        rank=st.sampled_from(RANKS),
        parts=st.tuples(
            st.just(KV),
            st.sampled_from([0, 0, 0, 1, 2, 5, 6, 7, 100, (1 << 40) - 1]),
            st.sampled_from([1, 4, 6, (1 << 24) - 1]),
        ).flatmap(lambda part: st.sampled_from([[part], [part, (AUX, 0, 1)], [(AUX, 0, 1)]])),
        held=st.sampled_from([None, None, None, 0, 5, 100, (1 << 40) - 1]),
    )
    def read(
        self,
        peer: int,
        room: int,
        early: bool,
        rank: Rank,
        parts: Parts,
        held: int | None = None,
    ) -> None:
        self.reads += 1
        held = parts[0][1] if held is None else held
        transfer = transfer_of(room)
        ask = AcceptedRead(peer, self.reads, transfer, early, rank, VIEWS, parts, held=held)
        try:
            self.agent.do(self.agent.sender.on_request(ask, 0.0))
        except ProtocolError:
            self.lost(peer)

    @rule(peer=st.integers(1, 3), back=st.integers(0, 5), what=st.sampled_from(["cancel", "done"]))
    def says(self, peer: int, back: int, what: str) -> None:
        self.agent.do(getattr(self.agent.sender, what)(peer, self.reads - back))

    @rule(room=st.sampled_from(ROOMS), peer=st.integers(1, 3), rank=st.sampled_from(RANKS))
    def declines(self, room: int, peer: int, rank: Rank) -> None:
        self.agent.do(self.agent.sender.decline(transfer_of(room), peer, rank))

    @rule(room=st.sampled_from(ROOMS))
    def renews(self, room: int) -> None:
        self.agent.do(self.agent.sender.renew(transfer_of(room)))

    @rule(peer=st.integers(1, 3))
    def lost(self, peer: int) -> None:
        self.agent.in_flight = [w for w in self.agent.in_flight if w[0] != peer]
        self.agent.stopped = [w for w in self.agent.stopped if w[0] != peer]
        self.agent.do(self.agent.sender.peer_lost(peer))

    @rule()
    def pages_leave(self) -> None:
        self.agent.everything_leaves()
        for link in self.agent.stopped:
            self.agent.do(self.agent.sender.drained(*link))
        self.agent.stopped = []

    @rule(now=st.floats(0.0, 100.0))
    def time_passes(self, now: float) -> None:
        self.agent.do(self.agent.sender.tick(now))

    @invariant()
    def what_sglang_was_told_holds(self) -> None:
        for room, request in self.requests.items():
            if request.next is not None:
                assert self.box.prefix(room) == request.prefix

    # What SGLang does ------------------------------------------------------------------------

    @rule(room=st.sampled_from(ROOMS))
    def opens(self, room: int) -> None:
        if room not in self.requests:
            self.ready.discard(room)
            self.requests[room] = Request(self.box, self.agent, room)

    @rule(room=st.sampled_from(ROOMS), count=st.integers(1, BLOCKS), push=st.booleans())
    def computes(self, room: int, count: int, push: bool) -> None:
        self.box.take(self.agent.take())
        request = self.requests.get(room)
        if request is None or room not in self.ready:
            return
        if request.next is None:
            request.begin()
        if push:
            request.push(count)
        request.send(count)

    @rule()
    def pumps(self) -> None:
        self.box.take(self.agent.take())

    @rule(room=st.sampled_from(ROOMS))
    def closes(self, room: int) -> None:
        if self.requests.pop(room, None) is not None:
            self.box.close(room)

    def teardown(self) -> None:
        """Another room goes on as if nothing had been."""
        self.box.take(self.agent.take())
        request = Request(self.box, self.agent, HONEST)
        self.reads += 1
        parts = [(KV, 0, BLOCKS), (AUX, 0, 1)]
        ask = AcceptedRead(8, self.reads, transfer_of(HONEST), True, RANKS[0], VIEWS, parts)
        self.agent.do(self.agent.sender.on_request(ask, 0.0))
        self.box.take(self.agent.take())
        assert HONEST in self.ready
        request.begin()
        request.push(2)
        request.send(BLOCKS)
        self.agent.everything_leaves()
        self.agent.do(self.agent.sender.done(8, self.reads))
        self.box.take(self.agent.take())
        assert self.served.count(HONEST) == 1
        assert not [why for room, why in self.failed if room == HONEST]
        # The boundary is for what nobody has thought of: nothing known comes that far.
        counters = (self.agent.counted.take() or OffloadingConnectorStats()).data.get("counters")
        assert "other" not in (counters or {}).get("handoff_refused", {})


def play(examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Peers,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
