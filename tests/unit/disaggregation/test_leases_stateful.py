"""Both engines' hand-off machines against each other, over a link that delays, reorders and dies.

Each worker's memory holds, per token, layer and head, *what was written*: so a page that comes from
the wrong block, lands in the wrong place or lands too late is caught where it does harm. The link
reads pages when it sends them and writes them when they arrive, in any order; a cancelled read goes
on being read and written until the link lets go of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvconnect.cache.groups import CacheGroup
from kvconnect.disaggregation import decode_actions, prefill_actions
from kvconnect.disaggregation.decode_planner import DecodePlanner
from kvconnect.disaggregation.leases import Leases
from kvconnect.disaggregation.limits import HandoffLimits
from kvconnect.disaggregation.messages import (
    Keep,
    NoticeKind,
    PrefillSource,
    Receive,
    ReceiveReport,
    TransferEvent,
)
from kvconnect.disaggregation.prefill_planner import PrefillPlanner
from kvconnect.disaggregation.prefill_reads import AcceptedRead
from kvconnect.disaggregation.receives import Receives
from kvconnect.disaggregation.states import TransferState
from kvconnect.disaggregation.wire_blocks import GroupView
from kvconnect.errors import KVConnectError
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Endpoint, FailureCause, Origin, Rank, Span, TransferId

LAYERS, HEADS, NUM_BLOCKS = 2, 2, 40
LEASE_S, DEADLINE_S, HEARTBEAT_S = 8.0, 5.0, 1.0
WRONG = ("wrong",)
SHAPES = {  # (tp, pp) of the prefill engine, and of the decode engine
    "1:1": ((1, 1), (1, 1)),
    "tp2:tp1": ((2, 1), (1, 1)),
    "tp1:tp2": ((1, 1), (2, 1)),
    "pp2:tp2": ((1, 2), (2, 1)),
    "tp2:pp2": ((2, 1), (1, 2)),
}
BLOCKS = {"same": (2, 2), "larger": (2, 4), "smaller": (4, 2)}  # tokens per block: prefill, decode
KINDS = {"full": (None,), "full+window": (None, 3)}
EVENTS = ["work"] * 12 + ["ask"] * 2 + ["step"] * 3 + ["time_passes", "abort", "preempt"]
EVENTS += ["pause", "decode_ends", "cut", "restart", "forget"]

Memory = dict[tuple[int, int, int, int], tuple[Any, ...]]  # (group, token slot, layer, head)


class Choose:
    """Hypothesis decides, or, to come to an end, nobody does."""

    def __init__(self, data: st.DataObject | None = None) -> None:
        self._data = data

    def below(self, count: int) -> int:
        return self._data.draw(st.integers(0, count - 1)) if self._data and count > 1 else 0

    def rarely(self) -> bool:
        return self._data is not None and self.below(16) == 15

    def hooks(self, layers: int) -> list[int]:
        """Which layers' hooks fire, in their order."""
        places = list(range(layers))
        return [places.pop(self.below(len(places))) for _ in range(self.below(layers + 1))]


class Frame(NamedTuple):
    """Pages between the two machines, with the bytes that were read."""

    read_id: int
    number: int
    first: int
    tokens: int  # per wire block
    cells: dict[tuple[int, int, int, int], tuple[Any, ...]]  # by wire block, token, layer, head
    count: int
    bad: bool


@dataclass(eq=False)
class Link:
    """One connection. Either end may learn later than the other that it is gone."""

    peer: int
    source: PrefillWorker
    reader: DecodeWorker
    to_source: list[tuple[Any, ...]] = field(default_factory=list)
    to_reader: list[tuple[Any, ...]] = field(default_factory=list)
    orders: list[prefill_actions.SendPages] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    incoming: dict[int, dict[int, Span]] = field(default_factory=dict)  # read_id -> group -> span
    source_stops: set[int] = field(default_factory=set)
    reader_stops: set[int] = field(default_factory=set)
    source_up: bool = True
    reader_up: bool = True


