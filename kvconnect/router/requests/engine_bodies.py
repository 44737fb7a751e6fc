"""Bodies of requests to engines, and readers of engines' responses. Pure.

Transfers, rooms and ranks that a client names are dropped: only the router sets them. Otherwise a
client could make an engine connect to any address.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.protocol.handoff_request import (
    STANDING_TICKET_EXPIRY_KEY,
    STANDING_TICKET_KEY,
    STANDING_TICKET_RANK_KEY,
    TICKET_KEY,
)
from kvconnect.protocol.options import (
    OPTIONS_KEY,
    RECEIPT,
    SHARE,
    SHARE_EXPIRY_KEY,
    SHARE_TICKET_KEY,
)
from kvconnect.router.requests.body import Body

_PARAMS = "kv_transfer_params"
_MOONCAKE = "remote_bootstrap_addr"
_TOKEN_IDS = "prompt_token_ids"  # of vLLM: in a prefill response, and in the ticket for decode
_WHOLE_ANSWER = ("stream", "stream_options", "min_tokens", "structured_outputs")
_EVENT_END = b"\n\n"
_OPENING = ("ping", "message_start", "response.created", "response.queued", "response.in_progress")
ONE_TOKEN: Mapping[str, Any] = {"max_tokens": 1}
SGLANG_GENERATE = "/generate"  # path of SGLang's own completion API
RANK_HEADER = "X-data-parallel-rank"
ROOMS = 2**63 - 2**20
"""Upper bound of rooms. SGLang takes the following numbers for a request's further prompts."""

Receipt = Mapping[str, int | float | str]
"""Where the tokens of a prompt came from, as a vLLM engine says it."""


class BootstrapRoom(NamedTuple):
    """Where the two SGLang servers of a request find each other: the prefill side's bootstrap
    server, a room, and the prefill side's data-parallel rank; None: it chooses one itself."""

    host: str
    port: int
    room: int
    rank: int | None


class TicketKind(StrEnum):
    """A signed ticket of an engine that is valid for many requests."""

    STANDING = "standing"  # to receive what it computes
    SHARE = "share"  # to read what it has cached


class EngineRequest(NamedTuple):
    """A request to an engine; ``body`` is JSON, None for a request without one."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None


class EngineTicket(NamedTuple):
    """The text of a ticket, and the seconds for which it is valid."""

    text: str
    lifetime_s: float


def encoded(body: Body) -> bytes:
    """Return the JSON of a body; the client's fields keep their bytes."""
    return msgspec.json.encode(body)


def prefill_body(
    body: Body, transfer: str, one_token: Mapping[str, Any] = ONE_TOKEN
) -> dict[str, Any]:
    """Return the prefill body: compute the prompt, and keep its KV for ``transfer``."""
    asked = {key: value for key, value in body.items() if key not in _WHOLE_ANSWER}
    asked |= {"stream": False, **one_token}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    return asked | {_PARAMS: params}


def push_body(body: Body, transfer: str, standing_ticket: str) -> dict[str, Any]:
    """Return the decode body of push mode: receive ``transfer`` while prefill computes it."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}
    return {**body, _PARAMS: params | {TICKET_KEY: standing_ticket}}


def pull_body(body: Body, ticket: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decode body of pull mode; ``ticket`` is passed on unchanged."""
    return {**body, _PARAMS: ticket}


def token_ids_too(asked: Body) -> dict[str, Any]:
    """Return a body for vLLM whose response also has the token ids of prompt and answer."""
    return {**asked, "return_token_ids": True}


