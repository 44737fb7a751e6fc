"""What each engine is asked: the bodies of both legs, and what an answer says. Pure functions.

A body is the JSON object of an OpenAI completion or chat completion, or of SGLang's ``/generate``.
What a client says itself about transfers, rooms and ranks goes nowhere: only the router names
them, or a client could have an engine talk to any address.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvconnect.errors import Refused
from kvconnect.router.reports import json_object

Body = Mapping[str, Any]

_PARAMS = "kv_transfer_params"
_TICKET = "kvconnect_ticket"
_CARD = "kvconnect_card"
_CARD_EXPIRY = "kvconnect_card_expires_in"
_RANK = "kvconnect_card_rank"
_MOONCAKE = "remote_bootstrap_addr"
_EXTRA = "vllm_xargs"  # vLLM merges these into the place where its connector looks
CHARS_PER_TOKEN = 4
"""Of English text: an estimate, for decisions that need none better."""

_WHOLE_ANSWER = ("stream", "stream_options", "min_tokens")
_ROUTERS_OWN = (
    _PARAMS,
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
)
_IDS = ("prompt", "input_ids")
_TEXTS = ("prompt", "text")
_PROMPTS = ("prompt", "prompt_embeds", "text", "input_ids", "input_embeds")
_SESSION = ("prompt_cache_key", "session_id", "user")
NATIVE = "/generate"  # SGLang's own form of a completion
OWN_ID = "rid"  # what a client of SGLang calls its request
RANK_HEADER = "X-data-parallel-rank"
ROOMS = 2**63 - 2**20
"""Rooms are below this: SGLang counts on from one, for further prompts of a request."""


class Prompt(NamedTuple):
    """What routing needs to know of a body.

    Attributes:
        single: one prompt with one answer, so that one transfer id can name it.
        tokens: length of the prompt; estimated where it is text.
        model: its name, empty if the body has none.
        session: what the body says about which requests belong together; may be empty.
        sampled: several answers to a prompt (``n``); SGLang's servers have but one room for them.
    """

    single: bool
    tokens: int
    model: str = ""
    session: str = ""
    sampled: bool = False


class Meeting(NamedTuple):
    """Where the two SGLang servers of a request meet: the prefill side's bootstrap server, a
    room, and the prefill side's data-parallel rank, None if it chooses one itself."""

    host: str
    port: int
    room: int
    rank: int | None


class Card(NamedTuple):
    """A prefill engine's standing offer to decode engines, signed by it."""

    text: str
    lifetime_s: float


