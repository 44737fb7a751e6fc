"""The engines' dashboards over real SGLang servers: one board serves both engines."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.boards import ALL, Prometheus, Shown, engines, filled, of_panels
from tests.sglang.linker_server import ROOM, linker_args
from tests.sglang.linker_server import prompts as kept
from tests.sglang.pd import ask_all, decode_server, side_by_side
from tests.sglang.scenario import CROWD, NEW, Fleet, page_bytes, pages, settled
from tests.sglang.scenario import prompts as handed_off
from tests.sglang.server import SglangServer
from tests.sglang.wire_sums import GOT, SENT, added, sums

NOT_IN_SGLANG = {
    ("kvconnect-handoff", "Leases"),
    ("kvconnect-tiers", "Prompt tokens of finished requests, by source (vLLM)"),
    ("kvconnect-tiers", "Kept by hints (vLLM)"),
    ("kvconnect-tiers", "Blocks of prompts with hints, by outcome (vLLM)"),
    ("kvconnect-tiers", "Hints of requests (vLLM)"),
    ("kvconnect-tiers", "Recomputed after a failed load"),
    ("kvconnect-tiers", "Requests and jobs that wait for disk or remote"),
    ("kvconnect-tiers", "Decisions on disk and remote hits"),
}
NO_DISK = {
    ("kvconnect-tiers", "Available tiers"),
    ("kvconnect-tiers", "Bytes in use"),
}
UNTIL_SOMETHING_FAILED = {  # which other tests of the shared servers may have seen to
    ("kvconnect-handoff", "Rejected, by field"),
    ("kvconnect-handoff", "Failures that SGLang counts"),
}
"""Panels all or part of which have no numbers here, and why."""

UNLABELLED = {("kvconnect-handoff", "Requests that wait for KV")}  # vLLM's have a stage

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus")


def of_engines() -> list[Shown]:
    """What boards show of engines, with SGLang chosen."""
    chosen = {**ALL, "${engine:pipe}": engines()["SGLang"]}
    panels = [one for one in of_panels() if one.board != "kvconnect-router"]
    return [one._replace(expr=filled(one.expr, chosen)) for one in panels]


def test_boards_serve_sglang(fleet: Fleet, tmp_path: Path) -> None:
    p, d, asked = fleet.layers, decode_server(), handed_off(9)  # d has shaken hands with nobody
    linker = SglangServer(
        tokens=ROOM,
        args=linker_args(host_bytes="64MiB"),
        env={"KVCONNECT_FAULTY_LINKER": str(tmp_path / "no fault")},
    )
    with side_by_side(linker, d):
        servers = {"prefill": p, "decode": d, "unified": linker}
        for server in servers.values():
            server.forget()
        targets = {job: [f"{server.host}:{server.port}"] for job, server in servers.items()}
        with Prometheus(targets, tmp_path) as prometheus:
            prometheus.await_scrapes()
            since = time.time()
            before = sums(p, SENT), sums(d, GOT)
            ask_all(p, d, asked, NEW, CROWD)
            for prompt in kept(9) * 2:  # more than the device holds: the host tier has the rest
                linker.complete(prompt, NEW)
            linker.complete(kept(9)[-1], NEW)  # which the device has
            sent, got = added(p, SENT, before[0], len(asked)), added(d, GOT, before[1], len(asked))
            assert sent["bytes"] == got["bytes"] >= pages(asked) * page_bytes()
            prometheus.await_scrapes()
            # Servers publish what they count a little later.
            empty = settled(
                lambda: prometheus.empty(of_engines(), since) - UNTIL_SOMETHING_FAILED,
                NOT_IN_SGLANG | NO_DISK,
            )
            assert empty == NOT_IN_SGLANG | NO_DISK
            assert prometheus.nameless(of_engines(), since) == UNLABELLED
