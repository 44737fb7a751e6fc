"""Which streams another engine can continue after theirs was lost, and what it is asked. Pure.

The other engine gets the prompt and all tokens that the client has as one prompt of token ids, by
vLLM's ``/v1/completions``, also where the client asked for a chat. So a request is continued only
if all that its answer depends on is in these tokens and in fields that mean the same there.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from kvconnect.router.requests.apis import COMPLETIONS, Api
from kvconnect.router.requests.body import Body, Prompt, raw_of

CHATS = "/v1/chat/completions"
MOST_HELD = 1024
"""Characters of the longest stop string of a request that is continued."""

_UNSAID_MAX_TOKENS = 16  # of vLLM's completions, also for null; a chat may fill the context
_MOST_OBJECTS = 4096  # in messages that are looked at
_MOST_STOPS = 4096  # texts that end an answer, and commas in them
_UNSET = (b"", b"null")
_FALSE = (*_UNSET, b"false", b"[]", b"{}", b'""', b"0", b"0.0")


class AfterLoss(StrEnum):
    """What became of a stream whose decode engine was lost, or why it was not continued."""

    CONTINUED = "continued"
    # The request
    API = "api"  # its events are not known
    PROMPTS = "prompts"  # several prompts or answers
    GRAMMAR = "grammar"  # the output's form is prescribed
    TOOLS = "tools"
    LOGPROBS = "logprobs"
    PENALTIES = "penalties"  # they count output tokens
    ECHO = "echo"
    MEDIA = "media"
    FIELD = "field"  # another field that is not known to mean the same
    RECEIPT = "receipt"  # its stream ends with one
    SAMPLED = "sampled"  # another engine's answer would be another one
    # The stream
    IDS = "ids"  # its events have no token ids
    PARSER = "parser"  # the engine makes reasoning or tool calls of its tokens
    MEMORY = "memory"  # there was none for its tokens
    TEXT = "text"  # no token is known to end where the text does
    LENGTH = "length"  # no tokens are left to generate, or nobody knows how many
    # The fleet
    LIMIT = "limit"  # of ``--continue``
    WITHHELD = "withheld"  # the request may have ended the engines
    FAILED = "failed"  # no other engine went on


class StreamTerms(NamedTuple):
    """What a continued stream keeps of its request.

    Attributes:
        chat: its events are those of chats.
        shows_ids: the client asked for token ids.
        usage: the client asked for usage at the end.
        held: characters that the engine holds back, because a stop string may begin there.
        reach: characters before the cut that the next engine must generate again, because a stop
            string may begin there.
        context: most tokens of prompt and answer together; None: unknown.
    """

    chat: bool = False
    shows_ids: bool = False
    usage: bool = False
    held: int = 0
    reach: int = 0
    context: int | None = None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _each(reason: AfterLoss, names: str) -> dict[str, AfterLoss]:
    return dict.fromkeys(names.split(), reason)


_CARRIED = _names("""
    allowed_token_ids cache_salt ignore_eos include_stop_str_in_output logit_bias min_p model
    priority repetition_penalty skip_special_tokens stop stop_token_ids stream stream_interval
    stream_options temperature top_k top_p user""")
"""Fields that the next engine gets as the client sent them."""
_RECKONED = _names("max_tokens max_completion_tokens min_tokens seed")
_SETTLED = _names("""
    add_generation_prompt add_special_tokens chat_template chat_template_kwargs
    continue_final_message documents include_reasoning messages metadata moderation
    parallel_tool_calls prediction prompt prompt_cache_key prompt_cache_options
    prompt_cache_retention reasoning reasoning_effort request_id return_token_ids
    safety_identifier service_tier store tool_choice top_logprobs truncate_prompt_tokens
    truncation_side verbosity""")
"""Fields whose effect is in the prompt's token ids, or that have none on the answer."""
_UNLESS_FALSE: Mapping[str, AfterLoss] = {
    **_each(AfterLoss.TOOLS, "tools functions function_call"),
    **_each(AfterLoss.GRAMMAR, "structured_outputs"),
    **_each(AfterLoss.PENALTIES, "presence_penalty frequency_penalty"),
    **_each(AfterLoss.ECHO, "echo suffix"),
    **_each(AfterLoss.MEDIA, "prompt_embeds media_io_kwargs mm_processor_kwargs audio"),
    **_each(AfterLoss.LOGPROBS, "logprob_token_ids"),
    **_each(AfterLoss.FIELD, "bad_words vllm_xargs web_search_options"),
    **_each(AfterLoss.FIELD, "return_prompt_text return_tokens_as_token_ids watermarking"),
}
"""Fields that prevent a continuation, unless they are empty."""
_UNLESS: Mapping[str, tuple[tuple[bytes, ...], AfterLoss]] = {
    "logprobs": ((*_UNSET, b"false"), AfterLoss.LOGPROBS),
    "prompt_logprobs": (_UNSET, AfterLoss.LOGPROBS),
    "n": ((*_UNSET, b"1"), AfterLoss.PROMPTS),
    "best_of": ((*_UNSET, b"1"), AfterLoss.PROMPTS),
    "use_beam_search": ((*_UNSET, b"false"), AfterLoss.PROMPTS),
    "spaces_between_special_tokens": ((*_UNSET, b"true"), AfterLoss.FIELD),
    "length_penalty": ((*_UNSET, b"1", b"1.0"), AfterLoss.FIELD),
}
"""Fields that prevent a continuation, unless they have one of these values."""
_FORMAT = "response_format"
DECIDED = _CARRIED | _RECKONED | _SETTLED | _UNLESS_FALSE.keys() | _UNLESS.keys() | {_FORMAT}
"""Fields that prevent a continuation for a known reason, or do not. Any other one prevents it."""


