"""Bounds of the prompts in a client's request: how many, that none is empty, and what may be a list
because they are one. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

from kvconnect.errors import Refused
from kvconnect.router.requests.body import Body
from kvconnect.router.requests.engine_bodies import SGLANG_GENERATE
from kvconnect.router.requests.field_values import (
    UNSET,
    first_of,
    is_set,
    one_value,
    refusal,
    view_of,
)

_ANSWERED = ("prompt", "text", "input_ids", "prompt_embeds")
_MOST_ANSWERED = 4096
_POOLED = (
    *("input", "items", "documents", "queries"),
    *("text_1", "text_2", "data_1", "data_2"),
)
_MOST = 65_536  # what is embedded or scored takes no place for answers; also answers in all
_BY_PROMPT = ("logprob_start_len", "top_logprobs_num", "return_hidden_states", "lora_path")
"""Fields that are a list only if the prompts are one. SGLang takes the list for the value."""
_MEDIA = ("audio_data", "image_data", "video_data")
_NATIVE = ("text", "input_ids", "input_embeds")
_COMPLETIONS, _EMBEDDINGS, _CLASSIFY = "/v1/completions", "/v1/embeddings", "/classify"
_PROMPTS_OF = {
    SGLANG_GENERATE: _NATIVE,
    _COMPLETIONS: ("prompt",),
    _CLASSIFY: _NATIVE,
    _EMBEDDINGS: ("input",),
}
"""Fields that may hold several prompts: SGLang takes the first that is set."""
_ANSWERS = (SGLANG_GENERATE, _COMPLETIONS)
_POOLED_IDS = {_EMBEDDINGS: "input", _CLASSIFY: "input_ids"}
_SCORES = ("/score", "/v1/score")
# None of them gives spaces back once it has read them: a body may be nothing else.
_MANY = re.compile(rb'\[\s*+["\[]')
_MANY_EMBEDS = re.compile(rb"\[\s*+\[\s*+\[")
_LIST_OF_LISTS = re.compile(rb"\[\s*+\[")
_EMPTY_LIST = re.compile(rb"\[\s*+\]")


def refuse_many_prompts(body: Body, sampling: Body | None = None) -> None:
    """Refuse more prompts at a time than an engine has room for, or more answers to them.
    ``sampling``: sampling parameters that say how many answers; None: the body does.

    Raises:
        Refused: a field has more of them.
    """
    most = min(_MOST_ANSWERED, int(_MOST // _answers(body if sampling is None else sampling)))
    for names, bound in ((_ANSWERED, most), (_POOLED, _MOST)):
        for name in names:
            if name in body:
                _refuse_over(name, body, bound)


def refuse_empty_prompts(path: str, body: Body) -> None:
    """Refuse a prompt without a token: a server of SGLang ends when it computes one. It refuses an
    empty prompt of OpenAI's API only if all are empty.

    Texts that are embedded or scored pass: most tokenizers of such models add tokens to them.

    Raises:
        Refused: a prompt is empty.
    """
    names = _PROMPTS_OF[path] if path in _ANSWERS else ()
    if path == SGLANG_GENERATE and any(is_set(body, each) for each in _MEDIA):
        names = ("input_ids",)  # a prompt may be audio or images alone
    empty = [name for name in names if name in body and _has_empty(view_of(body, name))]
    ids = _POOLED_IDS.get(path, "")
    if ids in body and _has_empty_ids(view_of(body, ids)):
        empty.append(ids)
    if path in _SCORES and _is_no_query(body) and _has_empty_ids(view_of(body, "items")):
        empty.append("items")
    if empty:
        raise Refused("body", f"{empty[0]}: a prompt is empty; send at least one token")


def refuse_lists_for_one_prompt(path: str, body: Body, named: Collection[str]) -> None:
    """Refuse a list of values, one for each prompt, where there is one prompt.

    Raises:
        Refused: a field that the operator has not named is such a list.
    """
    lists = [name for name in _BY_PROMPT if name in body and first_of(view_of(body, name)) == b"["]
    lists = [name for name in lists if name not in named]
    if lists and _is_one_prompt(path, body):
        raise refusal(lists[0], "use one value, not a list, for one prompt")


def _answers(fields: Body) -> float:
    """Return how many answers are asked for to each prompt; 1 for what is no such number."""
    if "n" not in fields:
        return 1.0
    try:
        return max(1.0, float(one_value(fields, "n")))
    except OverflowError:
        return float(_MOST + 1)
    except (TypeError, ValueError):
        return 1.0


def _refuse_over(name: str, body: Body, most: int) -> None:
    view = view_of(body, name)
    # A prompt takes two bytes and a comma.
    if first_of(view) == b"[" and len(view) > 3 * most and _prompts_in(view) > most:
        fewer = "" if most >= _MOST_ANSWERED else ", or a smaller n"
        raise refusal(name, f"use {most} prompts or less at a time{fewer}")


def _prompts_in(view: memoryview) -> int:
    """Return the number of texts, or of lists of token ids, in a list; 0 for other lists."""
    if not _MANY.match(view):
        return 0
    raw = bytes(view)
    if _LIST_OF_LISTS.match(raw):
        return raw.count(b"[") - 1
    # A quote within a text has a backslash that is not another one's second half.
    return (raw.count(b'"') - raw.replace(b"\\\\", b"").count(b'\\"')) // 2


def _has_empty(view: memoryview) -> bool:
    if first_of(view) != b"[":
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


def _has_empty_ids(view: memoryview) -> bool:
    return bool(_LIST_OF_LISTS.match(view) and _EMPTY_LIST.search(view))


def _is_no_query(body: Body) -> bool:
    """Return whether a score's prompts are its items alone. They are ids only if the query is."""
    view = view_of(body, "query")
    return view in UNSET or _EMPTY_LIST.match(view) is not None


def _is_one_prompt(path: str, body: Body) -> bool:
    """Return whether SGLang takes a request for one prompt, not for a list of prompts."""
    for name in _PROMPTS_OF.get(path, ()):
        view = view_of(body, name)
        if view in UNSET:
            continue
        if name == "text":
            return first_of(view) != b"["
        return not (_MANY_EMBEDS if name == "input_embeds" else _MANY).match(view)
    return True
