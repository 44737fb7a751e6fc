"""A prefill worker and a decode worker, each on streams of an emulated device: what one computes
and hands off is what the other one's forward must find, while blocks of both are used again."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

import pytest
import torch

from kvconnect.cache.pages import layer_pages
from kvconnect.copy.wire_blocks import BlockCopier
from kvconnect.disaggregation import (
    agent,
    bandwidth_probe,
    decode_executor,
    decode_planner,
    layer_queue,
    prefill_executor,
    sessions,
    staging,
)
from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.bandwidth_probe import ProbedMemory
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    Drop,
    NoticeKind,
    OfferBlocks,
    PrefillSource,
    Receive,
    Withdraw,
)
from kvconnect.disaggregation.sessions import HandoffSessions, PathPreference
from kvconnect.disaggregation.staging import StagedMemory
from kvconnect.engines.sglang.layerwise import EngineStreams
from kvconnect.offload.streams import DeviceFence, make_streams
from kvconnect.peers import loop
from kvconnect.peers import sessions as peers_sessions
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import GroupHello, HandoffHello
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.testing import inproc
from kvconnect.testing.inproc import InprocTransport, Network
from kvconnect.transport import event_queue
from kvconnect.transport.base import Event, Fence
from kvconnect.types import Endpoint, FailureCause, JobId, Rank, Span, TransferId
from tests.emulated.device import (
    CUDA,
    EmulatedDriver,
    EmulatedEvent,
    Emulator,
    OnDevice,
    Site,
)
from tests.emulated.offload import content
from tests.emulated.world import World

BLOCKS, LAYERS, TOKENS, ROW = 6, 3, 2, 4  # ROW is floats of one token
RUN = TOKENS * ROW * 4
TRANSFERS, CHUNK = 5, 2
PATIENCE_S = 1e9
EPOCH = 0


@dataclass(frozen=True)
class Style:
    """What the engines are like.

    Attributes:
        two_streams: the model runs on a stream of its own, beside the scheduler's, and hand-offs
            are told outside of steps, as in SGLang.
        micro_batches: how often a layer runs in a step.
        layerwise: hooks of layers are followed.
        joined: whoever receives waits for both streams.
    """

    two_streams: bool = False
    micro_batches: int = 1
    layerwise: bool = True
    joined: bool = True


@dataclass(eq=False)
class Transfer:
    """One prompt's KV: ``numbers[i]`` is the content of its block ``i``."""

    name: TransferId
    numbers: list[int]
    blocks: list[int] = field(default_factory=list)  # of the prefill side
    done: bool = False  # nobody wants it (any more)
    withdrawn: bool = False


class PromptTransport(InprocTransport):
    """Carries out an order at once, not only when it is asked for events."""

    def __init__(self, network: Network, world: World) -> None:
        super().__init__(network)
        self._world = world

    def poll(self, timeout: float) -> list[Event]:
        self._world.block(self._has_work, timeout)
        return super().poll(0)

    def _has_work(self) -> bool:
        return bool(self._events._events) or any(end.orders for end in self._ends.values())


