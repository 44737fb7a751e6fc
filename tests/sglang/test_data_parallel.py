"""Servers with two data-parallel ranks behind a router, which picks the ranks of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.engines.models import prompt_tokens
from tests.engines.ranks import (
    NEW,
    Ranked,
    check_minimum_tokens,
    check_that_picked_ranks_run,
    prompts,
    routed,
)
from tests.sglang.pd import LAYERWISE, decode_server, prefill_server, room, side_by_side
from tests.sglang.scenario import Fleet, assert_quiet
from tests.sglang.server import GenerateRouter, SglangServer

LONG = 6000  # its prefill takes longer than all short requests together


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SglangServer, SglangServer]]:
    servers = prefill_server(dp=2, env=LAYERWISE), decode_server(dp=2)
    with side_by_side(*servers):
        yield servers


@pytest.fixture(scope="module")
def ranked(pair: tuple[SglangServer, SglangServer]) -> Iterator[Ranked]:
    with routed(GenerateRouter, *pair, "sglang", "dp_rank") as found:
        yield found


def test_the_picked_ranks_are_those_that_run(
    ranked: Ranked, pair: tuple[SglangServer, SglangServer], fleet: Fleet
) -> None:
    check_that_picked_ranks_run(
        ranked, [fleet.single.complete(prompt, NEW).tokens for prompt in prompts()]
    )
    assert_quiet(*pair)


def test_requests_go_to_the_rank_with_the_fewest_tokens(
    ranked: Ranked, pair: tuple[SglangServer, SglangServer]
) -> None:
    check_minimum_tokens(ranked, long_request(*pair))
    assert_quiet(*pair)


@contextmanager
def long_request(p: SglangServer, d: SglangServer) -> Iterator[None]:
    """Have both servers work on one request on rank 0 until the block is left."""
    prompt = prompt_tokens(LONG, start=30_000)
    body = p.body(prompt, 2000, stream=True, routed_dp_rank=0, disagg_prefill_dp_rank=0, **room(p))
    with ExitStack() as streams:
        for server in (p, d):
            streams.enter_context(server.open("/generate", body))
        yield
