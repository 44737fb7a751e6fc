"""Bounds of what a client's request may ask an engine for. Pure.

SGLang's scheduler checks few types and ranges, and an error in one request ends its server. Other
values have an engine compute for ever, or fill its memory. Requests that are meant well stay far
below these bounds, and ``--pass-field`` lifts that of a field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.body import Body, raw_of
from kvconnect.router.requests.engine_bodies import SGLANG_GENERATE
from kvconnect.router.requests.json_parts import check_parts

_SAMPLING_PARAMS = "sampling_params"
_RANGES = {
    "n": (0, 128),
    "top_k": (-1, 2**30),  # SGLang's number for the whole vocabulary
    "temperature": (0, 100),  # an infinite one makes a token of a grammar no number
    "logprob_start_len": (-1, 2**31 - 1),
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
# For each prompt. A least number of tokens forbids those that stop: all of them end the server.
_MOST_IDS = {"token_ids_logprob": 4096, "stop_token_ids": 1024}
_MOST_PATTERN = 1024  # tokens; vLLM compares as many patterns after each token
_MOST_PROMPTS = dict.fromkeys(("prompt", "text", "input_ids", "prompt_embeds"), 4096)
_MOST_PROMPTS["input"] = 65_536  # what is embedded takes no place for answers
_BY_PROMPT = ("logprob_start_len", "top_logprobs_num", "return_hidden_states", "lora_path")
"""Fields that are a list only if the prompts are one. SGLang takes the list for the value."""
_NATIVE = ("text", "input_ids", "input_embeds")
_COMPLETIONS = "/v1/completions"
_PROMPTS_OF = {
    SGLANG_GENERATE: _NATIVE,
    _COMPLETIONS: ("prompt",),
    "/classify": _NATIVE,
    "/v1/embeddings": ("input",),
}
"""Fields that may hold several prompts: SGLang takes the first that is set."""
_COMPUTED_EMPTY = (SGLANG_GENERATE, _COMPLETIONS)
_MANY = re.compile(rb'\[\s*["\[]')
_MANY_EMBEDS = re.compile(rb"\[\s*\[\s*\[")
_LIST_OF_LISTS = re.compile(rb"\[\s*\[")
_EMPTY_LIST = re.compile(rb"\[\s*\]")
_UNSET = (b"", b"null")
_FREE = (None, "none", "auto")  # choices of tools that leave the answer's form open
_FEWER = "ask about fewer prompts at a time"
_BROKEN = (msgspec.DecodeError, ValueError, RecursionError)


class _Typed(msgspec.Struct):
    type: str = ""


class _TemplateValues(msgspec.Struct):
    spaces_between_special_tokens: bool | None = None


class _Repetition(msgspec.Struct):
    max_pattern_size: Raw = Raw(b"")


_BIASES = msgspec.json.Decoder(dict[str, float] | None)
_TEMPLATE = msgspec.json.Decoder(_TemplateValues | None)
_FORMAT = msgspec.json.Decoder(_Typed | None)
_REPETITION = msgspec.json.Decoder(_Repetition | None)
_SPACES = b"spaces_between_special_tokens"


def refuse_beyond_limits(
    kind: EngineKind, path: str, body: Body, named: Collection[str] = ()
) -> None:
    """Refuse what ends an engine, or keeps it from other requests. ``named``: fields that the
    operator lets pass.

    Raises:
        Refused: a field is beyond its bound; a prompt of several is empty.
    """
    if kind is not EngineKind.SGLANG:
        _check(_OF_VLLM, body, named)
        return
    _refuse_empty_prompts(path, body)
    _check(_OF_SGLANG, body, named)
    _refuse_least_in_grammar("min_tokens", body, named)
    lists = [name for name in _BY_PROMPT if name in body and _first(_view(body, name)) == b"["]
    lists = [name for name in lists if name not in named]
    if lists and _is_one_prompt(path, body):
        raise Refused(lists[0], f"{lists[0]}: use one value, not a list, for one prompt")
    for params in _sampling_params(body):
        _check(_OF_SGLANG, params, named)
        _refuse_least_in_grammar("min_new_tokens", params, named)


def refuse_many_prompts(body: Body) -> None:
    """Refuse more prompts at a time than an engine has room for.

    Raises:
        Refused: a field has more of them.
    """
    for name, most in _MOST_PROMPTS.items():
        if name not in body:
            continue
        view = _view(body, name)
        # A prompt takes two bytes and a comma.
        if _first(view) == b"[" and len(view) > 3 * most and _prompts_in(view) > most:
            raise Refused(name, f"{name}: use {most} prompts or less at a time")


def values_of(body: Body, name: str) -> list[Any]:
    """Return a field's value for each prompt, or the one for all.

    Raises:
        Refused: it is not JSON that can be read, or has too many parts.
    """
    raw = raw_of(body, name)
    check_parts(name, raw, _FEWER)
    try:
        found = msgspec.json.decode(raw or b"null")
    except _BROKEN as error:
        raise Refused(name, f"{name}: use one value, or a list, one for each prompt") from error
    return found if isinstance(found, list) else [found]


def _refuse_empty_prompts(path: str, body: Body) -> None:
    """Refuse a prompt without a token: the server ends when it computes one. SGLang itself refuses
    an empty prompt of OpenAI's API only if all are empty."""
    names = _PROMPTS_OF[path] if path in _COMPUTED_EMPTY else ()
    for name in names:
        if name in body and _has_empty(_view(body, name)):
            raise Refused("body", f"{name}: a prompt is empty; send at least one token")