def parse_body(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in ``raw`` without what only the router may say.

    Raises:
        Refused: not a JSON object; the message says where.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused("body", f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("body", "the request body is not a JSON object")
    for name in _ROUTERS_OWN:
        body.pop(name, None)
    extra = body.get(_EXTRA)
    if isinstance(extra, dict):
        extra.pop(_PARAMS, None)
    return body


def look_at(body: Body) -> Prompt:
    """Say what routing needs to know of a body. Never fails: an engine judges the rest."""
    sampled = any(settings.get("n") not in (None, 1) for settings in (body, *_sampling(body)))
    prompts = sum(_count(body.get(key)) for key in _PROMPTS)
    one_prompt = "messages" in body or prompts == 1
    one_answer = not sampled and body.get("best_of") in (None, 1)
    single = one_answer and one_prompt and not body.get("use_beam_search")
    tokens = sum(_token_ids(body.get(key)) for key in _IDS) + _text_tokens(body)
    model, session = body.get("model"), next(filter(None, map(body.get, _SESSION)), "")
    named = model if isinstance(model, str) else ""
    return Prompt(single, tokens, named, session if isinstance(session, str) else "", sampled)


def ids_of(body: Body) -> list[int]:
    """Return the token ids of a body's only prompt; none if it is text."""
    for key in _IDS:
        ids = body.get(key)
        if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
            ids = ids[0]
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            return ids
    return []


def prefill_body(body: Body, transfer: str) -> dict[str, Any]:
    """Return what the prefill engine is asked: compute the prompt and keep it for ``transfer``."""
    asked = {key: value for key, value in body.items() if key not in _WHOLE_ANSWER}
    asked |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    return asked | {_PARAMS: params}


def push_body(body: Body, transfer: str, card: str) -> dict[str, Any]:
    """Return what the decode engine is asked while ``transfer`` is being computed."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}
    return {**body, _PARAMS: params | {_TICKET: card}}


def pull_body(body: Body, ticket: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the decode engine is asked after prefill; ``ticket`` goes on as it came."""
    return {**body, _PARAMS: ticket}


def mooncake_ticket(transfer: str, engine_id: str, address: str) -> dict[str, Any]:
    """Return what a decode engine with vLLM's MooncakeConnector is told: its prefill engine
    answers without saying where its KV is, so the router has to."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}
    return params | {"remote_engine_id": engine_id, _MOONCAKE: address}


def room_body(body: Body, meeting: Meeting, rank: int | None) -> dict[str, Any]:
    """Return what an SGLang server is asked, of either role, to run on its ``rank``."""
    asked = {
        **body,
        "bootstrap_host": meeting.host,
        "bootstrap_port": meeting.port,
        "bootstrap_room": meeting.room,
    }
    if meeting.rank is not None:
        asked["disagg_prefill_dp_rank"] = meeting.rank
    if rank is not None:
        asked["routed_dp_rank"] = rank
    return asked


def transfer_of(asked: Body) -> str:
    """Return the transfer that a :func:`prefill_body` names."""
    return str(asked[_PARAMS]["transfer_id"])


def card_body(model: str, rank: int | None) -> dict[str, Any]:
    """Return the request for a prefill engine's card; ``rank`` is named if all of its requests
    name one."""
    params: dict[str, Any] = {"do_remote_decode": True, _CARD: True}
    if rank is not None:
        params[_RANK] = rank
    return {"model": model, "prompt": [1], "max_tokens": 1, _PARAMS: params}


def ids_body(model: str, ids: list[int], *, native: bool) -> dict[str, Any]:
    """Return the request for one token after a prompt; ``native``: in SGLang's own form, which its
    servers without a tokenizer know too."""
    if native:
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    return {"model": model, "prompt": ids, "max_tokens": 1}


def ticket_of(answer: bytes) -> dict[str, Any] | None:
    """Return the hand-off that a prefill engine's answer offers, None if it offers none.

    Raises:
        Refused: the answer is no JSON object.
    """
    params = json_object(answer).get(_PARAMS)
    return params if isinstance(params, dict) and params else None


def cached_of(answer: bytes) -> int | None:
    """Return how many tokens of the prompt an answer says were cached, None if it does not."""
    match json_object(answer):
        case {"usage": {"prompt_tokens_details": {"cached_tokens": int(cached)}}}:
            return cached
        case {"meta_info": {"cached_tokens": int(cached)}}:
            return cached
    return None


def card_of(answer: bytes) -> Card:
    """Return the card in a prefill engine's answer.

    Raises:
        Refused: there is none that could be used.
    """
    params = json_object(answer).get(_PARAMS)
    if not isinstance(params, dict):
        raise Refused("answer", "it offers no hand-off: is KVConnect its KV connector?")
    text, lifetime = params.get(_CARD), params.get(_CARD_EXPIRY)
    if isinstance(text, str) and isinstance(lifetime, int | float) and 0 < lifetime < 2**31:
        return Card(text, float(lifetime))
    raise Refused("answer", f"it has no usable {_CARD}")


def error_in(event: bytes) -> tuple[int, bytes] | None:
    """Return (HTTP status, JSON) if a server-sent event is an engine's failure, else None."""
    text = _data_of(event)
    match _said(text):
        case {"error": {"code": int(code)}} if 500 <= code < 600:
            return code, text
        case {
            "meta_info": {"finish_reason": {"type": "abort", "status_code": int(code), **more}}
        } if 500 <= code < 600:
            return code, error_body(code, str(more.get("message")))
    return None


def only_opens(event: bytes) -> bool:
    """Whether a server-sent event begins a chat's answer and has nothing of it: engines name the
    role first, also when what comes next is an error."""
    match _said(_data_of(event)):
        case {"choices": [_, *_] as choices}:
            return all(map(_only_names_role, choices))
    return False


def error_body(status: int, message: str) -> bytes:
    """Return an error as OpenAI clients expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def _data_of(event: bytes) -> bytes:
    line = event.strip()
    return line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""


def _said(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # [DONE]
        return None


def _only_names_role(choice: object) -> bool:
    match choice:
        case {"finish_reason": str()}:
            return False
        case {"delta": {"role": str(), **rest}}:
            return not any(rest.values())
    return False


def _sampling(body: Body) -> list[dict[str, Any]]:
    """Return SGLang's sampling parameters: of all prompts, or of each."""
    given = body.get("sampling_params")
    return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]


def _count(prompt: object) -> int:
    """Return how many prompts ``prompt`` holds: a text, token ids, or a list of either."""
    if not isinstance(prompt, list):
        return int(prompt is not None)
    return 1 if prompt and isinstance(prompt[0], int) else len(prompt)


def _token_ids(prompt: object) -> int:
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int):
        return len(prompt)
    return len(prompt[0]) if isinstance(prompt[0], list) else 0


def _text_tokens(body: Body) -> int:
    return sum(len(text) for text in texts_of(body)) // CHARS_PER_TOKEN


def texts_of(body: Body) -> Iterator[str]:
    """Yield the texts of a body's prompt."""
    for prompt in map(body.get, _TEXTS):
        yield from (
            item
            for item in (prompt if isinstance(prompt, list) else [prompt])
            if isinstance(item, str)
        )
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
