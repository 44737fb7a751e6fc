"""SGLang's gRPC API as if it were its HTTP API.

The API (``--grpc-port`` of SGLang 0.5.23) is ``sglang.runtime.v1.SglangService``. Its OpenAI calls
take and return the JSON of the HTTP API. ``Generate`` and ``TextGenerate`` have typed fields, which
have the names of ``/generate``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.connections.sglang_messages import message

SERVICE = "/sglang.runtime.v1.SglangService/"

_ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_T = TypeVar("_T")

_ROUTERS_OWN = {"disaggregated_params", "trace_headers"}
_OWN_HEADERS = {"host", "content-type", "content-length"}
_STATUS_OF = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "FAILED_PRECONDITION": HTTPStatus.BAD_REQUEST,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNIMPLEMENTED": HTTPStatus.NOT_FOUND,
    "OUT_OF_RANGE": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,  # tonic: the message is too large
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}
_CLIENTS_FAULT = re.compile(
    r"\d+ validation errors? for |\w+ must be |Requested token count exceeds "
    r"|The input \(\d+ tokens\) is longer "
)
"""How SGLang's refusals begin, which its gRPC API does not tell from failures of its own. Without
this, clients with bad requests would have an engine taken for a broken one."""


class NoSuchCall(Refused):
    """The gRPC API has nothing for a path."""


class Part(NamedTuple):
    """A message of a response. ``last``: none follows."""

    body: bytes
    status: int = 200
    last: bool = True


class Call(NamedTuple):
    """A call. ``read`` reads one message of its response; ``streams``: the client wants events."""

    name: str
    request: bytes
    read: Callable[[bytes], Part]
    streams: bool = False


def call_for(head: bytes, body: bytes) -> Call:
    """Return the call that an HTTP request stands for.

    Raises:
        NoSuchCall: there is none.
        Refused: a field of ``/generate`` has none in the gRPC API, or another type.
    """
    first, *lines = head.decode("utf-8", "surrogateescape").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    path = target.partition("?")[0]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    told = {name: value for name, value in headers.items() if name not in _OWN_HEADERS}
    if method == "GET" and path in _GETS:
        name, read = _GETS[path]
        return Call(name, b"", read)
    if method == "POST" and path == "/generate":
        return _generate(body, told)
    name = _OPENAI.get(path, "") if method == "POST" else ""
    if not name:
        raise NoSuchCall("path", f"SGLang's gRPC API has nothing for {path}; use its HTTP port")
    asked = message("OpenAIRequest")(json_body=body, trace_headers=_pairs(told))
    if name in _STREAMED:
        streams = bytes(_object(body, dict[str, Raw]).get("stream", b"")) == b"true"
        return Call(name, asked.SerializeToString(), _openai_part, streams)
    return Call(name, asked.SerializeToString(), _openai_answer)


def status_of(code: str, details: str) -> int:
    """Return the HTTP status for an error of a call that has sent nothing."""
    if code in ("INTERNAL", "UNKNOWN") and _CLIENTS_FAULT.match(details):
        return HTTPStatus.BAD_REQUEST
    return _STATUS_OF.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_body(why: str, status: int) -> bytes:
    """Return the body of an error, as OpenAI's API has it."""
    kind = "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"
    return msgspec.json.encode({"object": "error", "message": why, "type": kind, "code": status})


def _object(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused("body", f"the request body is not a JSON object: {error}") from error


def _generate(body: bytes, headers: Mapping[str, str]) -> Call:
    asked = _object(body, dict[str, Any])
    room = {name: asked.pop(name) for name in _ROOM if name in asked}
    sampling = asked.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise Refused("body", "sampling_params: SGLang's gRPC API takes one object")
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    name = "TextGenerate" if asked.get("text") is not None else "Generate"
    request = message(f"{name}Request")()
    known = request.DESCRIPTOR.fields_by_name
    settings = known["sampling_params"].message_type.fields_by_name
    strange = {*asked} - ({*known} - _ROUTERS_OWN) | {*sampling} - {*settings}
    for field in sorted(strange)[:1]:
        raise Refused("body", f"{field}: SGLang's gRPC API has no such field; use its HTTP port")
    asked |= {"sampling_params": sampling, "trace_headers": _pairs(headers)}
    if room:
        asked["disaggregated_params"] = room
    try:
        json_format.ParseDict(asked, request)
    except json_format.ParseError as error:
        raise Refused("body", f"SGLang's gRPC API does not take it: {error}") from error
    read = _text_part if name == "TextGenerate" else _ids_part
    return Call(name, request.SerializeToString(), read, asked.get("stream") is True)


def _pairs(headers: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": name, "value": value} for name, value in headers.items() if value.isascii()]


def _read(name: str, data: bytes) -> Any:
    try:
        return message(name).FromString(data)
    except DecodeError as error:
        raise Refused("message", f"it is no {name}: {error}") from error


def _openai_part(data: bytes) -> Part:
    chunk = _read("OpenAIStreamChunk", data)
    status = _error_status(chunk.json_chunk) if chunk.finished else HTTPStatus.OK
    return Part(chunk.json_chunk, status, chunk.finished)


class _Error(msgspec.Struct):
    object: str = ""
    code: int = 0


def _error_status(body: bytes) -> int:
    """Return the status of a last message: an error is told by its fields only."""
    try:
        told = msgspec.json.decode(body, type=_Error) if body else _Error()
    except msgspec.DecodeError:  # of another form
        return HTTPStatus.OK
    is_error = told.object == "error" and 400 <= told.code < 600
    return told.code if is_error else HTTPStatus.OK


def _openai_answer(data: bytes) -> Part:
    answer = _read("OpenAIResponse", data)
    return Part(answer.json_body, answer.status_code or HTTPStatus.OK)


def _text_part(data: bytes) -> Part:
    chunk = _read("TextGenerateResponse", data)
    return _native_part({"text": chunk.text}, chunk)


def _ids_part(data: bytes) -> Part:
    chunk = _read("GenerateResponse", data)
    return _native_part({"output_ids": list(chunk.output_ids)}, chunk)


def _native_part(answer: dict[str, Any], chunk: Any) -> Part:
    """Return an answer as of ``/generate``; the values of ``meta_info`` are JSON."""
    info = {pair.key: Raw(pair.value.encode()) for pair in chunk.meta_info}
    return Part(msgspec.json.encode({**answer, "meta_info": info}), last=chunk.finished)


def _health(data: bytes) -> Part:
    healthy = _read("HealthCheckResponse", data).healthy
    return Part(b"", HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE)


def _models(data: bytes) -> Part:
    cards = _read("ListModelsResponse", data).models
    models = [json_format.MessageToDict(card, preserving_proto_field_name=True) for card in cards]
    return Part(msgspec.json.encode({"object": "list", "data": models}))


def _loads(data: bytes) -> Part:
    return Part(b'{"loads":%b}' % _read("GetLoadResponse", data).json_info.encode())


_GETS: Mapping[str, tuple[str, Callable[[bytes], Part]]] = {
    "/health": ("HealthCheck", _health),
    "/v1/models": ("ListModels", _models),
    "/v1/loads": ("GetLoad", _loads),
}
_STREAMED = ("ChatComplete", "Complete")
_OPENAI = {
    "/v1/chat/completions": "ChatComplete",
    "/v1/completions": "Complete",
    "/v1/embeddings": "OpenAIEmbed",
    "/classify": "OpenAIClassify",
    **dict.fromkeys(("/score", "/v1/score"), "Score"),
    **dict.fromkeys(("/rerank", "/v1/rerank"), "Rerank"),
}
