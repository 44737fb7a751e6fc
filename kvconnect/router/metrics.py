"""The router's own metrics. Every series exists, as 0, from the first scrape on."""

from __future__ import annotations

from enum import Enum
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvconnect.router.options import Options
from kvconnect.router.policy import MODES, Cause, Mode, Reason
from kvconnect.router.view import Role


class Outcome(str, Enum):
    """How a client's request ended."""

    OK = "ok"
    REJECTED = "rejected"  # 4xx, of the router or an engine
    FAILED = "failed"  # 5xx, before the first byte
    BROKEN = "broken"  # after the first byte
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # by the client


class LegOutcome(str, Enum):
    """How one leg ended."""

    OK = "ok"
    REJECTED = "rejected"
    ERROR = "error"
    UNREACHABLE = "unreachable"
    CANCELLED = "cancelled"  # by the client, the deadline, or the other leg's failure


_NO_MODE = ("none", "none")  # turned away before a mode was chosen
_LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RouterMetrics:
    """Counts of one router. Used on the event loop only.

    Labels are closed sets: modes, outcomes, and the configured URLs (``upstream``).
    """

    def __init__(self, options: Options) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Client requests.", "mode", "reason", "outcome")
        self._legs = self._counter(
            "leg_requests", "Requests to engines.", "leg", "upstream", "outcome"
        )
        self._retries = self._counter("retries", "Attempts after a failed one.", "leg", "cause")
        self._cards = self._counter("card_fetches", "Cards asked for.", "upstream", "outcome")
        self._in_flight = self._gauge("in_flight", "Open requests to engines.", "leg", "upstream")
        self._up = self._gauge("upstream_up", "1 while an engine answers.", "leg", "upstream")
        self._added = self._histogram(
            "added_latency_seconds",
            "Time that the router itself added: until both requests to engines were written, "
            "without the wait for prefill in pull mode.",
            _LATENCY_BUCKETS,
        )
        self._ttft = self._histogram(
            "ttft_seconds", "Request to first byte of a streamed answer.", _TTFT_BUCKETS
        )
        self._create(options)

    def request(self, chosen: tuple[Mode, Reason] | None, outcome: Outcome) -> None:
        """A client's request ended; ``chosen`` None: before a mode was chosen."""
        mode, reason = (chosen[0].value, chosen[1].value) if chosen else _NO_MODE
        self._requests.labels(mode, reason, outcome.value).inc()

    def leg_began(self, role: Role, url: str) -> None:
        """A request to an engine begins."""
        self._in_flight.labels(role.value, url).inc()

    def leg_ended(self, role: Role, url: str, outcome: LegOutcome) -> None:
        """It is over."""
        self._in_flight.labels(role.value, url).dec()
        self._legs.labels(role.value, url, outcome.value).inc()

    def retry(self, role: Role, cause: Cause) -> None:
        """Another attempt is made, because this leg failed."""
        self._retries.labels(role.value, cause).inc()

    def card(self, url: str, *, fetched: bool) -> None:
        """A card was asked for."""
        self._cards.labels(url, "ok" if fetched else "failed").inc()

    def up(self, role: Role, url: str, *, up: bool) -> None:
        """An engine was found up or down."""
        self._up.labels(role.value, url).set(up)

    def added(self, mode: Mode, seconds: float) -> None:
        """An attempt's requests were written."""
        self._added.labels(mode.value).observe(seconds)

    def first_byte(self, mode: Mode, seconds: float) -> None:
        """A streamed answer began."""
        self._ttft.labels(mode.value).observe(seconds)

    def _create(self, options: Options) -> None:
        """Make every series, so that it reads 0 before its event."""
        for mode, reason in [_NO_MODE, *((m.value, r.value) for m, r in MODES)]:
            for outcome in Outcome:
                self._requests.labels(mode, reason, outcome.value)
        for chosen in Mode:
            self._added.labels(chosen.value)
            self._ttft.labels(chosen.value)
        for role, urls in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
            for cause in get_args(Cause):
                self._retries.labels(role.value, cause)
            for url in urls:
                self._in_flight.labels(role.value, url)
                self._up.labels(role.value, url)
                for leg_outcome in LegOutcome:
                    self._legs.labels(role.value, url, leg_outcome.value)
        for url in options.prefill:
            self._cards.labels(url, "ok")
            self._cards.labels(url, "failed")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvconnect_router_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"kvconnect_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full = f"kvconnect_router_{name}"
        return Histogram(full, text, ("mode",), registry=self.registry, buckets=buckets)
