"""Computes rates from two scrapes of an endpoint, without I/O or clock.

Rates are per second between the scrapes, ``None`` with one scrape. Series of one metric are summed
over engines, and over ranks unless every rank counts the same. A counter that fell belongs to a
restarted engine: its value is its rise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import NamedTuple

import msgspec

from kvconnect.observability.metrics.catalog import ALIKE, CATALOG, RANK_LABELS, SGLANG, VLLM
from kvconnect.types import Tier, TransferType

Labels = frozenset[tuple[str, str]]
Samples = Mapping[str, Mapping[Labels, float]]
"""Sample name as in the scrape -> labels -> value."""

FAILURES = {
    "failed_blocks": "cause",
    "failed_requests": "cause",
    "quarantined_blocks": "cause",
    "skipped_store_blocks": "reason",
    "expired_jobs": "transfer_type",
    "store_failed_blocks": "outcome",
    "tier_skipped_blocks": "",
    "handoff_failures": "cause",
    "handoff_refused": "field",
    "handoff_expired_leases": "",
    "handoff_digest_failed_blocks": "",
    "thread_failures": "thread",
}
"""Failure counters -> the label to show."""
ROUTER = "kvconnect_router_"
_KINDS = {f"{VLLM}kvconnect_": "vllm", f"{SGLANG}kvconnect_": "sglang", ROUTER: "router"}
_ROUTER_PHASES = {"ttft_seconds": "mode", "added_latency_seconds": "mode"}
_PHASES = {
    row.name: row.label.name if row.label else ""
    for row in CATALOG
    if row.kind == "histogram" and row.unit == "seconds" and row.name != "transfer_wire_seconds"
}
_PERCENTILE = 0.99


class Lookups(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens beyond the device's own prefix hits, and the share of hits."""

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
    """One tier. ``None`` means that the tier does not publish the figure."""

    tier: str
    hit_tokens_total: float
    hit_tokens_per_s: float | None = None
    evicted_blocks_per_s: float | None = None
    used_bytes: float | None = None
    capacity_bytes: float | None = None
    available: bool | None = None


class PeerTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Pages exchanged with one peer."""

    peer: str
    bytes_total: float
    failures_total: float
    bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Device blocks by holder, and jobs that not every rank has finished."""

    held_blocks: dict[str, float]
    jobs_in_flight: dict[str, float]
    oldest_hold_s: float


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One histogram of seconds over the interval. ``p99_s`` is its bucket's upper bound, ``None``
    for the last bucket."""

    name: str
    per_s: float
    mean_s: float
    p99_s: float | None


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """A failure counter above 0; ``label`` is its cause, or another label."""

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
    """Queue, request rates and engines of a router."""

    queue: float
    requests_per_s: dict[str, float] | None
    imbalance: dict[str, float]
    upstreams: tuple[UpstreamRates, ...]


class EndpointFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint. ``kind``: ``vllm``, ``sglang`` or ``router``; ``error``: why it is down."""

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
        """Whether the last scrape succeeded."""
        return not self.error


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All endpoints at one time; ``at`` is seconds since 1970. One line of a recording."""

    at: float
    endpoints: tuple[EndpointFrame, ...]


class Scrape(NamedTuple):
    """One scrape of an endpoint. ``at``: seconds of a monotonic clock; ``error``: why it failed."""

    url: str
    at: float
    samples: Samples
    error: str = ""


class _ScrapePair:
    """Two scrapes, and the metrics in them whose names start with ``prefix``."""

    def __init__(self, prefix: str, before: Scrape | None, after: Scrape) -> None:
        self._prefix = prefix
        self._now = after.samples
        known = before is not None and not before.error and after.at > before.at
        self._then: Samples | None = before.samples if before is not None and known else None
        self.seconds = after.at - before.at if before is not None and known else None

    def series(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of every series with ``labels``."""
        wanted = labels.items()
        for found, value in self._now.get(self._prefix + name, {}).items():
            if wanted <= (named := dict(found)).items():
                yield named, value

    def values(self, name: str, label: str) -> list[str]:
        """Return the values of a label in the scrape's order; [""] for no label."""
        return list(dict.fromkeys(found.get(label, "") for found, _ in self.series(name)))

    def total(self, name: str, **labels: str) -> float:
        return added(name, self.series(name, **labels))

    def highest(self, name: str) -> float:
        return max((value for _, value in self.series(name)), default=0.0)

    def rise(self, name: str, **labels: str) -> float | None:
        """Return the rise of counters between the scrapes, None with one scrape."""
        if self._then is None:
            return None
        then = self._then.get(self._prefix + name, {})
        risen = []
        for named, value in self.series(name, **labels):
            old = then.get(frozenset(named.items()), 0.0)
            risen.append((named, value if value < old else value - old))
        return added(name, risen)

    def rate(self, name: str, **labels: str) -> float | None:
        return over(self.rise(name, **labels), self.seconds)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return a gauge's sum by value of a label."""
        return {
            value: self.total(name, **{label: value} if label else {})
            for value in self.values(name, label)
        }


