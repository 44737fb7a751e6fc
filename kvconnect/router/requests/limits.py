"""Bounds of what a client's request may ask an engine for. Pure.

SGLang's scheduler checks few types and ranges, and an error in one request ends its server. Other
values have an engine compute for ever, or fill its memory. Requests that are meant well stay far
below these bounds, and ``--pass-field`` lifts that of a field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import inf

import msgspec
from msgspec import Raw

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.body import Body, raw_of
from kvconnect.router.requests.engine_bodies import SGLANG_GENERATE
from kvconnect.router.requests.field_values import (
    BROKEN,
    FEWER,
    NOT_SET,
    UNSET,
    decoded,
    first_of,
    is_set,
    one_value,
    outside,
    refusal,
    values_of,
    view_of,
)
from kvconnect.router.requests.json_parts import check_parts
from kvconnect.router.requests.prompt_limits import (
    refuse_empty_prompts,
    refuse_lists_for_one_prompt,
    refuse_many_prompts,
)

_SAMPLING_PARAMS = "sampling_params"
_TILES = "max_dynamic_patch"
_RANGES = {
    "n": (0, 128),
    "top_k": (-1, 2**30),  # SGLang's number for the whole vocabulary
    "temperature": (0, 100),  # an infinite one makes a token of a grammar no number
    "repetition_penalty": (1e-3, 2),  # a smaller one is 0 in 32 bits, and divides
    "logprob_start_len": (-1, 2**31 - 1),
    # SGLang tries all shapes of so many tiles, in its HTTP process.
    **dict.fromkeys((_TILES, f"image_{_TILES}", f"video_{_TILES}"), (0, 128)),
}
_MOST_BIAS = 1e9  # beyond it, a 32-bit float may become infinite, and no token has a probability
_KIB = 1024
_GRAMMARS = ("regex", "ebnf", "json_schema", "structural_tag")
_MOST_BYTES = {
    "stop": 4 * _KIB,  # compared with the answer's end after each token, in quadratic time
    # SGLang keeps each grammar and its text for ever. Tools may become one.
    **dict.fromkeys((*_GRAMMARS, "response_format", "text"), 256 * _KIB),
    "tools": 1024 * _KIB,
}
_MOST_TOOL_OBJECTS = 8192  # SGLang checks each schema in its HTTP process: about 0.5 ms an object
# For each prompt. A least number of tokens forbids those that stop: all of them end the server.
_MOST_IDS = {"token_ids_logprob": 4096, "label_token_ids": 4096, "stop_token_ids": 1024}
_MOST_LISTS = 65_536  # of ids, one for each prompt
_MOST_PATTERN = 1024  # tokens; vLLM compares as many patterns after each token
_TOPS = {"/v1/completions": "logprobs", SGLANG_GENERATE: "top_logprobs_num"}
_TOP = "top_logprobs"  # on any other path
_MOST_TOPS = 4096  # the vocabulary of a language model has more tokens
_MOST_TOPS_HANDED_OVER = 128  # the room that SGLang's prefill server has for them
_CAPTURED = ("return_routed_experts", "return_indexer_topk")
_HIDDEN = "return_hidden_states"
_NOT_ALL = (None, False, "last")  # hidden states that decode has
_FREE = (None, "none", "auto")  # choices of tools that leave the answer's form open


class _Typed(msgspec.Struct):
    type: str = ""


class _TemplateValues(msgspec.Struct):
    spaces_between_special_tokens: bool | None = None
    chat_template: Raw = Raw(b"")


class _Media(msgspec.Struct):
    max_dynamic_patch: Raw = Raw(b"")


class _Part(msgspec.Struct):
    """A part of a message's content."""

    image_url: Raw = Raw(b"")
    video_url: Raw = Raw(b"")


class _Content(msgspec.Struct):
    """A message with its content."""

    content: Raw = Raw(b"")


class _Repetition(msgspec.Struct):
    max_pattern_size: Raw = Raw(b"")


class _Declaring(msgspec.Struct):
    """A message, which may declare tools."""

    tools: Raw = Raw(b"")


_BIASES = msgspec.json.Decoder(dict[str, float] | None)
_TEMPLATE = msgspec.json.Decoder(_TemplateValues | None)
_FORMAT = msgspec.json.Decoder(_Typed | None)
_REPETITION = msgspec.json.Decoder(_Repetition | None)
_MESSAGES = msgspec.json.Decoder(list[_Declaring])
_CONTENTS = msgspec.json.Decoder(list[_Content])
_PARTS = msgspec.json.Decoder(list[_Part])
_OF_MEDIA = msgspec.json.Decoder(_Media)
_STOPS = msgspec.json.Decoder(str | list[str] | None)
_SPACES = b"spaces_between_special_tokens"


