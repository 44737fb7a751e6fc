"""What the plan tells the workers to do, and what they answer.

Sent from the scheduler to every worker and back through the engine's own channel, once per step.
Durations, not points in time: clocks of two processes are not comparable.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.types import FailureCause, JobId


class Part(NamedTuple):
    """The blocks of one KV-cache group in one job, in prefix order.

    ``block_ids[i]`` on the device belongs to ``slots[i]`` in the host tier. A slot of -1 stands
    for a block that the tier lost between promise and plan; it counts as failed.
    """

    group: int
    block_ids: array[int]  # typecode q, as the copy loop wants it
    slots: array[int]


@dataclass(frozen=True)
class Store:
    """Copy device blocks to slots, once the device has finished writing them."""

    job: JobId
    parts: tuple[Part, ...]
    deadline_s: float


@dataclass(frozen=True)
class Load:
    """Copy slots to device blocks that belong to ``req_id``.

    ``sync`` loads must be complete before this step's forward; others are reported when done.
    """

    job: JobId
    req_id: str
    parts: tuple[Part, ...]
    deadline_s: float
    sync: bool


@dataclass
class Instructions:
    """One step's work for every worker."""

    stores: list[Store] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class Failure(NamedTuple):
    """One block that was not copied. Its device or slot bytes are unknown."""

    group: int
    block_id: int
    slot: int
    cause: FailureCause


@dataclass(frozen=True)
class Report:
    """One worker's answer to one job. An empty ``failures`` means every block is there."""

    job: JobId
    failures: tuple[Failure, ...] = ()