class Side:
    """One worker: its memory, its agent, and its engine's streams."""

    def __init__(self, emulator: Emulator, network: Network, style: Style, sends: bool) -> None:
        self.emulator, self.random, self.style = emulator, emulator.world.random, style
        self.area = torch.zeros(LAYERS * BLOCKS * RUN, dtype=torch.uint8)
        self.scheduling = emulator.stream()
        self.forward = emulator.stream() if style.two_streams else self.scheduling
        self.both = EngineStreams(CUDA)
        self.both.forward = self.forward if style.joined else None
        self.free = list(range(BLOCKS))
        self.launched: deque[EmulatedEvent] = deque()
        self.ahead = self.random.choice((1, 2, 4))
        self.wrong: list[str] = []
        self.agent = self._agent(network, sends)

    def _agent(self, network: Network, sends: bool) -> HandoffAgent:
        view = self.area.view(torch.float32).view(LAYERS, BLOCKS, 1, TOKENS, ROW)
        pages = tuple(
            layer_pages(f"layer{i}", i * BLOCKS * RUN, (v.shape, v.stride(), 4), BLOCKS, TOKENS)
            for i, v in enumerate(view)
        )
        names = [page.name for page in pages]
        group = GroupHello(
            block_tokens=TOKENS,
            page_tokens=TOKENS,
            layers=names,
            kv_heads=1,
            heads=1,
            row_bytes=4 * ROW,
            order="HNC",
            splittable=True,
        )
        engine = "sender" if sends else "receiver"
        rank = Rank(0, 1, 0, 1)
        hello = HandoffHello(
            software="test",
            engine_id=engine,
            epoch=0,
            rank=rank,
            identity=Identity(weights=Weights(files="same")),
            format={},
            groups=[group],
        )
        transport = PromptTransport(network, self.emulator.world)
        copier = BlockCopier(self.area, EmulatedDriver(self.emulator))
        memory = StagedMemory(OnDevice(self.area), 1 << 12, copier)  # type: ignore[arg-type]
        transport.register(ProbedMemory(memory, torch.device("cpu")))
        address = transport.listen(engine, 0) if sends else None
        found = HandoffSessions(
            hello, (pages,), transport, OffloadingConnectorStats(), PathPreference()
        )
        return HandoffAgent(found, PATIENCE_S, make_streams(CUDA).mark, address)

    @contextmanager
    def scheduler(self) -> Iterator[None]:
        """The engine's thread, where no forward is launched."""
        with self.emulator.on(self.scheduling):
            yield

    @contextmanager
    def model(self) -> Iterator[None]:
        """The engine's thread, as it launches a forward, which comes after what the scheduler has
        launched."""
        if self.style.two_streams:
            self.forward.wait_stream(self.scheduling)
        with self.emulator.on(self.forward):
            yield

    def view(self, block: int, layer: int) -> torch.Tensor:
        return self.area[(layer * BLOCKS + block) * RUN :][:RUN]

    def take(self) -> int:
        """Take a free block, which the engine may clear first. A scheduler with a stream of its own
        has that wait for the model's then."""
        block = self.free.pop(self.random.randrange(len(self.free)))
        if self.random.random() < (0.1 if self.style.two_streams else 0.5):
            if self.style.two_streams:
                self.scheduling.wait_stream(self.forward)
            self.emulator.launch(lambda: [self.view(block, n).zero_() for n in range(LAYERS)])
        return block

    def end_of_forward(self) -> EmulatedEvent:
        """Note the end of a step; wait until the device is not too far behind."""
        event = self.emulator.event()
        event.record(self.forward)
        self.launched.append(event)
        while len(self.launched) > self.ahead:
            self.launched.popleft().synchronize()
        return event


