"""Two prefill engines, two decode engines and the router: what clients of a fleet get."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.load import CLIENTS, Admin, Load
from tests.engines.models import prompt_tokens
from tests.engines.pd import assert_quiet, decode_config, prefill_config
from tests.engines.ranks import until
from tests.engines.server import Router, Server, StreamBroken, events, kv_transfer
from tests.servers import free_port

REQUESTS = 200
LONGEST = 4000
NEW = 8
SHORT = 600
LONG_NEW = 400
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
    admin: Admin

    def engine(self, role: str, number: int) -> Server:
        """Return the one that the router gave a number."""
        known = (one for one in self.admin.workers() if not one["draining"])
        url = next(one["url"] for one in known if (one["role"], one["number"]) == (role, number))
        return next(engine for engine in self.engines if engine.url == url)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    token = tmp_path_factory.mktemp("admin") / "token"
    token.write_text("a-token-for-these-tests")
    admin = Admin(free_port(), token.read_text())
    flags = ("--admin-token-file", str(token), "--admin-port", str(admin.port))
    with ExitStack() as stack:
        connectors = [prefill_config(digest="full")] * 2 + [decode_config(digest="full")] * 2
        engines = [Server("llama", text, BLOCKS, MAX_LEN) for text in connectors]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, engines))
        router = stack.enter_context(Router(engines[:2], engines[2:], flags))
        yield Fleet(engines, router, admin)


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
        assert status == 409 and "decode computed the prompt itself" in said["error"], said
        status, said = switch(port, "prefill", both)
        assert (status, said) == (200, said | {"role": "decode", "draining": False})
        with ThreadPoolExecutor(6) as pool:  # so many that one decode engine is not enough
            found = list(
                pool.map(lambda prompt: router.complete(prompt, NEW).tokens, prompts()[:12])
            )
        assert found == want[:12]
        assert served(router, both) > 0


def served(router: Router, decode: Server) -> float:
    name = "kvconnect_router_upstream_requests_total"
    return router.metric(name, role="decode", upstream=decode.url, outcome="ok")


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
    probes = "kvconnect_router_probes_total"
    until(
        lambda: all(router.metric(probes, outcome=name) >= n for name, n in outcomes.items()),
        f"probes {outcomes}",
    )


# A fleet that changes under load ----------------------------------------------------------------


@pytest.fixture
def load(fleet: Fleet, want: list[tuple[int, ...]]) -> Load:
    """Requests of prompts that are soon computed."""
    short = [number for number, prompt in enumerate(prompts()) if len(prompt) < SHORT]
    return Load(fleet.router, [prompts()[n] for n in short], [want[n] for n in short])


def assert_all_done(fleet: Fleet) -> None:
    """No request is open, neither at the router nor at an engine, and no engine holds a block."""
    for what in ("in_flight", "tokens_in_flight", "queue"):  # which clients outrun by a moment
        name = f"kvconnect_router_{what}"
        until(lambda name=name: fleet.router.metric(name) == 0, f"no {what}")
    assert_quiet(*fleet.engines)


def test_a_request_that_fails_is_counted(fleet: Fleet, load: Load) -> None:
    """Negative control of what follows: for a while there is no prefill engine, and later one
    answer is not what is expected."""
    prefill = fleet.engines[:2]
    with load:
        load.advance(6)
        for engine in prefill:
            fleet.admin.drain("prefill", engine.url)
        load.advance(6)
        for engine in prefill:
            fleet.admin.add("prefill", engine.url)
        load.advance(6)
    assert load.failed and not load.broken
    assert all("503" in what and "no prefill engine is up" in what for what in load.failed)
    with Load(fleet.router, load.prompts, [(-1,) * NEW] * len(load.prompts)) as wrong:
        wrong.advance(6)
    assert not wrong.right and all("wrong tokens" in what for what in wrong.failed)
    assert_all_done(fleet)


def test_killed_engines_fail_nothing_but_what_streams_from_them(
    fleet: Fleet, load: Load, want: list[tuple[int, ...]]
) -> None:
    prefill = fleet.engines[0]
    with load:
        load.advance(6)
        prefill.kill()
        load.advance(8)
        with urllib.request.urlopen(f"{fleet.router.url}/health") as answer:
            assert json.load(answer)["prefill"][prefill.url] is False
        prefill.restart()
        assert not load.failed + load.broken
        body = fleet.router.body(prompts()[0], LONG_NEW, stream=True)
        streams = [fleet.router.open("/v1/completions", body) for _ in range(2)]
        number = streams[-1].headers["X-KVConnect-Decode"]  # the first may soon be at its end
        decode = fleet.engine("decode", int(number))
        decode.kill()
        load.advance(8)
        with streams[-1], pytest.raises(StreamBroken, match=f"decode engine {number} was lost"):
            list(events(streams[-1]))
        with streams[0]:
            if streams[0].headers["X-KVConnect-Decode"] != number:
                tokens = [t for e in events(streams[0]) for t in e["choices"][0]["token_ids"] or ()]
                assert tokens[:NEW] == list(want[0]) and len(tokens) == LONG_NEW
        decode.restart()
        load.advance(8)
    assert not load.failed
    assert set(load.broken) <= {f"decode engine {number} was lost"}
    assert len(load.broken) <= CLIENTS
    assert_all_done(fleet)


def test_a_rolling_upgrade_fails_nothing(fleet: Fleet, load: Load) -> None:
    """One engine after the other is drained and removed, stops, starts again and is added as one
    of the next version; those of one version hand over to each other only."""
    fleet.admin.until_all_are_up()
    version = dict.fromkeys(((w["role"], w["number"]) for w in fleet.admin.workers()), "old")
    with load:
        load.advance(6)
        for place in (1, 3, 0, 2):  # prefill and decode in turn
            role, engine = ("prefill" if place < 2 else "decode"), fleet.engines[place]
            fleet.admin.drain(role, engine.url)
            fleet.admin.remove(role, engine.url)
            engine.restart()
            number = fleet.admin.add(role, f"{engine.url},version=next")
            version[role, number] = "next"
            load.advance(8)
    assert not load.failed + load.broken
    served = Counter[tuple[str, str]]()
    for (prefill, decode), requests in load.right.items():
        served[version["prefill", prefill], version["decode", decode]] += requests
    assert set(served) == {("old", "old"), ("next", "next")}
    assert_all_done(fleet)
