"""Reads a client's request body. Pure functions.

Only the fields that the router reads are decoded; all others stay the bytes that the client sent.
So memory and time depend on a body's length alone. Engines check nesting and numbers.
"""

from __future__ import annotations

import codecs
import hashlib
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.policy.prefixes import CHUNK_TOKENS, PromptPrefix

Body = Mapping[str, Any]
"""A JSON object: field name -> JSON as sent (``msgspec.Raw``), or a value set by the router."""

CHARS_PER_TOKEN = 4
"""Estimate for English text."""

MOST_FIELDS = 1024
_SMALL = 16 * 1024  # bytes of a body that holds too few fields for their memory to matter
_PIECE = 1 << 20  # bytes of UTF-8 checked at a time
_MOST_OBJECTS = 4096  # limit of objects decoded in one field; beyond it, the worst case is assumed
_MOST_IDS = 1 << 21  # bytes of token ids to decode; the rest is left out
_MOST_UNITS = 8192  # limit of chunks of a prefix
_MOST_NAME = 4096  # bytes of a model or session name; a longer one is replaced by its digest

_PARAMS = ("kv_transfer_params", "ec_transfer_params")
_EXTRA = "vllm_xargs"  # what vLLM's connectors and engine also find in it:
_EXTRAS = (*_PARAMS, "kv_hints")
_ROUTERS_OWN = (
    *_PARAMS,
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
)
SALT = "cache_salt"
_SCOPE = (SALT, "extra_key", "lora_path")  # equal prompts share blocks only if these are equal too
_IDS = ("prompt", "input_ids")
_TEXTS = ("system", "instructions", "prompt", "text", "input", "messages")
_PROMPTS = ("prompt", "prompt_embeds", "text", "input_ids", "input_embeds")
_SESSION = ("prompt_cache_key", "session_id", "user")
_TURNS = ("previous_response_id", "background")  # of Responses: need further requests
_RETENTION = {"24h": 86_400.0}  # "in_memory" is what engines do without being asked
_MARKS = {"5m": 300.0, "1h": 3600.0}
_MARK_DEPTH = 3  # messages, their parts, and parts of a tool's result
_MARKED = ("system", "messages", "tools")
_FALSE = (b"", b"null", b"false", b"[]", b"{}", b'""', b"0")


class Prompt(NamedTuple):
    """Summary of a body for routing.

    Attributes:
        single: one prompt, one answer that may have one token: one transfer id identifies it.
        tokens: length of all prompts together; estimated for text.
        model: model name; empty if the body has none.
        session: key that related requests share; may be empty.
        sampled: several answers per prompt (``n``); SGLang has only one room for all of them.
        retention_s: seconds for which the client asks to keep the prompt's KV, in the words of
            OpenAI's or Anthropic's API; 0: it does not ask.
        streamed: the client asks for a stream.
    """

    single: bool = True
    tokens: int = 0
    model: str = ""
    session: str = ""
    sampled: bool = False
    retention_s: float = 0.0
    streamed: bool = False


class _ContentPart(msgspec.Struct):
    text: Raw = Raw(b"")


class _Message(msgspec.Struct):
    content: Raw = Raw(b"")


class _CacheControl(msgspec.Struct):
    ttl: str = "5m"


class _Marked(msgspec.Struct):
    """A message, a part of one, or a tool, which Anthropic's API lets clients mark."""

    cache_control: _CacheControl | None = None
    content: Raw = Raw(b"")


class _Sampling(msgspec.Struct):
    n: Raw = Raw(b"")


class _Tool(msgspec.Struct):
    type: str = ""


class _Field(str):
    """A field name, counted by :class:`_Count` while it is decoded."""

    __slots__ = ()


# Made once: to make one takes longer than to decode a short prompt.
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_MESSAGES, _PARTS = msgspec.json.Decoder(list[_Message]), msgspec.json.Decoder(list[_ContentPart])
_MARKED_LIST, _CHOICE = msgspec.json.Decoder(list[_Marked]), msgspec.json.Decoder(_Tool | None)
_BROKEN = (msgspec.DecodeError, ValueError, RecursionError)
"""Errors of decoding bytes that are not JSON of the expected type."""