def mooncake_ticket(transfer: str, engine_id: str, address: str) -> dict[str, Any]:
    """Return the ticket for vLLM's MooncakeConnector, whose prefill responses do not name the
    location of their KV."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}
    return params | {"remote_engine_id": engine_id, _MOONCAKE: address}


def bootstrap_body(body: Body, meeting: BootstrapRoom, rank: int | None) -> dict[str, Any]:
    """Return the body for an SGLang server of either role, to run on its ``rank``."""
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


def options_body(body: Body, options: Mapping[str, Any]) -> Body:
    """Return a body for vLLM with options of KVConnect: a receipt, hints, or none."""
    if not options:
        return body
    return {**body, _PARAMS: {**body.get(_PARAMS, {}), OPTIONS_KEY: options}}


def cached_details_body(body: Body) -> dict[str, Any]:
    """Return a body for SGLang that asks where the prompt's cached tokens were: on the device, in
    host memory or in its storage."""
    return {**body, "return_cached_tokens_details": True}


def transfer_of(asked: Body) -> str:
    """Return the transfer id in a :func:`prefill_body`."""
    return str(asked[_PARAMS]["transfer_id"])


def tickets_body(model: str, rank: int | None, kinds: Collection[TicketKind]) -> dict[str, Any]:
    """Return the request for tickets; ``rank``: None if the engine has one rank."""
    params: dict[str, Any] = {}
    if TicketKind.STANDING in kinds:
        params = {"do_remote_decode": True, STANDING_TICKET_KEY: True}
        if rank is not None:
            params[STANDING_TICKET_RANK_KEY] = rank
    if TicketKind.SHARE in kinds:
        params[OPTIONS_KEY] = {SHARE: True}
    # vLLM's CPU engine dies of prompts of one token with some models (Qwen3.5).
    return {"model": model, "prompt": [1, 1], "max_tokens": 1, _PARAMS: params}


def token_ids_body(model: str, ids: list[int], *, native: bool) -> dict[str, Any]:
    """Return a body that asks for one token; ``native``: for SGLang's own API, which also works
    without a tokenizer."""
    if native:
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    return {"model": model, "prompt": ids, "max_tokens": 1}


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: Raw = Raw(b"null")
    prompt_token_ids: Raw = Raw(b"null")


class _Counted(msgspec.Struct):
    usage: _Usage | None = None
    meta_info: _Cached | None = None


class _Options(msgspec.Struct):
    receipt: dict[str, int | float | str] = {}


class _Params(msgspec.Struct):
    options: _Options = msgspec.field(default_factory=_Options, name=OPTIONS_KEY)


class _Receipted(msgspec.Struct):
    kv_transfer_params: _Params | None = None


class _ChunkHead(msgspec.Struct):
    """What the chunks of one stream have in common."""

    id: str
    object: str
    created: int
    model: str


_ANSWER = msgspec.json.Decoder(_Answer)
_COUNTED = msgspec.json.Decoder(_Counted)


def ticket_of(answer: bytes, *, ids: bool = True) -> dict[str, Any] | None:
    """Return the ticket in a prefill engine's response, with the prompt's token ids if the response
    has them and ``ids`` is true; None if there is no ticket.

    Raises:
        Refused: the response is not a JSON object.
    """
    try:
        parsed = _ANSWER.decode(answer)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused("answer", f"it is not a JSON object: {error}") from error
    try:
        ticket = msgspec.json.decode(parsed.kv_transfer_params, type=dict[str, Raw])
    except (msgspec.DecodeError, ValueError):  # no ticket, or an unusable one
        return None
    if ids and ticket and bytes(parsed.prompt_token_ids) != b"null":
        ticket[_TOKEN_IDS] = parsed.prompt_token_ids
    return ticket or None


def cached_tokens_of(answer: bytes) -> int | None:
    """Return the cached prompt tokens that a response reports, None if it reports none."""
    try:
        parsed = _COUNTED.decode(answer)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    details = parsed.usage and parsed.usage.prompt_tokens_details
    found = details or parsed.meta_info
    return found.cached_tokens if found else None


def receipt_of(answer: bytes) -> Receipt:
    """Return the receipt in a whole response, empty if it has none."""
    try:
        params = msgspec.json.decode(answer, type=_Receipted).kv_transfer_params
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
    return params.options.receipt if params else {}


def receipt_event(beginning: bytes, receipt: Receipt) -> bytes:
    """Return the event that tells a receipt within a stream of OpenAI's API: a chunk like those in
    the stream's ``beginning``, without choices."""
    try:
        head = msgspec.to_builtins(msgspec.json.decode(_data_of(beginning), type=_ChunkHead))
    except (msgspec.DecodeError, ValueError, RecursionError):
        head = {}
    chunk = {**head, "choices": [], _PARAMS: {OPTIONS_KEY: {RECEIPT: receipt}}}
    return b"data: " + msgspec.json.encode(chunk) + _EVENT_END


