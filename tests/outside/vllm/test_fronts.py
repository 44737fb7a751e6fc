"""Routers and clients that others wrote, at vLLM engines with KVConnect: the answers are those of
an engine without a connector, and the prompts' KV was handed off."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.engines.models import TEXT
from tests.engines.pd import assert_quiet, pair, received_bytes
from tests.engines.scenario import NEW
from tests.engines.server import Process, Router, Server
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / ".venv-peers"
KEY = "none"  # clients insist on one


class Fleet(NamedTuple):
    """``plain`` has no connector. ``router`` is this project's."""

    plain: Server
    prefill: Server
    decode: Server
    router: Router


@dataclass
class Front(Process):
    """A router of others. ``argv`` starts it; the port is added."""

    argv: tuple[str, ...] = ()
    health = "/health"
    metrics_port: int = field(default_factory=free_port)

    def command(self) -> list[str]:
        ports = ("--port", str(self.port), "--prometheus-port", str(self.metrics_port))
        return [*self.argv, "--host", "127.0.0.1", *ports]


def vllm_router(p: Server, d: Server) -> Front:
    program = str(PEERS / "vllm-router" / "bin" / "vllm-router")
    return Front(argv=(program, "--vllm-pd-disaggregation", "--prefill", p.url, "--decode", d.url))


def own_router(p: Server, d: Server) -> Router:
    return Router([p], [d], args=("--pull",))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        plain = stack.enter_context(Server("llama"))
        p, d = stack.enter_context(pair())
        yield Fleet(plain, p, d, stack.enter_context(Router([p], [d])))


@pytest.mark.parametrize("start", [vllm_router, own_router])
def test_front(fleet: Fleet, start: Callable[[Server, Server], Process]) -> None:
    for server in (fleet.prefill, fleet.decode):
        server.post("/reset_prefix_cache?reset_external=true")
    want = [answer(of(fleet.plain), text) for text in texts()]
    assert len(set(want)) == len(want)  # a wrong prompt would show
    with start(fleet.prefill, fleet.decode) as front:
        client = of(front)
        for text, right in zip(texts(), want, strict=True):
            before = received_bytes(fleet.decode)
            assert answer(client, text) == right
            assert_quiet(fleet.prefill, fleet.decode)
            assert received_bytes(fleet.decode) > before
        assert chat(client) == streamed_chat(client) == chat(of(fleet.plain))


def texts() -> list[str]:
    whole = TEXT.read_text(encoding="utf-8")
    return [whole[start : start + 1000] for start in range(0, 8000, 2000)]


def answer(client: openai.OpenAI, text: str) -> str:
    return client.completions.create(prompt=text, max_tokens=NEW, **GREEDY).choices[0].text


def of(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


QUESTION = [{"role": "user", "content": "What do blocks, pages and ranks have in common? " * 12}]
GREEDY: dict[str, Any] = {"model": "model", "temperature": 0}
MESSAGES: dict[str, Any] = {"model": "model", "extra_body": {"temperature": 0}}


def chat(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(messages=QUESTION, max_tokens=NEW, **GREEDY)
    return answer.choices[0].message.content or ""


def streamed_chat(client: openai.OpenAI) -> str:
    chunks = client.chat.completions.create(
        messages=QUESTION, max_tokens=NEW, stream=True, **GREEDY
    )
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def responses(server: Process) -> str:
    answer = of(server).responses.create(
        input="Say what a lease is. " * 20, max_output_tokens=NEW, **GREEDY
    )
    return answer.output_text


def messages(server: Process) -> str:
    answer = _anthropic(server).messages.create(messages=QUESTION, max_tokens=NEW, **MESSAGES)
    return "".join(block.text for block in answer.content if block.type == "text")


def streamed_messages(server: Process) -> str:
    client = _anthropic(server)
    with client.messages.stream(messages=QUESTION, max_tokens=NEW, **MESSAGES) as stream:
        return "".join(stream.text_stream)


def _anthropic(server: Process) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
url, question, length = sys.argv[1:]
model = ChatOpenAI(
    model="model", temperature=0, max_tokens=int(length), base_url=url, api_key="none"
)
print(model.invoke(question).content, end="")
"""


def langchain(server: Process) -> str:
    python = str(PEERS / "langchain" / "bin" / "python")
    asked = (f"{server.url}/v1", QUESTION[0]["content"], str(NEW))
    return _output([python, "-c", LANGCHAIN, *asked])


def curl(server: Process) -> str:
    body = json.dumps({**GREEDY, "messages": QUESTION, "max_tokens": NEW})
    url = f"{server.url}/v1/chat/completions"
    said = _output(["curl", "-sSf", url, "-H", "Content-Type: application/json", "-d", body])
    content: str = json.loads(said)["choices"][0]["message"]["content"]
    return content


def _output(command: list[str]) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("client", [responses, messages, streamed_messages, langchain, curl])
def test_client(fleet: Fleet, client: Callable[[Process], str]) -> None:
    for server in (fleet.prefill, fleet.decode):
        server.post("/reset_prefix_cache?reset_external=true")
    want = client(fleet.plain)
    assert want
    before = received_bytes(fleet.decode)
    assert client(fleet.router) == want
    assert_quiet(fleet.prefill, fleet.decode)
    assert received_bytes(fleet.decode) > before
