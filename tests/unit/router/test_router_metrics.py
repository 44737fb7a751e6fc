"""What the router counts, as its registry shows it; see ``kvconnect/router/metrics.py``."""

from __future__ import annotations

from kvconnect.router.metrics import CallOutcome, RequestOutcome, RouterMetrics
from kvconnect.router.policy.choice import Mode, RoutingReason
from kvconnect.router.policy.fleet_view import Role

URL = "http://engine"


def in_flight(metrics: RouterMetrics) -> float | None:
    labels = {"role": "decode", "upstream": URL}
    return metrics.registry.get_sample_value("kvconnect_router_in_flight", labels)


def ended(metrics: RouterMetrics) -> float | None:
    labels = {"role": "decode", "upstream": URL, "outcome": "ok"}
    return metrics.registry.get_sample_value("kvconnect_router_upstream_requests_total", labels)


def test_every_look_shows_what_was_counted_until_then() -> None:
    metrics = RouterMetrics()
    labels = {"mode": "push", "reason": "default", "outcome": "ok"}
    for number in range(1, 4):
        for _ in range(number):
            metrics.request((Mode.PUSH, RoutingReason.DEFAULT), RequestOutcome.OK)
        name = "kvconnect_router_requests_total"
        assert metrics.registry.get_sample_value(name, labels) == number * (number + 1) / 2


def test_calls_in_flight_are_counted_until_they_end() -> None:
    metrics = RouterMetrics()
    assert in_flight(metrics) is None
    metrics.add_engine(Role.DECODE, URL)
    metrics.call_began(Role.DECODE, URL)
    metrics.call_began(Role.DECODE, URL)
    assert in_flight(metrics) == 2
    metrics.call_ended(Role.DECODE, URL, CallOutcome.OK)
    assert (in_flight(metrics), ended(metrics)) == (1, 1)


def test_what_was_counted_of_an_engine_that_left_leaves_no_series() -> None:
    name, labels = "kvconnect_router_kv_events_total", ("decode", URL, "ok")
    named = dict(zip(("role", "upstream", "outcome"), labels, strict=True))
    metrics = RouterMetrics()
    metrics.add_engine(Role.DECODE, URL)
    metrics.count("kv_events", *labels)
    assert metrics.registry.get_sample_value(name, named) == 1
    metrics.count("kv_events", *labels)
    metrics.remove_engine(Role.DECODE, URL)
    assert metrics.registry.get_sample_value(name, named) is None
    assert ("kv_events", *labels) not in metrics._found


def test_a_call_that_outlives_its_engine_leaves_no_series() -> None:
    metrics = RouterMetrics()
    metrics.add_engine(Role.DECODE, URL)
    metrics.call_began(Role.DECODE, URL)
    assert in_flight(metrics) == 1
    metrics.remove_engine(Role.DECODE, URL)
    metrics.call_ended(Role.DECODE, URL, CallOutcome.OK)
    assert in_flight(metrics) is ended(metrics) is None
    metrics.add_engine(Role.DECODE, URL)  # the control
    metrics.call_ended(Role.DECODE, URL, CallOutcome.OK)
    assert ended(metrics) == 1