def _has_empty(view: memoryview) -> bool:
    if _first(view) != b"[":
        return bytes(view[:3]) == b'""'
    if not _MANY.match(view):
        return _EMPTY_LIST.match(view) is not None
    if _LIST_OF_LISTS.match(view):
        return _EMPTY_LIST.search(view) is not None
    raw = bytes(view)
    at = raw.find(b'""')  # an empty text, or a text's last character and its end
    while at >= 0 and raw[at - 1 : at] == b"\\":
        at = raw.find(b'""', at + 1)
    return at >= 0


def _is_one_prompt(path: str, body: Body) -> bool:
    """Return whether SGLang takes a request for one prompt, not for a list of prompts."""
    for name in _PROMPTS_OF.get(path, ()):
        view = _view(body, name)
        if view in _UNSET:
            continue
        if name == "text":
            return _first(view) != b"["
        return not (_MANY_EMBEDS if name == "input_embeds" else _MANY).match(view)
    return True


def _prompts_in(view: memoryview) -> int:
    """Return the number of texts, or of lists of token ids, in a list; 0 for other lists."""
    if not _MANY.match(view):
        return 0
    raw = bytes(view)
    if _LIST_OF_LISTS.match(raw):
        return raw.count(b"[") - 1
    # A quote within a text has a backslash that is not another one's second half.
    return (raw.count(b'"') - raw.replace(b"\\\\", b"").count(b'\\"')) // 2


def _sampling_params(body: Body) -> list[dict[str, Raw]]:
    raw = raw_of(body, _SAMPLING_PARAMS)
    if raw in _UNSET:
        return []
    check_parts(_SAMPLING_PARAMS, raw, _FEWER)
    try:
        if raw[:1] != b"[":
            return [msgspec.json.decode(raw, type=dict[str, Raw])]
        found = msgspec.json.decode(raw, type=list[dict[str, Raw] | None])
    except _BROKEN as error:
        fix = "use an object, or a list of objects"
        raise Refused(_SAMPLING_PARAMS, f"{_SAMPLING_PARAMS}: {fix}") from error
    return [each for each in found if each]


def _refuse_least_in_grammar(name: str, fields: Body, named: Collection[str]) -> None:
    """Refuse a least number of tokens where a grammar may end the answer before: SGLang then lets
    no token follow."""
    if name not in fields or name in named:
        return
    if _outside(_one_value(fields, name), -inf, 0) and _has_grammar(fields):
        raise Refused(name, f"{name}: leave it out where a format, grammar or tool is asked for")


