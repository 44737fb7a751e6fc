"""Messages between scheduler and workers of the connector, through vLLM's own channels."""

from __future__ import annotations

from dataclasses import dataclass, field

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
from kvconnect.tiers.messages import TierAnswer, TierInstructions


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker as it came up: how many slots its host tier has, their size in bytes, where it
    hands out blocks (None if it does not), and whether it can receive any."""

    num_slots: int
    slot_bytes: int
    address: tuple[str, int] | None = None
    receives: bool = False


@dataclass
class StepInstructions(KVConnectorMetadata):
    """One step's work, scheduler to every worker; ``epoch`` numbers the engine's incarnation.
    ``idle``: the step computes nothing, it is made for the sake of transfers. ``greet``: workers
    are to say who they are; vLLM hands that over for one connector only."""

    offload: OffloadInstructions = field(default_factory=OffloadInstructions)
    tiers: TierInstructions = field(default_factory=TierInstructions)
    disaggregation: DisaggregationInstructions = field(default_factory=DisaggregationInstructions)
    epoch: int = 0
    idle: bool = False
    greet: bool = False


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Jobs that ended, workers to scheduler; one entry per worker and job.

    ``reports`` are those of the host tier, ``arrivals`` those of hand-offs received, ``answers``
    those of the tiers below host memory; ``notices`` say what the other side did with a hand-off
    sent. ``hellos`` are those of workers that were asked, by (pipeline rank, tensor rank).
    """

    reports: list[JobReport] = field(default_factory=list)
    arrivals: list[ReceiveReport] = field(default_factory=list)
    notices: list[TransferEvent] = field(default_factory=list)
    answers: list[TierAnswer] = field(default_factory=list)
    hellos: dict[tuple[int, int], WorkerHello] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Return this step's reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(
            self.reports + other.reports,
            self.arrivals + other.arrivals,
            self.notices + other.notices,
            self.answers + other.answers,
            self.hellos | other.hellos,
        )
