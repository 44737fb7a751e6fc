"""Requests that would end a server of SGLang, sent to real ones: by a router, and directly."""

from __future__ import annotations

import importlib
import urllib.error
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from kvconnect.engines.sglang import token_checks
from tests.engines.models import VOCAB_SIZE
from tests.engines.server import Client, Router
from tests.sglang.server import SglangServer

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TURN = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
PROMPT = {"prompt": "a", "max_tokens": 4, "top_p": 0.9}
SCORE = "/v1/score"
LABELS: dict[str, Any] = {"label_token_ids": [1]}
OVERRIDES: dict[str, Any] = {
    "embed_override_token_id": 5,
    "query_embed_overrides": [[1.0, 2.0]],
}
STRICT = {"type": "function", "function": {"name": "x", "parameters": {}, "strict": True}}
LONG = {"input_ids": list(range(5, 45)), "sampling_params": {"max_new_tokens": 4}}


class Servers(NamedTuple):
    """A server, and a router in front of it."""

    server: SglangServer
    router: Router


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with SglangServer(texts=True) as server:
        flags = ("--unified", "--decode", f"{server.url},engine=sglang")
        with Router([], [], flags) as router:
            yield Servers(server, router)


def refused(client: Client, path: str, body: dict[str, Any]) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught, client.open(path, body):
        pass
    with caught.value as error:
        error.read()
        return error.code


def is_there(server: SglangServer) -> bool:
    with server.open(COMPLETIONS, {"model": "model", **PROMPT}) as reply:
        return bool(reply.status == 200)


def generate(new: int = 4, **fields: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": new}, **fields}


def sampled(**params: Any) -> tuple[str, dict[str, Any]]:
    return generate(sampling_params={"max_new_tokens": 4, **params})


IDS = [
    (COMPLETIONS, {**PROMPT, "prompt": [10**9]}),
    (COMPLETIONS, {**PROMPT, "prompt": [[1], [VOCAB_SIZE]]}),
    (CHAT, {**TURN, "input_ids": [10**9]}),
    (GENERATE, {"input_ids": [-1], "sampling_params": {"max_new_tokens": 4}}),
    (GENERATE, {"input_ids": [[1], [10**9]], "sampling_params": {"max_new_tokens": 4}}),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": [10**9], "min_tokens": 2}),
    sampled(stop_token_ids=[-1], min_new_tokens=2),
    generate(return_logprob=True, top_logprobs_num=VOCAB_SIZE + 1),
    (COMPLETIONS, {**PROMPT, "prompt": [[1], []]}),
    (COMPLETIONS, {**PROMPT, "prompt": ["a", ""]}),
    (GENERATE, {"input_ids": [[1], []], "sampling_params": {"max_new_tokens": 4}}),
    (SCORE, {"query": "", "items": [""], **LABELS}),
    (SCORE, {"query": "", "items": ["a", ""], **LABELS}),
    (SCORE, {"query": [], "items": [[]], **LABELS}),
    (SCORE, {"items": [[1], []], **LABELS}),
    ("/v1/embeddings", {"input": [[1], []]}),
    ("/classify", {"input_ids": [[1], []]}),
]
"""Requests that a server with KVConnect refuses itself."""

VALUES = [
    (COMPLETIONS, {**PROMPT, "top_k": 2**31}),
    sampled(top_k=2**40),
    (GENERATE, {**LONG, "return_logprob": True, "logprob_start_len": -5}),
    generate(return_logprob=True, logprob_start_len=[0]),
    generate(return_logprob=True, top_logprobs_num=[5]),
    generate(return_hidden_states=[False]),
    generate(return_hidden_states=[]),
    sampled(repetition_penalty=1e-50, top_p=0.9),
    (CHAT, {**TURN, "tools": [STRICT], "parallel_tool_calls": False, "min_tokens": 4}),
    (SCORE, {"query": [5], "items": [[7]], **LABELS, **OVERRIDES}),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"5": 1e39}}),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"5": "nan"}}),
    (COMPLETIONS, {**PROMPT, "regex": "a", "temperature": 1e39}),
    (COMPLETIONS, {**PROMPT, "regex": "a", "min_tokens": 4}),
    sampled(regex="a", min_new_tokens=4, top_p=0.9),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 2}),
    (CHAT, {**TURN, "chat_template_kwargs": {"spaces_between_special_tokens": []}}),
]
"""Requests that the router refuses."""


@pytest.mark.parametrize(("path", "body"), IDS)
def test_a_server_survives_empty_prompts_and_ids_that_its_model_lacks(
    servers: Servers, path: str, body: dict[str, Any]
) -> None:
    for client in (servers.server, servers.router):
        assert refused(client, path, {"model": "model", **body}) == 400
    assert is_there(servers.server)


@pytest.mark.parametrize(("path", "body"), VALUES)
def test_a_server_behind_a_router_survives_values_that_end_it(
    servers: Servers, path: str, body: dict[str, Any]
) -> None:
    assert refused(servers.router, path, {"model": "model", **body}) == 400
    assert is_there(servers.server)


def test_values_and_ids_within_the_bounds_are_answered(servers: Servers) -> None:
    last = VOCAB_SIZE - 1
    for path, body in (
        (COMPLETIONS, {**PROMPT, "prompt": [[1], [last]], "stop_token_ids": [last]}),
        (COMPLETIONS, {**PROMPT, "logit_bias": {"5": -1e9, "6": 100}, "temperature": 100}),
        (COMPLETIONS, {**PROMPT, "min_tokens": 3, "stop_token_ids": [0], "top_k": 2**30}),
        generate(return_logprob=True, logprob_start_len=0, top_logprobs_num=5),
        generate(text=["a"], return_logprob=[True], logprob_start_len=[0]),
        sampled(regex="[ab]+", skip_special_tokens=False, stream_interval=1),
        (CHAT, {**TURN, "chat_template_kwargs": {"spaces_between_special_tokens": False}}),
        (SCORE, {"query": [5], "items": [[7], []], **LABELS}),
    ):
        with servers.router.open(path, {"model": "model", **body}) as reply:
            assert reply.status == 200


def test_the_hook_is_set_where_requests_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, hook, kind: registered.update({target: hook})
    )
    module, owner, name = token_checks.VALIDATE.rsplit(".", 2)
    assert callable(getattr(getattr(importlib.import_module(module), owner), name))
    token_checks.watch()
    assert registered == {token_checks.VALIDATE: token_checks.before_validate}
    # Control: a scheduler's process has imported no tokenizer, and is another's child.
    monkeypatch.delitem(token_checks.sys.modules, module)
    monkeypatch.setattr(token_checks.multiprocessing, "parent_process", object)
    registered.clear()
    token_checks.watch()
    assert registered == {}
