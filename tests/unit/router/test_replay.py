"""Which streams another engine can answer again, and which journal a stream has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.apis import APIS, COMPLETIONS, Api
from kvconnect.router.requests.body import prompt_of
from kvconnect.router.requests.chunk_events import ChunkEvents
from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.generate_events import GenerateEvents
from kvconnect.router.requests.journal import StreamJournal
from kvconnect.router.requests.journals import Journaled, journal_of
from kvconnect.router.requests.messages_events import MessagesEvents
from kvconnect.router.requests.replay import replay_of
from kvconnect.router.requests.replay_events import EventFormat
from kvconnect.router.requests.replay_journal import ReplayJournal
from kvconnect.router.requests.responses_events import ResponsesEvents
from tests.fakes.answer_streams import ASKS, CHATS, GENERATE, MESSAGES, RESPONSES

VLLM, SGLANG = EngineKind.VLLM, EngineKind.SGLANG
OTHERS = frozenset(EngineKind) - {SGLANG}


def api_of(path: str) -> Api:
    return next(api for api in APIS if api.path == path)


def parsed(asked: dict[str, Any]) -> dict[str, Raw]:
    return {name: Raw(json.dumps(value).encode()) for name, value in asked.items()}


def found(path: str, kind: EngineKind = VLLM, **more: Any) -> Callable[[], EventFormat] | AfterLoss:
    if path == GENERATE:
        kind, more = SGLANG, {"sampling_params": {"temperature": 0} | more}
    body = parsed(ASKS.get(path, ASKS[CHATS]) | more)
    return replay_of(kind, api_of(path), body, prompt_of(body))


def journal(path: str, kind: EngineKind = VLLM, **more: Any) -> Journaled | AfterLoss:
    body = parsed(ASKS[path] | more)
    return journal_of(kind, api_of(path), body, prompt_of(body), lambda size: True)


def test_each_api_has_its_events() -> None:
    assert found(MESSAGES) is MessagesEvents
    for kind in (VLLM, SGLANG):
        assert found(RESPONSES, kind) is ResponsesEvents
        for path in (COMPLETIONS.path, CHATS):
            assert found(path, kind) is ChunkEvents
    assert found(GENERATE) is GenerateEvents
    assert found("/tokenize") is AfterLoss.API


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize(
    "more",
    [
        *({"temperature": 1}, {"temperature": None}, {"temperature": 0.1}, {"temperature": "0"}),
        *({"temperature": 1, "top_k": 2}, {"temperature": None, "top_k": None}),
    ],
)
def test_sampled_answers_are_others_each_time(path: str, more: dict[str, Any]) -> None:
    assert found(path, **more) is AfterLoss.SAMPLED


@pytest.mark.parametrize("path", ASKS)
def test_greedy_ones_are_not(path: str) -> None:
    for more in ({"temperature": 0.0}, {"temperature": 0, "top_p": 0.5, "seed": 3}):
        assert not isinstance(found(path, **more), AfterLoss)
    assert not isinstance(found(path, temperature=1, top_k=1), AfterLoss)


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        (RESPONSES, {"previous_response_id": "resp_a"}, AfterLoss.FIELD),
        (RESPONSES, {"background": True}, AfterLoss.FIELD),
        (RESPONSES, {"tools": [{"type": "web_search_preview"}]}, AfterLoss.TOOLS),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "look"}}, AfterLoss.TOOLS),
        (CHATS, {"n": 2}, AfterLoss.PROMPTS),
        (COMPLETIONS.path, {"prompt": ["a", "b"]}, AfterLoss.PROMPTS),
        (COMPLETIONS.path, {"session_params": {"id": "a"}}, AfterLoss.FIELD),
    ],
)
def test_what_prevents_it(path: str, more: dict[str, Any], reason: AfterLoss) -> None:
    assert found(path, **more) is reason


@pytest.mark.parametrize(
    ("path", "name"), [(COMPLETIONS.path, "rid"), (CHATS, "rid"), (RESPONSES, "request_id")]
)
def test_an_id_that_the_client_chose_is_sglangs_alone(path: str, name: str) -> None:
    assert found(path, SGLANG, **{name: "mine"}) is AfterLoss.FIELD
    assert not isinstance(found(path, **{name: "mine"}), AfterLoss)


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": None, "background": False, "store": True},
        {"tools": [{"type": "function", "name": "a"}]},
        {"text": {"format": {"type": "json_object"}}, "nobody_knows": 1},
    ],
)
def test_what_does_not(more: dict[str, Any]) -> None:
    """The request goes to the next engine as it is. What else it may bring is seen in events."""
    assert found(RESPONSES, **more) is ResponsesEvents


def test_tokens_are_better_than_text() -> None:
    """A stream with token ids goes on at its last token, whatever is sampled."""
    for more in ({}, {"temperature": 1}):
        chosen = journal(CHATS, **more)
        assert isinstance(chosen, Journaled) and isinstance(chosen.journal, StreamJournal)
        assert chosen.api == COMPLETIONS._replace(kinds=OTHERS)


@pytest.mark.parametrize(
    ("path", "kind", "kinds"),
    [(MESSAGES, VLLM, OTHERS), (RESPONSES, VLLM, OTHERS), (CHATS, SGLANG, {SGLANG})],
)
def test_the_rest_comes_from_an_engine_of_the_same_kind(
    path: str, kind: EngineKind, kinds: frozenset[EngineKind]
) -> None:
    chosen = journal(path, kind)
    assert isinstance(chosen, Journaled) and isinstance(chosen.journal, ReplayJournal)
    assert chosen.api == api_of(path)._replace(kinds=kinds)
    assert not chosen.journal.can_leave(ASKS[path])  # all would be computed again


def test_what_cannot_go_on_by_tokens_is_answered_again() -> None:
    chosen = journal(CHATS, presence_penalty=1, response_format={"type": "json_object"})
    assert isinstance(chosen, Journaled) and isinstance(chosen.journal, ReplayJournal)
    assert chosen.api == api_of(CHATS)._replace(kinds=OTHERS)
    sampled = journal(CHATS, presence_penalty=1, temperature=1)
    assert sampled is AfterLoss.PENALTIES
    assert journal(CHATS, logprobs=True) is AfterLoss.LOGPROBS
    assert journal(CHATS, n=2) is AfterLoss.PROMPTS
    assert journal(CHATS, SGLANG, temperature=1) is AfterLoss.SAMPLED
    assert journal(MESSAGES, temperature=1) is AfterLoss.SAMPLED
