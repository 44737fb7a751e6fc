"""Records the router's metrics; their rows are in ``observability/metrics/catalog.py``.

Every series reads 0 from the first scrape on. An engine's series exist from when it is added until
it is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, StrEnum
from itertools import product
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvconnect.observability.metrics.model import RouterMetric
from kvconnect.observability.metrics.router_catalog import ROUTER_CATALOG
from kvconnect.router.policy.choice import MODES, Cause, Mode, RoutingChoice, RoutingReason
from kvconnect.router.policy.expected_ttft import HANDOFF_DECISIONS
from kvconnect.router.policy.fleet_view import Role, TargetLoad
from kvconnect.router.policy.leaving import AfterDrain
from kvconnect.router.policy.ranking import RankingReason
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.fields import DROPPED
from kvconnect.router.requests.retries import Withheld
from kvconnect.router.supervisor import TaskKind


class RequestOutcome(StrEnum):
    """How a client's request ended."""

    OK = "ok"
    CONTINUED = "continued"  # whole, after its decode engine was lost or drained in mid-stream
    REJECTED = "rejected"  # 4xx, from the router or an engine
    FAILED = "failed"  # 5xx, before the first byte
    BROKEN = "broken"  # after the first byte
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # by the client


class CallOutcome(StrEnum):
    """How one request to an engine ended."""

    OK = "ok"
    REJECTED = "rejected"
    ERROR = "error"
    UNREACHABLE = "unreachable"
    CANCELLED = "cancelled"  # by the client, the deadline, the other engine's failure, or a drain


class ProbeOutcome(StrEnum):
    """How a probe of a pair of engines ended."""

    OK = "ok"
    COMPUTED = "computed"  # the decode engine computed the prompt itself
    FAILED = "failed"  # an engine reported an error, or was lost
    LATE = "late"
    REFUSED = "refused"  # 4xx, which shows nothing about KV: counts as passed
    VOID = "void"  # the router cannot open more connections


class RoleChange(StrEnum):
    """What became of a role that an engine was to change to by itself."""

    MADE = "made"
    REFUSED = "refused"  # it was not drained in time, or its probe failed
    NONE = "none"  # no engine may change to it


class InputKind(StrEnum):
    """Kind of unusable input from engines, or from sources of engines."""

    MODELS = "models"
    VERSION = "version"
    REGISTRY = "registry"  # of MooncakeConnector
    LOAD = "load"
    TICKET = "standing_ticket"  # of any kind
    FILE = "file"
    DNS = "dns"
    KUBERNETES = "kubernetes"
    ETCD = "etcd"


class EngineLoads(NamedTuple):
    """The loads of an engine's ranks."""

    role: Role
    url: str
    ranks: Sequence[TargetLoad]


_NO_MODE = ("none", "none")  # ended before a mode was chosen
_OF_CALLS = ("in_flight", "upstream_requests")  # a call may end after its engine was removed
_RETURN_REASONS = ("bytes", "full", "ended", "removed", "memory")  # of ``native/relay.c``
_REFUSAL_REASONS = ("address", "files", "memory")  # of a client's connection
_TICKET_OUTCOMES = ("ok", "failed")
_EVENT_OUTCOMES = ("ok", "replayed", "late", "lost", "refused")
_RECEIPT_OUTCOMES = ("ok", "missing")
_REPORT_OUTCOMES = ("ok", "discarded", "failed")


class _Ranks:
    """Gauges of ranks. An engine's number of ranks may change."""

    def __init__(self, own: Gauge, foreign: Gauge) -> None:
        self._own, self._foreign = own, foreign
        self._known: dict[tuple[str, str], int] = {}

    def known(self, role: str, url: str) -> bool:
        """Return whether an engine has ranks: it was added, and not removed."""
        return (role, url) in self._known

    def set(self, role: str, url: str, ranks: Sequence[TargetLoad]) -> None:
        """Set the loads of an engine's ranks; drop the series of its former ranks."""
        for rank, load in enumerate(ranks):
            self._own.labels(role, url, str(rank)).set(load.own)
            foreign = -1 if load.foreign is None else load.foreign
            self._foreign.labels(role, url, str(rank)).set(foreign)
        for rank in range(len(ranks), self._known.get((role, url), 0)):
            for gauge in (self._own, self._foreign):
                gauge.remove(role, url, str(rank))
        self._known[role, url] = len(ranks)
        if not ranks:
            del self._known[role, url]