@dataclass(eq=False)
class Worker:
    rank: Rank
    machine: Any

    def __post_init__(self) -> None:
        per_stage = LAYERS // self.rank.pp
        first = self.rank.pp_rank * per_stage
        self.layers = list(range(first, first + per_stage))
        per_rank = HEADS // self.rank.tp
        self.heads = range(self.rank.tp_rank * per_rank, (self.rank.tp_rank + 1) * per_rank)
        self.memory: Memory = {}
        self.queue: list[Any] = []  # steps to run
        self.output: list[Any] = []  # what the scheduler has not seen yet


@dataclass(eq=False)
class PrefillWorker(Worker):
    machine: PrefillPlanner


@dataclass(eq=False)
class DecodeWorker(Worker):
    machine: DecodePlanner
    connecting: list[Origin] = field(default_factory=list)
    open: dict[int, Receive] = field(default_factory=dict)  # until the scheduler knows the end
    writable: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # until reported
    renewals: dict[TransferId, Keep] = field(default_factory=dict)


@dataclass(eq=False)
class Pool:
    """Device blocks of an engine, with reference counts."""

    refs: list[int] = field(default_factory=lambda: [1] + [0] * NUM_BLOCKS)

    def take(self, count: int) -> list[int] | None:
        free = [block for block, refs in enumerate(self.refs) if not refs][:count]
        if len(free) < count:
            return None
        self.hold(free)
        return free

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0

    @property
    def used(self) -> int:
        return sum(self.refs) - 1


@dataclass(eq=False)
class Request:
    """A prompt in an engine. ``tokens`` of it are handed off."""

    name: str
    transfer: TransferId
    tokens: int
    computed: int = 0
    local: int = 0
    early: bool = False
    state: str = "waiting"
    tables: list[list[int]] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        return [block for table in self.tables for block in table]


