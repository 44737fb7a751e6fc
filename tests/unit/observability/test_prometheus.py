"""Prometheus: a real scrape shows exactly what was recorded, under every promised name."""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from kvconnect.errors import Misuse
from kvconnect.observability.metrics.catalog import CATALOG, families
from kvconnect.observability.metrics.model import Metric
from kvconnect.observability.metrics.prometheus import PromMetrics, _add_buckets
from kvconnect.stats import (
    COUNTERS,
    HISTOGRAMS,
    MOST_LABELS,
    OTHER,
    SIZE_BUCKETS,
    TIME_BUCKETS,
    TRANSFER_SIZE,
    OffloadingConnectorStats,
)

ROOT = Path(__file__).resolve().parents[3]
LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def types_for(registry: CollectorRegistry) -> dict[type[Any], Any]:
    return {cls: functools.partial(cls, registry=registry) for cls in (Counter, Gauge, Histogram)}


def make(registry: CollectorRegistry) -> PromMetrics:
    return PromMetrics(types_for(registry), LABELS, ENGINES)


def scrape(registry: CollectorRegistry) -> Scrape:
    text = generate_latest(registry).decode()
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if not s.name.endswith("_created")
    }


def get(scraped: Scrape, name: str, engine: int = 0, **labels: str) -> float:
    labels |= {"model_name": "m", "engine": str(engine)}
    return scraped[name, frozenset(labels.items())]


def payload(**changes: Any) -> dict[str, Any]:
    stats = OffloadingConnectorStats()
    stats.record_transfer("CPU_to_GPU", 3_000_000, 0.25)
    stats.record_transfer("CPU_to_GPU", 1_000_000, 0.5)
    stats.record_transfer("GPU_to_CPU", 7_000_000_000, 2.0)
    stats.count("lookups", 2)
    stats.count("hit_tokens", 512, "host")
    stats.count("skipped_store_blocks", 5, "no_space")
    stats.count("skipped_store_blocks", 3, "busy")
    for name, value in {"host_blocks_pinned": 5, "host_blocks_capacity": 20, **changes}.items():
        stats.gauge(name, value)
    return stats.data


# --- publishing -------------------------------------------------------------------------------


def test_every_series_exists_as_zero_at_the_first_scrape() -> None:
    registry = CollectorRegistry()
    make(registry)
    scraped = scrape(registry)
    for family in families("vllm:"):
        for engine in ENGINES:
            for value in family.values:
                labels = {family.label: value} if family.label else {}
                for suffix in ("_count", "_sum") if family.metric.buckets else ("",):
                    assert get(scraped, family.exposed + suffix, engine, **labels) == 0
    assert set(scraped.values()) == {0}


def full_load(rows: Iterable[Metric] = CATALOG) -> dict[str, Any]:
    """Every series of these rows in one payload, with numbers larger than an interval's."""
    data = OffloadingConnectorStats().data
    for row in rows:
        number: Any = 1 << 40 if row.section == COUNTERS else 1e9 + 0.5
        if row.section == HISTOGRAMS:
            bounds = SIZE_BUCKETS if row.recorded_as == TRANSFER_SIZE else TIME_BUCKETS
            number = [1e12, *[1 << 20] * (len(bounds) + 1)]
        labels = row.label.values if row.label else ("",)
        if row.label and row.label.limit:
            labels = (
                *(f"[2001:db8:85a3:1234:5678:8a2e:370:{n:x}]:14580" for n in range(32)),
                OTHER,
            )
        data[row.section][row.recorded_as] = dict.fromkeys(labels, number)
    return OffloadingConnectorStats(data).data


_LOWER_TIER = re.compile("disk|peer|remote", re.I)


def test_every_metric_at_once_is_bounded_and_all_of_it_is_shown() -> None:
    handoff = [row for row in CATALOG if row.name.startswith("handoff_")]
    offload = [row for row in CATALOG if row not in handoff]
    assert len(msgspec.msgpack.encode(full_load(offload))) <= 6.5 * 1024
    # The host tier alone, which all engines have.
    host = full_load([row for row in offload if not row.name.startswith("tier_")])
    for section in host.values():
        for series in section.values():
            for label in [name for name in series if _LOWER_TIER.search(name)]:
                del series[label]
    assert len(msgspec.msgpack.encode(host)) <= 4.25 * 1024
    # All peers there is room for, by the longest addresses, are more than half of it.
    assert len(msgspec.msgpack.encode(full_load())) <= 14 * 1024
    registry = CollectorRegistry()
    make(registry).observe(full_load())
    moved = {name for (name, labels), value in scrape(registry).items() if value}
    assert moved >= {f.exposed for f in families("vllm:") if not f.metric.buckets}