def added(name: str, found: Iterable[tuple[Mapping[str, str], float]]) -> float:
    """Return the sum of a metric's series; of ranks that count alike, the largest."""
    if name not in ALIKE:
        return sum(value for _, value in found)
    engines: dict[Labels, float] = {}
    for named, value in found:
        engine = frozenset(pair for pair in named.items() if pair[0] not in RANK_LABELS)
        engines[engine] = max(value, engines.get(engine, value))
    return sum(engines.values())


def over(value: float | None, whole: float | None) -> float | None:
    """Return ``value / whole``, None if either is unknown or ``whole`` is 0."""
    return value / whole if value is not None and whole else None


def endpoint(before: Scrape | None, after: Scrape) -> EndpointFrame:
    """Return an endpoint's frame, with rates if the scrape ``before`` succeeded."""
    if after.error:
        return EndpointFrame(url=after.url, error=after.error)
    for prefix, kind in _KINDS.items():
        if any(name.startswith(prefix) for name in after.samples):
            read = _ScrapePair(prefix, before, after)
            return _router(after.url, read) if prefix == ROUTER else _engine(after.url, kind, read)
    return EndpointFrame(url=after.url, error="no metrics of KVConnect there")


def _engine(url: str, kind: str, read: _ScrapePair) -> EndpointFrame:
    asked, hits = read.rise("query_tokens_total"), read.rise("hit_tokens_total")
    # Without a host tier, skipped stores are not failures.
    unused = "" if read.total("host_bytes_capacity") else "skipped_store_blocks"
    return EndpointFrame(
        url=url,
        kind=kind,
        seconds=read.seconds,
        lookups=Lookups(query_tokens_per_s=over(asked, read.seconds), hit_share=over(hits, asked)),
        transfers=tuple(_transfer(read, each.value) for each in TransferType),
        tiers=tuple(_tier(read, each.value) for each in Tier),
        peers=tuple(_peer(read, peer) for peer in read.values("handoff_peer_bytes_total", "peer")),
        ledger=LedgerCounts(
            held_blocks=read.by("ledger_held_blocks", "owner"),
            jobs_in_flight=read.by("jobs_in_flight", "transfer_type"),
            oldest_hold_s=read.highest("ledger_oldest_hold_seconds"),
        ),
        phases=_phases(read, _PHASES),
        failures=_failures(read, {n: label for n, label in FAILURES.items() if n != unused}),
    )


def _transfer(read: _ScrapePair, kind: str) -> TransferRates:
    moved = read.rise("transfer_bytes_total", transfer_type=kind)
    busy = read.rise("transfer_seconds_total", transfer_type=kind)
    operations = read.rise("transfer_operations_total", transfer_type=kind)
    return TransferRates(
        transfer_type=kind,
        bytes_total=read.total("transfer_bytes_total", transfer_type=kind),
        bytes_per_s=over(moved, read.seconds),
        operations_per_s=over(operations, read.seconds),
        seconds_per_operation=over(busy, operations),
        copy_bytes_per_s=over(moved, busy),
    )


