"""Machines of both sides against peers that hold the key and say anything, in any order.

What a peer says raises at most :class:`ProtocolError`, which ends its connection; others are served
all the same, the ledger adds up at every step, and nothing is kept of who is gone. Time is an
argument and may jump by an hour, as after a process was stopped.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvconnect.cache.groups import CacheGroup
from kvconnect.disaggregation import (
    decode_actions,
    decode_planner,
    prefill_actions,
    prefill_planner,
)
from kvconnect.disaggregation.decode_planner import DecodePlanner
from kvconnect.disaggregation.leases import Leases
from kvconnect.disaggregation.limits import HandoffLimits
from kvconnect.disaggregation.messages import NoticeKind, PrefillSource, Receive, TransferEvent
from kvconnect.disaggregation.prefill_planner import PrefillPlanner
from kvconnect.disaggregation.prefill_reads import AcceptedRead, OfferedTransfer
from kvconnect.disaggregation.wire_blocks import GroupView
from kvconnect.errors import Misuse, ProtocolError
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity, identify
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Endpoint, FailureCause, JobId, Origin, Rank, Span, TransferId

BLOCKS, TOKENS, LAYERS = 4, 4, 2
VIEW = GroupView(1, LAYERS, tuple(range(LAYERS)))
RANKS = [Rank(0, 1, 0, 1), Rank(0, 2, 0, 1), Rank(1, 2, 0, 1)]
HONEST, EVIL = 1, (2, 3)
TRANSFERS = [TransferId(bytes([n]) * 16) for n in range(3)]
UNKNOWN = TransferId(b"?" * 16)
JUMPS = st.sampled_from([0.0, 0.2, 1.0, 5.0, 30.0, 3600.0])
PROFILE = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

CONTROL = settings(PROFILE, max_examples=300, phases=[Phase.generate], database=None)

numbers = st.one_of(st.integers(0, 12), st.sampled_from([-1, 63, 1 << 40, (1 << 63) - 1]))
peers = st.sampled_from(EVIL)
some_transfer = st.sampled_from([*TRANSFERS, UNKNOWN])
part = st.tuples(st.sampled_from([0, 0, 0, 1]), st.integers(-1, 5), st.sampled_from([1, 2, 4, 99]))

counts = st.integers(1, 5)

PROMPTS = {transfer: identify([n], None) for n, transfer in enumerate(TRANSFERS)}
read_requests = st.fixed_dictionaries(
    {
        "transfer": some_transfer,
        "early": st.booleans(),
        "reader": st.sampled_from(RANKS),
        "parts": st.one_of(st.just([(0, 0, BLOCKS)]), st.lists(part, max_size=3)),
        "prompt": st.sampled_from([*PROMPTS.values(), NO_PROMPT]),
    }
)


class SourceMachine(RuleBasedStateMachine):
    """A prefill engine: its leases and one worker's sender. An honest reader wants the first
    transfer; hostile ones say what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.last = Counter[int]()
        self.in_flight: list[tuple[int, int, TransferId]] = []  # peer, read_id, transfer
        self.stopping: list[tuple[int, int]] = []
        self.of: dict[tuple[int, int], TransferId] = {}
        self.prompts: dict[tuple[int, int], PromptIdentity] = {}
        self.got = Counter[tuple[int, int]]()  # layer, block: sent to the honest reader
        self.refused = False
        self.offered: Counter[TransferId] = Counter()
        self.withdrawn: Counter[TransferId] = Counter()
        self.ordered: Counter[TransferId] = Counter()
        self.machine = PrefillPlanner((LAYERS,), deadline_s=10.0, heartbeat_s=1.0)
        limits = HandoffLimits(1, lease_s=10.0, deadline_s=10.0)
        self.leases = Leases([CacheGroup(TOKENS)], OffloadingConnectorStats(), limits)

    @initialize()
    def begin(self) -> None:
        parts, prompt = [(0, 0, BLOCKS)], PROMPTS[TRANSFERS[0]]
        ask = AcceptedRead(HONEST, 1, TRANSFERS[0], True, RANKS[0], {0: VIEW}, parts, prompt)
        self.of[HONEST, 1], self.prompts[HONEST, 1] = TRANSFERS[0], prompt
        self.carry_out(self.machine.on_request(ask, self.now))
        self.open(0)

    def open(self, number: int) -> None:
        transfer = TRANSFERS[number]
        prompt = PROMPTS[transfer]
        if self.leases.open(f"r{number}", transfer, BLOCKS * TOKENS, self.now, prompt):
            self.offered[transfer] = 0
        self.hand_over()

    def hand_over(self) -> None:
        """What the scheduler hands to the worker with a step."""
        offers, withdrawals = self.leases.take()
        for offer in offers:
            self.carry_out(self.machine.offer(offer))
        for order in withdrawals:
            self.ordered[order.transfer] += 1
            self.carry_out(self.machine.withdraw(order))

    def carry_out(self, actions: Sequence[prefill_actions.Action]) -> None:
        for action in actions:
            assert not isinstance(action, prefill_actions.DropPeer), action
            if isinstance(action, prefill_actions.SendPages):
                key = action.peer, action.read_id
                self.in_flight.append((*key, self.of[key]))
                assert self.prompts[key] == PROMPTS[self.of[key]], "pages of another prompt"
                layers = [action.number] if action.number < LAYERS else range(LAYERS)
                for layer in layers if key == (HONEST, 1) else ():
                    self.got.update((layer, action.first + i) for i in range(len(action.ids)))
            elif isinstance(action, prefill_actions.CancelRead):
                self.stopping.append((action.peer, action.read_id))
            elif isinstance(action, prefill_actions.RefuseRead):
                self.refused |= action.peer == HONEST
            elif isinstance(action, prefill_actions.ReportNotice | prefill_actions.ReportServed):
                self.tell(action.notice)

    def tell(self, notice: TransferEvent) -> None:
        if notice.kind is NoticeKind.WITHDRAWN:
            self.withdrawn[notice.transfer] += 1
            busy = {transfer for _, _, transfer in self.in_flight}
            assert notice.transfer not in busy  # or its blocks would be written to while read
        self.leases.on_notice(notice, self.now)

    # The engine ---------------------------------------------------------------------------------

    @rule(number=st.sampled_from([0, 1, 2]), whole=st.booleans())
    def step(self, number: int, whole: bool) -> None:
        """Compute one more block, in all layers or with the first one written ahead."""
        transfer = TRANSFERS[number]
        if transfer not in self.offered:
            self.open(number)
        count = self.offered[transfer] = min(BLOCKS, self.offered[transfer] + 1)
        blocks = [10 * number + 1 + i for i in range(count)]  # 0 is no block
        self.leases.offer(f"r{number}", count * TOKENS, [blocks])
        self.hand_over()
        if not whole:
            self.carry_out(self.machine.layer_written(0, 0, None))
        self.carry_out(self.machine.step_written(None))
        if count == BLOCKS:
            self.leases.finish(f"r{number}", True, self.now)

    @rule(jump=JUMPS)
    def pass_time(self, jump: float) -> None:
        self.now += jump
        self.carry_out(self.machine.tick(self.now))
        self.leases.tick(self.now)
        self.hand_over()
        self.carry_out(self.machine.step_written(None))

    @rule(index=st.integers(0, 99))
    @precondition(lambda self: self.in_flight)
    def pages_leave(self, index: int) -> None:
        peer, read_id, _ = self.in_flight.pop(index % len(self.in_flight))
        self.carry_out(self.machine.sent(peer, read_id))

    @rule()
    @precondition(lambda self: self.stopping)
    def fall_quiet(self) -> None:
        self.drained(*self.stopping.pop(0))

    def drained(self, peer: int, read_id: int) -> None:
        self.in_flight = [item for item in self.in_flight if item[:2] != (peer, read_id)]
        self.carry_out(self.machine.drained(peer, read_id))

    # What hostile peers say ---------------------------------------------------------------------

    @rule(peer=peers, fresh=st.booleans(), number=numbers, said=read_requests)
    def read(self, peer: int, fresh: bool, number: int, said: dict[str, Any]) -> None:
        number = self.last[peer] + 1 if fresh else number
        self.of.setdefault((peer, number), said["transfer"])
        self.prompts.setdefault((peer, number), said["prompt"])
        try:
            actions = self.machine.on_request(
                AcceptedRead(peer, number, views={0: VIEW}, **said), self.now
            )
        except ProtocolError:
            self.lose(peer)
            return
        self.of[peer, number], self.prompts[peer, number] = said["transfer"], said["prompt"]
        self.last[peer] = number
        self.carry_out(actions)

    @rule(peer=peers, fresh=st.booleans(), number=numbers, verb=st.sampled_from(["cancel", "done"]))
    def end(self, peer: int, fresh: bool, number: int, verb: str) -> None:
        number = self.last[peer] if fresh else number
        self.carry_out(getattr(self.machine, verb)(peer, number))

    @rule(
        transfer=st.sampled_from([*TRANSFERS[1:], UNKNOWN]),
        verb=st.sampled_from(["renew", "decline"]),
    )
    def speak_of(self, transfer: TransferId, verb: str) -> None:
        who = (EVIL[0], RANKS[0]) if verb == "decline" else ()
        self.carry_out(getattr(self.machine, verb)(transfer, *who))

    @rule(peer=peers)
    def lose(self, peer: int) -> None:
        self.in_flight = [item for item in self.in_flight if item[0] != peer]
        self.stopping = [item for item in self.stopping if item[0] != peer]
        self.last[peer] = 0
        self.of = {key: transfer for key, transfer in self.of.items() if key[0] != peer}
        self.carry_out(self.machine.peer_lost(peer))

    # What holds ---------------------------------------------------------------------------------

    @invariant()
    def the_ledger_adds_up(self) -> None:
        self.leases.check()

    @invariant()
    def what_is_kept_is_needed(self) -> None:
        book = self.machine._transfers
        kept = {(peer, read_id) for peer, reads in book.readers.items() for read_id in reads}
        assert kept == {key for known in book.offered.values() for key in known.readers}
        for peer, reads in book.readers.items():
            for read_id, reader in reads.items():
                count = sum(item[:2] == (peer, read_id) for item in self.in_flight)
                assert reader.in_flight == count
                assert reader.state.value != "over"

    @invariant()
    def nothing_goes_out_twice(self) -> None:
        assert all(count == 1 for count in self.got.values())

    def teardown(self) -> None:
        """The honest reader gets everything, unless its lease ran out; then all ends."""
        for peer in EVIL:
            self.lose(peer)
        if self.now < 10.0 and not self.withdrawn[TRANSFERS[0]] and not self.refused:
            while self.offered[TRANSFERS[0]] < BLOCKS:
                self.step(0, whole=True)
            wanted = {(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)}
            if not self.refused:
                assert set(self.got) == wanted
        self.lose(HONEST)
        for number in range(len(TRANSFERS)):
            self.leases.finish(f"r{number}", False, self.now)
        self.leases.withdraw_all(self.now)
        self.hand_over()
        assert not self.machine._transfers.readers
        assert not self.machine._transfers.offered
        assert self.withdrawn == self.ordered
        assert self.leases.granted == self.leases.returned


