"""Messages between the connector's scheduler and workers, sent through vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    ReceiveReport,
    TransferEvent,
)
from kvconnect.offload.messages import JobReport, OffloadInstructions
from kvconnect.protocol.identity import Identity
from kvconnect.tiers.messages import TierAnswer, TierInstructions
from kvconnect.types import Endpoint


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker after its start: its host slots and their size in bytes, the (host, port) where it
    hands off blocks (None if it does not), whether it receives blocks, the (host, port) where it
    serves blocks of host memory (None if it does not), which weights it has, and whether it stores
    in its slots and has the secondary tiers, or another worker does."""

    num_slots: int
    slot_bytes: int
    address: tuple[str, int] | None = None
    receives: bool = False
    serves: tuple[str, int] | None = None
    identity: Identity = field(default_factory=Identity)
    stores: bool = True


def endpoints_of(
    addresses: Mapping[tuple[int, int], tuple[str, int] | None],
) -> tuple[Endpoint, ...]:
    """Return the endpoints of workers, by (pp_rank, tp_rank), that have an address; in order."""
    return tuple(
        Endpoint(tp_rank, pp_rank, address[0], address[1])
        for (pp_rank, tp_rank), address in sorted(addresses.items())
        if address is not None
    )


class LookAtWeights(NamedTuple):
    """An order to look whether the weights have changed; ``version``: they are declared to have it,
    or "". ``reset``: the engine has forgotten all KV. Orders are numbered from 1 on."""

    number: int
    version: str
    reset: bool = False


class LookedAtWeights(NamedTuple):
    """A worker's weights, with the number of the last order to look. ``mixed``: the engine's caches
    may have KV of former ones, too."""

    number: int
    identity: Identity
    mixed: bool = False


@dataclass
class StepInstructions(KVConnectorMetadata):
    """One step's work, scheduler to every worker.

    ``epoch`` identifies the engine's incarnation. ``idle``: the step computes nothing and only
    serves transfers. ``handoffs``: some of these are hand-offs. ``greet``: workers answer with
    their hellos, which vLLM itself passes on for one connector only. ``computes``: the step
    computes KV. ``timed``: number of the step if its time is measured; 0 otherwise. ``weights``:
    the weights may have changed, and workers look.
    """

    offload: OffloadInstructions = field(default_factory=OffloadInstructions)
    tiers: TierInstructions = field(default_factory=TierInstructions)
    disaggregation: DisaggregationInstructions = field(default_factory=DisaggregationInstructions)
    epoch: int = 0
    idle: bool = False
    handoffs: bool = False
    computes: bool = False
    greet: bool = False
    timed: int = 0
    weights: LookAtWeights | None = None


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Results of a step, workers to scheduler. Finished jobs have one entry per worker.

    Attributes:
        reports: jobs of the host tier.
        arrivals: received hand-offs.
        notices: what readers did with sent hand-offs.
        answers: jobs of the secondary tiers.
        hellos: answers to ``greet``, by (pipeline rank, tensor rank).
        timed: ``timed`` of the step. vLLM passes on no report of some steps without tokens.
        identities: the weights of workers that looked, or were told of new ones, in the same way.
    """

    reports: list[JobReport] = field(default_factory=list)
    arrivals: list[ReceiveReport] = field(default_factory=list)
    notices: list[TransferEvent] = field(default_factory=list)
    answers: list[TierAnswer] = field(default_factory=list)
    hellos: dict[tuple[int, int], WorkerHello] = field(default_factory=dict)
    timed: int = 0
    identities: dict[tuple[int, int], LookedAtWeights] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Return whether there is nothing to report; asked in every step."""
        jobs = self.reports or self.arrivals or self.notices or self.answers
        return not (jobs or self.hellos or self.timed or self.identities)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Return the combined reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(
            self.reports + other.reports,
            self.arrivals + other.arrivals,
            self.notices + other.notices,
            self.answers + other.answers,
            self.hellos | other.hellos,
            max(self.timed, other.timed),
            self.identities | other.identities,
        )