def test_names_follow_the_rule_by_which_the_engine_cleans_up() -> None:
    registry = CollectorRegistry()
    make(registry)
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith("vllm:"):
            registry.unregister(collector)
    assert scrape(registry) == {}
    make(registry)


def test_counts_appear_under_own_names_and_vllms() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    metrics.observe(payload())
    metrics.observe(payload())
    scraped = scrape(registry)
    load = {"transfer_type": "CPU_to_GPU"}

    assert get(scraped, "vllm:kvconnect_transfer_bytes_total", **load) == 8_000_000
    assert get(scraped, "vllm:kvconnect_transfer_seconds_total", **load) == 1.5
    assert get(scraped, "vllm:kvconnect_transfer_operations_total", **load) == 4
    assert get(scraped, "vllm:kvconnect_lookups_total") == 4
    assert get(scraped, "vllm:kvconnect_hit_tokens_total", tier="host") == 1024
    assert get(scraped, "vllm:kvconnect_skipped_store_blocks_total", reason="busy") == 6

    assert get(scraped, "vllm:kv_offload_load_bytes_total") == 8_000_000
    assert get(scraped, "vllm:kv_offload_load_time_total") == 1.5
    assert get(scraped, "vllm:kv_offload_store_bytes_total") == 14_000_000_000
    assert get(scraped, "vllm:kv_offload_store_time_total") == 4.0
    assert get(scraped, "vllm:kv_offload_total_bytes_total", **load) == 8_000_000
    assert get(scraped, "vllm:kv_offload_total_time_total", **load) == 1.5
    assert get(scraped, "vllm:kv_offload_allocation_failure_total") == 10
    assert get(scraped, "vllm:kv_offload_load_size_bucket", le="1e+06") == 2
    assert get(scraped, "vllm:kv_offload_load_size_sum") == 8_000_000
    assert get(scraped, "vllm:kv_offload_store_size_count") == 2
    assert get(scraped, "vllm:kv_offload_size_count", transfer_type="GPU_to_CPU") == 2


def test_hand_off_is_not_counted_as_offload() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    metrics.observe(payload())
    before = {key: value for key, value in scrape(registry).items() if "kv_offload" in key[0]}
    stats = OffloadingConnectorStats()
    stats.record_transfer("SEND", 5_000_000, 0.5)
    stats.record_transfer("RECV", 3_000_000, 0.25)
    metrics.observe(stats.data)
    after = scrape(registry)
    assert {key: value for key, value in after.items() if "kv_offload" in key[0]} == before
    assert get(after, "vllm:kvconnect_transfer_bytes_total", transfer_type="SEND") == 5_000_000
    assert get(after, "vllm:kvconnect_transfer_seconds_total", transfer_type="RECV") == 0.25
    # Control: an offload does move them.
    metrics.observe(payload())
    assert get(scrape(registry), "vllm:kv_offload_load_bytes_total") == 8_000_000


# --- peers ------------------------------------------------------------------------------------


def by_peer(scraped: Scrape, name: str, engine: str = "0") -> dict[str, float]:
    return {
        dict(labels)["peer"]: value
        for (sample, labels), value in scraped.items()
        if sample == f"vllm:kvconnect_handoff_peer_{name}_total"
        and dict(labels)["engine"] == engine
    }


def peers(numbers: Iterable[int], *names: str) -> dict[str, Any]:
    stats = OffloadingConnectorStats()
    for number in numbers:
        for name in names:
            stats.count(f"handoff_peer_{name}", 2, f"10.0.0.{number}:14580")
    return stats.data


