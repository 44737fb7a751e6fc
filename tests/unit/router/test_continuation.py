"""Which streams can be continued, and what the next engine is asked."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests import continuation
from kvconnect.router.requests.apis import APIS
from kvconnect.router.requests.body import prompt_of
from kvconnect.router.requests.continuation import (
    MOST_HELD,
    AfterLoss,
    StreamTerms,
    context_of,
    continuation_body,
    terms_of,
)
from kvconnect.router.requests.fields import DECISIONS

ASK = {"prompt": "hello", "stream": True}
TURN = {"role": "user", "content": "hello"}
CHAT = {"messages": [TURN], "stream": True}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
NUMBERS = array("i", [5, 6]), array("i", [7, 8, 9])


def parsed(asked: dict[str, Any]) -> dict[str, Raw]:
    return {name: Raw(json.dumps(value).encode()) for name, value in asked.items()}


def terms(
    asked: dict[str, Any], path: str = "", context: int | None = 100
) -> StreamTerms | AfterLoss:
    path = path or ("/v1/chat/completions" if "messages" in asked else "/v1/completions")
    body = parsed(asked)
    api = next(api for api in APIS if api.path == path)
    found = terms_of(api, body, prompt_of(body), context)
    assert isinstance(found, AfterLoss) or found.context == context
    return found


def body(asked: dict[str, Any]) -> dict[str, Any] | None:
    found = terms(asked)
    assert isinstance(found, StreamTerms)
    made = continuation_body(parsed(asked), found, *NUMBERS)
    return None if made is None else dict(json.loads(msgspec.json.encode(made)))


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"prompt": ["a", "b"]}, AfterLoss.PROMPTS),
        ({"n": 2}, AfterLoss.PROMPTS),
        ({"best_of": 2}, AfterLoss.PROMPTS),
        ({"use_beam_search": True}, AfterLoss.PROMPTS),
        ({"response_format": {"type": "json_object"}}, AfterLoss.GRAMMAR),
        ({"response_format": 3}, AfterLoss.GRAMMAR),
        ({"structured_outputs": {"regex": "a+"}}, AfterLoss.GRAMMAR),
        ({"guided_regex": "a+"}, AfterLoss.GRAMMAR),
        ({"logprobs": 0}, AfterLoss.LOGPROBS),
        ({"logprobs": 1}, AfterLoss.LOGPROBS),
        ({"prompt_logprobs": 0}, AfterLoss.LOGPROBS),
        ({"echo": True}, AfterLoss.ECHO),
        ({"suffix": "b"}, AfterLoss.ECHO),
        ({"presence_penalty": 0.5}, AfterLoss.PENALTIES),
        ({"frequency_penalty": -1}, AfterLoss.PENALTIES),
        ({"prompt_embeds": "x"}, AfterLoss.PROMPTS),
        ({"bad_words": ["a b"]}, AfterLoss.FIELD),
        ({"vllm_xargs": {"a": 1}}, AfterLoss.FIELD),
        ({"repetition_detection": {"a": 1}}, AfterLoss.FIELD),
        ({"thinking_token_budget": 5}, AfterLoss.FIELD),
        ({"nobody_knows": False}, AfterLoss.FIELD),
        ({"stop": "x" * (MOST_HELD + 1)}, AfterLoss.FIELD),
        ({"stop": 5}, AfterLoss.FIELD),
        ({"stop": ["a"] * 5000}, AfterLoss.FIELD),
        ({"max_tokens": "many"}, AfterLoss.FIELD),
        ({"seed": 1.5}, AfterLoss.FIELD),
    ],
)
def test_what_prevents_a_continuation(field: dict[str, Any], reason: AfterLoss) -> None:
    assert terms(ASK | field) is reason


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"tools": [{"type": "function"}]}, AfterLoss.TOOLS),
        ({"functions": [{}]}, AfterLoss.TOOLS),
        ({"logprobs": True}, AfterLoss.LOGPROBS),
        ({"messages": [TURN, TURN | {"content": [IMAGE]}]}, AfterLoss.MEDIA),
        ({"messages": [TURN | {"content": [{"type": "text"}] * 5000}]}, AfterLoss.MEDIA),
        ({"messages": "odd"}, AfterLoss.FIELD),
    ],
)
def test_what_prevents_one_of_a_chat(field: dict[str, Any], reason: AfterLoss) -> None:
    assert terms(CHAT | field) is reason


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/generate", "/tokenize"])
def test_other_apis_have_no_token_ids(path: str) -> None:
    assert terms(CHAT, path) is AfterLoss.API


@pytest.mark.parametrize(
    "field",
    [
        {"n": 1, "best_of": None, "echo": False, "suffix": None, "logprobs": None, "stop": []},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "seed": 3},
        {"structured_outputs": None, "bad_words": [], "vllm_xargs": {}, "nobody_knows": None},
    ],
)
def test_what_does_not(field: dict[str, Any]) -> None:
    assert terms(ASK | field, context=None) == StreamTerms()
    assert terms(CHAT | field) == StreamTerms(chat=True, context=100)


def test_terms() -> None:
    every = StreamTerms(context=100)
    assert terms(ASK | {"return_token_ids": True}) == every._replace(shows_ids=True)
    assert terms(ASK | {"stream_options": {"include_usage": True}}) == every._replace(usage=True)
    stops = ASK | {"stop": ["ab", "\u00e9\u00e9\u00e9\u00e9"]}
    assert terms(stops) == every._replace(held=3)
    assert terms(stops | {"include_stop_str_in_output": True}) == every._replace(reach=3)
    texts = [{"type": "text", "text": "a"}]
    assert terms(CHAT | {"messages": [TURN | {"content": texts}]}) == every._replace(chat=True)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None, "max_completion_tokens": None}])
def test_a_chat_without_a_limit_needs_that_of_the_model(limit: dict[str, Any]) -> None:
    assert terms(CHAT | limit, context=None) is AfterLoss.LENGTH
    limited = {"max_completion_tokens": 5}
    assert terms(CHAT | limit | limited, context=None) == StreamTerms(chat=True)
    full = terms(CHAT | limit, context=5)  # two tokens of the prompt, three of the answer
    assert isinstance(full, StreamTerms)
    assert continuation_body(parsed(CHAT | limit), full, *NUMBERS) is None


@pytest.mark.parametrize(
    ("models", "context"),
    [
        ({"m": {"max_model_len": 40}}, 40),
        ({"m": {"max_model_len": 40}, "adapter": {"parent": "m", "max_model_len": None}}, 40),
        ({"m": {}}, None),
        ({"m": {"max_model_len": "40"}}, None),
        ({"m": 3}, None),
        ({}, None),
    ],
)
def test_the_models_limit(models: dict[str, Any], context: int | None) -> None:
    assert context_of(models) == context


def test_the_next_engine_gets_the_rest() -> None:
    asked = ASK | {"model": "m", "max_tokens": 10, "min_tokens": 4, "seed": 2**63 - 1, "stop": "x"}
    asked |= {"temperature": 0, "cache_salt": "s", "user": "u", "request_id": "r", "logprobs": None}
    asked |= {"truncate_prompt_tokens": 3, "add_special_tokens": True, "priority": 2}
    assert body(asked) == {
        **{"model": "m", "prompt": [5, 6, 7, 8, 9], "max_tokens": 7, "min_tokens": 1, "seed": 2},
        **{"stop": "x", "temperature": 0, "cache_salt": "s", "user": "u", "priority": 2},
        "stream": True,
    }


def test_limits_are_those_of_the_api() -> None:
    for asked, most in (
        (ASK, 13),
        (ASK | {"max_tokens": None}, 13),
        (CHAT, 95),
        (CHAT | {"max_tokens": None}, 95),
        (CHAT | {"max_tokens": 5}, 2),
        (CHAT | {"max_tokens": 5, "max_completion_tokens": 9}, 6),
        (CHAT | {"max_tokens": 5, "max_completion_tokens": None}, 2),
        (ASK | {"min_tokens": 2, "max_tokens": 4}, 1),
    ):
        found = body(asked)
        assert found is not None and found["max_tokens"] == most
        assert found.get("min_tokens", 0) == 0
    assert body(ASK | {"max_tokens": 3}) is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_field_of_the_api_has_a_decision(path: str) -> None:
    """A field without one prevents a continuation, which is right but rarely meant."""
    left = DECISIONS[EngineKind.VLLM].passed[path] - continuation.DECIDED
    assert left == UNDECIDED & DECISIONS[EngineKind.VLLM].passed[path]


UNDECIDED = frozenset(
    (
        *("conversation", "max_tool_calls", "modalities", "mm_payload", "repetition_detection"),
        *("return_mm_kwargs", "return_token_offsets", "return_weight_versions", "text"),
        *("routed_experts_prompt_start", "thinking_token_budget", "truncation"),
    )
)