class ReaderMachine(RuleBasedStateMachine):
    """A decode worker's receiver: one job from an honest source, others from hostile ones."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = DecodePlanner([TOKENS], [LAYERS], [1])
        self.jobs = 0
        self.finished: Counter[int] = Counter()
        self.failures: dict[int, int] = {}
        self.asked: dict[int, int] = {}  # by peer: the last read_id
        self.source: dict[int, int] = {}  # of each job: who is to send its pages
        self.came: dict[tuple[int, int], set[tuple[int, int]]] = {}  # right ones: layer and block
        self.cancelled: list[tuple[int, int]] = []
        self.up: dict[int, Origin] = {}
        self.peer = 0

    def origin(self, port: int) -> Origin:
        return Origin(Endpoint(0, 0, "127.0.0.1", port), "e", 7)

    @initialize()
    def begin(self) -> None:
        self.start(HONEST)
        self.carry_out(self.machine.connected(self.origin(HONEST), HONEST, {0: VIEW}))

    def start(self, port: int) -> None:
        self.jobs += 1
        self.source[self.jobs] = port
        origin = self.origin(port)
        source = PrefillSource("e", 7, (origin.endpoint,), 1, 1)
        spans = (Span(0, 0, array("q", range(BLOCKS))),)
        tokens = ((0, BLOCKS * TOKENS),)
        job = Receive(JobId(self.jobs), "r", TRANSFERS[0], source, spans, tokens, True, 10.0)
        self.carry_out(self.machine.receive(job, [origin.endpoint], self.now))

    def carry_out(self, actions: Sequence[decode_actions.Action]) -> None:
        for action in actions:
            if isinstance(action, decode_actions.RequestPages):
                self.asked[action.peer] = action.read_id
            elif isinstance(action, decode_actions.CancelReceive | decode_actions.ConfirmRead):
                self.cancelled.append((action.peer, action.read_id))
            elif isinstance(action, decode_actions.ReportFinished):
                job = int(action.report.job)
                self.finished[job] += 1
                self.failures[job] = len(action.report.failures)
                came = self.came.get((self.source[job], job), ())  # a read has its job's number
                whole = all((la, b) in came for la in range(LAYERS) for b in range(BLOCKS))
                assert whole or self.failures[job], "pages are missing, and nobody says so"

    @rule(port=peers)
    def receive(self, port: int) -> None:
        self.start(port)

    @rule(port=peers, views=st.sampled_from([{0: VIEW}, {}, {0: GroupView(1, 9, (-1, 1))}]))
    def connect(self, port: int, views: dict[int, GroupView]) -> None:
        if port not in self.up and self.origin(port) in self.machine._connecting:
            self.up[port] = self.origin(port)
            self.carry_out(self.machine.connected(self.origin(port), port, views))

    @rule(port=peers)
    def refuse(self, port: int) -> None:
        if port not in self.up:
            self.carry_out(self.machine.refused(self.origin(port), FailureCause.REFUSED))

    @rule(
        peer=peers,
        number=numbers,
        unit=st.integers(-1, 3),
        blocks=st.builds(lambda first, n: range(first, first + n), st.integers(-1, 5), counts),
        bad=st.booleans(),
    )
    def pages(self, peer: int, number: int, unit: int, blocks: range, bad: bool) -> None:
        self.land(peer, number, unit, blocks, [blocks[0]] if bad else [])

    @rule(peer=peers, unit=st.integers(0, LAYERS), bad=st.booleans())
    @precondition(lambda self: self.asked)
    def whole_unit(self, peer: int, unit: int, bad: bool) -> None:
        self.land(peer, self.asked.get(peer, 1), unit, range(BLOCKS), [0] if bad else [])

    def land(self, peer: int, number: int, unit: int, blocks: range, bad: list[int]) -> None:
        try:
            actions = self.machine.received(peer, number, unit, blocks, bad, self.now)
        except ProtocolError:
            self.lose(peer)
            return
        layers = [unit] if unit < LAYERS else range(LAYERS)
        right = {(layer, block) for layer in layers for block in blocks if block not in bad}
        self.came.setdefault((peer, number), set()).update(right)
        self.carry_out(actions)

    @rule(peer=peers, number=numbers, cause=st.sampled_from(list(FailureCause)))
    def fail(self, peer: int, number: int, cause: FailureCause) -> None:
        self.carry_out(self.machine.failed(peer, number, cause))

    @rule(peer=peers, said=st.lists(numbers, max_size=5))
    def alive(self, peer: int, said: list[int]) -> None:
        self.machine.alive(peer, said, self.now)

    @rule(peer=peers)
    def lose(self, peer: int) -> None:
        self.up.pop(peer, None)
        self.cancelled = [item for item in self.cancelled if item[0] != peer]
        self.carry_out(self.machine.peer_lost(peer))

    @rule()
    @precondition(lambda self: self.cancelled)
    def fall_quiet(self) -> None:
        self.carry_out(self.machine.drained(*self.cancelled.pop(0)))

    @rule(job=st.integers(2, 5))
    def drop(self, job: int) -> None:
        self.carry_out(self.machine.drop(JobId(job)))

    @rule(jump=JUMPS)
    def pass_time(self, jump: float) -> None:
        self.now += jump
        self.carry_out(self.machine.tick(self.now))

    @invariant()
    def every_job_ends_at_most_once(self) -> None:
        assert all(count == 1 for count in self.finished.values())
        assert len(self.machine._jobs) == self.jobs - len(self.finished)

    @invariant()
    def the_honest_job_waits_for_its_own_source(self) -> None:
        assert 1 not in self.finished or self.now >= 10.0

    def teardown(self) -> None:
        """The honest source's pages come; then all peers go, and every job is over."""
        if 1 not in self.finished and self.now < 10.0:
            self.land(HONEST, 1, LAYERS, range(BLOCKS), [])
            while self.cancelled:
                self.fall_quiet()
            assert self.finished[1] == 1
            assert self.failures[1] == 0
        for peer in (HONEST, *EVIL):
            self.lose(peer)
            self.carry_out(self.machine.refused(self.origin(peer), FailureCause.PEER))
        while self.cancelled:
            self.fall_quiet()
        assert sorted(self.finished) == list(range(1, self.jobs + 1))
        assert not (self.machine._jobs or self.machine._reads or self.machine._peers)