class World:
    """Two engines and what is between them."""

    def __init__(self, shape: str, blocks: str, kinds: str, machine: type[Handoffs]) -> None:
        self.machine = machine
        self.now = 0.0
        self.sizes = BLOCKS[blocks]
        self.shape = SHAPES[shape]
        self.windows = KINDS[kinds]
        self.peers = self.asked = self.epoch = 0
        self.links: list[Link] = []
        self.start_prefill()
        self.start_decode()

    # -- engines ----------------------------------------------------------------------------------

    def start_prefill(self) -> None:
        (tp, pp), size = self.shape[0], self.sizes[0]
        ranks = [Rank(t, tp, p, pp) for p in range(pp) for t in range(tp)]
        layers = [LAYERS // pp for _ in self.windows]
        self.sources = [
            PrefillWorker(rank, self.machine.sender(layers, DEADLINE_S, HEARTBEAT_S))
            for rank in ranks
        ]
        self.prefill_groups = [CacheGroup(size, window) for window in self.windows]
        limits = HandoffLimits(len(ranks), LEASE_S, DEADLINE_S)
        self.leases = self.machine.leases(self.prefill_groups, OffloadingConnectorStats(), limits)
        self.prefill_pool, self.prefills = Pool(), dict[str, Request]()
        self.epoch += 1
        ends = tuple(Endpoint(r.tp_rank, r.pp_rank, "p", n) for n, r in enumerate(ranks))
        self.source = PrefillSource("p", self.epoch, ends, tp, pp)

    def start_decode(self) -> None:
        (tp, pp), size = self.shape[1], self.sizes[1]
        ranks = [Rank(t, tp, p, pp) for p in range(pp) for t in range(tp)]
        groups = len(self.windows)
        layers, heads = [LAYERS // pp] * groups, [HEADS // tp] * groups
        self.readers = [
            DecodeWorker(rank, self.machine.receiver([size] * groups, layers, heads))
            for rank in ranks
        ]
        self.decode_groups = [CacheGroup(size, window) for window in self.windows]
        limits = HandoffLimits(len(ranks), LEASE_S, DEADLINE_S)
        self.arrivals = Receives(self.decode_groups, OffloadingConnectorStats(), limits)
        self.decode_pool, self.decodes = Pool(), dict[str, Request]()
        self.reports: dict[int, list[ReceiveReport]] = {}

    def ask(self, tokens: int, local: int, early: bool, prefill_too: bool) -> None:
        """A router sends a prompt to both engines (``early``), or to one after the other."""
        self.asked += 1
        name, transfer = f"r{self.asked}", TransferId(self.asked.to_bytes(16, "big"))
        if prefill_too and self.leases.open(name, transfer, tokens, self.now):
            self.prefills[name] = Request(name, transfer, tokens)
        if early:
            self.send_to_decode(Request(name, transfer, tokens, local=local, early=True))
        elif prefill_too:
            self.prefills[name].local = local

    def send_to_decode(self, request: Request) -> None:
        self.arrivals.open(request.name, request.transfer, self.source, request.early)
        self.decodes[request.name] = request

    def step_prefill(self, chunks: Callable[[], int]) -> None:
        """Schedule a step, and queue it for every worker."""
        writes: list[tuple[int, int, tuple[Any, ...]]] = []
        for request in self.prefills.values():
            start = request.computed
            request.computed = min(start + chunks(), request.tokens + 1)
            if not self.grow(request):
                self.preempt(request)
                continue
            for number, group in enumerate(self.prefill_groups):
                for token in range(start, request.computed):
                    block, offset = divmod(token, group.block_tokens)
                    slot = request.tables[number][block] * group.block_tokens + offset
                    writes.append((number, slot, (request.transfer, number, token)))
            held = self.leases.offer(request.name, request.computed, request.tables)
            self.prefill_pool.hold(held)
        self.leases.tick(self.now)
        work = self.leases.take()
        for worker in self.sources:
            worker.queue.append((*work, writes))
        for request in list(self.prefills.values()):
            if request.computed > request.tokens:
                self.finish_prefill(request, completed=True)

    def grow(self, request: Request) -> bool:
        """Allocate blocks up to the computed tokens."""
        size = self.prefill_groups[0].block_tokens
        wanted = -(-request.computed // size)
        have = len(request.tables[0]) if request.tables else 0
        fresh = self.prefill_pool.take((wanted - have) * len(self.windows))
        if fresh is None:
            return False
        request.tables = request.tables or [[] for _ in self.windows]
        for table in request.tables:
            table += [fresh.pop() for _ in range(wanted - have)]
        return True

    def finish_prefill(self, request: Request, completed: bool) -> None:
        del self.prefills[request.name]
        self.prefill_pool.release(request.blocks)
        kept = self.leases.finish(request.name, completed, self.now)
        if kept is not None and request.name not in self.decodes:
            self.send_to_decode(Request(request.name, kept, request.tokens, local=request.local))

    def preempt(self, request: Request) -> None:
        self.prefill_pool.release(request.blocks)
        request.tables, request.computed = [], 0
        self.leases.preempted(request.name, self.now)

    def step_decode(self) -> None:
        for request in self.decodes.values():
            if request.state == "waiting":
                self.plan(request)
        self.arrivals.tick(self.now)
        work = self.arrivals.take()
        for worker in self.readers:
            worker.queue.append(work)

    def plan(self, request: Request) -> None:
        size = self.decode_groups[0].block_tokens
        local = min(request.local, request.tokens) // size * size
        if local >= request.tokens:
            self.arrivals.decline(request.name)
            request.state = "running"
            return
        spans = []
        for number, group in enumerate(self.decode_groups):
            first = max(local // size, group.first_block(request.tokens))
            ids = self.decode_pool.take(-(-request.tokens // size) - first)
            if ids is None:
                self.decode_pool.release(request.blocks)
                request.tables = []
                return
            request.tables.append(ids)
            if ids:
                spans.append(Span(number, first, array("q", ids)))
        self.arrivals.plan(request.name, spans, local, request.tokens, self.now)
        request.state = "receiving"

    def finish_decode(self, request: Request) -> None:
        """The client is gone, or has its answer."""
        self.arrivals.finish(request.name)
        if request.state != "receiving":
            del self.decodes[request.name]
            self.decode_pool.release(request.blocks)
        else:
            request.state = "leaving"  # its blocks stay until the receive is over

    def on_report(self, worker: DecodeWorker, report: ReceiveReport) -> None:
        receive = worker.open.get(report.job)
        self.reports.setdefault(report.job, []).append(report)
        settled = self.arrivals.on_report(report, self.now)
        if settled is None or receive is None:
            return
        request = self.decodes[settled.req_id]
        bad = {(f.group, f.block_id) for r in self.reports.pop(report.job) for f in r.failures}
        assert settled.dropped == (request.state == "leaving")
        assert bool(bad) == (settled.cause is not None)
        for reader in self.readers:
            self.verify(reader, request, receive, bad)
            del reader.open[report.job]
        if settled.dropped:
            del self.decodes[request.name]
            self.decode_pool.release(request.blocks)
        request.state = "running"

    def verify(
        self, reader: DecodeWorker, request: Request, receive: Receive, bad: set[tuple[int, int]]
    ) -> None:
        """Every block that has not failed is right in all layers and heads."""
        size = self.decode_groups[0].block_tokens
        for span, (begin, end) in zip(receive.spans, receive.tokens, strict=True):
            for token in range(begin, end):
                block = span.block_ids[token // size - span.first]
                if (span.group, block) in bad:
                    continue
                right = request.transfer, span.group, token
                for layer in reader.layers:
                    for head in reader.heads:
                        cell = span.group, block * size + token % size, layer, head
                        assert reader.memory.get(cell) == (*right, layer, head)

    # -- workers ----------------------------------------------------------------------------------

    def run_step(self, worker: PrefillWorker, choose: Choose) -> None:
        """Run one step; some of the hooks fire, and pages go out meanwhile."""
        offers, withdrawals, writes = worker.queue.pop(0)
        machine = worker.machine
        for offer in offers:
            self.do(worker, machine.offer(offer))
        for order in withdrawals:
            self.do(worker, machine.withdraw(order))
        places = choose.hooks(len(worker.layers))
        for place in [*places, *(n for n in range(len(worker.layers)) if n not in places)]:
            for link in self.links:
                if link.source is worker and link.orders and choose.below(2):
                    self.transmit(link, choose)
            for group, slot, content in writes:
                for head in worker.heads:
                    layer = worker.layers[place]
                    worker.memory[group, slot, layer, head] = (*content, layer, head)
            for group in range(len(self.windows)) if place in places else ():
                self.do(worker, machine.layer_written(group, place, None))
                if choose.below(2):  # a draft model's hook fires again
                    self.do(worker, machine.layer_written(group, place, None))
        self.do(worker, machine.step_written(None))

    def run_decode_step(self, worker: DecodeWorker) -> None:
        receives, drops, keeps = worker.queue.pop(0)
        for receive in receives:
            worker.renewals.pop(receive.transfer, None)
            worker.open[receive.job] = receive
            worker.writable[receive.job] = {
                (span.group, block) for span in receive.spans for block in span.block_ids
            }
            self.act(
                worker, worker.machine.receive(receive, self.needed(worker, receive), self.now)
            )
        for drop in drops:
            self.act(worker, worker.machine.drop(drop.job))
        for keep in keeps:
            if keep.every_s:
                worker.renewals[keep.transfer] = keep
            else:
                worker.renewals.pop(keep.transfer, None)
                self.tell_sources(worker, ("decline", keep.transfer))

    def tell_sources(self, worker: DecodeWorker, message: tuple[Any, ...]) -> None:
        for link in self.links:
            if link.reader is worker and link.reader_up:
                link.to_source.append(message)

    def needed(self, worker: DecodeWorker, receive: Receive) -> list[Endpoint]:
        return [
            end
            for end in (receive.source.endpoints if receive.source else ())
            if self.common(self.sources[end.port], worker)[1]
            and self.common(self.sources[end.port], worker)[0]
        ]

    def common(self, source: PrefillWorker, reader: DecodeWorker) -> tuple[list[int], list[int]]:
        layers = [layer for layer in source.layers if layer in reader.layers]
        return layers, [head for head in source.heads if head in reader.heads]

    def views(self, link: Link, worker: Worker, size: int) -> dict[int, GroupView]:
        shared, heads = self.common(link.source, link.reader)
        return {
            group: GroupView(
                size // min(self.sizes),
                group * 10,
                tuple(group * 10 + 1 + n if n in shared else -1 for n in worker.layers),
                len(heads),
            )
            for group in range(len(self.windows))
        }

    def layers_of(self, link: Link, number: int) -> list[int]:
        shared = self.common(link.source, link.reader)[0]
        return [number % 10 - 1] if number % 10 else shared

    def do(self, worker: PrefillWorker, actions: Iterable[prefill_actions.Action]) -> None:
        for action in actions:
            if isinstance(action, prefill_actions.ReportNotice):
                worker.output.append(action.notice)
                continue
            link = next(link for link in self.links if link.peer == action.peer)
            if isinstance(action, prefill_actions.SendPages):
                link.orders.append(action)
            elif isinstance(action, prefill_actions.CancelRead):
                link.source_stops.add(action.read_id)
            elif isinstance(action, prefill_actions.RefuseRead):
                link.to_reader.append(("fail", action.read_id, action.cause))
            elif isinstance(action, prefill_actions.SendAlive):
                link.to_reader.append(("alive", action.read_ids))

    def act(self, worker: DecodeWorker, actions: Iterable[decode_actions.Action]) -> None:
        for action in actions:
            if isinstance(action, decode_actions.ConnectPeer):
                worker.connecting.append(action.origin)
                continue
            if isinstance(action, decode_actions.ReportFinished):
                worker.output.append(action.report)
                del worker.writable[action.report.job]
                continue
            link = next(link for link in self.links if link.peer == action.peer)
            if isinstance(action, decode_actions.RequestPages):
                link.incoming[action.read_id] = {span.group: span for span in action.spans}
                parts = [(s.group, s.first, len(s.block_ids)) for s in action.spans]
                link.to_source.append(
                    ("read", action.read_id, action.transfer, action.early, parts)
                )
            else:
                done = isinstance(action, decode_actions.ConfirmRead)
                link.to_source.append(("done" if done else "cancel", action.read_id))
                link.reader_stops.add(action.read_id)

    # -- the link ---------------------------------------------------------------------------------

    def events(self, choose: Choose) -> list[Callable[[], None]]:
        """Return everything that could happen next between the engines."""
        found: list[Callable[[], None]] = []
        for source in self.sources:
            found += [partial(self.run_step, source, choose)] * bool(source.queue)
            found += [partial(self.look, source)] * bool(source.output)
        for reader in self.readers:
            found += [partial(self.run_decode_step, reader)] * bool(reader.queue)
            found += [partial(self.look_decode, reader)] * bool(reader.output)
            found += [partial(self.connect, reader, origin) for origin in reader.connecting]
        for link in self.links:
            found += self.link_events(link, choose)
        return found

    def link_events(self, link: Link, choose: Choose) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if link.source_up:
            found += [partial(self.hear, link)] * bool(link.to_source)
            found += [partial(self.transmit, link, choose)] * bool(link.orders)
            found += [partial(self.source_quiet, link, read_id) for read_id in link.source_stops]
        if link.reader_up:
            found += [partial(self.hear_back, link)] * bool(link.to_reader)
            found += [partial(self.arrive, link, choose)] * bool(link.frames)
            found += [partial(self.reader_quiet, link, read_id) for read_id in link.reader_stops]
        if not (link.source_up and link.reader_up):
            found.append(partial(self.cut, link))
        return found

    def look(self, worker: PrefillWorker) -> None:
        """The scheduler sees a worker's output."""
        notices, worker.output = worker.output, []
        for notice in notices:
            self.leases.on_notice(notice, self.now)
        self.prefill_pool.release(self.leases.take_released())

    def look_decode(self, worker: DecodeWorker) -> None:
        reports, worker.output = worker.output, []
        for report in reports:
            self.on_report(worker, report)

    def connect(self, reader: DecodeWorker, origin: Origin) -> None:
        reader.connecting.remove(origin)
        if origin.epoch != self.epoch:
            self.act(reader, reader.machine.refused(origin, FailureCause.GONE))
            return
        self.peers += 1
        link = Link(self.peers, self.sources[origin.endpoint.port], reader)
        self.links.append(link)
        views = self.views(link, reader, self.sizes[1])
        self.act(reader, reader.machine.connected(origin, link.peer, views))

    def hear(self, link: Link) -> None:
        """A message reaches the prefill side."""
        machine = link.source.machine
        what, *rest = link.to_source.pop(0)
        if what == "read":
            read_id, transfer, early, parts = rest
            views = self.views(link, link.source, self.sizes[0])
            ask = AcceptedRead(link.peer, read_id, transfer, early, link.reader.rank, views, parts)
            self.do(link.source, machine.on_request(ask, self.now))
        elif what == "renew":
            self.do(link.source, machine.renew(*rest))
        elif what == "decline":
            self.do(link.source, machine.decline(rest[0], link.peer, link.reader.rank))
        else:
            self.do(link.source, getattr(machine, what)(link.peer, *rest))

    def hear_back(self, link: Link) -> None:
        what, *rest = link.to_reader.pop(0)
        if what == "alive":
            (read_ids,) = rest
            link.reader.machine.alive(link.peer, read_ids, self.now)
        else:
            self.act(link.reader, link.reader.machine.failed(link.peer, *rest))

    def transmit(self, link: Link, choose: Choose) -> None:
        """Read the pages of an order, in one or two frames."""
        order = link.orders.pop(choose.below(len(link.orders)))
        half = choose.below(len(order.ids))
        tokens = min(self.sizes)
        for wire_id in order.ids if link.source in self.sources else ():
            block = wire_id // (self.sizes[0] // tokens)
            assert self.prefill_pool.refs[block], "a block is read that nobody holds"
        heads = self.common(link.source, link.reader)[1]
        for begin, end in ((0, half), (half, len(order.ids))):
            cells = {
                (place, offset, layer, head): link.source.memory.get(
                    (order.group, order.ids[place] * tokens + offset, layer, head), WRONG
                )
                for place in range(begin, end)
                for offset in range(tokens)
                for layer in self.layers_of(link, order.number)
                for head in heads
            }
            if begin < end:
                first = order.first + begin
                moved = {(p - begin, *rest): cell for (p, *rest), cell in cells.items()}
                bad = choose.rarely()
                link.frames.append(
                    Frame(order.read_id, order.number, first, tokens, moved, end - begin, bad)
                )
        self.do(link.source, link.source.machine.sent(link.peer, order.read_id))

    def arrive(self, link: Link, choose: Choose) -> None:
        """Write a frame's pages, if its read has not been let go."""
        frame = link.frames.pop(choose.below(len(link.frames)))
        if frame.read_id not in link.incoming:
            return
        group = frame.number // 10
        span = link.incoming[frame.read_id][group]
        ratio = self.sizes[1] // min(self.sizes)
        writable = set().union(*link.reader.writable.values())
        for (place, offset, layer, head), content in frame.cells.items():
            wire_id = span.block_ids[frame.first - span.first + place]
            assert (group, wire_id // ratio) in writable, "a page lands in a finished job"
            slot = wire_id * frame.tokens + offset
            link.reader.memory[group, slot, layer, head] = WRONG if frame.bad else content
        if frame.read_id not in link.reader_stops:
            blocks = range(frame.first, frame.first + frame.count)
            bad = tuple(blocks) if frame.bad else ()
            machine = link.reader.machine
            self.act(
                link.reader,
                machine.received(link.peer, frame.read_id, frame.number, blocks, bad, self.now),
            )

    def source_quiet(self, link: Link, read_id: int) -> None:
        link.source_stops.discard(read_id)
        link.orders = [order for order in link.orders if order.read_id != read_id]
        self.do(link.source, link.source.machine.drained(link.peer, read_id))

    def reader_quiet(self, link: Link, read_id: int) -> None:
        link.reader_stops.discard(read_id)
        del link.incoming[read_id]
        self.act(link.reader, link.reader.machine.drained(link.peer, read_id))

    def cut(self, link: Link) -> None:
        """The other end learns that the connection is gone."""
        if link.source_up:
            self.cut_source(link)
        if link.reader_up:
            self.cut_reader(link)
        self.links.remove(link)

    def cut_source(self, link: Link) -> None:
        link.source_up, link.orders = False, []
        self.do(link.source, link.source.machine.peer_lost(link.peer))

    def cut_reader(self, link: Link) -> None:
        link.reader_up, link.frames = False, []
        self.act(link.reader, link.reader.machine.peer_lost(link.peer))

    def restart_prefill(self) -> None:
        """The prefill engine is killed and comes back at the same addresses."""
        for link in self.links:
            link.source_up, link.orders = False, []
        self.start_prefill()

    def restart_decode(self) -> None:
        for link in self.links:
            link.reader_up, link.frames = False, []
        self.start_decode()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for source in self.sources:
            self.do(source, source.machine.tick(self.now))
        for reader in self.readers:
            self.act(reader, reader.machine.tick(self.now))
            for transfer in reader.renewals:
                self.tell_sources(reader, ("renew", transfer))

    def check(self) -> None:
        self.leases.check()
        self.arrivals.check()

    @property
    def idle(self) -> bool:
        return not (
            self.leases.busy
            or self.arrivals.busy
            or self.prefill_pool.used
            or self.decode_pool.used
        )

    def come_to_rest(self) -> None:
        """Nobody asks any more: whatever is under way must end, and nothing may remain."""
        choose = Choose()
        for _ in range(400):
            for request in list(self.decodes.values()):
                if request.state == "running":
                    self.finish_decode(request)
            self.step_prefill(lambda: 8)
            self.step_decode()
            for _ in range(1000):
                events = self.events(choose)
                if not events:
                    break
                events[0]()
            self.check()
            if self.idle and not self.decodes and not self.prefills:
                break
            self.pass_time(2.0)
        assert self.idle and not self.decodes and not self.prefills
        for _ in range(2):  # for reads and declines that came too late
            self.pass_time(DEADLINE_S)
        for worker in self.sources:
            machine = worker.machine
            assert not (machine._transfers.offered or machine._parked or machine._declined)
        for reader in self.readers:
            assert not (reader.machine._jobs or reader.machine._reads or reader.writable)


class Handoffs(RuleBasedStateMachine):
    """Drives both engines."""

    leases: ClassVar[type[Leases]] = Leases
    sender: ClassVar[type[PrefillPlanner]] = PrefillPlanner
    receiver: ClassVar[type[DecodePlanner]] = DecodePlanner

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)),
        blocks=st.sampled_from(sorted(BLOCKS)),
        kinds=st.sampled_from(sorted(KINDS)),
    )
    def start(self, shape: str, blocks: str, kinds: str) -> None:
        self.world = World(shape, blocks, kinds, type(self))
        self.sound = True

    @rule(event=st.sampled_from(EVENTS), data=st.data())
    def happens(self, event: str, data: st.DataObject) -> None:
        self.sound = False
        getattr(self, event)(Choose(data))
        self.sound = True

    def ask(self, choose: Choose) -> None:
        if len(self.world.prefills) < 4:
            early, prefill_too = bool(choose.below(2)), choose.below(8) < 7
            self.world.ask(1 + choose.below(12), choose.below(6), early, prefill_too)

    def step(self, choose: Choose) -> None:
        self.world.step_prefill(lambda: 1 + choose.below(7))
        self.world.step_decode()

    def work(self, choose: Choose) -> None:
        for _ in range(8):
            events = self.world.events(choose)
            if events:
                events[choose.below(len(events))]()

    def time_passes(self, choose: Choose) -> None:
        self.world.pass_time(1.0 + choose.below(4))

    def abort(self, choose: Choose) -> None:
        requests = list(self.world.prefills.values())
        if requests:
            self.world.finish_prefill(requests[choose.below(len(requests))], completed=False)

    def preempt(self, choose: Choose) -> None:
        requests = list(self.world.prefills.values())
        if requests:
            self.world.preempt(requests[choose.below(len(requests))])

    def pause(self, choose: Choose) -> None:
        """Nothing is scheduled for a while; what is half done may be forgotten after it."""
        self.world.leases.preempted(None, self.world.now)
        self.world.step_prefill(lambda: 0)

    def decode_ends(self, choose: Choose) -> None:
        requests = [r for r in self.world.decodes.values() if r.state != "leaving"]
        if requests:
            self.world.finish_decode(requests[choose.below(len(requests))])

    def cut(self, choose: Choose) -> None:
        links = [link for link in self.world.links if link.source_up and link.reader_up]
        if links and choose.below(2):
            link = links[choose.below(len(links))]
            (self.world.cut_source, self.world.cut_reader)[choose.below(2)](link)

    def restart(self, choose: Choose) -> None:
        what = choose.below(8)
        if what == 6:
            self.world.restart_prefill()
        elif what == 7:
            self.world.restart_decode()

    def forget(self, choose: Choose) -> None:
        if not choose.below(4):
            self.world.leases.withdraw_all(self.world.now)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if getattr(self, "sound", False):  # else it has failed already
            self.world.come_to_rest()


def run(machine: type[Handoffs], examples: int, shrink: bool = True) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_hand_offs_are_never_wrong_and_leak_nothing() -> None:
    run(Handoffs, examples=400)


# Negative controls ------------------------------------------------------------------------------


class SendsWrongBlocks(PrefillPlanner):
    """Takes the last block of a range for the first."""

    def on_request(self, ask: AcceptedRead, now: float) -> list[prefill_actions.Action]:
        return [
            action._replace(ids=action.ids[::-1])
            if isinstance(action, prefill_actions.SendPages)
            else action
            for action in super().on_request(ask, now)
        ]


class SendsBeforeTheWrite(PrefillPlanner):
    """Takes blocks for readable when they are offered."""

    def offer(self, offer: Any) -> list[prefill_actions.Action]:
        return super().offer(offer) + (super().step_written(None) if offer.spans else [])


class ReportsBeforeQuiet(DecodePlanner):
    """Takes a cancelled read for one of which nothing lands any more."""

    def _advance(self, job: Any) -> list[decode_actions.Action]:
        actions = job.confirm()
        for read in job.reads:
            if read.state is TransferState.STOPPING:
                read.state = TransferState.OVER
        return actions + super()._advance(job)


class TrustsEveryPage(DecodePlanner):
    """Ignores digests."""

    def received(self, *event: Any) -> list[decode_actions.Action]:
        *rest, _, now = event
        return super().received(*rest, (), now)  # type: ignore[call-arg]


class ReleasesEarly(Leases):
    """Gives blocks back when it orders the end, not when the workers have answered."""

    def take(self) -> Any:
        offers, withdrawals = super().take()
        for order in withdrawals:
            for _ in range(self._limits.workers):
                super().on_notice(TransferEvent(order.transfer, NoticeKind.WITHDRAWN), 0.0)
        return offers, withdrawals


class ForgetsToRelease(Leases):
    """Loses a released block."""

    def take_released(self) -> list[int]:
        return super().take_released()[1:]


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("sender", SendsWrongBlocks),
        ("sender", SendsBeforeTheWrite),
        ("receiver", ReportsBeforeQuiet),
        ("receiver", TrustsEveryPage),
        ("leases", ReleasesEarly),
        ("leases", ForgetsToRelease),
    ],
)
def test_a_broken_machine_is_found(part: str, broken: type) -> None:
    machine = type(f"With{broken.__name__}", (Handoffs,), {part: broken})
    with pytest.raises((AssertionError, KVConnectError)):
        run(machine, examples=600, shrink=False)