class RouterMetrics:
    """Metrics of one router. Event loop only.

    Labels are closed sets (modes, reasons, outcomes) and the engines' URLs (``upstream``).
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._families: dict[str, Any] = {
            row.name: _metric(row, self._registry) for row in ROUTER_CATALOG
        }
        # Since the registry was last read: the library takes ten times as long for each.
        self._counted: dict[tuple[str, ...], int] = {}
        self._found: dict[tuple[str, ...], Any] = {}  # the library checks labels at each look-up
        self._ranks = _Ranks(self._families["tokens_in_flight"], self._families["foreign_tokens"])
        _create_series(self._families)

    @property
    def registry(self) -> CollectorRegistry:
        """The metrics, up to date when it is asked for."""
        counted, self._counted = self._counted, {}
        for (name, *labels), number in counted.items():
            if name not in _OF_CALLS or self._ranks.known(labels[0], labels[1]):
                self._series(name, *labels).inc(number)
        return self._registry

    def request(self, chosen: tuple[Mode, RoutingReason] | None, outcome: RequestOutcome) -> None:
        """Count a client's request that ended; ``chosen``: None before a mode was chosen."""
        mode, reason = chosen or _NO_MODE
        self._count(1, "requests", mode, reason, outcome)

    def chosen(self, choice: RoutingChoice) -> None:
        """Count the choice of an attempt's engines."""
        if (made := choice.handoff) is not None:
            self._count(1, "handoff_decisions", made.decision, made.reason)
        for role, target_choice in ((Role.PREFILL, choice.prefill), (Role.DECODE, choice.decode)):
            if isinstance(target_choice, TargetChoice):
                self._count(1, "picks", role, target_choice.why)

    def call_began(self, role: Role, url: str) -> None:
        """Count a request to an engine as in flight."""
        self._count(1, "in_flight", role, url)

    def call_ended(self, role: Role, url: str, outcome: CallOutcome) -> None:
        """Count a request to an engine that ended."""
        self._count(-1, "in_flight", role, url)
        self._count(1, "upstream_requests", role, url, outcome)

    def retry(self, role: Role, cause: Cause) -> None:
        """Count another attempt, after the request to an engine of ``role`` failed."""
        self._count(1, "retries", role, cause)

    def count(self, row: str, *labels: str) -> None:
        """Increment the counter ``row``."""
        self._count(1, row, *labels)

    def up(self, role: Role, url: str, *, up: bool) -> None:
        """Record whether an engine is up."""
        self._series("upstream_up", role, url).set(up)

    def tokens(self, engines: Iterable[EngineLoads]) -> None:
        """Set the gauges that change only on a scrape: tokens of every rank, and imbalance."""
        loads: dict[Role, list[int]] = {role: [] for role in Role}
        for role, url, ranks in engines:
            loads[role] += (load.own + (load.foreign or 0) for load in ranks)
            self._ranks.set(role.value, url, ranks)
        for role, totals in loads.items():
            mean = sum(totals) / max(1, len(totals))
            self._series("imbalance", role).set(max(totals) / mean if mean else 1)

    def hit(self, expected: int, found: int | None) -> None:
        """Count expected and found cached tokens; ``found``: None if the engine does not tell."""
        if found is not None:
            self._count(expected, "hit_tokens", "expected")
            self._count(found, "hit_tokens", "found")

    def queued(self, number: int) -> None:
        """Set the number of waiting requests."""
        self._families["queue"].set(number)

    def added(self, mode: Mode, seconds: float) -> None:
        """Record the time that the router added to an attempt."""
        self._series("added_latency_seconds", mode).observe(seconds)

    def first_byte(self, mode: Mode, seconds: float) -> None:
        """Record the time to the first byte of a stream."""
        self._series("ttft_seconds", mode).observe(seconds)

    def add_engine(self, role: Role, url: str) -> None:
        """Create the series of an engine, at 0."""
        for name, labels in _engine_series(role, url):
            self._families[name].labels(*labels)
        self._ranks.set(role.value, url, (TargetLoad(),))

    def remove_engine(self, role: Role, url: str) -> None:
        """Remove the series of an engine."""
        for name, labels in _engine_series(role, url):
            self._families[name].remove(*labels)
            self._found.pop((name, *labels), None)
            self._counted.pop((name, *labels), None)
        self._ranks.set(role.value, url, ())

    def _count(self, number: int, *name_and_labels: str) -> None:
        self._counted[name_and_labels] = self._counted.get(name_and_labels, 0) + number

    def _series(self, *name_and_labels: str) -> Any:
        found = self._found.get(name_and_labels)
        if found is None:
            name, *labels = name_and_labels
            found = self._found[name_and_labels] = self._families[name].labels(*labels)
        return found