@pytest.mark.parametrize("machine", [SourceMachine, ReaderMachine])
def test_hostile_peers_harm_no_one_else(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=PROFILE)


def test_a_machine_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the defect of one that took a second join for the engine's own mistake."""

    def serves(self: OfferedTransfer, rank: Rank) -> bool:
        if self.readers and rank.tp > 1:
            raise Misuse("out of turn")
        return False

    monkeypatch.setattr(OfferedTransfer, "serves", serves)
    with pytest.raises((Misuse, AssertionError)):
        run_state_machine_as_test(SourceMachine, settings=CONTROL)


def test_readers_of_another_prompt_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: nobody compares."""
    monkeypatch.setattr(OfferedTransfer, "mismatch", lambda *_: [])
    with pytest.raises(AssertionError, match="another prompt"):
        run_state_machine_as_test(SourceMachine, settings=CONTROL)


def test_readers_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: nothing was ever forgotten before."""
    monkeypatch.setattr(prefill_planner._TransferTable, "_forget", lambda *_: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SourceMachine, settings=CONTROL)


def test_jobs_that_wait_for_who_is_gone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reader does not hear that a source was lost."""
    monkeypatch.setattr(DecodePlanner, "peer_lost", lambda *_: [])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ReaderMachine, settings=CONTROL)


def reading() -> ReaderMachine:
    """An honest job under way, and another one from a hostile source: the reader's second read."""
    machine = ReaderMachine()
    machine.begin()
    machine.receive(EVIL[0])
    machine.connect(EVIL[0], {0: VIEW})
    return machine


def test_a_source_that_ends_the_job_of_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, played by hand as chance takes long: a read is known by its number."""
    failed = DecodePlanner.failed

    def fail(
        self: DecodePlanner, peer: int, read_id: int, cause: FailureCause
    ) -> list[decode_actions.Action]:
        owner = next((known for known, number in self._reads if number == read_id), peer)
        return failed(self, owner, read_id, cause)

    monkeypatch.setattr(DecodePlanner, "failed", fail)
    machine = reading()
    machine.fail(EVIL[0], 1, FailureCause.PEER)
    machine.fall_quiet()
    with pytest.raises(AssertionError):
        machine.the_honest_job_waits_for_its_own_source()


def test_a_page_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, by hand: another one would never come, and nobody would notice."""
    take = decode_planner._AwaitedPages.take

    def taken(self: decode_planner._AwaitedPages, number: int, blocks: range) -> int:
        self.got = dict.fromkeys(self.got, 0)
        return take(self, number, blocks)

    monkeypatch.setattr(decode_planner._AwaitedPages, "take", taken)
    machine = reading()
    for _ in range(2):
        machine.whole_unit(EVIL[0], 0, bad=False)
    with pytest.raises(AssertionError, match="nobody says so"):
        machine.fall_quiet()
