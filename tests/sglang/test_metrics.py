"""Metrics on SGLang's own scrape: its labels, and sums that are what the wire really took."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kvconnect.observability.metrics import rates
from kvconnect.observability.top import scrape
from tests.engines.models import model_dir
from tests.sglang.one_scheduler import PUBLISHED
from tests.sglang.pd import ask_all
from tests.sglang.scenario import CROWD, NEW, Fleet, page_bytes, pages, prompts
from tests.sglang.server import SglangServer
from tests.sglang.wire_sums import (
    GOT,
    OURS,
    SENT,
    added,
    sums,
)

SCHEDULER_S = 60.0


def scheduler(directory: Path, *flags: str) -> None:
    arguments = [
        *("--model-path", str(model_dir("llama")), "--skip-tokenizer-init", "--device", "cpu"),
        *("--attention-backend", "torch_native", "--dtype", "float32", *flags),
    ]
    published = directory / "published"
    published.mkdir()
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(published)}
    log = directory / "log"
    log.touch()
    assert SglangServer.fork_server is not None
    command = ["tests.sglang.one_scheduler", *arguments]
    SglangServer.fork_server.start(command, env, log).wait(SCHEDULER_S)
    assert log.read_text().endswith(PUBLISHED), log.read_text()


def labels_of(directory: Path, name: str) -> list[dict[str, str]]:
    """Labels of all series of a family in the scrape that SGLang's server makes."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory / "published"))
    return [s.labels for f in registry.collect() for s in f.samples if s.name == name]


def test_labels_are_those_of_sglangs_own_series(tmp_path: Path) -> None:
    zone = json.dumps({"zone": "a"})
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl")
    scheduler(tmp_path, "--enable-metrics", *prefill, "--extra-metric-labels", zone)
    theirs = labels_of(tmp_path, "sglang:kv_transfer_latency_ms_count")
    ours = labels_of(tmp_path, f"{OURS}_count")
    assert len(theirs) == 1 and theirs[0]["engine_type"] == "prefill" and "zone" in theirs[0]
    assert sorted(found.pop("role") for found in ours) == ["recv", "send"]
    assert ours == theirs * 2
    assert labels_of(tmp_path, "sglang:kvconnect_host_blocks_used") == theirs


def test_without_metrics_nothing_is_there(tmp_path: Path) -> None:
    scheduler(tmp_path)
    assert list((tmp_path / "published").iterdir()) == []


# --- servers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sends", ["layers", "chunks"])
def test_requests_add_up_to_what_the_transport_measured(fleet: Fleet, sends: str) -> None:
    p, d, asked = getattr(fleet, sends), fleet.tcp, prompts(9)
    p.forget()
    d.forget()
    before = sums(p, SENT), sums(d, GOT)
    ask_all(p, d, asked, NEW, CROWD)
    sent, got = added(p, SENT, before[0], len(asked)), added(d, GOT, before[1], len(asked))
    for side in (sent, got):
        assert side["requests"] == len(asked)
        assert side["request seconds"] == pytest.approx(side["wire seconds"])
        assert side["request seconds"] > 0
    assert sent["bytes"] == got["bytes"] >= pages(asked) * page_bytes()
    # SGLang's own series, which only prefill has, mean the same.
    assert sent["their requests"] == len(asked) and got["their requests"] == 0
    assert sent["their seconds"] == pytest.approx(sent["request seconds"])
    assert sent["their bytes"] == pytest.approx(sent["bytes"])
    for server, side in ((p, SENT), (d, GOT)):
        seen = rates.endpoint(None, scrape.scrape(f"{server.url}/metrics"))  # kvconnect top
        kind = side["transfer_type"]
        totals = {row.transfer_type: row.bytes_total for row in seen.transfers}
        assert seen.kind == "sglang"
        assert totals[kind] == sums(server, side)["bytes"] > 0
    # Control: one request more is seen in all of them.
    ask_all(p, d, prompts(10)[:1], NEW, 1)
    more = added(p, SENT, before[0], len(asked) + 1)
    assert all(more[name] > sent[name] for name in sent)
