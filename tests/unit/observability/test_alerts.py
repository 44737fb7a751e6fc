"""Alerts: each fires when it should and then stops, by promtool; each has a runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.boards import ALERTS, rules

DOCS = Path(__file__).resolve().parents[3] / "docs" / "alerts.md"
ENGINES = ("vllm:", "sglang_")

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")


@dataclass(frozen=True)
class Case:
    """What makes one alert fire, and nothing else; ``alert`` is "" if it makes none fire.

    ``series`` are of an engine, without the ``vllm:kvconnect_`` in front, or of the router;
    ``running`` is how many requests run. Their values are one a minute, in promtool's notation. At
    minute ``fires`` the alert fires, with those in ``also``; at ``starts`` and ``ends`` none does.
    ``engine``: the only one that this is true of.
    """

    alert: str
    series: dict[str, str]
    fires: int
    ends: int
    starts: int = 9
    also: tuple[str, ...] = ()
    lookups: str = "0+60x300"
    engine: str = ""


BUSY = "0+100x300"
BURST = "0x10 10+10x5 60x100"  # between minutes 10 and 16
HALF_FAIL = "0x10 50+50x20 1050x200"  # of BUSY, between minutes 10 and 31
RUNNING = {"vllm:": "vllm:num_requests_running", "sglang_": "sglang_num_running_reqs"}

CASES = (
    Case(
        "KVConnectNoData",
        {},
        lookups="0x20 _x20 0x20",
        starts=20,
        fires=35,
        ends=50,
        also=("KVConnectInstanceGone",),
    ),
    Case(
        "KVConnectInstanceGone",
        {'lookups_total{job="d",instance="other"}': "0x20 _x30 0x100"},
        fires=40,
        ends=60,
        starts=20,
    ),
    Case("KVConnectLoadsFail", {'failed_requests_total{cause="copy"}': HALF_FAIL}, 25, 60),
    Case(
        "KVConnectHandoffsFail",
        {
            'handoff_failures_total{cause="peer"}': HALF_FAIL,
            'handoff_received_requests_total{outcome="done"}': BUSY,
        },
        fires=25,
        ends=60,
    ),
    Case(
        "KVConnectLeasesExpire",
        {
            'handoff_sent_requests_total{outcome="expired"}': HALF_FAIL,
            'handoff_sent_requests_total{outcome="done"}': BUSY,
        },
        fires=25,
        ends=60,
    ),
    Case("KVConnectJobsExpire", {'expired_jobs_total{transfer_type="SEND"}': BURST}, 20, 40),
    Case(
        "KVConnectDigestFailures",
        {
            'failed_blocks_total{cause="digest"}': BURST,
            "handoff_digest_failed_blocks_total": "0x200",
        },
        fires=12,
        ends=40,
    ),
    Case(
        "KVConnectDigestFailures",
        {
            'failed_blocks_total{cause="digest"}': "0x200",
            "handoff_digest_failed_blocks_total": BURST,
        },
        fires=12,
        ends=40,
    ),
    Case("KVConnectQuarantine", {'quarantined_blocks_total{cause="digest"}': BURST}, 12, 90),
    Case("KVConnectTransportBelowFloor", {'handoff_refused_total{field="rate"}': BURST}, 12, 40),
    Case("KVConnectHandoffsRefused", {'handoff_refused_total{field="auth"}': BURST}, 20, 40),
    Case("KVConnectPeerFails", {'handoff_peer_failures_total{peer="a:1"}': BURST}, 20, 40),
    Case("KVConnectTierDown", {'tier_available{tier="disk"}': "1x9 0x20 1x20"}, 20, 35),
    Case(  # of two data-parallel engines, one has had no request since its start
        "KVConnectTierDown",
        {
            'tier_available{tier="disk",engine="0"}': "1x9 0x20 1x20",
            'lookups_total{engine="0"}': "0+60x60",
            'tier_available{tier="disk",engine="1"}': "0x60",
            'lookups_total{engine="1"}': "0x60",
        },
        fires=20,
        ends=35,
        engine="vllm:",
    ),
    Case(  # an engine that only decodes looks nothing up
        "KVConnectTierDown",
        {
            'tier_available{tier="disk"}': "1x9 0x20 1x20",
            'transfer_operations_total{transfer_type="RECV"}': "0+10x60",
        },
        lookups="0x60",
        fires=20,
        ends=35,
        engine="vllm:",
    ),
    Case(  # SGLang says at its start which tiers it has
        "KVConnectTierDown",
        {'tier_available{tier="disk"}': "1x9 0x20 1x20"},
        lookups="0x60",
        fires=20,
        ends=35,
        engine="sglang_",
    ),
    Case("KVConnectTierFails", {'store_failed_blocks_total{outcome="corrupt"}': BURST}, 20, 40),
    Case(
        "KVConnectDiskNearCapacity",
        {
            'tier_bytes_used{tier="disk"}': "50x9 97x120 50x60",
            'tier_bytes_capacity{tier="disk"}': "100x300",
            "store_evicted_blocks_total": "0+1x300",
        },
        fires=80,
        ends=140,
    ),
    Case("KVConnectDiskFull", {'store_failed_blocks_total{outcome="full"}': BURST}, 20, 40),
    Case(
        "KVConnectTierBehind",
        {"tier_skipped_blocks_total": HALF_FAIL, "tier_written_blocks_total": "0+20x300"},
        fires=36,
        ends=60,
    ),
    Case("KVConnectLedgerDrift", {"ledger_oldest_hold_seconds": "5x9 1000x30 5x20"}, 30, 45),
    Case(
        "KVConnectLedgerDrift",
        {'ledger_held_blocks{owner="send"}': "4x60", "running": "1x9 0x30 1x20"},
        fires=30,
        ends=45,
    ),
    Case(  # the router's probes move blocks, and their leases end
        "KVConnectLedgerDrift",
        {
            'ledger_held_blocks{owner="send"}': "4x60",
            "running": "1x9 0x30 1x20",
            'jobs_in_flight{transfer_type="SEND"}': "0x60",
            'transfer_operations_total{transfer_type="SEND"}': "0+100x60",
        },
        fires=30,
        ends=45,
    ),
    Case(
        "KVConnectHitRateCollapse",
        {
            "query_tokens_total": "0+60000x300",
            'hit_tokens_total{tier="host"}': "0+30000x120 3600000x60 3630000+30000x60",
        },
        starts=120,
        fires=160,
        ends=210,
    ),
    Case(
        "KVConnectRouterErrors",
        {
            'kvconnect_router_requests_total{outcome="failed"}': HALF_FAIL,
            'kvconnect_router_requests_total{outcome="ok"}': BUSY,
        },
        fires=25,
        ends=60,
    ),
    Case(
        "KVConnectRouterEngineDown",
        {
            'kvconnect_router_upstream_up{role="decode",upstream="a"}': "1x9 0x20 1x20",
            'kvconnect_router_upstream_up{role="decode",upstream="b"}': "1x60",
        },
        fires=20,
        ends=35,
    ),
    Case(
        "KVConnectRouterNoEngine",
        {'kvconnect_router_upstream_up{role="decode",upstream="a"}': "1x9 0x20 1x20"},
        fires=20,
        ends=35,
        also=("KVConnectRouterEngineDown",),
    ),
    Case(  # a source names none any more: their series end, those of the router do not
        "KVConnectRouterNoEngine",
        {
            'kvconnect_router_upstream_up{role="decode",upstream="a"}': "1x9 stale _x19 1x20",
            'kvconnect_router_upstream_up{role="prefill",upstream="b"}': "1x60",
            "kvconnect_router_queue": "0x60",
        },
        fires=20,
        ends=35,
    ),
    Case(
        "KVConnectRouterImbalance",
        {
            'kvconnect_router_imbalance{role="decode"}': "1x9 3x30 1x20",
            'kvconnect_router_tokens_in_flight{role="decode",upstream="a",rank="0"}': "20000x90",
        },
        fires=30,
        ends=45,
    ),
    Case(
        "KVConnectRouterDeadlyRequest",
        {'kvconnect_router_withheld_retries_total{reason="deadly"}': "0x9 3x60"},
        fires=12,
        ends=25,
    ),
    Case("KVConnectRouterQueue", {"kvconnect_router_queue": "0x9 5x20 0x20"}, 25, 35),
)

WELL = (
    Case(  # a succession of leases, of prefills that are over before the next scrape
        "",
        {
            'ledger_held_blocks{owner="send"}': "4x60",
            "running": "0x60",
            'jobs_in_flight{transfer_type="SEND"}': "1x60",
            'transfer_operations_total{transfer_type="SEND"}': "0+100x60",
        },
        fires=30,
        ends=45,
    ),
    Case(  # an engine that was started again, and is idle
        "",
        {
            'tier_available{tier="disk"}': "1x9 0x40",
            'transfer_operations_total{transfer_type="RECV"}': "0+10x9 0x40",
        },
        lookups="0+60x9 0x40",
        fires=20,
        ends=35,
        engine="vllm:",
    ),
)


def series(name: str, engine: str) -> str:
    """A series' name with the labels that every scrape adds."""
    if name == "running":
        name = RUNNING[engine]
    elif not name.startswith("kvconnect_router"):
        name = f"{engine}kvconnect_{name}"
    stem, _, labels = name.removesuffix("}").partition("{")
    if "job=" not in labels:
        labels = ",".join(filter(None, (labels, 'job="d",instance="i"')))
    return f"{stem}{{{labels}}}"