def refuse_beyond_limits(
    kind: EngineKind, path: str, body: Body, named: Collection[str], *, handed_over: bool
) -> None:
    """Refuse what ends an engine, or keeps it from other requests, and what a hand-off would have
    it answer wrongly. ``named``: fields that the operator lets pass. ``handed_over``: another
    server of SGLang computes the prompt.

    Raises:
        Refused: a field is beyond its bound; a prompt of several is empty; decode would read
            states of other requests' prompts.
    """
    if kind is not EngineKind.SGLANG:
        _check(_OF_VLLM, body, named)
        return
    refuse_empty_prompts(path, body)
    _check(_OF_SGLANG, body, named)
    _refuse_least_in_grammar("min_tokens", body, named)
    refuse_lists_for_one_prompt(path, body, named)
    sampling = _sampling_params(body)
    for params in sampling:
        _check(_OF_SGLANG, params, named)
        _refuse_least_in_grammar("min_new_tokens", params, named)
    counted = next((params for params in sampling if "n" in params), None)
    if counted is not None:  # SGLang wants the same number in all of them
        refuse_many_prompts(body, counted)
    _refuse_many_tops(path, body, _MOST_TOPS_HANDED_OVER if handed_over else _MOST_TOPS)
    if handed_over:
        _refuse_lost_states(body)


def _refuse_many_tops(path: str, body: Body, most: int) -> None:
    """Refuse to ask for more of the likeliest tokens than a server can tell, which its scheduler
    does not survive."""
    name = _TOPS.get(path, _TOP)
    if name in body and any(outside(each, -inf, most) for each in values_of(body, name)):
        raise refusal(name, f"use {most} or less")


def _refuse_lost_states(body: Body) -> None:
    wrong = [name for name in _CAPTURED if is_set(body, name)]
    if _HIDDEN in body and any(each not in _NOT_ALL for each in values_of(body, _HIDDEN)):
        wrong.append(_HIDDEN)
    if wrong:
        fix = "a hand-off loses the prompt's: use an engine that computes its own prompts"
        raise refusal(wrong[0], fix)


def _sampling_params(body: Body) -> list[dict[str, Raw]]:
    raw = raw_of(body, _SAMPLING_PARAMS)
    if raw in UNSET:
        return []
    check_parts(_SAMPLING_PARAMS, raw, FEWER)
    try:
        if raw[:1] != b"[":
            return [msgspec.json.decode(raw, type=dict[str, Raw])]
        found = msgspec.json.decode(raw, type=list[dict[str, Raw] | None])
    except BROKEN as error:
        raise refusal(_SAMPLING_PARAMS, "use an object, or a list of objects") from error
    return [each for each in found if each]


def _refuse_least_in_grammar(name: str, fields: Body, named: Collection[str]) -> None:
    """Refuse a least number of tokens where a grammar may end the answer before: SGLang then lets
    no token follow."""
    if name not in fields or name in named:
        return
    if outside(one_value(fields, name), -inf, 0) and _has_grammar(fields):
        raise refusal(name, "leave it out where a format, a grammar or tools are asked for")


def _has_grammar(fields: Body) -> bool:
    if any(raw_of(fields, name) not in (*UNSET, b'""') for name in _GRAMMARS):
        return True
    choice = raw_of(fields, "tool_choice")
    if choice[:1] == b"{" or (choice and one_value(fields, "tool_choice") not in _FREE):
        return True
    # Tools that are strict, or of some models, have one even where the model may choose.
    if choice != b'"none"' and (is_set(fields, "tools") or _declares_tools(fields)):
        return True
    wanted = raw_of(fields, "response_format")
    if wanted in UNSET:
        return False
    found = decoded("response_format", wanted, _FORMAT, "use an object with a type")
    return found is not None and found.type != "text"


def _declares_tools(fields: Body) -> bool:
    """Return whether a message has tools, as SGLang lets those of the system."""
    raw = raw_of(fields, "messages")
    if b'"tools"' not in raw and b"\\u" not in raw:  # an escape may hide a name
        return False
    check_parts("messages", raw, "leave min_tokens out")
    found = decoded("messages", raw, _MESSAGES, "use a list of messages")
    return any(bytes(message.tools) not in NOT_SET for message in found)