class Prefill(Side):
    """Computes prompts, a chunk per step, and holds their blocks until nobody reads them."""

    def __init__(self, emulator: Emulator, network: Network, style: Style) -> None:
        super().__init__(emulator, network, style, sends=True)
        numbers = count(1)
        self.todo = [
            Transfer(TransferId(bytes([n] * 16)), [next(numbers) for _ in range(count_)])
            for n, count_ in enumerate(self.random.choices((1, 2, 3, 4), k=TRANSFERS), start=1)
        ]
        self.known = {transfer.name: transfer for transfer in self.todo}
        self.computing: list[Transfer] = []

    @property
    def source(self) -> PrefillSource:
        assert self.agent.address is not None
        return PrefillSource("sender", EPOCH, (Endpoint(0, 0, *self.agent.address),), 1, 1)

    def run(self) -> None:
        with self.scheduler():
            while self.known:
                self._collect()
                if not self._step() and self.known:
                    self.emulator.world.block(lambda: self.agent.has_news or bool(self._over()))

    def _over(self) -> list[Transfer]:
        """Return computed prompts that are to be given up."""
        return [
            t
            for t in self.known.values()
            if t.done and not t.withdrawn and t not in self.todo + self.computing
        ]

    def _collect(self) -> None:
        for notice in self.agent.poll()[1]:
            transfer = self.known.get(notice.transfer)
            if transfer is None:
                continue  # of a reader that came too late
            if notice.kind is NoticeKind.DONE:
                transfer.done = True
            elif notice.kind is NoticeKind.WITHDRAWN:
                del self.known[transfer.name]
                self.free += transfer.blocks

    def _step(self) -> bool:
        """Compute a chunk of up to two prompts; say whether there was anything to do."""
        chunks = self._chunks()
        over = self._over()
        withdrawals = [Withdraw(t.name, FailureCause.GONE) for t in over]
        for transfer in over:
            transfer.withdrawn = True
        if not chunks and not withdrawals:
            return False
        offers = [
            OfferBlocks(t.name, (Span(0, first, array("q", t.blocks[first:])),))
            for t, first in chunks
        ]
        if self.style.two_streams and not self.style.layerwise:
            self.agent.run(DisaggregationInstructions(withdrawals=withdrawals))
            self._forward(chunks)
            fence: Fence | None = DeviceFence(self.end_of_forward())  # type: ignore[arg-type]
            if self.random.random() < 0.5:  # the engine does not say where the forward ends
                fence = self.both.mark()
            self.agent.run(DisaggregationInstructions(offers=offers), fence)
            return True
        self.agent.begin_step(
            DisaggregationInstructions(offers=offers, withdrawals=withdrawals), EPOCH
        )
        self._forward(chunks)
        with self.model():
            self.agent.end_step()
        self.end_of_forward()
        return True

    def _chunks(self) -> list[tuple[Transfer, int]]:
        """Choose what this step computes: each with its first block."""
        while self.todo and len(self.computing) < 2:
            due = [self.todo[0], *self.computing]
            if sum(len(t.numbers) - len(t.blocks) for t in due) > len(self.free):
                break  # two of them could wait for one another
            self.computing.append(self.todo.pop(0))
        found = []
        for transfer in list(self.computing):
            first = len(transfer.blocks)
            todo = min(CHUNK, len(transfer.numbers) - first)
            transfer.blocks += [self.take() for _ in range(todo)]
            found.append((transfer, first))
            if len(transfer.blocks) == len(transfer.numbers):
                self.computing.remove(transfer)
        return found

    def _forward(self, chunks: list[tuple[Transfer, int]]) -> None:
        written = [
            (t.blocks[i], t.numbers[i]) for t, first in chunks for i in range(first, len(t.blocks))
        ]
        parts = self.style.micro_batches
        with self.model():
            for layer in range(LAYERS):
                for part in range(parts):
                    self.emulator.launch(partial(self._write, layer, written[part::parts]))
                    if self.style.layerwise and layer != 1:  # one hook does not fire
                        self.agent.layer_written(f"layer{layer}")

    def _write(self, layer: int, written: list[tuple[int, int]]) -> None:
        for block, number in written:
            wanted = bytearray(content(number, layer, RUN))
            self.view(block, layer).copy_(torch.frombuffer(wanted, dtype=torch.uint8))


@dataclass(eq=False)
class Asked:
    """A request of the decode side."""

    job: JobId
    transfer: Transfer
    blocks: list[int]
    steps: int
    there: bool = False
    dropped: bool = False