def test_a_peer_appears_when_it_is_first_seen_and_keeps_its_series() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    assert by_peer(scrape(registry), "bytes") == {OTHER: 0}
    metrics.observe(peers([1], "bytes", "seconds"))
    metrics.observe(peers([1, 2], "bytes"))
    scraped = scrape(registry)
    assert by_peer(scraped, "bytes") == {"10.0.0.1:14580": 4, "10.0.0.2:14580": 2, OTHER: 0}
    assert by_peer(scraped, "seconds") == {"10.0.0.1:14580": 2, OTHER: 0}
    assert by_peer(scraped, "bytes", engine="1") == {OTHER: 0}


def test_peers_of_a_whole_life_are_bounded_alike_in_all_families() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    metrics.observe(peers(range(MOST_LABELS - 1), "bytes"))
    metrics.observe(peers([200], "failures"))
    assert by_peer(scrape(registry), "bytes")[OTHER] == 0, "control: this many have room"
    for _ in range(2):
        metrics.observe(peers([100, 200], "bytes", "seconds", "failures"))
    metrics.observe(peers(range(101, 131), "bytes"))
    scraped = scrape(registry)
    seen = by_peer(scraped, "bytes")
    assert len(seen) == MOST_LABELS + 1 and seen[OTHER] == 2 * 2 + 30 * 2
    assert seen["10.0.0.200:14580"] == 4 and "10.0.0.100:14580" not in seen
    assert by_peer(scraped, "seconds") == {"10.0.0.200:14580": 4, OTHER: 4}
    assert by_peer(scraped, "failures") == {"10.0.0.200:14580": 6, OTHER: 4}
    assert sum(seen.values()) == 2 * (MOST_LABELS - 1 + 4 + 30), "nothing is lost"
    # Another engine of the process has room of its own.
    metrics.observe(peers([100], "bytes"), 1)
    assert by_peer(scrape(registry), "bytes", engine="1") == {"10.0.0.100:14580": 2, OTHER: 0}


def test_a_reason_to_refuse_that_is_not_listed_is_shown_as_other() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    before = set(scrape(registry))
    stats = OffloadingConnectorStats()
    stats.count("handoff_refused", 2, "auth")
    stats.count("handoff_refused", 3, "moon phase")
    stats.count("handoff_failures", 5, "moon phase")  # control: this label has no `other`
    metrics.observe(stats.data)
    scraped = scrape(registry)
    assert set(scraped) == before
    assert get(scraped, "vllm:kvconnect_handoff_refused_total", field="auth") == 2
    assert get(scraped, "vllm:kvconnect_handoff_refused_total", field=OTHER) == 3
    assert sum(v for (name, _), v in scraped.items() if "handoff_failures" in name) == 0


# --- values -----------------------------------------------------------------------------------


def test_gauges_show_the_last_value_and_the_pinned_share() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    metrics.observe(payload(host_blocks_used=11))
    metrics.observe(payload(host_blocks_used=12, host_blocks_pinned=10))
    scraped = scrape(registry)
    assert get(scraped, "vllm:kvconnect_host_blocks_used") == 12
    assert get(scraped, "vllm:kv_offload_cpu_cache_usage_perc") == 0.5
    metrics.observe(payload(host_blocks_capacity=0))
    assert get(scrape(registry), "vllm:kv_offload_cpu_cache_usage_perc") == 0.5


def test_engines_do_not_mix_and_the_payload_stays_as_it_is() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    data = payload()
    metrics.observe(data, 1)
    assert data == payload()
    assert get(scrape(registry), "vllm:kvconnect_lookups_total", 1) == 2
    assert get(scrape(registry), "vllm:kvconnect_lookups_total", 0) == 0
    with pytest.raises(Misuse, match="engine 2"):
        metrics.observe(data, 2)


# Multiples of 1/1024 up to 1000 s: sums are exact in any order.
SECONDS = [random.Random(7).randrange(1 << 20) / 1024 for _ in range(200)] + [0.5, 600.0, 0.0]


def observed_directly(samples: list[float]) -> list[tuple[str, float]]:
    registry = CollectorRegistry()
    real = Histogram("x", "x", buckets=TIME_BUCKETS, registry=registry)
    for seconds in samples:
        real.observe(seconds)
    return histogram_of(scrape(registry), "x")


