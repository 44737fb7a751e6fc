"""Words shared by every layer. No behaviour, no engine, no torch."""

from __future__ import annotations

from enum import Enum
from typing import NewType

JobId = NewType("JobId", int)
"""Number of one transfer, unique within a scheduler's lifetime; never reused."""


class TransferType(str, Enum):
    """Direction of a transfer, spelt as vLLM's offloading metrics spell it."""

    GPU_TO_CPU = "GPU_to_CPU"
    CPU_TO_GPU = "CPU_to_GPU"


class Tier(str, Enum):
    """Where a block can be found below the device."""

    HOST = "host"


class FailureCause(str, Enum):
    """Why a block could not be stored or loaded. Values are metric labels."""

    DIGEST = "digest"  # bytes differ from what was stored
    COPY = "copy"  # the copy raised
    DEADLINE = "deadline"  # not started or not finished in time
    MISSING = "missing"  # the tier no longer had it
    SKIPPED = "skipped"  # not tried, because an earlier block of the same job failed