def _check(
    checks: Mapping[str, Callable[[str, Body], None]], fields: Body, named: Collection[str]
) -> None:
    for name in fields:
        if name in checks and name not in named:
            checks[name](name, fields)


def _check_range(name: str, fields: Body) -> None:
    low, high = _RANGES[name]
    if any(outside(each, low, high) for each in values_of(fields, name)):
        raise refusal(name, f"use {low} to {high}")


def _check_size(name: str, fields: Body) -> None:
    view, most = view_of(fields, name), _MOST_BYTES[name]
    # `text` is a prompt unless it is the form of a response.
    if len(view) > most and (name != "text" or first_of(view) == b"{"):
        raise refusal(name, f"use {most // _KIB} KiB or less")


def _check_stop(name: str, fields: Body) -> None:
    _check_size(name, fields)
    decoded(name, raw_of(fields, name), _STOPS, "use a text, or a list of texts")


def _check_tools(name: str, fields: Body) -> None:
    _check_size(name, fields)
    if raw_of(fields, name).count(b"{") > _MOST_TOOL_OBJECTS:
        raise refusal(name, f"use {_MOST_TOOL_OBJECTS} objects or fewer")


def _check_bias(name: str, fields: Body) -> None:
    raw, fix = raw_of(fields, name), f"use numbers from {-_MOST_BIAS:g} to {_MOST_BIAS:g}"
    check_parts(name, raw, "name fewer tokens")
    found = decoded(name, raw, _BIASES, fix) or {}
    if any(abs(bias) > _MOST_BIAS for bias in found.values()):
        raise refusal(name, fix)


def _check_ids(name: str, fields: Body) -> None:
    """Refuse a long list, or one within a list. Ids have no brackets, so nothing is decoded."""
    raw, most = raw_of(fields, name), _MOST_IDS[name]
    if raw.count(b",") < most:
        return
    if raw.count(b"[") > _MOST_LISTS + 1:
        raise refusal(name, FEWER)
    if any(part.rpartition(b"[")[2].count(b",") >= most for part in raw.split(b"]")):
        raise refusal(name, f"use {most} ids or less")


def _check_template(name: str, fields: Body) -> None:
    raw = raw_of(fields, name)
    if any(each in raw for each in (_SPACES, b"chat_template", b"\\")):  # an escape may hide a name
        found = decoded(name, raw, _TEMPLATE, f"use true or false for {_SPACES.decode()}")
        if found is not None and bytes(found.chat_template):
            raise refusal(name, "leave out chat_template: a template is a program")


def _check_tiles(name: str, fields: Body) -> None:
    """Refuse more tiles of an image or video than its field may have."""
    raw = raw_of(fields, name)
    if _TILES.encode() not in raw and b"\\u" not in raw:
        return
    try:
        contents = [bytes(each.content) for each in _CONTENTS.decode(raw)]
        parts = [part for each in contents if each[:1] == b"[" for part in _PARTS.decode(each)]
    except BROKEN:
        return  # messages or parts that are no objects, which SGLang refuses
    for media in (bytes(each) for part in parts for each in (part.image_url, part.video_url)):
        if media[:1] == b"{":
            found = _OF_MEDIA.decode(media)
            if bytes(found.max_dynamic_patch):
                _check_range(_TILES, {_TILES: found.max_dynamic_patch})


def _check_repetition(name: str, fields: Body) -> None:
    found = decoded(name, raw_of(fields, name), _REPETITION, "use an object")
    if found is None:
        return
    size = one_value({"size": found.max_pattern_size}, "size")
    if outside(size, 0, _MOST_PATTERN):
        raise refusal(name, f"use a max_pattern_size of 0 to {_MOST_PATTERN}")


_OF_VLLM: Mapping[str, Callable[[str, Body], None]] = {"repetition_detection": _check_repetition}
_OF_SGLANG: Mapping[str, Callable[[str, Body], None]] = {
    **dict.fromkeys(_RANGES, _check_range),
    **dict.fromkeys(_MOST_BYTES, _check_size),
    **dict.fromkeys(_MOST_IDS, _check_ids),
    "stop": _check_stop,
    "tools": _check_tools,
    "logit_bias": _check_bias,
    "chat_template_kwargs": _check_template,
    "messages": _check_tiles,
}
