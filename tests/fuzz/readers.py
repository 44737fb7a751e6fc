"""What reads bytes that others wrote, one function each: the targets of `tests.fuzz.guided`.

Each takes an input and raises nothing, or what is no error of the caller's contract: a fault.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import xxhash

from kvconnect.doctor import exchange
from kvconnect.errors import KVConnectError, Misuse, Refused
from kvconnect.protocol import cache_messages, codec, messages, nixl_messages, tickets
from kvconnect.protocol.cache_hints import LONGEST_S, read_hints
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.cache_admin import CacheAdmin
from kvconnect.router.connections import http1
from kvconnect.router.fleet import reports
from kvconnect.router.fleet.kv_events import RankEvents, receipts_in
from kvconnect.router.fleet.sources import etcd, file
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.policy import fleet_view
from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.loads import Loads
from kvconnect.router.policy.prefixes import PrefixIndex
from kvconnect.tiers.backends.disk import record

KEY, NOW = b"fuzz", 1_000_000.0
Reader = Callable[[bytes], object]


def expecting(*errors: type[Exception]) -> Callable[[Reader], Reader]:
    def wrap(read: Reader) -> Reader:
        @functools.wraps(read)
        def target(data: bytes) -> None:
            try:
                read(data)
            except Misuse:
                raise
            except errors:
                pass

        return target

    return wrap


@expecting(KVConnectError)
def message_pieces(data: bytes) -> None:
    reader = codec.MessageReader()
    for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
        for each in reader.feed(piece):
            assert len(each) <= codec.MAX_MESSAGE


@expecting(KVConnectError)
def cache_message(data: bytes) -> None:
    decoded = cache_messages.decode(data)
    assert cache_messages.decode(cache_messages.encode(decoded)) == decoded


@expecting(KVConnectError)
def message(data: bytes) -> None:
    decoded = messages.decode(data)
    assert messages.decode(messages.encode(decoded)) == decoded


@expecting(KVConnectError)
def doctor_message(data: bytes) -> None:
    decoded = exchange.decode(data)
    assert exchange.decode(exchange.encode(decoded)) == decoded


@expecting(KVConnectError)
def nixl_message(data: bytes) -> None:
    decoded = nixl_messages.decode(data)
    assert nixl_messages.decode(nixl_messages.encode(decoded)) == decoded


@expecting(KVConnectError)
def ticket(data: bytes) -> None:
    mac = hmac.digest(KEY, b"kvconnect ticket\0" + data, hashlib.sha256)
    text = base64.urlsafe_b64encode(data + mac).decode().rstrip("=")
    scope = tickets.Scope.SHARE if b"share" in data else tickets.Scope.HANDOFF
    tickets.verify(text, (KEY,), NOW, scope=scope)


def hints(data: bytes) -> None:
    """A request's hints, in whatever JSON it sends."""
    try:
        options = json.loads(data)
    except (ValueError, RecursionError):
        return
    hinted(options)


def hinted(options: object) -> bool:
    """Read hints; return whether some are left. They are within their limits, and few."""
    found, ignored = read_hints(options)
    assert len(ignored) <= 6
    if found is None:
        return False
    assert 0 <= found.pin_s <= LONGEST_S and 0 <= found.retain_s <= LONGEST_S
    assert found.tokens is None or (type(found.tokens) is int and found.tokens > 0)
    assert found.hints and (found.release is None or found.hints == (found.release,))
    return True