def histogram_of(scraped: Scrape, name: str) -> list[tuple[str, float]]:
    found = []
    for (sample, labels), value in scraped.items():
        known = dict(labels)
        if sample in (f"{name}_bucket", f"{name}_sum", f"{name}_count") and (
            known.get("engine", "0") == "0" and known.get("tier", "host") == "host"
        ):
            found.append((sample.removeprefix(name) + known.get("le", ""), value))
    return sorted(found)


def latencies(samples: list[float]) -> dict[str, Any]:
    stats = OffloadingConnectorStats()
    for seconds in samples:
        stats.observe("load_latency_seconds", seconds, "host")
    return stats.data


def test_buckets_equal_those_of_a_histogram_that_saw_every_sample() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    metrics.observe(latencies(SECONDS[:50]))
    metrics.observe(latencies(SECONDS[50:]))
    seen = histogram_of(scrape(registry), "vllm:kvconnect_load_latency_seconds")
    assert len(seen) == len(TIME_BUCKETS) + 3
    assert seen == observed_directly(SECONDS)
    # Control: one sample in another bucket is seen.
    assert seen != observed_directly([*SECONDS[:-1], 1.0])


def test_a_corrupted_payload_shows_in_the_scrape() -> None:
    data = latencies(SECONDS)
    cells = data[HISTOGRAMS]["load_latency_seconds"]["host"]
    cells[3], cells[4] = cells[3] + 1, cells[4] - 1 if cells[4] else 0
    registry = CollectorRegistry()
    make(registry).observe(data)
    seen = histogram_of(scrape(registry), "vllm:kvconnect_load_latency_seconds")
    assert seen != observed_directly(SECONDS)


# --- several API servers ----------------------------------------------------------------------

SERVER = """
import json, sys
from prometheus_client import Counter, Gauge, Histogram
from kvconnect.observability.metrics.prometheus import PromMetrics
metrics = PromMetrics({c: c for c in (Counter, Gauge, Histogram)},
                      ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
for data in json.loads(sys.argv[1]):
    metrics.observe(data)
"""


def serve(directory: Path, *payloads: dict[str, Any]) -> Scrape:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, msgspec.json.encode(payloads).decode()],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))
    return scrape(registry)


def test_several_processes_add_up_in_one_scrape(tmp_path: Path) -> None:
    first = serve(tmp_path)
    expected = {
        (family.exposed + ("_count" if family.metric.buckets else ""), engine)
        for family in families("vllm:")
        for engine in "01"
    }
    present = {(name, dict(labels)["engine"]) for name, labels in first}
    assert expected <= present, "absent before the first event"
    assert set(first.values()) == {0}

    serve(tmp_path, payload(host_blocks_used=11), latencies(SECONDS[:50]))
    scraped = serve(tmp_path, latencies(SECONDS[50:]), payload(host_blocks_used=12))
    assert get(scraped, "vllm:kvconnect_lookups_total") == 4
    assert get(scraped, "vllm:kvconnect_host_blocks_used") == 12
    assert get(scraped, "vllm:kv_offload_load_bytes_total") == 8_000_000
    seen = histogram_of(scraped, "vllm:kvconnect_load_latency_seconds")
    assert seen == observed_directly(SECONDS)
    assert seen != observed_directly(SECONDS[1:])


# --- wrappers with a small interface, as with Ray Serve ---------------------------------------


class Wrapper:
    """A family, or after the one call of ``labels()`` a series, that keeps what it is given."""

    def __init__(self, name: str, labelnames: list[str], method: str) -> None:
        self.name, self.labelnames, self.method = name, labelnames, method
        self.series: dict[tuple[object, ...], list[float]] = {}

    def labels(self, *values: object) -> object:
        assert len(values) == len(self.labelnames)
        kept = self.series[values] = []
        return type("Series", (), {self.method: lambda _, value: kept.append(value)})()


