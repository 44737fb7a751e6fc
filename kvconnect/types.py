"""Types that all packages share. They have no behaviour and import no engine and no torch."""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import NamedTuple, NewType

JobId = NewType("JobId", int)
"""Number of a transfer, never reused in a scheduler's lifetime."""

TransferId = NewType("TransferId", bytes)
"""16 random bytes that identify a hand-off between engines, also in tickets."""


class Block(NamedTuple):
    """A full block by its content: the number of its KV-cache group, and the engine's chained hash
    of its tokens and all before."""

    group: int
    block_hash: bytes


NULL_BLOCK = 0
"""The engine's placeholder for blocks outside a window; never copied."""


class TransferType(StrEnum):
    """Direction of a transfer. Values are spelt as in vLLM's offloading metrics."""

    GPU_TO_CPU = "GPU_to_CPU"
    CPU_TO_GPU = "CPU_to_GPU"
    CPU_TO_DISK = "CPU_to_DISK"
    DISK_TO_CPU = "DISK_to_CPU"
    CPU_TO_REMOTE = "CPU_to_REMOTE"
    REMOTE_TO_CPU = "REMOTE_to_CPU"
    CPU_TO_PEER = "CPU_to_PEER"
    PEER_TO_CPU = "PEER_to_CPU"
    SEND = "SEND"
    RECV = "RECV"


class Tier(StrEnum):
    """A storage tier below the device."""

    HOST = "host"
    DISK = "disk"
    PEER = "peer"  # host memory of other engines
    REMOTE = "remote"


class PromptSource(StrEnum):
    """Where the KV of a prompt's token came from."""

    DEVICE = "device"
    HOST = Tier.HOST.value
    DISK = Tier.DISK.value
    PEER = Tier.PEER.value
    REMOTE = Tier.REMOTE.value
    HANDOFF = "handoff"
    COMPUTED = "computed"


class FailureCause(StrEnum):
    """Why a block could not be stored or loaded. Values are metric labels."""

    DIGEST = "digest"  # bytes differ from what was stored
    COPY = "copy"  # the copy raised an error
    DEADLINE = "deadline"  # not started or not finished in time
    MISSING = "missing"  # the tier no longer had the block
    SKIPPED = "skipped"  # not tried, because an earlier block of the same job failed
    PEER = "peer"  # the peer died or its connection broke
    REFUSED = "refused"  # a ticket or handshake was rejected, on either side
    GONE = "gone"  # the peer no longer has the blocks: expired or aborted
    PROMPT = "prompt"  # the peer computes another prompt


class Rank(NamedTuple):
    """A worker's tensor- and pipeline-parallel rank, each with the number of ranks."""

    tp_rank: int
    tp: int
    pp_rank: int
    pp: int


class Endpoint(NamedTuple):
    """Ranks of a worker, and the address that it listens at."""

    tp_rank: int
    pp_rank: int
    host: str
    port: int


class Origin(NamedTuple):
    """One worker of one incarnation of a prefill engine. ``engine_id`` "": any engine at the
    endpoint."""

    endpoint: Endpoint
    engine_id: str
    epoch: int


class Span(NamedTuple):
    """Blocks of one KV-cache group of one request, in prefix order.

    ``block_ids[i]`` on the device is the request's block number ``first + i``.
    """

    group: int
    first: int
    block_ids: array[int]