class Decode(Side):
    """Receives prompts into blocks that have just been given up, and computes on them."""

    def __init__(
        self, emulator: Emulator, network: Network, style: Style, prefill: Prefill
    ) -> None:
        super().__init__(emulator, network, style, sends=False)
        self.source = prefill.source
        self.todo = list(prefill.todo)
        self.requests: list[Asked] = []
        self.jobs = count(1)

    def run(self) -> None:
        with self.scheduler():
            while self.todo or self.requests:
                self._collect()
                if not self._step() and self.requests:
                    self.emulator.world.block(lambda: self.agent.has_news)
            while self.launched:
                self.launched.popleft().synchronize()

    def _collect(self) -> None:
        for report, job in self.agent.poll()[0]:
            (request,) = (r for r in self.requests if r.job == job.job)
            if request.dropped:
                request.transfer.done = True
                self._end(request)
                continue
            assert not report.failures, report
            request.there = True

    def _end(self, request: Asked) -> None:
        self.requests.remove(request)
        self.free += request.blocks

    def _step(self) -> bool:
        receives, running = self._admit(), [r for r in self.requests if r.there]
        drops = [
            Drop(r.job)
            for r in self.requests
            if not (r.there or r.dropped or r.job in [x.job for x in receives])
            and self.random.random() < 0.05
        ]
        for request in self.requests:
            request.dropped = request.dropped or request.job in [drop.job for drop in drops]
        work = DisaggregationInstructions(receives=receives, drops=drops)
        if self.style.two_streams:
            self._tell(work)
        else:
            self.agent.begin_step(work, EPOCH)
        if running:
            with self.model():
                for layer in range(LAYERS):
                    self.emulator.launch(partial(self._read, layer, list(running)))
            self.end_of_forward()
        if not self.style.two_streams:
            self.agent.end_step()
        for request in running:
            request.steps -= 1
            if not request.steps:
                self._end(request)
        return bool(receives or running or drops)

    def _tell(self, work: DisaggregationInstructions) -> None:
        """As SGLang's scheduler asks: outside of a step."""
        with self.both.joined():
            self.agent.run(work)

    def _admit(self) -> list[Receive]:
        """Ask for the next prompt, if there is room."""
        if not self.todo or len(self.todo[0].numbers) > len(self.free):
            return []
        transfer = self.todo.pop(0)
        blocks = [self.take() for _ in transfer.numbers]
        job = JobId(next(self.jobs))
        self.requests.append(Asked(job, transfer, blocks, self.random.choice((1, 2))))
        span = Span(0, 0, array("q", blocks))
        tokens = ((0, len(blocks) * TOKENS),)
        return [Receive(job, "r", transfer.name, self.source, (span,), tokens, True, PATIENCE_S)]

    def _read(self, layer: int, requests: list[Asked]) -> None:
        for request in requests:
            for block, number in zip(request.blocks, request.transfer.numbers, strict=True):
                if self.view(block, layer).numpy().tobytes() != content(number, layer, RUN):
                    self.wrong.append(f"layer {layer} of block {block} is not {number}")


def play(
    random: Random, disabled: frozenset[Site] = frozenset(), style: Style | None = None
) -> Emulator:
    """Run both workers once; raise if something is wrong."""
    world = World(random)
    layerwise, two = random.random() < 0.7, random.random() < 0.5
    style = style or Style(two_streams=two, layerwise=layerwise)

    def body(emulator: Emulator) -> None:
        network = Network()
        prefill = Prefill(emulator, network, style)
        decode = Decode(emulator, network, style, prefill)
        tasks = [world.spawn("prefill", prefill.run), world.spawn("decode", decode.run)]
        world.block(lambda: all(task.over for task in tasks))
        for side in (prefill, decode):
            side.agent.close()
        assert not decode.wrong, decode.wrong

    with pytest.MonkeyPatch.context() as monkeypatch:
        emulator = Emulator(world, disabled)
        emulator.install(monkeypatch)
        _replace_modules(monkeypatch, world)
        world.run(lambda: body(emulator))
    return emulator


def _replace_modules(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    for module in (inproc, event_queue, agent, layer_queue, loop, staging):
        monkeypatch.setattr(module, "threading", world.threading)
    timed = (agent, loop, prefill_executor, decode_executor, sessions)
    for module in timed:  # type: ignore[assignment]
        monkeypatch.setattr(module, "time", world.time)
    monkeypatch.setattr(layer_queue, "SimpleQueue", world.simple_queue)
    monkeypatch.setattr(bandwidth_probe, "_ROUNDS", (array("q", [0]), array("q", [0])))
    monkeypatch.setattr(decode_planner, "MAX_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(peers_sessions, "HELLO_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(sessions, "_PROBE_TIMEOUT_S", PATIENCE_S)

    def room(self: object, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(staging._Ring, "_make", room)
