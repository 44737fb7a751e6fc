"""Log probabilities of a prompt, which cached tokens do not have. Pure.

Of a prompt that SGLang handed over, only the prefill server has them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.requests.body import Body, raw_of
from kvconnect.router.requests.engine_bodies import SGLANG_GENERATE
from kvconnect.router.requests.field_values import NOT_SET, UNSET, is_set

_META = "meta_info"
_PROMPTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_FIRST = "output_token_ids_logprobs"  # prefill samples the first token
_COMPLETIONS = "/v1/completions"
_FIX = f"use {SGLANG_GENERATE} without stream, or an engine that computes its own prompts"


def needs_own_prompt(body: Body) -> bool:
    """Return whether an engine of vLLM computes the prompt itself, whatever it is handed over:
    cached tokens have no log probabilities. 0 asks for those of the prompt's own tokens."""
    if raw_of(body, "prompt_logprobs") not in UNSET:
        return True
    # With echo, the answer's number is the prompt's too. That of chats is 0 unless it is set.
    return is_set(body, "echo") and ("messages" in body or raw_of(body, "logprobs") not in UNSET)


def wants_prompt_logprobs(path: str, body: Body) -> bool:
    """Return whether the prefill server's log probabilities belong into the answer.

    Raises:
        Refused: they do, and cannot be put into an answer of this form.
    """
    if path == _COMPLETIONS:
        if is_set(body, "echo") and raw_of(body, "logprobs") not in (*NOT_SET, b"0"):
            raise Refused("logprobs", f"with echo, a hand-off loses the prompt's: {_FIX}")
        return False
    if path != SGLANG_GENERATE or not is_set(body, "return_logprob"):
        return False
    start = bytes(body.get("logprob_start_len", b"-1"))
    if start in (b"-1", *NOT_SET) and not is_set(body, "token_ids_logprob"):
        return False
    if is_set(body, "stream"):
        raise Refused("logprob_start_len", f"a hand-off streams no prompt logprobs: {_FIX}")
    return True


def with_prompt_logprobs(answer: bytes, prefilled: bytes) -> bytes:
    """Return decode's answer with the log probabilities of the prompt in prefill's.

    Raises:
        Refused: an answer is not what SGLang answers.
    """
    try:
        if answer[:1] == b"[":
            pairs = zip(_items(answer), _items(prefilled), strict=True)
            merged: Any = [_merged(mine, theirs) for mine, theirs in pairs]
        else:
            merged = _merged(Raw(answer), Raw(prefilled))
        return msgspec.json.encode(merged)
    except (msgspec.DecodeError, KeyError, ValueError, RecursionError) as error:
        raise Refused("answer", f"it has no log probabilities: {error}") from error


def _items(answer: bytes) -> list[Raw]:
    return msgspec.json.decode(answer, type=list[Raw])


def _merged(answer: Raw, prefilled: Raw) -> dict[str, Any]:
    fields = msgspec.json.decode(answer, type=dict[str, Raw])
    meta: dict[str, Any] = msgspec.json.decode(fields[_META], type=dict[str, Raw])
    theirs = msgspec.json.decode(prefilled, type=dict[str, Raw])
    source = msgspec.json.decode(theirs[_META], type=dict[str, Raw])
    if (_PROMPTS[0] in source) != (_PROMPTS[0] in meta):
        raise KeyError(_PROMPTS[0])
    if _PROMPTS[0] not in source:  # this prompt's were not asked for
        return fields
    prompts = {name: source[name] for name in _PROMPTS if name in source}
    meta |= {name: found for name, found in prompts.items() if bytes(found) not in NOT_SET}
    if is_set(meta, _FIRST) and is_set(source, _FIRST):
        mine, first = _items(bytes(meta[_FIRST])), _items(bytes(source[_FIRST]))
        if bytes(mine[0]) == b"null":
            meta[_FIRST] = [first[0], *mine[1:]]
    return {**fields, _META: meta}