def _has_grammar(fields: Body) -> bool:
    if any(raw_of(fields, name) not in (*_UNSET, b'""') for name in _GRAMMARS):
        return True
    choice = raw_of(fields, "tool_choice")
    if choice[:1] == b"{" or (choice and _one_value(fields, "tool_choice") not in _FREE):
        return True
    wanted = raw_of(fields, "response_format")
    if wanted in _UNSET:
        return False
    found = _decoded("response_format", wanted, _FORMAT, "use an object with a type")
    return found is not None and found.type != "text"


def _check(
    checks: Mapping[str, Callable[[str, Body], None]], fields: Body, named: Collection[str]
) -> None:
    for name in fields:
        if name in checks and name not in named:
            checks[name](name, fields)


def _check_range(name: str, fields: Body) -> None:
    low, high = _RANGES[name]
    if any(_outside(each, low, high) for each in values_of(fields, name)):
        raise Refused(name, f"{name}: use {low} to {high}")


def _check_size(name: str, fields: Body) -> None:
    view, most = _view(fields, name), _MOST_BYTES[name]
    # `text` is a prompt unless it is the form of a response.
    if len(view) > most and (name != "text" or _first(view) == b"{"):
        raise Refused(name, f"{name}: use {most // _KIB} KiB or less")


def _check_bias(name: str, fields: Body) -> None:
    raw, fix = raw_of(fields, name), f"use numbers from {-_MOST_BIAS:g} to {_MOST_BIAS:g}"
    check_parts(name, raw, "name fewer tokens")
    found = _decoded(name, raw, _BIASES, fix) or {}
    if any(abs(bias) > _MOST_BIAS for bias in found.values()):
        raise Refused(name, f"{name}: {fix}")


def _check_ids(name: str, fields: Body) -> None:
    raw, most = raw_of(fields, name), _MOST_IDS[name]
    if raw.count(b",") < most:
        return
    found = values_of(fields, name)
    lists = found if found and isinstance(found[0], list) else [found]
    if any(isinstance(each, list) and len(each) > most for each in lists):
        raise Refused(name, f"{name}: use {most} ids or less")


def _check_template(name: str, fields: Body) -> None:
    raw = raw_of(fields, name)
    if _SPACES in raw or b"\\" in raw:  # an escape may hide a name
        _decoded(name, raw, _TEMPLATE, f"use true or false for {_SPACES.decode()}")


def _check_repetition(name: str, fields: Body) -> None:
    found = _decoded(name, raw_of(fields, name), _REPETITION, "use an object")
    if found is None:
        return
    size = _one_value({"size": found.max_pattern_size}, "size")
    if _outside(size, 0, _MOST_PATTERN):
        raise Refused(name, f"{name}: use a max_pattern_size of 0 to {_MOST_PATTERN}")


_OF_VLLM: Mapping[str, Callable[[str, Body], None]] = {"repetition_detection": _check_repetition}
_OF_SGLANG: Mapping[str, Callable[[str, Body], None]] = {
    **dict.fromkeys(_RANGES, _check_range),
    **dict.fromkeys(_MOST_BYTES, _check_size),
    **dict.fromkeys(_MOST_IDS, _check_ids),
    "logit_bias": _check_bias,
    "chat_template_kwargs": _check_template,
}


def _view(fields: Body, name: str) -> memoryview:
    """Return a field's JSON without a copy of what a client sent."""
    value = fields.get(name, b"")
    return memoryview(value if isinstance(value, bytes | Raw) else msgspec.json.encode(value))


def _first(view: memoryview) -> bytes:
    return bytes(view[:1])


def _one_value(fields: Body, name: str) -> Any:
    return values_of(fields, name)[0] if raw_of(fields, name)[:1] not in (b"[", b"{") else None


def _decoded(name: str, raw: bytes, decoder: msgspec.json.Decoder[Any], fix: str) -> Any:
    try:
        return decoder.decode(raw)
    except _BROKEN as error:
        raise Refused(name, f"{name}: {fix}") from error


def _outside(value: Any, low: float, high: float) -> bool:
    """Return whether a number lies outside; it may stand in a text. NaN does. What is no number is
    left to the engine, which refuses it."""
    try:
        return not low <= float(value) <= high
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False
