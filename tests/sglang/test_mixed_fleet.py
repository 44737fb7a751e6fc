"""vLLM engines and SGLang servers behind one router: they share what they have in host memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import pytest

from benchmarks.serve.__main__ import TRACE
from benchmarks.serve.trace import prompt_of, read, scaled
from tests.engines.models import model_dir
from tests.engines.server import Client, Process, Router, kv_transfer
from tests.servers import free_port
from tests.sglang.peer_servers import peers, sglang
from tests.sglang.server import SglangServer
from tests.sglang.vllm_server import VLLM, Vllm

NEW = 4
LONGEST = 960  # tokens of a prompt
CONNECTED_S = 60.0
UNDECIDED = 491
CROWD = 3  # requests at a time
SOURCES = ("device", "host", "disk", "peer", "remote", "handoff", "computed")

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is not here")


class Answer(NamedTuple):
    """What an engine answered, and where it says that the prompt's tokens came from."""

    engine: int
    tokens: tuple[int, ...]
    prompt: int
    sources: dict[str, int]


class Fleet(NamedTuple):
    """The first engines are vLLM's, the others SGLang's."""

    router: Router
    engines: Sequence[Process]

    def ask(self, prompt: list[int]) -> Answer:
        with self.router.open("/v1/completions", self.router.body(prompt, NEW)) as reply:
            engine = int(reply.headers["X-KVConnect-Decode"])
            told = json.load(reply)
        if isinstance(self.engines[engine], SglangServer):
            details = told.get("sglext", {}).get("cached_tokens_details", {})  # none: all computed
            sources = {name: details.get(name) or 0 for name in ("device", "host", "storage")}
            sources["computed"] = told["usage"]["prompt_tokens"] - sum(sources.values())
        else:
            receipt = told["kv_transfer_params"]["kvconnect"]["receipt"]
            assert receipt["prompt"] == told["usage"]["prompt_tokens"]
            sources = {name: receipt[name] for name in SOURCES}
        return Answer(engine, _tokens(told), told["usage"]["prompt_tokens"], sources)


def _tokens(told: dict[str, list[dict[str, list[int]]]]) -> tuple[int, ...]:
    return tuple(told["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def fleet(vllm_fork_server: None) -> Iterator[Fleet]:
    model_dir("llama")
    ports = [free_port() for _ in range(5)]
    vllm = {"host_bytes": "32MiB", "load_when": "always", "listen": "off", "wait_s": 30.0}
    engines: list[Process] = []
    for number, port in enumerate(ports):
        shared = peers(port, *(str(other) for other in ports if other != port))
        if number < 3:
            engines.append(Vllm("llama", kv_transfer(**vllm, cache_peers=shared)))
        else:
            engines.append(sglang(shared, texts=True))
    args = ("--unified", "--decode-policy", "random", "--receipts")
    with ExitStack() as ends:
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(ends.enter_context, engines))
        yield Fleet(ends.enter_context(Router([], engines, args)), engines)


@pytest.mark.timeout(800)  # 1,000 requests, beside other tests
def test_requests_of_a_trace_to_engines_at_random(fleet: Fleet) -> None:
    requests = scaled(read(TRACE))
    prompts = [prompt_of(request)[:LONGEST] for request in requests]
    # Log probabilities of two first tokens differ by 5e-6 here: engines choose by how they round.
    prompts[UNDECIDED] = prompts[0]
    assert len(prompts) == 500
    for engine in fleet.engines:
        await_peers(engine)
    with ThreadPoolExecutor(CROWD) as pool:
        answers = list(pool.map(fleet.ask, prompts))
        alone = partial(computed_alone, fleet.engines[0])
        want = list(pool.map(alone, prompts, range(len(prompts))))
    assert [answer.tokens for answer in answers] == want
    assert len(set(want)) > len(prompts) / 4, "the prompts can be told apart"
    assert {answer.engine for answer in answers} == set(range(5))
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.prompt == sum(answer.sources.values()) == len(prompt)
        assert min(answer.sources.values()) >= 0
    for number, engine in enumerate(fleet.engines):
        shared = "storage" if isinstance(engine, SglangServer) else "peer"
        assert sum(a.sources[shared] for a in answers if a.engine == number) > 0


def await_peers(engine: Process) -> None:
    """Wait until an engine reaches another one: those that start later are tried again."""
    kind = "sglang" if isinstance(engine, SglangServer) else "vllm"
    deadline = time.monotonic() + CONNECTED_S
    while not engine.metric(f"{kind}:kvconnect_tier_available", tier="peer"):
        assert time.monotonic() < deadline, f"{engine} reaches no other engine"
        engine.post("/v1/completions", engine.body([5] * 8, 1))  # an idle engine tells no news


def computed_alone(engine: Client, prompt: list[int], number: int) -> tuple[int, ...]:
    """Return the tokens of a prompt that an engine computes: no other prompt has this salt."""
    body = engine.body(prompt, NEW, cache_salt=f"number {number}")
    with engine.open("/v1/completions", body) as reply:
        return _tokens(json.load(reply))
