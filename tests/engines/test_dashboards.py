"""Every panel and alert, evaluated by a real Prometheus over real engines that work and fail."""

from __future__ import annotations

import copy
import re
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.boards import (
    ALL,
    PATIENCE_S,
    Prometheus,
    boards,
    filled,
    of_alerts,
    of_board,
    of_panels,
    selectors,
)
from tests.engines.models import prompt_tokens
from tests.engines.pd import (
    BLOCKS_EACH,
    assert_quiet,
    prefill,
    prefill_config,
    pull,
    push_params,
    standing_ticket,
)
from tests.engines.scenario import COUNT, FULL, NEW, PROMPT, ask, block_bytes, disk, prompts, settle
from tests.engines.server import Router, Server, kv_transfer

LIMITS = {"lease_s": 4.0, "deadline_s": 10.0, "digest": "full"}
HOST = "4MiB"  # a block is 64 KiB: less than the prompts need, so that disk is read as well

EMPTY = {
    ("kvconnect-handoff", "Failures that SGLang counts"): "of SGLang",
}
"""Panels without numbers here, and why."""

BROKEN = {
    "KVConnectLoadsFail",
    "KVConnectHandoffsFail",
    "KVConnectLeasesExpire",
    "KVConnectDigestFailures",
    "KVConnectQuarantine",
    "KVConnectHandoffsRefused",
    "KVConnectRouterEngineDown",
    "KVConnectRouterNoEngine",
}
"""Alerts whose condition the faults of this test meet."""

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus")


class Fleet(NamedTuple):
    prefill: Server
    decode: Server
    router: Router
    prometheus: Prometheus
    since: float


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    tiers = {"host_bytes": HOST, "disk": disk(folder / "disk"), "load_when": "always"}
    with ExitStack() as stack:
        p = Server("llama", prefill_config(**tiers, **LIMITS))
        faulty = {"connector": "FlipsByte", "module": "tests.engines.faulty"}
        d = Server("llama", kv_transfer(**faulty, host_bytes="32MiB", transport="tcp", **LIMITS))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, (p, d)))
        router = stack.enter_context(Router([p], [d]))
        targets: dict[str, list[Any]] = {"prefill": [p], "decode": [d], "router": [router]}
        addresses = {
            job: [f"{server.host}:{server.port}" for server in servers]
            for job, servers in targets.items()
        }
        prometheus = stack.enter_context(Prometheus(addresses, folder))
        prometheus.await_scrapes()  # of the state before anything moves
        yield Fleet(p, d, router, prometheus, time.time())


def shown(fleet: Fleet, board: str, title: str, server: Server | Router) -> dict[str, float]:
    """What a panel's first expression was at the last scrape, with one instance chosen."""
    expr = next(one.expr for one in of_panels() if (one.board, one.title) == (board, title))
    instance = f"{server.host}:{server.port}"
    chosen = {**ALL, "$instance": instance, "$__rate_interval": ALL["$__range"]}
    (scraped,) = fleet.prometheus.at_once(f'timestamp(up{{instance="{instance}"}})').values()
    return fleet.prometheus.at_once(filled(expr, chosen), scraped)


def counted(fleet: Fleet, board: str, title: str, server: Server | Router) -> dict[str, float]:
    """How much a panel's rate is over the whole time. It began at 0 and is asked for at a scrape:
    there is nothing that Prometheus could extrapolate."""
    values = shown(fleet, board, title, server)
    return {labels: pytest.approx(value * 30 * 60) for labels, value in values.items()}