def test_wrappers_get_one_representative_sample_per_operation() -> None:
    built: dict[str, Wrapper] = {}

    # The constructors of vLLM's Ray wrappers, and nothing beyond them.
    def counter(name: str, documentation: str, labelnames: list[str]) -> Wrapper:
        return built.setdefault(name, Wrapper(name, labelnames, "inc"))

    def gauge(
        name: str, documentation: str, labelnames: list[str], multiprocess_mode: str
    ) -> Wrapper:
        return built.setdefault(name, Wrapper(name, labelnames, "set"))

    def histogram(
        name: str, documentation: str, labelnames: list[str], buckets: list[float]
    ) -> Wrapper:
        return built.setdefault(name, Wrapper(name, labelnames, "observe"))

    types = {Counter: counter, Gauge: gauge, Histogram: histogram}
    metrics = PromMetrics(types, LABELS, ENGINES)
    assert set(built) == {family.name for family in families("vllm:")}
    metrics.observe(latencies(SECONDS))
    given = built["vllm:kvconnect_load_latency_seconds"].series["m", "0", "host"]
    assert len(given) == len(SECONDS)

    def without_sum(samples: list[float]) -> list[tuple[str, float]]:
        return [entry for entry in observed_directly(samples) if entry[0] != "_sum"]

    assert without_sum(given) == without_sum(SECONDS)
    assert without_sum(given[1:]) != without_sum(SECONDS)

    metrics.observe(latencies([0.0625, 0.0625, 0.09375]), 1)
    alone = built["vllm:kvconnect_load_latency_seconds"].series["m", "1", "host"]
    assert sum(alone) == pytest.approx(0.21875) and len(alone) == 3
    metrics.observe(payload(), 1)
    assert built["vllm:kv_offload_load_bytes"].series["m", "1"] == [4_000_000]


@pytest.mark.parametrize("seconds", [0.1, 0.3, TIME_BUCKETS[0], 700.0])
def test_a_mean_rounded_over_the_bound_stays_in_its_bucket(seconds: float) -> None:
    seen: list[float] = []

    class Child:
        def observe(self, value: float) -> None:
            seen.append(value)

    stats = OffloadingConnectorStats(latencies([seconds] * 3))
    cells = stats.data[HISTOGRAMS]["load_latency_seconds"]["host"]
    _add_buckets(Child(), cells, TIME_BUCKETS)
    assert (
        OffloadingConnectorStats(latencies(seen)).data[HISTOGRAMS]["load_latency_seconds"]["host"][
            1:
        ]
        == cells[1:]
    )


# --- neighbours and mistakes ------------------------------------------------------------------


def test_an_alias_that_is_taken_is_left_to_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    owner = Counter("vllm:kv_offload_load_bytes", "owner's", LABELS, registry=registry)
    owner.labels("m", "0").inc(1)
    with caplog.at_level(logging.INFO, "kvconnect.observability.metrics.prometheus"):
        metrics = make(registry)
    assert [r.getMessage().split()[0] for r in caplog.records] == ["vllm:kv_offload_load_bytes"]
    metrics.observe(payload())
    scraped = scrape(registry)
    assert get(scraped, "vllm:kv_offload_load_bytes_total") == 1
    assert get(scraped, "vllm:kv_offload_store_bytes_total") == 7_000_000_000


def test_an_own_name_that_is_taken_is_an_error() -> None:
    registry = CollectorRegistry()
    make(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        make(registry)


def test_what_a_newer_worker_sends_is_left_out_with_one_remark(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    before = set(scrape(registry))
    data = payload()
    data[COUNTERS]["teleported_blocks"] = {"": 3}
    data[COUNTERS]["hit_tokens"]["moon"] = 9
    data["traces"] = {"x": {"": 1}}
    with caplog.at_level(logging.DEBUG, "kvconnect.observability.metrics.prometheus"):
        metrics.observe(data)
        metrics.observe(data)
    remarks = [record.getMessage() for record in caplog.records]
    assert len(remarks) == 1 and "teleported_blocks" in remarks[0] and "moon" in remarks[0]
    assert set(scrape(registry)) == before
    assert get(scrape(registry), "vllm:kvconnect_hit_tokens_total", tier="host") == 1024


def test_a_malformed_payload_is_refused_and_adds_nothing() -> None:
    registry = CollectorRegistry()
    metrics = make(registry)
    data = payload()
    data[HISTOGRAMS]["load_latency_seconds"] = {"host": [1.0, 2]}
    with pytest.raises(Misuse, match=r"load_latency_seconds\.host"):
        metrics.observe(data)
    assert set(scrape(registry).values()) == {0}
