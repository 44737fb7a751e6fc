"""Scheduler to worker: blocks to copy between device and host memory. Worker to scheduler: reports.

The messages carry durations, not points in time: clocks of two processes are not comparable.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.types import FailureCause, JobId


class GroupBlocks(NamedTuple):
    """The blocks of one KV-cache group in one job, in prefix order.

    ``block_ids[i]`` on the device belongs to ``slots[i]`` in the host tier. A slot of -1 stands
    for a block that the tier lost between promise and plan; it counts as failed.
    """

    group: int
    block_ids: array[int]  # typecode q, as the copy loop wants it
    slots: array[int]


@dataclass(frozen=True)
class StoreBlocks:
    """Copy device blocks to slots, once the device has finished writing them."""

    job: JobId
    parts: tuple[GroupBlocks, ...]
    deadline_s: float


@dataclass(frozen=True)
class LoadBlocks:
    """Copy slots to device blocks that belong to ``req_id``.

    ``sync`` loads must be complete before this step's forward; others are reported when done.
    """

    job: JobId
    req_id: str
    parts: tuple[GroupBlocks, ...]
    deadline_s: float
    sync: bool


@dataclass
class OffloadInstructions:
    """One step's copies between device and host memory, for every worker."""

    stores: list[StoreBlocks] = field(default_factory=list)
    loads: list[LoadBlocks] = field(default_factory=list)


class FailedBlock(NamedTuple):
    """One block that was not copied. Its device or slot bytes are unknown."""

    group: int
    block_id: int
    slot: int
    cause: FailureCause


@dataclass(frozen=True)
class JobReport:
    """One worker's answer to one job. An empty ``failures`` means that every block is there.

    ``seconds``: duration of the copies of a load or store.
    """

    job: JobId
    failures: tuple[FailedBlock, ...] = ()
    seconds: float = 0.0
