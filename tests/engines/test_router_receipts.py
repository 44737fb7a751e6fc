"""Receipts through a router: a stream's says the same as that of a whole answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import openai
import pytest

from kvconnect.types import PromptSource
from tests.engines.kv_events import published_at
from tests.engines.ranks import until
from tests.engines.scenario import FULL, HOST, NEW, PROMPT, ask, expected, prompts, receipt
from tests.engines.server import Router, Server, kv_transfer
from tests.servers import free_port

UNIFIED = ("--unified", "--receipts")


class Fleet(NamedTuple):
    """``silent`` is not told to give receipts; ``deaf`` does not know of the KV events."""

    engine: Server
    router: Router
    silent: Router
    deaf: Router


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    expected("llama")  # before the machine is busy with another engine
    port = free_port()
    settings = kv_transfer(host_bytes=HOST, digest="full")
    with Server("llama", settings, args=published_at(f"tcp://*:{port}")) as engine:
        telling: Any = SimpleNamespace(worker=f"{engine.url},events={port}")
        with (
            Router([], [telling], UNIFIED) as router,
            Router([], [telling], UNIFIED[:1]) as silent,
            Router([], [engine], UNIFIED) as deaf,
        ):
            # The first events are lost: a subscription takes a while.
            until(lambda: "receipt" in told(streamed(router, [1, 2, 3])), "a receipt")
            yield Fleet(engine, router, silent, deaf)


def streamed(router: Router, prompt: list[int], new: int = NEW, **extra: Any) -> list[Any]:
    """The chunks of a streamed answer, which ends as it must."""
    with router.open("/v1/completions", router.body(prompt, new, stream=True, **extra)) as reply:
        *lines, end = [line for line in reply if line.startswith(b"data: ")]
    assert end == b"data: [DONE]\n"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def told(chunks: list[Any]) -> dict[str, Any]:
    """What KVConnect says in the last chunk, and in no other one."""
    *tokens, last = chunks
    assert not any("kv_transfer_params" in chunk for chunk in tokens)
    if "kv_transfer_params" not in last:
        return {}
    for key in ("id", "object", "created", "model"):
        assert last[key] == tokens[0][key]
    assert last["choices"] == []
    found: dict[str, Any] = last["kv_transfer_params"]["kvconnect"]
    return found


def tokens_in(chunks: list[Any]) -> tuple[int, ...]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return tuple(token for choice in choices for token in choice["token_ids"] or ())


def sums(receipt: dict[str, Any]) -> dict[str, int]:
    """The sources that are not 0, after a check that they add up to the prompt."""
    found = {source.value: receipt[source.value] for source in PromptSource}
    assert sum(found.values()) == receipt["prompt"]
    return {name: tokens for name, tokens in found.items() if tokens}


def counted(engine: Server) -> dict[str, float]:
    name = "vllm:kvconnect_prompt_tokens_total"
    return {one.value: engine.metric(name, source=one.value) for one in PromptSource}


def test_streams_and_whole_answers_say_the_same(fleet: Fleet) -> None:
    engine, router, *_ = fleet
    prompt, want = prompts()[0], expected("llama").fresh[0]
    for _ in range(2):
        ask(engine)  # the prompt that is asked for now has left the device
    engine.settle()
    before, found = counted(engine), []
    for _ in range(2):
        chunks = streamed(router, prompt)
        assert tokens_in(chunks) == want
        found.append(told(chunks)["receipt"])
    assert sums(found[0]) == {"host": FULL, "computed": PROMPT - FULL}
    assert sums(found[1]) == {"device": FULL, "computed": PROMPT - FULL}
    whole = receipt(router, prompt)
    assert sums(whole) == sums(found[1]) and whole.keys() == found[1].keys()
    engine.settle()
    after = counted(engine)
    for source in PromptSource:
        asked = sum(one[source.value] for one in (*found, whole))
        assert after[source.value] - before[source.value] == asked


def test_negative_control_nobody_asks_or_nobody_hears(fleet: Fleet) -> None:
    prompt, want = prompts()[0], expected("llama").fresh[0]
    for router in (fleet.silent, fleet.deaf):
        chunks = streamed(router, prompt)
        assert told(chunks) == {} and tokens_in(chunks) == want
    assert receipt(fleet.silent, prompt) is None
    assert sums(receipt(fleet.deaf, prompt))


def test_streams_that_end_early(fleet: Fleet) -> None:
    """After the first token, and at a word that the engine's scheduler does not look for."""
    router, prompt = fleet.router, prompts()[1]
    # One token and its receipt are a race, which the receipt loses on a machine that is busy.
    until(lambda: "receipt" in told(streamed(router, prompt, 1)), "a receipt with one token")
    text = "".join(c["text"] for chunk in streamed(router, prompt) for c in chunk["choices"])
    chunks = streamed(router, prompt, 200, stop=[text[len(text) // 2 :][:4]])
    assert len(tokens_in(chunks)) < 2 * NEW
    assert sums(told(chunks)["receipt"])


def test_the_official_client_takes_the_chunk(fleet: Fleet) -> None:
    client: Any = openai.OpenAI(base_url=f"{fleet.router.url}/v1", api_key="any", max_retries=0)
    turn: Any = {"model": "model", "messages": [{"role": "user", "content": "the sea " * 40}]}
    turn |= {"max_tokens": NEW, "temperature": 0}
    *others, last = client.chat.completions.create(**turn, stream=True)
    assert sums(last.model_extra["kv_transfer_params"]["kvconnect"]["receipt"])
    assert last.choices == [] and last.id == others[0].id
    text = client.chat.completions.create(**turn).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in others) == text
    with client.chat.completions.stream(**turn) as stream:  # it puts chunks together
        assert "".join(event.delta for event in stream if event.type == "content.delta") == text