@functools.cache
def _admin() -> tuple[CacheAdmin, asyncio.AbstractEventLoop]:
    """The handlers of ``/cache``, with one engine that answers."""
    engine = SimpleNamespace(
        up=True,
        url="http://a:1",
        base=http1.BaseUrl.of("http://a:1"),
        role=fleet_view.Role.PREFILL,
        index=0,
        spec=SimpleNamespace(kind=fleet_view.EngineKind.VLLM, events=1),
        info=SimpleNamespace(models={"tiny"}),
        loads=Loads(1.0),
    )

    async def whole(base: object, head: bytes, raw: bytes, timeout_s: float) -> tuple[int, bytes]:
        asked = json.loads(raw)
        if head.startswith(b"POST /tokenize "):
            return 200, b'{"tokens": [1, 2]}'
        assert (asked["model"], asked["max_tokens"], asked["stream"]) == ("tiny", 1, False)
        options = asked["kv_transfer_params"]["kvconnect"]
        assert hinted(options) or set(options) == {"receipt"}
        return 200, b'{"kv_transfer_params": {"kvconnect": {"hints": {}}}}'

    fleet: Any = SimpleNamespace(all=lambda: [engine], is_base=lambda model: True)
    pool: Any = SimpleNamespace(whole=whole)
    tenants = Tenants((ApiKey("key"),), isolate=True)
    indexes = {fleet_view.Role.PREFILL: PrefixIndex()}
    return CacheAdmin(fleet, pool, tenants, 1.0, indexes), asyncio.new_event_loop()


def cache_body(data: bytes) -> bool:
    """What an operator's ``POST /cache`` holds, or ``POST /cache/stats``; return whether the engine
    was asked to do something."""
    admin, loop = _admin()

    async def read() -> bytes:
        return data

    request: Any = SimpleNamespace(read=read)
    with contextlib.suppress(Refused):
        loop.run_until_complete(admin.find(request))
    try:
        answer = loop.run_until_complete(admin.apply(request))
    except Refused:
        return False
    assert isinstance(answer.text, str)
    said = json.loads(answer.text)
    return "error" not in said["engines"][0]


def disk_index(data: bytes) -> None:
    """The index of a segment, sealed with a digest that fits."""
    sealed = data + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
    found = record.unpack_index(sealed, b"i" * 16)
    if found is not None:
        columns, _ = found
        assert len({len(column) for column in columns}) == 1


def disk_heads(data: bytes) -> None:
    """The first page of a segment, and that of a record, likewise."""
    for nbytes in (record._SEGMENT.size, record._RECORD.size):
        head = data[:nbytes].ljust(nbytes, b"\0")
        page = head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
        record.unpack_segment(page.ljust(record.PAGE, b"\0"))
        record.unpack_record(page.ljust(record.PAGE, b"\0"), b"i" * 16)


@expecting(Refused)
def events(data: bytes) -> None:
    for told in receipts_in(data):
        assert isinstance(told.nonce, str) and len(told.receipt) < len(data)
    RankEvents(Target(0, 0), PrefixIndex()).receive(0, data)


def loads(data: bytes) -> None:
    """What engines answer about themselves."""
    asked = (reports.models_of, reports.version_of, reports.engine_ids_of)
    for read in (*asked, reports.sglang_tokens):
        expecting(Refused)(read)(data)
    text = data.decode("utf-8", "replace")
    for read_text in (reports.vllm_tokens, reports.vllm_received, reports.sglang_metric_tokens):
        with contextlib.suppress(Refused):
            read_text(text)


def answer(data: bytes) -> None:
    """An engine's HTTP answer, in two pieces, cut off at the end."""

    class Transport:
        def abort(self) -> None:
            """The connection's own end."""

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    connection = http1.Connection(memoryview(b""), lambda: True)
    connection.connection_made(Transport())  # type: ignore[arg-type]
    connection.response = http1.IncomingResponse()
    for piece in (data[: len(data) // 3], data[len(data) // 3 :]):
        connection.receive(piece)
    connection.connection_lost(None)


def members(data: bytes) -> None:
    """A file of engines, and keys and values in etcd."""

    def refuse(what: object, why: str) -> None:
        assert why

    etcd.Entries("kv", refuse).named([(b"kv/prefill/a", data), (data, b"http://a:1")])
    file.parse(data.decode("utf-8", "replace"), {}, refuse)


def planted(data: bytes) -> None:
    """The control: a fault behind three bytes, which guidance finds and luck does not."""
    if data[:1] == b"K" and data[1:2] == b"V" and data[2:3] == b"C":
        raise KeyError("planted")


CONTROL: dict[str, Reader] = {"planted": planted}
TARGETS: dict[str, Reader] = {
    each.__name__: each
    for each in (
        *(message_pieces, message, cache_message, doctor_message, nixl_message, ticket),
        *(disk_index, disk_heads),
        *(events, loads, answer, members, hints, cache_body),
    )
}
