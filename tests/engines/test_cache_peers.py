"""Blocks in the host memory of other real engines."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engines.models import BLOCK_SIZE, prompt_tokens
from tests.engines.ranks import until
from tests.engines.scenario import (
    COUNT,
    FULL,
    NEW,
    PATIENCE_S,
    PROMPT,
    ask,
    assert_nothing_leaks,
    cached_by_source,
    expected,
    fill,
    hits,
    moved,
    prompts,
    receipt,
    tokens,
)
from tests.engines.server import Router, Server, kv_transfer
from tests.servers import free_port

HOST = "32MiB"
HALF = COUNT // 2


def shares(
    port: int, *ask: int, page_tokens: int = 0, same_machine: str = "memory", **extra: Any
) -> str:
    """Settings of an engine that serves at ``port`` and asks the engines at other ports."""
    peers = {
        "page_tokens": page_tokens,
        "same_machine": same_machine,
        "serve": True,
        "ask": [f"127.0.0.1:{other}" for other in ask],
        "ask_s": 5.0,  # engines on CPUs answer when they get to it
    }
    listen = f"127.0.0.1:{port}"
    settings = {"host_bytes": HOST, "load_when": "always", "listen": listen, "wait_s": 30.0}
    return kv_transfer(**{**settings, "cache_peers": peers, **extra})


def test_a_prompt_that_another_engine_has() -> None:
    """The reader has two ranks with half of each block, and also asks itself."""
    first, second = free_port(), free_port()
    with Server("llama", shares(first)) as source:
        fill(source)
        with Server("llama", shares(second, first, second, digest="full"), tp=2) as reader:
            want = expected("llama", 2).fresh
            salted = reader.complete(prompts()[0], NEW, cache_salt="a")  # control
            assert (salted.tokens, salted.cached) == (want[0], 0)
            assert hits(reader, "peer") == 0
            options = {"kvconnect": {"receipt": True}}
            told = receipt(reader, prompts()[0], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (FULL, PROMPT - FULL)
            for prompt, answer in zip(prompts()[:HALF], want, strict=False):
                assert reader.complete(prompt, NEW).tokens == answer
            assert hits(reader, "peer") == HALF * FULL
            assert cached_by_source(reader)["p2p"] == HALF * FULL
            assert_nothing_leaks(reader)
            source.complete([5] * 8, 2)  # an engine at rest tells no new numbers
            source.settle()
            assert moved(reader, "PEER_to_CPU") == moved(source, "CPU_to_PEER") > 0
            assert_nothing_leaks(source)
            source.kill()
            assert tokens(ask(reader)) == want
            assert hits(reader, "peer") == HALF * FULL
            assert_nothing_leaks(reader)


def test_tenants_share_with_themselves_alone() -> None:
    """Equal prompts under other salts are computed; under the same salt they are read: from the
    source's memory, which sends nothing then, or over the network."""
    first = free_port()
    mine, plain = prompts()[:2]
    others: list[tuple[list[int], dict[str, str]]] = [
        (mine, {}),
        (mine, {"cache_salt": "b"}),
        (plain, {"cache_salt": "a"}),
    ]
    with Server("llama", shares(first)) as source:
        want = source.complete(mine, NEW, cache_salt="a").tokens
        source.complete(plain, NEW)
        source.settle()
        for way in ("memory", "network"):
            with Server("llama", shares(free_port(), first, same_machine=way)) as reader:
                for prompt, salt in others:
                    assert reader.complete(prompt, NEW, **salt).cached == 0
                assert hits(reader, "peer") == 0
                shared = reader.complete(mine, NEW, cache_salt="a")  # control
                assert (shared.tokens, shared.cached) == (want, FULL)
                assert hits(reader, "peer") == FULL
                assert reader.complete(plain, NEW).cached == FULL
                source.complete([5] * 8, 2)  # an engine at rest tells no new numbers
                source.settle()
                sent = moved(source, "CPU_to_PEER")
                assert moved(reader, "PEER_to_CPU") > 0
                assert sent == (moved(reader, "PEER_to_CPU") if way == "network" else 0)
                assert_nothing_leaks(source)
                assert_nothing_leaks(reader)


@pytest.mark.parametrize("model", ["gemma3", "deepseek_v2"])
def test_other_attention_kinds(model: str) -> None:
    first, second = free_port(), free_port()
    with Server(model, shares(first)) as source:
        fill(source, model)
        with Server(model, shares(second, first)) as reader:
            assert tokens(ask(reader)) == expected(model).fresh
            assert hits(reader, "peer") > COUNT * FULL / 2
            assert_nothing_leaks(reader)


class Published(Server):
    """An engine that publishes KV events, and tells a router where."""

    @property
    def worker(self) -> str:
        return f"{self.url},events={self.events},replay={self.replay}"

    def command(self) -> list[str]:
        self.events, self.replay = free_port(), free_port()
        places = {"endpoint": self.events, "replay_endpoint": self.replay}
        config = {name: f"tcp://*:{port}" for name, port in places.items()}
        told = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **config})
        return [*super().command(), "--kv-events-config", told]