def read_body(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in ``raw``, without the fields that only the router may set. A byte
    order mark before it is skipped, as engines do.

    Raises:
        Refused: not a JSON object in UTF-8, or too many fields; the message says where.
    """
    try:
        if raw.startswith(codecs.BOM_UTF8):
            raw = raw[len(codecs.BOM_UTF8) :]
        _check_encoding(raw)
        body = _fields(raw)
        if _EXTRA in body:
            body[_EXTRA] = _without_transfers(body[_EXTRA])
    except _BROKEN as error:
        raise Refused("body", f"the request body is not a JSON object: {error}") from error
    for name in _ROUTERS_OWN:
        body.pop(name, None)
    return body


def prompt_of(body: Body) -> Prompt:
    """Return the summary of a body. Never fails: validation is left to the engine."""
    sampled = not _is_one(body.get("n")) or not all(map(_is_one, _sampling(body)))
    prompts = sum(_count(raw_of(body, key)) for key in _PROMPTS if key in body)
    responses = not prompts and "input" in body
    chat = "messages" in body and not _forces_tool(body)
    one_prompt = prompts == 1 or chat or (responses and _one_turn(body))
    one_answer = not sampled and _is_one(body.get("best_of")) and not _true(body, "use_beam_search")
    tokens = sum(_ids_in(raw_of(body, key)) for key in _IDS if key in body)
    chars = sum(_chars_in(raw_of(body, key)) for key in _TEXTS if key in body)
    session = next(filter(None, (_text(body, key) for key in _SESSION)), "")
    tokens += chars // CHARS_PER_TOKEN
    return Prompt(
        single=one_prompt and one_answer,
        tokens=tokens,
        model=_text(body, "model"),
        session=session,
        sampled=sampled,
        retention_s=_retention_of(body),
        streamed=raw_of(body, "stream") == b"true",
    )


def prefix_of(body: Body, *, ids: bool = True) -> PromptPrefix:
    """Return a prompt's cache keys, with its token ids if ``ids``. Takes bounded time: the end of a
    long prompt is left out."""
    tokens = token_ids_of(body)
    scope = hash((raw_of(body, "model"), *(raw_of(body, name) for name in _SCOPE)))
    if tokens:
        cut: list[Any] = [
            tuple(tokens[at : at + CHUNK_TOKENS]) for at in range(0, len(tokens), CHUNK_TOKENS)
        ]
        whole = len(tokens) // CHUNK_TOKENS
    else:
        text = b"\0".join(filter(None, (_words(raw_of(body, key)) for key in _TEXTS)))
        size = CHUNK_TOKENS * CHARS_PER_TOKEN
        whole = len(text) // size
        cut = [text[at * size : (at + 1) * size] for at in range(min(whole, _MOST_UNITS))]
    chunk_hashes = [hash((scope, piece)) for piece in cut[: min(whole, _MOST_UNITS)]]
    plain = not any(_true(body, name) for name in _SCOPE)
    return PromptPrefix(_packed(tokens if ids else []), chunk_hashes, plain)


def _packed(ids: list[int]) -> array[int]:
    """Return ids of 64 bits, none where one is larger: a list takes several times as much."""
    try:
        return array("q", ids)
    except OverflowError:
        return array("q")


def token_ids_of(body: Body) -> list[int]:
    """Return the first token ids of a body's only prompt, usually all; none if it is text."""
    for key in _IDS:
        text = raw_of(body, key)
        if len(text) > _MOST_IDS:
            text = text[: text.rfind(b",", 0, _MOST_IDS)] + b"]"
        try:
            if text[1:].lstrip()[:1] == b"[":
                return msgspec.json.decode(text, type=tuple[list[int]])[0]
            return msgspec.json.decode(text, type=list[int])
        except _BROKEN:
            continue
    return []


def _check_encoding(raw: bytes | bytearray) -> None:
    if raw.isascii():
        return
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(raw)
    for at in range(0, len(raw), _PIECE):
        decoder.decode(view[at : at + _PIECE])
    decoder.decode(b"", final=True)


def _fields(raw: bytes | bytearray | Raw) -> dict[str, Any]:
    """Return the fields of an object; raise ValueError if there are too many."""
    if len(memoryview(raw)) <= _SMALL:
        fields: dict[str, Any] = _FIELDS.decode(raw)
    else:
        fields = {**msgspec.json.decode(raw, type=dict[_Field, Raw], dec_hook=_Count())}
    if len(fields) > MOST_FIELDS:
        raise ValueError(f"more than {MOST_FIELDS} fields")
    return fields


class _Count:
    """Makes field names; raises ValueError when there are too many."""

    def __init__(self) -> None:
        self._made = 0

    def __call__(self, kind: type, name: str) -> _Field:  # noqa: ARG002
        self._made += 1
        if self._made > MOST_FIELDS:
            raise ValueError(f"more than {MOST_FIELDS} fields")
        return _Field(name)


def _without_transfers(extra: Raw) -> object:
    if bytes(memoryview(extra)[:1]) != b"{":  # left to the engine
        return extra
    return {name: value for name, value in _fields(extra).items() if name not in _EXTRAS}


def raw_of(body: Body, key: str) -> bytes:
    """Return a field's JSON, b"" if it is missing."""
    if key not in body:
        return b""
    value = body[key]
    # What is neither, the router has set.
    return bytes(value) if isinstance(value, bytes | Raw) else msgspec.json.encode(value)


def _text(body: Body, key: str) -> str:
    """Return a field's string, "" if it holds none. A long string is replaced by its digest."""
    value = raw_of(body, key)
    if value[:1] != b'"':
        return ""
    if len(value) > _MOST_NAME:  # it is kept, and decoded it may take four times its bytes
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    try:
        return msgspec.json.decode(value, type=str)
    except _BROKEN:
        return ""


def _true(body: Body, key: str) -> bool:
    return raw_of(body, key) not in _FALSE


def _is_one(count: Raw | None) -> bool:
    return count is None or bytes(count) in (b"", b"null", b"1")


def _sampling(body: Body) -> list[Raw]:
    """Return ``n`` in SGLang's sampling parameters: one for all prompts, or one each."""
    text = raw_of(body, "sampling_params")
    if not text:
        return []
    if text.count(b"{") > _MOST_OBJECTS:
        return [Raw(b"many")]
    try:
        if text[:1] == b"[":
            return [each.n for each in msgspec.json.decode(text, type=list[_Sampling])]
        return [msgspec.json.decode(text, type=_Sampling).n]
    except _BROKEN:
        return []


def _count(text: bytes) -> int:
    """Return the number of prompts in a text, in token ids, or in a list of either; at most 2."""
    if text[:1] != b"[":
        return int(text not in (b"", b"null"))
    first = text[1:].lstrip()[:1]
    if first in b'"[{n' and first:
        try:
            msgspec.json.decode(text, type=tuple[Raw])
        except _BROKEN:
            return 2
    return int(first != b"]")


def _ids_in(text: bytes) -> int:
    """Return the number of token ids in a field's JSON."""
    inner = text[1:65].lstrip(b" \t\r\n[") if text[:1] == b"[" else b""
    return text.count(b",") + 1 if inner[:1].isdigit() else 0


def _chars_in(text: bytes) -> int:
    """Return the approximate number of characters in a text, a list of texts, or messages."""
    if text[:1] == b'"':
        return len(text) - 2 - text.count(b"\\")
    if text[:1] != b"[":
        return 0
    first = text[1:].lstrip()[:1]
    if first == b'"':
        quotes = text.count(b'"') - text.count(b'\\"')
        return max(0, len(text) - 2 * quotes - text.count(b"\\"))
    return _chars_of_messages(text) if first == b"{" else 0


def _chars_of_messages(text: bytes) -> int:
    if text.count(b"{") > _MOST_OBJECTS:
        return len(text)
    chars = 0
    try:
        for message in _MESSAGES.decode(text):
            content = bytes(message.content)
            if content[:1] == b"[":
                chars += sum(_chars_in(bytes(part.text)) for part in _PARTS.decode(content))
            else:
                chars += _chars_in(content)
    except _BROKEN:
        return chars
    return chars


def _retention_of(body: Body) -> float:
    """Return the longest time that ``prompt_cache_retention`` or a ``cache_control`` asks for."""
    asked = _RETENTION.get(_text(body, "prompt_cache_retention"), 0.0)
    lists = [raw_of(body, key) for key in _MARKED if key in body]
    if "cache_control" in body:
        lists.append(b'[{"cache_control":%b}]' % raw_of(body, "cache_control"))
    return max((asked, *map(_longest_mark, lists)))


def _longest_mark(text: bytes, depth: int = _MARK_DEPTH) -> float:
    """Return the longest time of a ``cache_control`` in a list of objects, or in their content."""
    if (
        not depth
        or text[:1] != b"["
        or b'"cache_control"' not in text
        or text.count(b"{") > _MOST_OBJECTS
    ):
        return 0.0
    try:
        marked = _MARKED_LIST.decode(text)
    except _BROKEN:
        return 0.0
    own = (_MARKS.get(mark.cache_control.ttl, 0.0) for mark in marked if mark.cache_control)
    inner = (_longest_mark(bytes(mark.content), depth - 1) for mark in marked)
    return max((*own, *inner), default=0.0)


def _words(text: bytes) -> bytes:
    """Return the part of a prompt's JSON to hash: a text without its quotes."""
    return text[1:-1] if text[:1] == b'"' else text


def _forces_tool(body: Body) -> bool:
    """Return whether Anthropic's API must call a certain tool: vLLM refuses to answer with one
    token of the call, which is no JSON. Where any tool will do, it answers without a call."""
    try:
        found = _CHOICE.decode(raw_of(body, "tool_choice") or b"null")
    except _BROKEN:
        return False
    return found is not None and found.type == "tool"


def _one_turn(body: Body) -> bool:
    """Return whether a Responses request is one prompt and needs no other request.

    An engine that calls a tool itself continues with a further prompt.
    """
    tools = raw_of(body, "tools")
    if any(_true(body, key) for key in _TURNS) or tools.count(b"{") > _MOST_OBJECTS:
        return False
    try:
        found = [] if tools in _FALSE else msgspec.json.decode(tools, type=list[_Tool])
    except _BROKEN:
        return False
    return all(tool.type == "function" for tool in found)
