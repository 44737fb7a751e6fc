"""Two prefill engines, two decode engines and the router: what clients of a fleet get."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.models import prompt_tokens
from tests.engines.pd import decode_config, prefill_config
from tests.engines.server import Router, Server, free_port, kv_transfer
from tests.engines.test_handoff import assert_quiet

REQUESTS = 200
LONGEST = 4000
NEW = 8
MAX_LEN = 4096
TOKEN = "0123456789abcdef"
BLOCKS = 320  # tokens for two and a half of the longest prompts: some requests have to wait


def prompts() -> list[list[int]]:
    """Different prompts of 64 to 4,000 tokens, most of them short."""
    draw = random.Random(1)
    lengths = [64, LONGEST, *(int(64 * (LONGEST / 64) ** draw.random()) for _ in range(REQUESTS))]
    return [prompt_tokens(n, start=37 * i) for i, n in enumerate(lengths[:REQUESTS])]


class Fleet(NamedTuple):
    engines: list[Server]
    router: Router


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        connectors = [prefill_config(digest="full")] * 2 + [decode_config(digest="full")] * 2
        engines = [Server("llama", text, BLOCKS, MAX_LEN) for text in connectors]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, engines))
        router = Router(engines[:2], engines[2:], ("--probe-interval", "0"))  # requests are counted
        yield Fleet(engines, stack.enter_context(router))


@pytest.fixture(scope="module")
def want() -> list[tuple[int, ...]]:
    with Server("llama", blocks=4 * BLOCKS, max_len=MAX_LEN) as single:
        return [single.complete(prompt, NEW).tokens for prompt in prompts()]


def test_mixed_requests_get_the_tokens_of_a_single_engine(
    want: list[tuple[int, ...]], fleet: Fleet
) -> None:
    assert len(set(want)) > REQUESTS / 2  # else equality would prove little
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: fleet.router.complete(prompt, NEW).tokens, prompts()))
    assert found == want
    assert_quiet(*fleet.engines)
    done = "vllm:kvconnect_handoff_received_requests_total"
    assert sum(e.metric(done, outcome="done") for e in fleet.engines[2:]) == REQUESTS
    for prefill in fleet.engines[:2]:
        assert prefill.metric("vllm:kvconnect_transfer_bytes_total", transfer_type="SEND") > 0


def test_chat_and_streams(fleet: Fleet) -> None:
    chat = {
        "model": "model",
        "messages": [{"role": "user", "content": "Say something about the sea. " * 20}],
        "max_tokens": NEW,
        "temperature": 0,
    }
    whole = json.loads(fleet.router.post("/v1/chat/completions", chat))
    text = whole["choices"][0]["message"]["content"]
    single = json.loads(fleet.engines[2].post("/v1/chat/completions", chat))
    assert text == single["choices"][0]["message"]["content"]
    streamed = fleet.router.post("/v1/chat/completions", {**chat, "stream": True})
    deltas = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(d["choices"][0]["delta"].get("content") or "" for d in deltas) == text
    prompt = prompts()[0]
    assert (
        fleet.router.stream(prompt, NEW)[1].tokens == fleet.engines[3].complete(prompt, NEW).tokens
    )
    assert_quiet(*fleet.engines)


def test_clients_that_leave_are_forgotten_everywhere(fleet: Fleet) -> None:
    for number, prompt in enumerate(prompts()[:12]):
        fleet.router.abort(prompt, after_chunks=number % 3)
    assert_quiet(*fleet.engines)


def test_requests_go_where_probes_have_seen_kv_move(
    fleet: Fleet, want: list[tuple[int, ...]], tmp_path: Path
) -> None:
    (p, other), (d, _) = fleet.engines[:2], fleet.engines[2:]
    both = Server("llama", kv_transfer(host_bytes="off", transport="tcp"), BLOCKS, MAX_LEN)
    token, port = tmp_path / "token", free_port()
    token.write_text(TOKEN)
    admin = ("--admin-token-file", str(token), "--admin-port", str(port))
    # A prefill engine in the place of a decode engine is healthy and answers, but receives nothing.
    with both, Router([p, both], [d, other], ("--probe-interval", "1", *admin)) as router:
        await_probes(router, ok=1, computed=1)
        assert [router.complete(prompt, NEW).tokens for prompt in prompts()[:6]] == want[:6]
        assert served(router, d) == 6
        status, said = switch(port, "prefill", p)
        assert status == 409 and "decode computed the prompt itself" in said["error"]
        status, said = switch(port, "prefill", both)
        assert (status, said) == (200, said | {"role": "decode", "draining": False})
        with ThreadPoolExecutor(6) as pool:  # so many that one decode engine is not enough
            found = list(
                pool.map(lambda prompt: router.complete(prompt, NEW).tokens, prompts()[:12])
            )
        assert found == want[:12]
        assert served(router, both) > 0


def served(router: Router, decode: Server) -> float:
    name = "kvconnect_router_leg_requests_total"
    return router.metric(name, leg="decode", upstream=decode.url, outcome="ok")


def switch(port: int, role: str, server: Server) -> tuple[int, dict[str, Any]]:
    """Have an engine change its role; return what the router's admin API says."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/workers/switch",
        json.dumps({"role": role, "url": server.url}).encode(),
        {"Authorization": f"Bearer {TOKEN}"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def await_probes(router: Router, **outcomes: int) -> None:
    deadline = time.monotonic() + 60
    probes = "kvconnect_router_probes_total"
    while any(router.metric(probes, outcome=name) < n for name, n in outcomes.items()):
        assert time.monotonic() < deadline, router.scrape()
        time.sleep(0.1)


def test_a_dead_prefill_engine_is_gone_around(fleet: Fleet, want: list[tuple[int, ...]]) -> None:
    victim = fleet.engines[0]
    victim.kill()
    found = [fleet.router.complete(prompt, NEW).tokens for prompt in prompts()[:6]]
    assert found == want[:6]
    with urllib.request.urlopen(f"http://127.0.0.1:{fleet.router.port}/health") as answer:
        assert answer.status == 200
    with victim:
        assert fleet.router.complete(prompts()[7], NEW).tokens == want[7]
        assert_quiet(*fleet.engines)
