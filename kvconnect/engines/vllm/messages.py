"""What the two halves of the connector send each other through vLLM's own channels."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvconnect.plan.instructions import Instructions, Report


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker's host tier, as it came up: how many slots, and their size in bytes."""

    num_slots: int
    slot_bytes: int


@dataclass
class StepInstructions(KVConnectorMetadata):
    """One step's work, scheduler to every worker."""

    work: Instructions = field(default_factory=Instructions)


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Jobs that ended, workers to scheduler; one entry per worker and job."""

    reports: list[Report]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Return this step's reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports)