def group(case: Case, engine: str) -> dict[str, Any]:
    """A test of promtool: the alert's state before, while and after."""
    given = {"lookups_total": case.lookups, **case.series}
    names = {case.alert, *case.also} - {""}
    firing = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)]
    states: tuple[tuple[int, list[Any]], ...] = (
        (case.starts, []),
        (case.fires, firing),
        (case.ends, []),
    )
    return {
        "name": f"{case.alert or sorted(case.series)} of {engine}",
        "interval": "1m",
        "input_series": [{"series": series(n, engine), "values": v} for n, v in given.items()],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": samples,
            }
            for minute, samples in states
        ],
    }


def promtool(rules_file: Path, folder: Path, cases: Iterable[Case] = CASES) -> str:
    """Run the cases; return what promtool has to say against the rules."""
    # The engines take turns: that every rule is for both, test_boards shows.
    groups = [group(case, case.engine or ENGINES[number % 2]) for number, case in enumerate(cases)]
    tests = {"rule_files": [str(rules_file)], "evaluation_interval": "1m", "tests": groups}
    path = folder / "tests.json"
    path.write_text(json.dumps(tests))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stderr), done
    return done.stderr


@needs_promtool
def test_rules_are_valid() -> None:
    command = ["promtool", "check", "rules", "--lint-fatal", ALERTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_promtool
def test_every_alert_fires_and_stops(tmp_path: Path) -> None:
    assert len(rules()) >= 12
    assert {case.alert for case in CASES} == {rule["alert"] for rule in rules()}
    assert promtool(ALERTS, tmp_path) == ""


@needs_promtool
def test_what_is_well_fires_nothing(tmp_path: Path) -> None:
    assert promtool(ALERTS, tmp_path, WELL) == ""


@needs_promtool
@pytest.mark.parametrize(
    ("right", "wrong", "alert"),
    [
        ("> 900", "> 9000", "KVConnectLedgerDrift"),
        ('outcome="expired"', 'outcome="expire"', "KVConnectLeasesExpire"),
        (
            "(kvconnect_router_queue[5m]) > 0",
            "(kvconnect_router_queue[5m]) >= 0",
            "KVConnectRouterQueue",
        ),
    ],
)
def test_control_a_rule_that_fires_otherwise_is_seen(
    right: str, wrong: str, alert: str, tmp_path: Path
) -> None:
    text = ALERTS.read_text()
    assert right in text
    broken = tmp_path / "alerts.yaml"
    broken.write_text(text.replace(right, wrong, 1))
    cases = [case for case in CASES if case.alert == alert]
    assert "got:" in promtool(broken, tmp_path, cases)


def headings(text: str) -> list[str]:
    return re.findall(r"^## (\w+)$", text, flags=re.MULTILINE)


def test_every_alert_has_a_runbook() -> None:
    alerts = [rule["alert"] for rule in rules()]
    assert headings(DOCS.read_text()) == alerts  # in the same order, and no others
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
