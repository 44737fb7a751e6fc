"""Which streams another engine can answer again, after theirs was lost. Pure.

It gets the client's request as it was, so every field means the same there. But its answer is
another one, unless the engine takes the most likely token each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.apis import COMPLETIONS, Api
from kvconnect.router.requests.body import Body, Prompt, raw_of
from kvconnect.router.requests.chunk_events import ChunkEvents
from kvconnect.router.requests.continuation import CHATS, AfterLoss
from kvconnect.router.requests.engine_bodies import SGLANG_GENERATE
from kvconnect.router.requests.generate_events import GenerateEvents
from kvconnect.router.requests.messages_events import MessagesEvents
from kvconnect.router.requests.replay_events import BROKEN, EventFormat, object_of
from kvconnect.router.requests.responses_events import ResponsesEvents

_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
_FORMATS: Mapping[str, Callable[[], EventFormat]] = {
    COMPLETIONS.path: ChunkEvents,
    CHATS: ChunkEvents,
    _RESPONSES: ResponsesEvents,
    _MESSAGES: MessagesEvents,
    SGLANG_GENERATE: GenerateEvents,
}
_AT_ONE_ENGINE = ("background", "previous_response_id", "session_params")
"""Fields about what only one engine has."""
_FALSE = (b"", b"null", b"false", b"[]", b"{}", b'""')


def replay_of(
    kind: EngineKind, api: Api, body: Body, prompt: Prompt
) -> Callable[[], EventFormat] | AfterLoss:
    """Return what makes a reader of the events of a stream that another engine of the same kind can
    answer again, or why none can."""
    if api.path not in _FORMATS:
        return AfterLoss.API
    names = (api.sglang_id,) if kind is EngineKind.SGLANG else ()  # of the request there
    if any(raw_of(body, name) not in _FALSE for name in (*_AT_ONE_ENGINE, *names)):
        return AfterLoss.FIELD
    if not prompt.single:  # of these two: they call tools
        several = api.path not in (_RESPONSES, _MESSAGES)
        return AfterLoss.PROMPTS if several else AfterLoss.TOOLS
    sampling = body
    if api.path == SGLANG_GENERATE:
        if raw_of(body, "return_logprob") not in _FALSE:
            return AfterLoss.LOGPROBS
        sampling = _object(body, "sampling_params")
    return _FORMATS[api.path] if _greedy(sampling) else AfterLoss.SAMPLED


def _greedy(body: Body) -> bool:
    """Return whether the client asks for the most likely tokens. Without a temperature, engines
    take their model's."""
    return _number(body, "temperature") == 0 or _number(body, "top_k") == 1


def _object(body: Body, name: str) -> Body:
    try:
        return object_of(raw_of(body, name))
    except BROKEN:
        return {}


def _number(body: Body, name: str) -> float | None:
    try:
        return msgspec.json.decode(raw_of(body, name), type=float)
    except BROKEN:
        return None
