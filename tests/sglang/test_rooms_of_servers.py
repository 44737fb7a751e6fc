"""Rooms on real servers: samples of a prompt, prompts that decode has, prompts computed again."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.engines.models import prompt_tokens
from tests.engines.ranks import until
from tests.sglang.pd import LAYERWISE, ask, decode_server, prefill_server, room, side_by_side
from tests.sglang.scenario import NEW, assert_quiet, tokens
from tests.sglang.server import PAGE, GenerateClient, GenerateRouter, SglangServer

RADIX = "--disaggregation-decode-enable-radix-cache"
SLOTS = 3  # requests that decode runs at a time
LONG = 200


class Started(NamedTuple):
    """Both prefill servers push to the one decode server."""

    layers: SglangServer
    chunks: SglangServer
    d: SglangServer
    single: SglangServer


class Servers(NamedTuple):
    p: SglangServer
    d: SglangServer
    single: SglangServer
    router: GenerateRouter


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    layers, chunks = prefill_server(env=LAYERWISE), prefill_server()
    d = decode_server(args=(RADIX, "--max-running-requests", str(SLOTS)))
    single = SglangServer()
    with side_by_side(layers, chunks, d, single):
        yield Started(layers, chunks, d, single)


@pytest.fixture(scope="module", params=["layers", "chunks"])
def servers(started: Started, request: pytest.FixtureRequest) -> Iterator[Servers]:
    p, d = getattr(started, request.param), started.d
    with GenerateRouter([p], [d]) as router:
        yield Servers(p, d, started.single, router)


def samples(client: GenerateClient, prompt: list[int], n: int, **meeting: Any) -> list[Any]:
    """Return the answers to ``n`` samples of a prompt: token ids, or the words of an error."""
    body = client.body(prompt, NEW, **meeting)
    body["sampling_params"]["n"] = n
    try:
        with client.open("/generate", body) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        return [error.read().decode()]
    return [words(each) for each in (found if isinstance(found, list) else [found])]


def words(answer: dict[str, Any]) -> Any:
    reason = answer["meta_info"]["finish_reason"]
    return reason["message"] if reason["type"] == "abort" else tuple(answer["output_ids"])


@pytest.mark.parametrize("n", [2, 2 * SLOTS])
def test_samples_of_a_prompt_are_right_or_a_clean_error(servers: Servers, n: int) -> None:
    """SGLang gives all of them one room."""
    p, d, single, _ = servers
    prompt = prompt_tokens(5 * PAGE + 3, start=700 * n)
    right = single.complete(prompt, NEW).tokens
    meeting = room(p)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(samples, p, prompt, n, **meeting)
        answers = samples(d, prompt, n, **meeting)
        first.result()
    assert all(each == right or "n > 1" in each for each in answers), answers
    assert any(each != right for each in answers), "SGLang gives samples rooms of their own"
    after = prompt_tokens(3 * PAGE, start=900 * n)
    assert ask(p, d, after, NEW).tokens == single.complete(after, NEW).tokens
    assert_quiet(p, d)


def test_samples_through_the_router_are_right_or_a_clean_error(servers: Servers) -> None:
    p, d, single, router = servers
    prompt = prompt_tokens(5 * PAGE + 3, start=7700)
    right = single.complete(prompt, NEW).tokens
    answers = samples(router, prompt, 3)
    assert all(each == right or "error" in each for each in answers), answers
    assert router.complete(prompt, NEW).tokens == right
    assert_quiet(p, d)


@pytest.mark.parametrize("length", [4 * PAGE, 4 * PAGE + 5])
def test_a_prompt_that_decode_has_is_handed_off_again(servers: Servers, length: int) -> None:
    p, d, single, _ = servers
    prompt = prompt_tokens(length, start=300 * length)
    right = single.complete(prompt, NEW).tokens
    assert tokens([ask(p, d, prompt, NEW) for _ in range(3)]) == [right] * 3
    assert_quiet(p, d)


def test_a_request_that_decode_retracts_is_computed_once_more(servers: Servers) -> None:
    """In the same room, with the answer so far."""
    p, d, single, _ = servers
    prompt = prompt_tokens(6 * PAGE + 1, start=5100)
    right = single.complete(prompt, LONG).tokens
    ask(p, d, prompt[:PAGE], NEW)
    seen = p.metric("sglang:num_requests_total")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, p, d, prompt, LONG)
        until(lambda: d.metric("sglang:num_running_reqs") >= 1, "decode runs the request")
        d.post("/pause_generation", {"mode": "retract"})
        d.post("/continue_generation", {})
        assert answer.result().tokens == right
    assert p.metric("sglang:num_requests_total") == seen + 2, "it was computed twice"
    assert_quiet(p, d)