def _tier(read: _ScrapePair, tier: str) -> TierUse:
    hits = read.total("hit_tokens_total", tier=tier)
    rate = read.rate("hit_tokens_total", tier=tier)
    if tier == Tier.HOST.value:
        return TierUse(
            tier=tier,
            hit_tokens_total=hits,
            hit_tokens_per_s=rate,
            evicted_blocks_per_s=read.rate("evicted_blocks_total", tier=tier),
            used_bytes=read.total("host_bytes_used"),
            capacity_bytes=read.total("host_bytes_capacity"),
        )
    # Only the first rank publishes it. With several engines, all must report the tier available.
    available = [value for _, value in read.series("tier_available", tier=tier)]
    return TierUse(
        tier=tier,
        hit_tokens_total=hits,
        hit_tokens_per_s=rate,
        used_bytes=read.total("tier_bytes_used", tier=tier),
        capacity_bytes=read.total("tier_bytes_capacity", tier=tier),
        available=bool(available) and all(available),
    )


def _peer(read: _ScrapePair, peer: str) -> PeerTraffic:
    moved = read.rise("handoff_peer_bytes_total", peer=peer)
    busy = read.rise("handoff_peer_seconds_total", peer=peer)
    return PeerTraffic(
        peer=peer,
        bytes_total=read.total("handoff_peer_bytes_total", peer=peer),
        failures_total=read.total("handoff_peer_failures_total", peer=peer),
        bytes_per_s=over(moved, read.seconds),
        copy_bytes_per_s=over(moved, busy),
    )


def _phases(read: _ScrapePair, histograms: Mapping[str, str]) -> tuple[Phase, ...]:
    """Return the histograms with samples in the interval, slowest first."""
    found = []
    for name, label in histograms.items():
        for value in read.values(f"{name}_count", label):
            labels = {label: value} if label else {}
            count = read.rise(f"{name}_count", **labels)
            seconds = read.rise(f"{name}_sum", **labels)
            if not count or seconds is None or read.seconds is None:
                continue
            found.append(
                Phase(
                    name=f"{name.removesuffix('_seconds')} {value}".strip(),
                    per_s=count / read.seconds,
                    mean_s=seconds / count,
                    p99_s=_percentile(read, name, labels),
                )
            )
    return tuple(sorted(found, key=lambda phase: -phase.mean_s))


def _percentile(read: _ScrapePair, name: str, labels: Mapping[str, str]) -> float | None:
    bounds = sorted({float(found["le"]) for found, _ in read.series(f"{name}_bucket", **labels)})
    counts = dict.fromkeys(bounds, 0.0)
    for text in read.values(f"{name}_bucket", "le"):
        counts[float(text)] += read.rise(f"{name}_bucket", **labels, le=text) or 0.0
    whole = counts.get(inf, 0.0)
    found = next((bound for bound in bounds if counts[bound] >= whole * _PERCENTILE), inf)
    return found if found < inf else None


def _failures(read: _ScrapePair, counters: Mapping[str, str]) -> tuple[FailureCount, ...]:
    found = []
    for name, label in counters.items():
        for value in read.values(f"{name}_total", label):
            labels = {label: value} if label else {}
            total = read.total(f"{name}_total", **labels)
            if total:
                per_s = read.rate(f"{name}_total", **labels)
                found.append(FailureCount(name=name, label=value, total=total, per_s=per_s))
    return tuple(found)


def _router(url: str, read: _ScrapePair) -> EndpointFrame:
    outcomes = {
        outcome: read.rate("requests_total", outcome=outcome)
        for outcome in read.values("requests_total", "outcome")
    }
    rates = {name: rate for name, rate in outcomes.items() if rate is not None}
    upstreams = tuple(
        UpstreamRates(
            role=found["role"],
            url=found["upstream"],
            up=bool(value),
            in_flight=read.total("in_flight", role=found["role"], upstream=found["upstream"]),
            tokens=read.total("tokens_in_flight", role=found["role"], upstream=found["upstream"]),
        )
        for found, value in read.series("upstream_up")
    )
    return EndpointFrame(
        url=url,
        kind="router",
        seconds=read.seconds,
        phases=_phases(read, _ROUTER_PHASES),
        failures=_failures(read, {"retries": "cause"}),
        router=Router(
            queue=read.total("queue"),
            requests_per_s=rates if read.seconds else None,
            imbalance=read.by("imbalance", "role"),
            upstreams=upstreams,
        ),
    )