class TestBoards:
    """One fleet, one life: the order of these tests matters."""

    def test_values_are_what_was_moved(self, fleet: Fleet) -> None:
        p, d, router, prometheus, _ = fleet
        for prompt in prompts():
            router.stream(prompt, NEW)
            settle(p)
        assert_quiet(p, d)
        ask(p)  # each prompt's turn comes when host memory has no room for it any more
        p.post("/reset_prefix_cache")
        p.complete(prompts()[-1], NEW)
        settle(p)
        prometheus.await_scrapes()
        nbytes = COUNT * BLOCKS_EACH * block_bytes("llama")
        for server, kind in ((p, "SEND"), (d, "RECV")):
            moved = counted(fleet, "kvconnect-overview", "Bytes per second", server)
            assert moved[f"transfer_type={kind}"] == nbytes
        done = counted(fleet, "kvconnect-router", "Requests by outcome", router)
        assert done["outcome=ok"] == COUNT
        whole = p.metric("vllm:kvconnect_query_tokens_total")
        share = shown(fleet, "kvconnect-overview", "Hit rate by tier", p)
        assert share["tier=disk"] == pytest.approx(COUNT * FULL / whole)
        assert share["tier=host"] == pytest.approx(FULL / whole)
        for kind in ("GPU_to_CPU", "CPU_to_GPU", "SEND"):
            part = p.metric("vllm:kvconnect_transfer_bytes_total", transfer_type=kind)
            whole = p.metric("vllm:kvconnect_transfer_seconds_total", transfer_type=kind)
            speed = shown(fleet, "kvconnect-overview", "Speed of one copy", p)
            assert speed[f"transfer_type={kind}"] == pytest.approx(part / whole)
        used = p.metric("vllm:kvconnect_tier_bytes_used", tier="disk")
        instance = f"instance={p.host}:{p.port}"
        assert (
            shown(fleet, "kvconnect-tiers", "Bytes in use", p)[f"{instance}, tier=disk"] == used > 0
        )

    def test_everything_has_numbers_when_things_work_and_fail(self, fleet: Fleet) -> None:
        p, d, router, prometheus, since = fleet
        pull(p, d, prompt_tokens(PROMPT, start=40_000), NEW)
        for _ in range(2):
            ask(d)  # a byte of what it loads is flipped
        d.settle()
        assert d.metric("vllm:kvconnect_quarantined_blocks_total", cause="digest") > 0
        params = prefill(p, prompt_tokens(PROMPT, start=50_000))
        d.complete(prompts()[0], NEW, kv_transfer_params={**params, "kvconnect_ticket": "forged"})
        deadline = time.monotonic() + PATIENCE_S  # nobody fetches it
        while not p.metric("vllm:kvconnect_handoff_expired_leases_total"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        prometheus.await_scrapes()
        self.kill_a_peer(p, d)
        await_health(router, up=False)
        prometheus.await_scrapes()
        assert firing(prometheus) >= BROKEN
        with p:
            await_health(router, up=True)
            router.complete(prompts()[1], NEW)
            prometheus.await_scrapes()
            assert prometheus.empty(of_panels(), since) == set(EMPTY)
            assert prometheus.nameless(of_panels(), since) == set()

    def kill_a_peer(self, p: Server, d: Server) -> None:
        """A prefill engine dies while a decode engine waits for it."""
        offer = standing_ticket(p)
        with ThreadPoolExecutor(1) as pool:
            params = push_params(secrets.token_hex(16), offer)
            waiting = pool.submit(
                d.complete, prompt_tokens(PROMPT, start=60_000), NEW, kv_transfer_params=params
            )
            time.sleep(0.5)
            p.kill()
            waiting.result()  # computed by the decode engine

    def test_alerts_select_series_that_exist(self, fleet: Fleet) -> None:
        for one in of_alerts():
            fleet.prometheus.ask("query", query=one.expr)  # an error raises
            for selector in selectors(one.expr):
                assert fleet.prometheus.numbers(selector, fleet.since), (one.title, selector)

    def test_variables_have_values(self, fleet: Fleet) -> None:
        for name, board in boards().items():
            for variable in board["templating"]["list"]:
                if variable["type"] == "query":
                    asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
                    assert asked, (name, variable)
                    selector, label = asked.groups()
                    values = fleet.prometheus.ask(
                        f"label/{label}/values", **{"match[]": filled(selector)}
                    )
                    assert values, (name, variable["name"])

    def test_control_broken_panels_are_seen(self, fleet: Fleet) -> None:
        name = "kvconnect-tiers"
        board = copy.deepcopy(boards()[name])
        misspelt, unlabelled = (
            next(panel for panel in board["panels"] if part in str(panel.get("targets")))
            for part in ("hit_tokens", "by (reason)")
        )
        for panel, right, wrong in (
            (misspelt, "hit_tokens", "hit_token"),
            (unlabelled, "by (reason)", "by (reasons)"),
        ):
            target = panel["targets"][0]
            target["expr"] = target["expr"].replace(right, wrong)
        broken = of_board(name, board)
        assert fleet.prometheus.empty(broken, fleet.since) == {(name, misspelt["title"])}
        assert fleet.prometheus.nameless(broken, fleet.since) == {(name, unlabelled["title"])}
        with pytest.raises(urllib.error.HTTPError) as refused:
            fleet.prometheus.numbers(f"sum({broken[0].expr}", fleet.since)
        with refused.value as error:
            assert error.code == 400


def is_healthy(router: Router) -> bool:
    try:
        urllib.request.urlopen(f"{router.url}/health").close()
    except urllib.error.HTTPError as error:
        error.close()
        return False
    return True


def await_health(router: Router, up: bool) -> None:
    """Wait until the router has, or lacks, an engine of each role."""
    deadline = time.monotonic() + PATIENCE_S
    while is_healthy(router) != up:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def firing(prometheus: Prometheus) -> set[str]:
    """Alerts whose condition holds now, however long it has to."""
    return {one.title for one in of_alerts() if prometheus.at_once(one.expr)}