class _ModelEntry(msgspec.Struct):
    max_model_len: int | None = None


class _ResponseFormat(msgspec.Struct):
    type: str = ""


class _UsageWish(msgspec.Struct):
    include_usage: bool | None = None


class _MessagePart(msgspec.Struct):
    type: str = ""


class _ChatMessage(msgspec.Struct):
    content: Raw = Raw(b"")


_BROKEN = (msgspec.DecodeError, ValueError, RecursionError)


def context_of(models: Mapping[str, Any]) -> int | None:
    """Return how many tokens prompt and answer may have together at an engine of vLLM, None if it
    does not say it. ``models``: name -> entry of ``/v1/models``: first its model, under each of its
    names, then adapters, whose entries say nothing."""
    try:
        first = next(iter(models.values()), None)
        return msgspec.convert(first, _ModelEntry).max_model_len
    except msgspec.ValidationError:
        return None


def terms_of(
    api: Api, body: Body, prompt: Prompt, context: int | None = None
) -> StreamTerms | AfterLoss:
    """Return what a continuation of a stream keeps, or why there can be none. ``context``: see
    :class:`StreamTerms`."""
    chat = api.path == CHATS
    if api is not COMPLETIONS and not chat:
        return AfterLoss.API
    if not prompt.single:
        return AfterLoss.PROMPTS
    for name in body.keys() - _CARRIED - _RECKONED - _SETTLED:
        if (reason := _prevented(name, raw_of(body, name))) is not None:
            return reason
    try:
        if chat and not _only_text(raw_of(body, "messages")):
            return AfterLoss.MEDIA
        longest = _longest_stop(raw_of(body, "stop"))
        shown = msgspec.json.decode(
            raw_of(body, "stream_options") or b"null", type=_UsageWish | None
        )
        for name in _RECKONED:
            _number(body, name)
        limited = not chat or _asked_limit(body, chat=chat) is not None
    except _BROKEN:  # the engine refuses it
        return AfterLoss.FIELD
    if longest > MOST_HELD:
        return AfterLoss.FIELD
    if not limited and context is None:
        return AfterLoss.LENGTH
    before = max(0, longest - 1)
    told = raw_of(body, "include_stop_str_in_output") not in _FALSE
    return StreamTerms(
        chat,
        shows_ids=raw_of(body, "return_token_ids") not in _FALSE,
        usage=shown is not None and bool(shown.include_usage),
        held=0 if told else before,
        reach=before if told else 0,
        context=context,
    )


def continuation_body(
    body: Body, terms: StreamTerms, prompt: array[int], generated: array[int]
) -> dict[str, Any] | None:
    """Return the body of a completion that goes on after ``generated``, None if nothing is left to
    generate. ``prompt``: token ids of the client's prompt."""
    done = len(generated)
    left = tokens_left(body, terms, len(prompt), done)
    if left <= 0:
        return None
    asked = {name: value for name, value in body.items() if name in _CARRIED}
    asked["prompt"] = Raw(f"[{','.join(map(str, (*prompt, *generated)))}]".encode())
    asked["max_tokens"] = left
    if least := _number(body, "min_tokens"):
        asked["min_tokens"] = max(0, least - done)
    if (seed := _number(body, "seed")) is not None:
        # With the same seed, the tokens would be drawn as those at the answer's beginning were.
        asked["seed"] = (seed + done) % 2**63
    return asked


def tokens_left(body: Body, terms: StreamTerms, prompt: int, done: int) -> int:
    """Return how many tokens are left to generate, if any, after so many of prompt and answer."""
    most = _asked_limit(body, chat=terms.chat)
    if most is None and terms.chat:
        assert terms.context is not None, "without it there are no terms"
        most = terms.context - prompt
    return (_UNSAID_MAX_TOKENS if most is None else most) - done


def _asked_limit(body: Body, *, chat: bool) -> int | None:
    most = _number(body, "max_completion_tokens") if chat else None
    return _number(body, "max_tokens") if most is None else most


def _prevented(name: str, raw: bytes) -> AfterLoss | None:
    """Return why a field with this JSON prevents a continuation, None if it does not."""
    if name in _UNLESS_FALSE:
        return None if raw in _FALSE else _UNLESS_FALSE[name]
    if name in _UNLESS:
        allowed, reason = _UNLESS[name]
        return None if raw in allowed else reason
    if name == _FORMAT:
        try:
            found = msgspec.json.decode(raw, type=_ResponseFormat | None)
        except _BROKEN:
            return AfterLoss.GRAMMAR
        return None if found is None or found.type == "text" else AfterLoss.GRAMMAR
    if name.startswith("guided_"):
        return AfterLoss.GRAMMAR
    return None if raw in _UNSET else AfterLoss.FIELD


def _only_text(messages: bytes) -> bool:
    if messages.count(b"{") > _MOST_OBJECTS:
        return False
    found = msgspec.json.decode(messages, type=list[_ChatMessage])
    lists = (bytes(each.content) for each in found if bytes(memoryview(each.content)[:1]) == b"[")
    parts = (part for raw in lists for part in msgspec.json.decode(raw, type=list[_MessagePart]))
    return all(part.type == "text" for part in parts)


def _longest_stop(raw: bytes) -> int:
    if raw in _UNSET:
        return 0
    if raw.count(b",") > _MOST_STOPS:
        raise ValueError("too many to look at")
    stops = msgspec.json.decode(raw, type=str | list[str])
    return max(map(len, [stops] if isinstance(stops, str) else stops), default=0)


def _number(body: Body, name: str) -> int | None:
    raw = raw_of(body, name)
    return None if raw in _UNSET else msgspec.json.decode(raw, type=int)
