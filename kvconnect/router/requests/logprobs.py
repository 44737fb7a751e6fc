"""What an engine says of tokens beside its text: log probabilities and internal states. Pure.

Of a prompt that SGLang handed over, only the prefill server has them. Too many end a server.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.requests.body import Body, raw_of
from kvconnect.router.requests.engine_bodies import SGLANG_GENERATE
from kvconnect.router.requests.limits import values_of

_META = "meta_info"
_PROMPTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_FIRST = "output_token_ids_logprobs"  # prefill samples the first token
_NULL = (b"", b"null", b"false", b"[]")
_UNSET = (b"", b"null")
_COMPLETIONS = "/v1/completions"
_OWN = "an engine that computes its own prompts"
_FIX = f"use {SGLANG_GENERATE} without stream, or {_OWN}"
_TOPS = {_COMPLETIONS: "logprobs", SGLANG_GENERATE: "top_logprobs_num"}
_TOP = "top_logprobs"  # on any other path
_MOST_HANDED_OVER = 128  # the room that SGLang's prefill server has for them
_MOST = 4096  # the vocabulary of a language model has more tokens
_CAPTURED = ("return_routed_experts", "return_indexer_topk")
_HIDDEN = "return_hidden_states"
_NOT_ALL = (None, False, "last")  # hidden states that decode has


def needs_own_prompt(body: Body) -> bool:
    """Return whether an engine of vLLM computes the prompt itself, whatever it is handed over:
    cached tokens have no log probabilities. 0 asks for those of the prompt's own tokens."""
    if raw_of(body, "prompt_logprobs") not in _UNSET:
        return True
    # With echo, the answer's number is the prompt's too. That of chats is 0 unless it is set.
    return _set(body, "echo") and ("messages" in body or raw_of(body, "logprobs") not in _UNSET)


def refuse_unsafe(path: str, body: Body, *, handed_over: bool) -> None:
    """Refuse what ends a server of SGLang, and what a hand-off would have it answer wrongly.

    Raises:
        Refused: it asks for more of the likeliest tokens than a server can tell, which its
            scheduler does not survive; or decode would read states of other requests' prompts.
    """
    name, most = _TOPS.get(path, _TOP), _MOST_HANDED_OVER if handed_over else _MOST
    if any(_exceeds(each, most) for each in values_of(body, name)):
        raise Refused(name, f"{name}: use {most} or less")
    if not handed_over:
        return
    wrong = [name for name in _CAPTURED if _set(body, name)]
    if any(each not in _NOT_ALL for each in values_of(body, _HIDDEN)):
        wrong.append(_HIDDEN)
    if wrong:
        raise Refused(wrong[0], f"{wrong[0]}: a hand-off loses the prompt's: use {_OWN}")


def wants_prompt_logprobs(path: str, body: Body) -> bool:
    """Return whether the prefill server's log probabilities belong into the answer.

    Raises:
        Refused: they do, and cannot be put into an answer of this form.
    """
    if path == _COMPLETIONS:
        if _set(body, "echo") and _set(body, "logprobs"):
            raise Refused("logprobs", f"with echo, a hand-off loses the prompt's: {_FIX}")
        return False
    if path != SGLANG_GENERATE or not _set(body, "return_logprob"):
        return False
    start = bytes(body.get("logprob_start_len", b"-1"))
    if start in (b"-1", *_NULL) and not _set(body, "token_ids_logprob"):
        return False
    if _set(body, "stream"):
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
    meta |= {name: found for name, found in prompts.items() if bytes(found) not in _NULL}
    if bytes(meta.get(_FIRST, b"")) not in _NULL and bytes(source.get(_FIRST, b"")) not in _NULL:
        mine, first = _items(bytes(meta[_FIRST])), _items(bytes(source[_FIRST]))
        if bytes(mine[0]) == b"null":
            meta[_FIRST] = [first[0], *mine[1:]]
    return {**fields, _META: meta}


def _exceeds(value: Any, most: int) -> bool:
    """Return whether a number is larger. SGLang also takes one in a text, or a whole float."""
    try:
        return float(value) > most
    except OverflowError:
        return True
    except (TypeError, ValueError):  # SGLang refuses it
        return False


def _set(body: Body, name: str) -> bool:
    return bytes(body.get(name, b"")) not in _NULL
