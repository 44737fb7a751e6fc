"""One engine's hand-off workers, with tensors for caches: agents, sessions, a real transport."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace

import torch

from kvconnect.cache.pages import layer_pages
from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.bandwidth_probe import ProbedMemory
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    NoticeKind,
    OfferBlocks,
    PrefillSource,
    Receive,
    ReceiveReport,
    TransferEvent,
)
from kvconnect.disaggregation.sessions import HandoffSessions, PathPreference
from kvconnect.disaggregation.staging import HostMemory, StagedMemory
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.protocol.messages import GroupHello, HandoffHello
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport import make_transport
from kvconnect.transport.base import ConnectionOptions, Security
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.types import Endpoint, JobId, Rank, Span, TransferId

HEADS, LAYERS, ROW, TOKENS = 4, 3, 8, 256  # of the model; ROW is floats of one head's token
TRANSFER = TransferId(b"0123456789abcdef")
EPOCH = 7
WAIT_S = 20.0


@dataclass
class Engine:
    """One engine of ``tp`` ranks with blocks of ``block`` tokens; ``nhd``: tokens outside heads."""

    tp: int = 1
    block: int = 16
    nhd: bool = False
    staged: bool = False
    sends: bool = False
    key: bytes = b""
    model: str = "tiny"
    weights: str = "tiny"
    digest: str = "full"
    row: int = ROW
    port: SharedPort | None = None  # of its process; it listens at number ``listen``
    listen: int = 0
    caches: list[torch.Tensor] = field(default_factory=list)
    agents: list[HandoffAgent] = field(default_factory=list)

    def __enter__(self) -> Engine:
        for rank in range(self.tp):
            self._start(rank)
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.agents:
            agent.close()

    def _start(self, rank: int) -> None:
        blocks, heads = TOKENS // self.block + 4, HEADS // self.tp
        area = torch.zeros(LAYERS * blocks * heads * self.block * self.row)
        shape = (LAYERS, blocks, self.block, heads, self.row)
        if self.nhd:
            cache = area.view(shape).permute(0, 1, 3, 2, 4)
        else:
            cache = area.view(LAYERS, blocks, heads, self.block, self.row)
        pages = tuple(
            layer_pages(
                f"layer{i}",
                (view.data_ptr() - area.data_ptr()),
                (view.shape, view.stride(), 4),
                blocks,
                self.block,
            )
            for i, view in enumerate(cache)
        )
        group = GroupHello(
            block_tokens=self.block,
            page_tokens=self.block,
            layers=[page.name for page in pages],
            kv_heads=HEADS,
            heads=heads,
            row_bytes=4 * self.row,
            order="NHC" if self.nhd else "HNC",
            splittable=True,
        )
        hello = HandoffHello(
            software="test",
            engine_id="sender" if self.sends else "receiver",
            epoch=0,
            rank=Rank(rank, self.tp, 0, 1),
            identity=Identity(weights=Weights(files=self.weights)),
            format={"model": self.model},
            groups=[group],
        )
        raw = area.view(torch.uint8)
        memory = StagedMemory(raw, 1 << 17) if self.staged else HostMemory(raw)
        options = ConnectionOptions(digest=self.digest, dead_after_s=3.0, port=self.port)
        transport = make_transport("tcp", Security(key=self.key), options)
        transport.register(ProbedMemory(memory, raw.device))
        address = transport.listen("127.0.0.1", self.listen) if self.sends else None
        links = HandoffSessions(
            hello, (pages,), transport, OffloadingConnectorStats(), PathPreference()
        )
        self.caches.append(cache)
        self.agents.append(HandoffAgent(links, 5.0, lambda: None, address))

    def step(self, **work: list[object]) -> None:
        """Give every worker a step's work, and end the step as the engine does."""
        for agent in self.agents:
            agent.begin_step(DisaggregationInstructions(**work), EPOCH)  # type: ignore[arg-type]
            for layer in range(LAYERS - 1):  # one hook does not fire
                agent.layer_written(f"layer{layer}")
            agent.end_step()

    def source(self, epoch: int = EPOCH) -> PrefillSource:
        endpoints = [
            Endpoint(rank, 0, *agent.address)
            for rank, agent in enumerate(self.agents)
            if agent.address is not None
        ]
        return PrefillSource("sender", epoch, tuple(endpoints), self.tp, 1)

    def content(self, table: array[int], tokens: int) -> torch.Tensor:
        """What all ranks together hold of a request: [layers, tokens, heads, ROW]."""
        parts = [cache[:, list(table)] for cache in self.caches]
        whole = torch.cat(parts, dim=2).permute(0, 1, 3, 2, 4)
        return whole.reshape(LAYERS, -1, HEADS, self.row)[:, :tokens]

    def fill(self, table: array[int], seed: int) -> None:
        """Write random KV of a request into all ranks' blocks."""
        torch.manual_seed(seed)
        whole = torch.randn(LAYERS, len(table), HEADS, self.block, self.row)
        share = HEADS // self.tp
        for rank, cache in enumerate(self.caches):
            cache[:, list(table)] = whole[:, :, rank * share : (rank + 1) * share]


def table(tokens: int, block: int) -> array[int]:
    """Scattered block ids for so many tokens."""
    count = -(-tokens // block)
    return array("q", [(5 * i + 3) % (TOKENS // block + 3) + 1 for i in range(count)])


def receive(
    source: PrefillSource | None, blocks: array[int], tokens: int, early: bool = False
) -> Receive:
    span = Span(0, 0, blocks)
    return Receive(JobId(1), "r", TRANSFER, source, (span,), ((0, tokens),), early, 5.0)


def finished(engine: Engine) -> list[ReceiveReport]:
    """Wait for the report of every worker."""
    reports: list[ReceiveReport] = []
    deadline = time.monotonic() + WAIT_S
    while len(reports) < engine.tp and time.monotonic() < deadline:
        for agent in engine.agents:
            reports += [report for report, _ in agent.poll()[0]]
        time.sleep(0.005)
    assert len(reports) == engine.tp
    return reports


def hand_off(p: Engine, d: Engine, transfer: TransferId = TRANSFER) -> None:
    """Move a prompt's blocks, and compare them."""
    there, here = table(150, p.block), table(150, d.block)
    p.fill(there, seed=1)
    for cache in d.caches:
        cache.zero_()
    p.step(offers=[OfferBlocks(transfer, (Span(0, 0, there),))])
    d.step(receives=[replace(receive(p.source(), here, 150), transfer=transfer)])
    assert [report.failures for report in finished(d)] == [()]
    assert torch.equal(d.content(here, 150), p.content(there, 150))


def notices(engine: Engine, kind: NoticeKind, count: int) -> list[TransferEvent]:
    found: list[TransferEvent] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline:
        for agent in engine.agents:
            found += [notice for notice in agent.poll()[1] if notice.kind is kind]
        time.sleep(0.005)
    return found
