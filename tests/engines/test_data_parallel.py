"""Engines with two data-parallel ranks behind a router, which picks the ranks of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvconnect.router.fleet import reports
from tests.engines.models import BLOCK_SIZE, prompt_tokens
from tests.engines.pd import assert_quiet, pair
from tests.engines.ranks import (
    COUNT,
    NEW,
    RANKS,
    Ranked,
    check_minimum_tokens,
    check_that_picked_ranks_run,
    prompts,
    routed,
    until,
)
from tests.engines.server import Process, Router, Server

MAX_LEN = 8192
BLOCKS = 320
LONG = 2000
FETCHES = "kvconnect_router_standing_ticket_fetches_total"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Ranked]:
    two = ("--data-parallel-size", "2")
    with (
        pair(blocks=BLOCKS, max_len=MAX_LEN, args=two) as (p, d),
        routed(Router, p, d, "vllm", "engine") as found,
    ):
        for router in found.routers:
            until(lambda r=router: r.metric(FETCHES, outcome="ok") >= len(RANKS))
        yield found


def test_the_picked_ranks_are_those_that_run(fleet: Ranked) -> None:
    with Server("llama", blocks=BLOCKS, max_len=MAX_LEN) as single:
        want = [single.complete(prompt, NEW).tokens for prompt in prompts()]
    check_that_picked_ranks_run(fleet, want, lambda: ask_every_rank(fleet.prefill))
    pushed = "kvconnect_router_requests_total"
    assert fleet.least.metric(pushed, mode="push", outcome="ok") == COUNT
    # What the router takes a rank's use for a share of.
    load = fleet.prefill.scrape(reports.VLLM_LOAD)
    assert f'kv_cache_size_tokens="{BLOCKS * BLOCK_SIZE}"' in load
    assert reports.vllm_tokens(load).keys() == set(RANKS)
    assert (load.count("# TYPE"), "kvconnect" in load) == (2, False)
    assert "kvconnect" in fleet.prefill.scrape()  # negative control
    assert_quiet(fleet.prefill, fleet.decode)


def test_requests_go_to_the_rank_with_the_fewest_tokens(fleet: Ranked) -> None:
    check_minimum_tokens(fleet, long_requests(fleet))
    assert_quiet(fleet.prefill, fleet.decode)


def ask_every_rank(server: Process) -> None:
    """An idle engine publishes nothing: what it did after its last step is told with the next."""
    for rank in RANKS:
        body = server.body([1, 2, 3], 1)
        server.open("/v1/completions", body, **{"X-data-parallel-rank": str(rank)}).close()


@contextmanager
def long_requests(fleet: Ranked) -> Iterator[None]:
    """Have both servers generate on rank 0 until the block is left."""
    with ExitStack() as streams:
        for server in (fleet.prefill, fleet.decode):
            prompt = prompt_tokens(LONG, start=30_000)
            body = server.body(prompt, MAX_LEN - LONG, stream=True)
            rank = {"X-data-parallel-rank": "0"}
            streams.enter_context(server.open("/v1/completions", body, **rank))
        yield
