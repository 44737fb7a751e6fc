"""Metrics in an SGLang scheduler process, with SGLang's configuration played by plain objects."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from kvconnect.engines.sglang.metrics_publisher import Publisher, scheduler_labels
from kvconnect.observability.metrics.catalog import SGLANG, families
from kvconnect.stats import OffloadingConnectorStats
from tests.fakes.sglang_runtime import Context, measured

ROOT = Path(__file__).resolve().parents[3]
LABELS = {
    "model_name": "m",
    "engine_type": "prefill",
    "tp_rank": "0",
    "pp_rank": "0",
    "moe_ep_rank": "0",
}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """An SGLang in name only; what a test registered is taken back."""
    played = Context()
    srt = ModuleType("sglang.srt")
    srt.runtime_context = played  # type: ignore[attr-defined]
    modules = {"sglang": ModuleType("sglang"), "sglang.srt": srt, played.__name__: played}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    before = set(REGISTRY._collector_to_names)
    yield played
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(registry: Any, name: str, **labels: str) -> float | None:
    found: float | None = registry.get_sample_value(name, LABELS | labels)
    return found


def ours() -> set[str]:
    return {name for name in REGISTRY._names_to_collectors if name.startswith(SGLANG)}


# --- publishing -------------------------------------------------------------------------------


def test_all_series_are_there_before_the_first_event_and_then_count(context: Context) -> None:
    publisher = Publisher()
    for family in families(SGLANG):
        for word in family.values:
            labels = {family.label: word} if family.label else {}
            for suffix in ("_count", "_sum") if family.metric.buckets else ("",):
                assert value(REGISTRY, family.exposed + suffix, **labels) == 0, family.name
    publisher.publish(measured())
    publisher.publish(None)
    publisher.publish(measured(nbytes=100, seconds=0.25))
    assert value(REGISTRY, "sglang:kvcache_transfer_latency_sum", role="send") == 0.75
    assert value(REGISTRY, "sglang:kvcache_transfer_latency_count", role="send") == 2
    sent = {"transfer_type": "SEND"}
    assert value(REGISTRY, "sglang:kvconnect_transfer_bytes_total", **sent) == 4196
    assert value(REGISTRY, "sglang:kvconnect_transfer_seconds_total", **sent) == 0.75
    assert value(REGISTRY, "sglang:kvconnect_handoff_peers", state="up") == 3
    # Control: the other side of the wire did nothing.
    assert value(REGISTRY, "sglang:kvcache_transfer_latency_count", role="recv") == 0
    assert not {name for name in ours() if "recomputed" in name or name.startswith("vllm:")}


def test_an_interval_that_was_published_stays_as_it_is(context: Context) -> None:
    interval = measured()
    Publisher().publish(interval)
    assert interval == measured()


def test_what_sglang_does_not_have_is_left_out(context: Context) -> None:
    stats = measured()
    stats.count("recomputed_tokens", 7)
    publisher = Publisher()
    publisher.publish(stats)
    publisher.publish(measured())
    assert value(REGISTRY, "sglang:kvcache_transfer_latency_count", role="send") == 2


@pytest.mark.parametrize("without", ["flag", "first rank", "first context rank"])
def test_nothing_is_registered_where_sglang_publishes_nothing(
    context: Context, without: str, caplog: pytest.LogCaptureFixture
) -> None:
    if without == "flag":
        context.observability.enable_metrics = False
    elif without == "first rank":
        context.parallel.attn_tp_rank = 1
    else:
        context.parallel.attn_cp_rank = 1
    Publisher().publish(measured())
    assert ours() == set() and not caplog.records
    # Control: all ranks publish when asked to, but not without metrics.
    context.observability.enable_metrics_for_all_schedulers = True
    Publisher()
    assert bool(ours()) == (without != "flag")


def test_labels_are_those_of_sglang(context: Context) -> None:
    assert scheduler_labels() == {k: 0 if v == "0" else v for k, v in LABELS.items()}
    context.parallel.dp_rank = 3
    context.observability.extra_metric_labels = {"zone": "a"}
    context.disagg.disaggregation_mode = "null"
    labels = scheduler_labels()
    assert labels is not None
    assert (labels["dp_rank"], labels["zone"], labels["engine_type"]) == (3, "a", "unified")
    context.disagg.disaggregation_mode = "decode"
    assert (scheduler_labels() or {})["engine_type"] == "decode"
    context.disagg.enable_pd_role_switch = True
    assert (scheduler_labels() or {})["engine_type"] == "dynamic"


# --- trouble ----------------------------------------------------------------------------------


def test_a_taken_name_costs_the_metrics_and_not_the_engine(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    Counter("sglang:kvconnect_lookups", "somebody else's")
    publisher = Publisher()
    publisher.publish(measured())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "sglang:kvconnect_lookups" in caplog.text


def test_settings_that_moved_cost_the_metrics_and_not_the_engine(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    del context.parallel.moe_ep_rank
    Publisher().publish(measured())
    assert "moe_ep_rank" in caplog.text and ours() == set()


def test_a_broken_interval_ends_the_metrics_with_one_line(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher()
    broken = OffloadingConnectorStats()
    broken.data["counters"]["lookups"] = {"": -1}
    for _ in range(3):
        publisher.publish(broken)
    publisher.publish(measured())
    assert len(caplog.records) == 1 and "counters.lookups" in caplog.text
    assert value(REGISTRY, "sglang:kvcache_transfer_latency_count", role="send") == 0


# --- processes --------------------------------------------------------------------------------


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_is_not_imported_before_a_publisher_is_made() -> None:
    script = (
        "import sys, kvconnect.engines.sglang.metrics_publisher as m\n"
        "print('prometheus_client' in sys.modules, 'sglang' in sys.modules)\n"
        "import kvconnect.observability.metrics.prometheus\n"
        "print('prometheus_client' in sys.modules)"  # control
    )
    assert run(script).split() == ["False", "False", "True"]


PROCESS = """
import os, sys
from unittest import mock
from tests.fakes.sglang_runtime import Context, measured
context = Context()
context.parallel.tp_rank = int(os.environ["RANK"])
srt = mock.MagicMock(runtime_context=context)
sys.modules.update({"sglang": mock.MagicMock(srt=srt), "sglang.srt": srt,
                    context.__name__: context})
from kvconnect.engines.sglang.metrics_publisher import publisher
assert publisher() is publisher()
for _ in range(2):
    publisher().publish(measured())
"""


def test_processes_add_up_in_one_scrape(tmp_path: Path) -> None:
    """Two lives of one rank, and another rank, as SGLang's multiprocess scrape shows them."""
    for rank in "001":
        run(PROCESS, RANK=rank, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    text = generate_latest(registry).decode()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    seen = {
        s.labels["tp_rank"]: s.value
        for s in samples
        if s.name == "sglang:kvcache_transfer_latency_sum" and s.labels["role"] == "send"
    }
    assert seen == {"0": 2 * 2 * 0.5, "1": 2 * 0.5}
    gauges = {
        s.labels["tp_rank"]: (s.value, "pid" in s.labels)
        for s in samples
        if s.name == "sglang:kvconnect_handoff_peers" and s.labels["state"] == "up"
    }
    assert gauges == {"0": (3, False), "1": (3, False)}