_CLASSES = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


def _metric(row: RouterMetric, registry: CollectorRegistry) -> Any:
    buckets: dict[str, Any] = {"buckets": row.buckets} if row.buckets else {}
    name = f"kvconnect_router_{row.name}"
    return _CLASSES[row.kind](name, row.help, row.labels, registry=registry, **buckets)


def _engine_series(role: Role, url: str) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Yield name and labels of every series of an engine, except those of its ranks."""
    name = role.value
    yield "in_flight", (name, url)
    yield "upstream_up", (name, url)
    for outcome in CallOutcome:
        yield "upstream_requests", (name, url, outcome.value)
    for result in _EVENT_OUTCOMES:
        yield "kv_events", (name, url, result)
    for result in _REPORT_OUTCOMES:
        yield "load_reports", (name, url, result)
    if role is Role.PREFILL:
        for result in _TICKET_OUTCOMES:
            yield "standing_ticket_fetches", (url, result)
    else:
        for result in _RECEIPT_OUTCOMES:
            yield "stream_receipts", (url, result)


def _create_series(families: Mapping[str, Any]) -> None:
    """Create every series, so that it reads 0 before its first event."""
    for mode, reason in [_NO_MODE, *((m.value, r.value) for m, r in MODES)]:
        for outcome in RequestOutcome:
            families["requests"].labels(mode, reason, outcome.value)
    for chosen in Mode:
        families["added_latency_seconds"].labels(chosen.value)
        families["ttft_seconds"].labels(chosen.value)
    closed: dict[str, Iterable[str]] = {
        "probes": ProbeOutcome,
        "refused_answers": InputKind,
        "task_failures": TaskKind,
        "withheld_retries": Withheld,
        "lost_streams": AfterLoss,
        "drained_streams": AfterDrain,
        "relay_returns": _RETURN_REASONS,
        "refused_connections": _REFUSAL_REASONS,
        "dropped_fields": DROPPED,
        "hit_tokens": ("expected", "found"),
    }
    for name, values in closed.items():
        for value in values:
            families[name].labels(value.value if isinstance(value, Enum) else value)
    for role in Role:
        families["imbalance"].labels(role.value).set(1)
        for why in RankingReason:
            families["picks"].labels(role.value, why.value)
        for cause in get_args(Cause):
            families["retries"].labels(role.value, cause)
    _create_decisions(families)


def _create_decisions(families: Mapping[str, Any]) -> None:
    """Create the series of what the router decides about hand-offs and roles."""
    for decision, reason in HANDOFF_DECISIONS:
        families["handoff_decisions"].labels(decision, reason.value)
    for role, change in product(Role, RoleChange):
        families["role_changes"].labels(role.value, change.value)
