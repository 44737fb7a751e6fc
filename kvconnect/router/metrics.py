"""The router's own metrics, one row each. Every series exists, as 0, from the first scrape on;
those of an engine from when it is added until it is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvconnect.router.fleet.upstreams import Upstream
from kvconnect.router.policy.choice import (
    MODES,
    Cause,
    Mode,
    RoutingChoice,
    RoutingReason,
    TargetChoice,
)
from kvconnect.router.policy.loads import Role, TargetLoad
from kvconnect.router.policy.ranking import RankingReason
from kvconnect.router.supervisor import TaskKind


class RequestOutcome(str, Enum):
    """How a client's request ended."""

    OK = "ok"
    REJECTED = "rejected"  # 4xx, of the router or an engine
    FAILED = "failed"  # 5xx, before the first byte
    BROKEN = "broken"  # after the first byte
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # by the client


class UpstreamOutcome(str, Enum):
    """How one leg ended."""

    OK = "ok"
    REJECTED = "rejected"
    ERROR = "error"
    UNREACHABLE = "unreachable"
    CANCELLED = "cancelled"  # by the client, the deadline, or the other leg's failure


class ProbeOutcome(str, Enum):
    """How a probe of a pair of engines ended."""

    OK = "ok"
    COMPUTED = "computed"  # the decode engine computed the prompt itself
    FAILED = "failed"  # an engine failed it, or was lost
    LATE = "late"
    REFUSED = "refused"  # 4xx, which says nothing about KV: taken for ok
    VOID = "void"  # the router could not try


class What(str, Enum):
    """What an answer or an entry that could not be used was about."""

    MODELS = "models"
    VERSION = "version"
    REGISTRY = "registry"  # of MooncakeConnector
    LOAD = "load"
    CARD = "card"
    FILE = "file"
    DNS = "dns"
    KUBERNETES = "kubernetes"
    ETCD = "etcd"


class RouterMetric(NamedTuple):
    """One metric: its name after ``kvconnect_router_``, what it counts, its labels."""

    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_LATENCY = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
_TTFT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

ROWS = (
    RouterMetric("requests", Counter, "Client requests.", ("mode", "reason", "outcome")),
    RouterMetric("leg_requests", Counter, "Requests to engines.", ("leg", "upstream", "outcome")),
    RouterMetric("picks", Counter, "Engines picked for a leg, by why.", ("leg", "why")),
    RouterMetric("retries", Counter, "Attempts after a failed one.", ("leg", "cause")),
    RouterMetric("probes", Counter, "Probes that had KV move between two engines.", ("outcome",)),
    RouterMetric("hit_tokens", Counter,
        "Prompt tokens expected and found in prefill engines' caches, "
        "of requests whose answer tells.", ("which",)),
    RouterMetric("kv_events", Counter, "Messages about caches.", ("leg", "upstream", "outcome")),
    RouterMetric("card_fetches", Counter, "Cards asked for.", ("upstream", "outcome")),
    RouterMetric("load_reports", Counter, "Loads asked for.", ("leg", "upstream", "outcome")),
    RouterMetric("refused_answers", Counter,
        "Answers of engines, and entries of sources of engines, "
        "that could not be used.", ("what",)),
    RouterMetric("task_failures", Counter, "Errors of background tasks.", ("task",)),
    RouterMetric("queue", Gauge, "Requests that wait for their turn."),
    RouterMetric("in_flight", Gauge, "Open requests to engines.", ("leg", "upstream")),
    RouterMetric("upstream_up", Gauge, "1 while an engine answers.", ("leg", "upstream")),
    RouterMetric("tokens_in_flight", Gauge, "Prompt tokens of open requests.",
        ("leg", "upstream", "rank")),
    RouterMetric("foreign_tokens", Gauge, "Tokens that are not the router's own, -1: unknown.",
        ("leg", "upstream", "rank")),
    RouterMetric("imbalance", Gauge, "Tokens of the busiest rank over their mean; 1 while idle.",
        ("leg",)),
    RouterMetric("added_latency_seconds", Histogram,
        "Time that the router itself added: until both requests to engines were written, "
        "without the wait for prefill in pull mode.",
        ("mode",), _LATENCY),
    RouterMetric("ttft_seconds", Histogram,
        "Request to first byte of a streamed answer.", ("mode",), _TTFT),
)  # fmt: skip

_NO_MODE = ("none", "none")  # turned away before a mode was chosen
_CARD_OUTCOMES = ("ok", "failed")
_EVENT_OUTCOMES = ("ok", "replayed", "late", "lost", "refused")
_REPORT_OUTCOMES = ("ok", "discarded", "failed")


class _Ranks:
    """The gauges of engines' ranks, which come and go."""

    def __init__(self, own: Gauge, foreign: Gauge) -> None:
        self._own, self._foreign = own, foreign
        self._known: dict[tuple[str, str], int] = {}

    def set(self, leg: str, url: str, ranks: Sequence[TargetLoad]) -> None:
        """An engine has these loads now, and no further ranks."""
        for rank, load in enumerate(ranks):
            self._own.labels(leg, url, str(rank)).set(load.own)
            foreign = -1 if load.foreign is None else load.foreign
            self._foreign.labels(leg, url, str(rank)).set(foreign)
        for rank in range(len(ranks), self._known.get((leg, url), 0)):
            for gauge in (self._own, self._foreign):
                gauge.remove(leg, url, str(rank))
        self._known[leg, url] = len(ranks)
        if not ranks:
            del self._known[leg, url]