def standing_ticket_of(answer: bytes) -> EngineTicket:
    """Return the standing ticket in a prefill engine's response.

    Raises:
        Refused: there is no usable one.
    """
    params = json_object(answer).get(_PARAMS)
    if not isinstance(params, dict):
        raise Refused("answer", "it offers no hand-off: is KVConnect its KV connector?")
    ticket = _ticket(params, STANDING_TICKET_KEY, STANDING_TICKET_EXPIRY_KEY)
    if ticket is None:
        raise Refused("answer", f"it has no usable {STANDING_TICKET_KEY}")
    return ticket


def share_ticket_of(answer: bytes) -> EngineTicket | None:
    """Return the share ticket in an engine's response, None if it offers none.

    Raises:
        Refused: the response is not a JSON object.
    """
    params = json_object(answer).get(_PARAMS)
    if not isinstance(params, dict):
        return None
    return _ticket(params, SHARE_TICKET_KEY, SHARE_EXPIRY_KEY)


def _ticket(params: Mapping[str, Any], key: str, expiry: str) -> EngineTicket | None:
    text, lifetime = params.get(key), params.get(expiry)
    if not isinstance(text, str) or not text.isascii():
        return None
    if isinstance(lifetime, int | float) and 0 < lifetime < 2**31:
        return EngineTicket(text, float(lifetime))
    return None


def error_in(event: bytes) -> tuple[int, bytes] | None:
    """Return (HTTP status, JSON) if a server-sent event reports an engine's failure, else None."""
    text = _data_of(event)
    match _json_or_none(text):
        case {"error": {"code": int(code)}} if 500 <= code < 600:
            return code, text
        case {"type": "error", "error": {"message": str()}}:  # of /v1/messages
            return 500, text
        case {
            "meta_info": {"finish_reason": {"type": "abort", "status_code": int(code), **more}}
        } if 500 <= code < 600:
            return code, error_body(code, str(more.get("message")))
    return None


def opens_without_content(event: bytes) -> bool:
    """Whether a server-sent event opens a response without content. Engines send such events
    first, even when an error follows, and comments as long as there is nothing else."""
    if all(line.startswith(b":") for line in event.splitlines() if line):
        return True
    match _json_or_none(_data_of(event)):
        case {"choices": [_, *_] as choices}:
            return all(map(_only_names_role, choices))
        case {"type": str(kind)}:
            return kind in _OPENING
    return False


def error_body(status: int, message: str) -> bytes:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 404:  # as vLLM calls it
        kind = "NotFoundError"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def explained(status: int, error: bytes, why: str) -> bytes:
    """Return an engine's error with ``why`` after its own message."""
    own = message_of(error)
    return error_body(status, f"{own}: {why}" if own else why)


def message_of(error: bytes) -> str:
    """Return an engine's own message in its error, empty if it has none."""
    match _json_or_none(error):
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            return message
    return ""


def error_event(message: str, *, named_events: bool) -> bytes:
    """Return the last event of a broken stream; ``named_events``: its events have names."""
    if not named_events:
        return b"data: " + error_body(502, message) + b"\n\ndata: [DONE]\n\n"
    error = {"message": message, "type": "api_error", "code": 502}
    text = json.dumps({"type": "error", "error": error}).encode()
    return b"event: error\ndata: " + text + b"\n\n"


def _data_of(event: bytes) -> bytes:
    """Return the first data line of an event, empty if it has none."""
    lines = event.strip().splitlines()
    return next((line[5:].strip() for line in lines if line.startswith(b"data:")), b"")


def _json_or_none(text: bytes) -> object:
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


def json_object(answer: bytes) -> dict[str, Any]:
    """Return the JSON object in a response.

    Raises:
        Refused: it is not a JSON object.
    """
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise Refused("answer", f"it is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Refused("answer", "it is not a JSON object")
    return parsed
