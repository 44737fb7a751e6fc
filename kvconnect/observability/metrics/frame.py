"""What ``kvconnect top`` shows and records: one moment of some endpoints, as frozen structs.

Rates are per second over the interval between two scrapes, ``None`` while there is only one.
"""

from __future__ import annotations

import msgspec


class Lookups(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for beyond the device's own prefix hits, and the share that was found."""

    query_tokens_per_s: float | None
    hit_share: float | None


class TransferRates(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer type. ``copy_bytes_per_s`` is bytes over wire time: the speed of one copy."""

    transfer_type: str
    bytes_total: float
    bytes_per_s: float | None = None
    operations_per_s: float | None = None
    seconds_per_operation: float | None = None
    copy_bytes_per_s: float | None = None


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """One tier. What a tier does not say is ``None``."""

    tier: str
    hit_tokens_total: float
    hit_tokens_per_s: float | None = None
    evicted_blocks_per_s: float | None = None
    used_bytes: float | None = None
    capacity_bytes: float | None = None
    available: bool | None = None


class PeerTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that this one exchanges pages with."""

    peer: str
    bytes_total: float
    failures_total: float
    bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds device blocks, and jobs not yet done by every rank."""

    held_blocks: dict[str, float]
    jobs_in_flight: dict[str, float]
    oldest_hold_s: float


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One histogram of seconds over the interval; ``p99_s`` is the upper bound of the bucket that
    it is in, ``None`` beyond the last one's."""

    name: str
    per_s: float
    mean_s: float
    p99_s: float | None


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """A counter of what went wrong that is not 0; ``label`` is its cause or the like."""

    name: str
    label: str
    total: float
    per_s: float | None = None


class UpstreamRates(msgspec.Struct, frozen=True, kw_only=True):
    """One engine behind a router."""

    role: str
    url: str
    up: bool
    in_flight: float
    tokens: float


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """What a router says of itself."""

    queue: float
    requests_per_s: dict[str, float] | None
    imbalance: dict[str, float]
    upstreams: tuple[UpstreamRates, ...]


class EndpointFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One ``/metrics``. ``kind`` is ``vllm``, ``sglang`` or ``router``; ``error`` says why it is
    down."""

    url: str
    error: str = ""
    kind: str = ""
    seconds: float | None = None
    lookups: Lookups | None = None
    transfers: tuple[TransferRates, ...] = ()
    tiers: tuple[TierUse, ...] = ()
    peers: tuple[PeerTraffic, ...] = ()
    ledger: LedgerCounts | None = None
    phases: tuple[Phase, ...] = ()
    failures: tuple[FailureCount, ...] = ()
    router: Router | None = None

    @property
    def up(self) -> bool:
        """Whether its last scrape could be had and read."""
        return not self.error


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All endpoints at one moment; ``at`` is seconds since 1970. A line of a recorded file."""

    at: float
    endpoints: tuple[EndpointFrame, ...]