class RouterMetrics:
    """Counts of one router. Used on the event loop only.

    Labels are closed sets: modes, reasons, outcomes; and the engines' URLs (``upstream``).
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of: dict[str, Any] = {row.name: _made(row, self.registry) for row in ROWS}
        gauges = (self._of["tokens_in_flight"], self._of["foreign_tokens"])
        self._ranks = _Ranks(*gauges)
        _create(self._of)

    def request(self, chosen: tuple[Mode, RoutingReason] | None, outcome: RequestOutcome) -> None:
        """A client's request ended; ``chosen`` None: before a mode was chosen."""
        mode, reason = (chosen[0].value, chosen[1].value) if chosen else _NO_MODE
        self._of["requests"].labels(mode, reason, outcome.value).inc()

    def chosen(self, choice: RoutingChoice) -> None:
        """An attempt was given its engines."""
        for role, place in ((Role.PREFILL, choice.prefill), (Role.DECODE, choice.decode)):
            if isinstance(place, TargetChoice):
                self._of["picks"].labels(role.value, place.why.value).inc()

    def leg_began(self, role: Role, url: str) -> None:
        """A request to an engine begins."""
        self._of["in_flight"].labels(role.value, url).inc()

    def leg_ended(self, role: Role, url: str, outcome: UpstreamOutcome) -> None:
        """It is over."""
        self._of["in_flight"].labels(role.value, url).dec()
        self._of["leg_requests"].labels(role.value, url, outcome.value).inc()

    def retry(self, role: Role, cause: Cause) -> None:
        """Another attempt is made, because this leg failed."""
        self._of["retries"].labels(role.value, cause).inc()

    def count(self, row: str, *labels: str) -> None:
        """Something happened that has a counter of its own."""
        self._of[row].labels(*labels).inc()

    def up(self, upstream: Upstream) -> None:
        """An engine was found up or down."""
        self._of["upstream_up"].labels(upstream.role.value, upstream.url).set(upstream.up)

    def tokens(self, upstreams: Iterable[Upstream], now: float) -> None:
        """Set what is only looked at on a scrape: tokens of every rank."""
        loads: dict[Role, list[int]] = {role: [] for role in Role}
        for upstream in upstreams:
            ranks = upstream.loads.at(now)
            loads[upstream.role] += (load.own + (load.foreign or 0) for load in ranks)
            self._ranks.set(upstream.role.value, upstream.url, ranks)
        for role, totals in loads.items():
            mean = sum(totals) / max(1, len(totals))
            self._of["imbalance"].labels(role.value).set(max(totals) / mean if mean else 1)

    def hit(self, expected: int, found: int | None) -> None:
        """A prefill engine answered; ``found`` None: without saying what it had cached."""
        if found is not None:
            self._of["hit_tokens"].labels("expected").inc(expected)
            self._of["hit_tokens"].labels("found").inc(found)

    def queued(self, number: int) -> None:
        """So many requests wait for their turn."""
        self._of["queue"].set(number)

    def added(self, mode: Mode, seconds: float) -> None:
        """An attempt's requests were written."""
        self._of["added_latency_seconds"].labels(mode.value).observe(seconds)

    def first_byte(self, mode: Mode, seconds: float) -> None:
        """A streamed answer began."""
        self._of["ttft_seconds"].labels(mode.value).observe(seconds)

    def add_upstream(self, role: Role, url: str) -> None:
        """An engine was added: its series read 0."""
        for name, labels in _of_upstream(role, url):
            self._of[name].labels(*labels)
        self._ranks.set(role.value, url, (TargetLoad(),))

    def remove_upstream(self, role: Role, url: str) -> None:
        """An engine was removed, and its series with it."""
        for name, labels in _of_upstream(role, url):
            self._of[name].remove(*labels)
        self._ranks.set(role.value, url, ())


def _made(row: RouterMetric, registry: CollectorRegistry) -> Any:
    more: dict[str, Any] = {"buckets": row.buckets} if row.buckets else {}
    return row.kind(f"kvconnect_router_{row.name}", row.text, row.labels, registry=registry, **more)


def _of_upstream(role: Role, url: str) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Yield every series of one engine but those of its ranks."""
    leg = role.value
    yield "in_flight", (leg, url)
    yield "upstream_up", (leg, url)
    for outcome in UpstreamOutcome:
        yield "leg_requests", (leg, url, outcome.value)
    for said in _EVENT_OUTCOMES:
        yield "kv_events", (leg, url, said)
    for said in _REPORT_OUTCOMES:
        yield "load_reports", (leg, url, said)
    if role is Role.PREFILL:
        for said in _CARD_OUTCOMES:
            yield "card_fetches", (url, said)


def _create(families: Mapping[str, Any]) -> None:
    """Make every series, so that it reads 0 before its event."""
    for mode, reason in [_NO_MODE, *((m.value, r.value) for m, r in MODES)]:
        for outcome in RequestOutcome:
            families["requests"].labels(mode, reason, outcome.value)
    for chosen in Mode:
        families["added_latency_seconds"].labels(chosen.value)
        families["ttft_seconds"].labels(chosen.value)
    for which in ("expected", "found"):
        families["hit_tokens"].labels(which)
    closed: dict[str, type[Enum]] = {
        "probes": ProbeOutcome,
        "refused_answers": What,
        "task_failures": TaskKind,
    }
    for name, values in closed.items():
        for value in values:
            families[name].labels(value.value)
    for role in Role:
        families["imbalance"].labels(role.value).set(1)
        for why in RankingReason:
            families["picks"].labels(role.value, why.value)
        for cause in get_args(Cause):
            families["retries"].labels(role.value, cause)