def share_ticket(server: Server) -> str:
    """The ticket that an engine gives to routers."""
    options = {"kvconnect": {"share": True}}
    answer = server.post("/v1/completions", server.body([1, 1], 1, kv_transfer_params=options))
    return str(json.loads(answer)["kv_transfer_params"]["kvconnect_share"])


def from_source(server: Server, prompt: list[int], source: str) -> Any:
    """Where a prompt came from for which a source is named."""
    options = {"kvconnect": {"receipt": True, "source": source}}
    return receipt(server, prompt, kv_transfer_params=options)


def test_a_source_that_the_router_names() -> None:
    """No engine has another one's address. The router's choice is forced by a long request."""
    big, long, want = 256, 4000, expected("llama").fresh
    left = iter(prompts()[:-1])
    with ExitStack() as ends:
        made = [Published("llama", shares(free_port()), big, long) for _ in range(2)]
        source, reader = [ends.enter_context(server) for server in made]
        fill(source)
        ticket = share_ticket(source)
        forged = ticket[:-2] + ("AA" if ticket[-2:] != "AA" else "BB")
        told = from_source(reader, next(left), forged)  # control
        assert (told["peer"], told["computed"]) == (0, PROMPT)
        ignored = "vllm:kvconnect_ignored_cache_hints_total"
        until(lambda: reader.metric(ignored, reason="invalid") == 1, "the forged ticket counts")

        def read() -> bool:
            told = from_source(reader, next(left), ticket)
            assert told["peer"] in (0, FULL) and told["peer"] + told["computed"] == PROMPT
            return bool(told["peer"])  # the first one may not wait until they are connected

        until(read, "the reader has blocks of the source")
        options = {"kvconnect": {"receipt": True}}
        told = receipt(reader, next(left), kv_transfer_params=options)  # control: no ticket
        assert (told["peer"], told["computed"]) == (0, PROMPT)

        args = ("--unified", "--receipts")
        router = ends.enter_context(Router([], made, args))
        events = {"role": "decode", "upstream": source.url, "outcome": "replayed"}
        news = itertools.count(9000, 100)

        def heard() -> bool:
            source.complete(prompt_tokens(64, start=next(news)), 1)
            return router.metric("kvconnect_router_kv_events_total", **events) > 0

        until(heard, "the router hears events")
        busy = router.body(prompts()[-1] + prompt_tokens(800, start=500), 2500, stream=True)
        with router.open("/v1/completions", busy) as stream:
            assert stream.headers["X-KVConnect-Decode"] == "0", "it goes where its prefix is"

            def named() -> bool:
                prompt = next(left)
                with router.open("/v1/completions", router.body(prompt, NEW)) as reply:
                    assert reply.headers["X-KVConnect-Decode"] == "1"
                    answer = json.load(reply)
                answered = tuple(answer["choices"][0]["token_ids"])
                assert answered == want[prompts().index(prompt)]
                told = answer["kv_transfer_params"]["kvconnect"]["receipt"]
                assert told["peer"] in (0, FULL)
                return bool(told["peer"])

            until(named, "the router names the source")
        assert_nothing_leaks(reader)


def test_block_sizes_that_divide_one_another() -> None:
    """Engines with blocks of 32 and of 64 tokens, there and back; a prompt's full blocks are equal
    tokens. Control: without pages, the one with blocks of 64 finds nothing."""
    first, second = free_port(), free_port()
    large = ("--block-size", str(2 * BLOCK_SIZE))
    options = {"kvconnect": {"receipt": True}}
    want = expected("llama").fresh
    with Server("llama", shares(first, second)) as small:
        for prompt in prompts()[:HALF]:
            small.complete(prompt, NEW)
        small.settle()
        with Server("llama", shares(second, first), blocks=32, args=large) as other:
            told = receipt(other, prompts()[0], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (0, PROMPT)
        pages = shares(second, first, page_tokens=BLOCK_SIZE)
        with Server("llama", pages, blocks=32, args=large) as other:
            told = receipt(other, prompts()[0], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (FULL, PROMPT - FULL)
            for prompt, answer in zip(prompts(), want, strict=True):
                assert other.complete(prompt, NEW).tokens == answer
            assert hits(other, "peer") == HALF * FULL
            other.settle()
            end = time.monotonic() + PATIENCE_S
            while not small.metric("vllm:kvconnect_tier_available", tier="peer"):
                assert time.monotonic() < end, "the other engine cannot be asked"
                small.complete([5] * 8, 2)  # an engine at rest tells no new numbers
            told = receipt(small, prompts()[-1], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (FULL, PROMPT - FULL)
            for prompt, answer in zip(prompts()[HALF:], want[HALF:], strict=True):
                assert small.complete(prompt, NEW).tokens == answer
            assert hits(small, "peer") == HALF * FULL
            assert_nothing_leaks(other)
            assert_nothing_leaks(small)
