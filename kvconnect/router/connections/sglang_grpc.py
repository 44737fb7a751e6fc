"""SGLang's gRPC API as if it were its HTTP API.

The API (``--grpc-port`` of SGLang 0.5.23) is ``sglang.runtime.v1.SglangService``. Its OpenAI calls
take and return the JSON of the HTTP API. ``Generate`` and ``TextGenerate`` have typed fields, which
have the names of ``/generate``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from msgspec import Meta, Raw

from kvconnect.errors import Refused
from kvconnect.router.connections.engine_connection import NotTaken
from kvconnect.router.connections.sglang_messages import message

SERVICE = "/sglang.runtime.v1.SglangService/"
MOST_IDS = 2**21
"""Token ids of a prompt. Each takes memory as an object until they are encoded."""

_SHOWN = 500  # characters of a reason, which may have a client's own text
_OWN_HEADERS = {"host", "content-type", "content-length"}
_STATUS_OF = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "FAILED_PRECONDITION": HTTPStatus.BAD_REQUEST,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNIMPLEMENTED": HTTPStatus.NOT_FOUND,
    "OUT_OF_RANGE": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,  # tonic: the message is too large
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}

_T = TypeVar("_T")
_Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
_Float = Annotated[float, Meta(ge=-3e38, le=3e38)]


class Part(NamedTuple):
    """A message of a response."""

    body: bytes
    status: int = 200


class Call(NamedTuple):
    """A call. ``read`` reads one message of its response; ``streams``: the client wants events."""

    name: str
    request: bytes
    read: Callable[[bytes], Part]
    streams: bool = False


class _Streams(msgspec.Struct):
    stream: bool | None = None


class _SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    temperature: _Float | None = None
    top_p: _Float | None = None
    top_k: _Int32 | None = None
    min_p: _Float | None = None
    frequency_penalty: _Float | None = None
    presence_penalty: _Float | None = None
    repetition_penalty: _Float | None = None
    max_new_tokens: _Int32 | None = None
    min_new_tokens: _Int32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Int32] | None = None
    ignore_eos: bool | None = None
    n: _Int32 | None = None
    json_schema: str | None = None
    regex: str | None = None


class _Generate(msgspec.Struct, forbid_unknown_fields=True):
    """A body of ``/generate`` as far as the gRPC API can say it."""

    text: str | None = None
    input_ids: list[_Int32] | None = None
    sampling_params: _SamplingParams | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: _Int32 | None = None
    logprob_start_len: _Int32 | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | None = None
    lora_path: str | None = None
    routed_dp_rank: _Int32 | None = None
    priority: _Int32 | None = None
    require_reasoning: bool | None = None
    max_thinking_tokens: _Int32 | None = None
    bootstrap_host: str | None = None
    bootstrap_port: _Int32 | None = None
    bootstrap_room: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


_CLIENTS_FAULT = re.compile(
    r"\d+ validation errors? for |Request body must be |Requested token count exceeds "
    rf"|(?:{'|'.join(_SamplingParams.__struct_fields__)}) must be |Only one of json_schema, "
    r"|at most \d+ stop|The input \(\d+ tokens\) is longer |Request \S+ exceeds the maximum "
    r"|Failed to compile \S+ grammar|legacy |guided |LoRA adapter |Got LoRA adapter "
    r"|max_thinking_tokens requires |The engine initialized with skip_tokenizer_init"
)
"""How SGLang's refusals begin, which its gRPC API does not tell from failures of its own. Without
this, clients with bad requests would have an engine taken for a broken one."""


def call_for(head: bytes, body: bytes) -> Call:
    """Return the call that an HTTP request stands for.

    Raises:
        NotTaken: there is none, or a field has none in the gRPC API, or another type.
    """
    first, *lines = head.decode("utf-8", "surrogateescape").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    path = target.partition("?")[0]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    told = [
        {"key": name, "value": value}
        for name, value in headers.items()
        if name not in _OWN_HEADERS and value.isascii()
    ]
    if method == "GET" and path in _GETS:
        name, read = _GETS[path]
        return Call(name, b"", read)
    if method == "POST" and path == "/generate":
        return _generate(body, told)
    name = _OPENAI.get(path, "") if method == "POST" else ""
    if not name:
        why = f"SGLang's gRPC API has nothing for {path}; use its HTTP port"
        raise NotTaken(HTTPStatus.NOT_FOUND, why)
    asked = message("OpenAIRequest")(json_body=body, trace_headers=told).SerializeToString()
    if name in _STREAMED:
        return Call(name, asked, _openai_part, bool(_decoded(body, _Streams).stream))
    return Call(name, asked, _openai_answer)


def status_of(code: str, details: str) -> int:
    """Return the HTTP status for an error of a call that has sent nothing."""
    if code in ("INTERNAL", "UNKNOWN") and _CLIENTS_FAULT.match(details):
        return HTTPStatus.BAD_REQUEST
    return _STATUS_OF.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)


def _decoded(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        why = f"SGLang's gRPC API does not take the body: {str(error)[:_SHOWN]}; use its HTTP port"
        raise NotTaken(HTTPStatus.BAD_REQUEST, why) from error


def _generate(body: bytes, headers: list[dict[str, str]]) -> Call:
    if body.count(b",") > MOST_IDS:
        raise NotTaken(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {MOST_IDS} tokens or fields")
    given = _decoded(body, dict[str, Raw])
    set_ones = {name: value for name, value in given.items() if bytes(value) != b"null"}
    asked = _decoded(msgspec.json.encode(set_ones), _Generate)
    fields = _values(asked)
    if room := {name: fields.pop(name) for name in _ROOM if name in fields}:
        fields["disaggregated_params"] = room
    if asked.sampling_params is not None:
        sampling = fields["sampling_params"] = _values(asked.sampling_params)
        if isinstance(asked.sampling_params.stop, str):
            sampling["stop"] = [asked.sampling_params.stop]
    name, read = ("Generate", _ids_part) if asked.text is None else ("TextGenerate", _text_part)
    try:
        request = message(f"{name}Request")(**fields, trace_headers=headers)
    except ValueError as error:  # there is no such field beside a text, or beside ids
        why = f"SGLang's gRPC API does not take the body: {error}"
        raise NotTaken(HTTPStatus.BAD_REQUEST, why) from error
    return Call(name, request.SerializeToString(), read, bool(asked.stream))


def _values(given: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are set, as they are."""
    found = {name: getattr(given, name) for name in given.__struct_fields__}
    return {name: value for name, value in found.items() if value is not None}


def _read(name: str, data: bytes) -> Any:
    try:
        return message(name).FromString(data)
    except DecodeError as error:
        raise Refused("message", f"it is no {name}: {error}") from error


def _openai_part(data: bytes) -> Part:
    chunk = _read("OpenAIStreamChunk", data)
    return Part(chunk.json_chunk, _error_status(chunk.json_chunk) if chunk.finished else 200)


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
    return Part(msgspec.json.encode({**answer, "meta_info": info}))


def _health(data: bytes) -> Part:
    healthy = _read("HealthCheckResponse", data).healthy
    return Part(b"", HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE)


def _models(data: bytes) -> Part:
    cards = _read("ListModelsResponse", data).models
    models = [json_format.MessageToDict(card, preserving_proto_field_name=True) for card in cards]
    return Part(msgspec.json.encode({"object": "list", "data": models}))


def _loads(data: bytes) -> Part:
    return Part(b'{"loads":%b}' % _read("GetLoadResponse", data).json_info.encode())


_ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
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
    **dict.fromkeys(("/score", "/v1/score"), "Score"),
    **dict.fromkeys(("/rerank", "/v1/rerank"), "Rerank"),
}
