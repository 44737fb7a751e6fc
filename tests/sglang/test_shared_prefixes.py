"""Prompts that share a beginning which no cache has, over a link that is slower than prefill.

SGLang's tree keeps the pages of one of them; those of the others are freed while they wait to be
sent, and the next prompts are computed in them.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.models import prompt_tokens
from tests.engines.server import Answer
from tests.sglang.conftest import FAULTY
from tests.sglang.pd import LAYERWISE, ask, prefill_server
from tests.sglang.scenario import NEW, Fleet, assert_quiet, tokens
from tests.sglang.server import PAGE, SglangServer, plugin_path

POOL = 64  # pages of the prefill server
SHARED, OWN = 8 * PAGE, PAGE  # tokens of a prompt
COPIES = 3  # of the shared beginning
OTHER = 6 * PAGE
WAIT_S = 60.0
Trio = tuple[SglangServer, SglangServer, SglangServer]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the prefill server's pages wait."""
    return tmp_path_factory.mktemp("fault") / "held"


@pytest.fixture(scope="module")
def servers(held: Path, fleet: Fleet) -> Iterator[Trio]:
    env = {**plugin_path(FAULTY), **LAYERWISE, "KVCONNECT_HELD": str(held)}
    with prefill_server(env=env, tokens=POOL * PAGE, chunk=32 * PAGE) as p:
        yield p, fleet.tcp, fleet.single


def waiting(p: SglangServer) -> int:
    """Return how many requests are computed and not sent."""
    with urllib.request.urlopen(f"{p.url}/v1/loads?include=disagg") as reply:
        loads = json.load(reply)["loads"]
    return sum(rank["disaggregation"]["prefill_inflight_queue_reqs"] for rank in loads)


def until_waiting(p: SglangServer, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while waiting(p) < count:
        assert time.monotonic() < deadline, f"{waiting(p)} of {count} requests wait"


def shared(number: int) -> list[list[int]]:
    """Return prompts that begin alike, and as no others do."""
    start = prompt_tokens(SHARED, start=3000 * number)
    return [
        start + prompt_tokens(OWN, start=40_000 + 97 * i + 3000 * number) for i in range(COPIES)
    ]


def others(number: int) -> list[list[int]]:
    return [prompt_tokens(OTHER, start=100_000 + 3000 * number + 200 * i) for i in range(6)]


@pytest.mark.parametrize("number", range(3))
def test_pages_of_a_shared_beginning_stay_until_they_are_sent(
    servers: Trio, held: Path, number: int
) -> None:
    p, d, single = servers
    first, then = shared(number), others(number)
    want = [single.complete(prompt, NEW).tokens for prompt in first + then]
    p.forget()
    held.touch()
    try:
        with ThreadPoolExecutor(len(want)) as pool:
            asked: list[Future[Answer]] = [pool.submit(ask, p, d, prompt, NEW) for prompt in first]
            until_waiting(p, len(first))
            asked += [pool.submit(ask, p, d, prompt, NEW) for prompt in then]
            until_waiting(p, len(first) + 5)  # which takes most of the pool
            held.unlink()
            assert tokens([each.result() for each in asked]) == want
    finally:
        held.unlink(missing_ok=True)
    assert_quiet(p, d)


def test_the_last_page_of_a_prompt_that_is_cached_whole(servers: Trio, held: Path) -> None:
    """SGLang computes the last token again, into a page that it frees when it enters it."""
    p, d, single = servers
    prompt, then = prompt_tokens(4 * PAGE, start=77_000), others(9)
    want = [single.complete(each, NEW).tokens for each in [prompt, *then]]
    p.forget()
    assert ask(p, d, prompt, NEW).tokens == want[0]
    held.touch()
    try:
        with ThreadPoolExecutor(len(want)) as pool:
            asked = [pool.submit(ask, p, d, prompt, NEW)]
            until_waiting(p, 1)
            asked += [pool.submit(ask, p, d, each, NEW) for each in then]
            until_waiting(p, 6)
            held.unlink()
            assert tokens([each.result() for each in asked]) == want
    finally:
        held.unlink(missing_ok=True)
    assert_quiet(p, d)
