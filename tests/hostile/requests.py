"""Malformed requests, and bodies of wrong types, from a client to a router.

A request is answered by the router alone and reaches no engine, or it is answered by an engine that
got exactly it: as many answers of an engine as requests that engines saw.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.fields import DECISIONS, PRIORITY
from tests.hostile import Outcome
from tests.hostile.fleet import Routed, Session, routed

_AT_ONCE = 12
_MALFORMED_AT_ONCE = 40  # most of their connections only wait until the router hangs up
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_FORGED = b"10.99.99.99"  # an address that only a client names


class Request(NamedTuple):
    """One request. ``half``: nothing comes after it."""

    name: str
    sent: bytes
    half: bool = False


def chunks(
    body: bytes, end: bytes = b"0\r\n\r\n", more: bytes = b"", line: bytes = b"\r\n"
) -> bytes:
    """Return a body in one chunk."""
    return b"%x" % len(body) + more + line + body + line + end


def malformed() -> Iterator[Request]:
    """Yield requests that are no HTTP, or that two readers could read as two different ones."""
    makers = (_lengths, _encodings, _chunked, _headers, _lines, _other)
    number = 0
    for maker in makers:
        for name, sent in maker(b"@body@", b"@evil@"):
            body = json.dumps({"model": "fake", "prompt": f"case-{number}.", "max_tokens": 1})
            inner = json.dumps({"model": "fake", "prompt": f"evil-{number}.", "max_tokens": 1})
            yield Request(name, _filled(sent, body.encode(), inner.encode()), "half" in name)
            number += 1


def _filled(sent: list[Any], body: bytes, inner: bytes) -> bytes:
    """Put bodies in: a callable gets the body."""
    evil = _POST + b"Content-Length: %d\r\n\r\n" % len(inner) + inner
    parts = []
    for part in sent:
        made = part(body) if callable(part) else part
        made = made.replace(b"@body@", body).replace(b"@evil@", evil)
        parts.append(
            made.replace(b"@length@", b"%d" % len(body)).replace(b"@hex@", b"%x" % len(body))
        )
    return b"".join(parts)


_LENGTH = b"Content-Length: @length@\r\n"
Made = Iterator[tuple[str, list[Any]]]


def _lengths(body: bytes, evil: bytes) -> Made:
    values = {
        "empty": b"", "plus": b"+@length@", "negative": b"-1", "hex": b"0x@hex@",
        "underscore": b"1_0", "space": b"1 0", "zeros": b"00@length@",
        "list": b"@length@, @length@",
        "huge": b"9" * 23, "wraps": b"9223372036854775808", "wraps 64": b"18446744073709551616",
        "digits": "٤١".encode(), "nul": b"4\0001", "float": b"1e1", "tab": b"\t@length@",
        "quoted": b'"@length@"', "too large": b"67108865", "minus zero": b"-0",
    }  # fmt: skip
    for name, value in values.items():
        yield f"length {name}", [_POST, b"Content-Length: ", value, b"\r\n\r\n", body]
    yield "length twice, the same", [_POST, _LENGTH, _LENGTH, b"\r\n", body]
    yield "length twice, another", [_POST, _LENGTH, b"Content-Length: 5\r\n\r\n", body]
    yield "length short", [_POST, b"Content-Length: 4\r\n\r\n", body, evil]
    yield "length zero", [_POST, b"Content-Length: 0\r\n\r\n", body, evil]
    yield "length and chunks", [_POST, _LENGTH, _CHUNKED, b"\r\n", chunks, evil]
    yield (
        "length short and chunks",
        [_POST, b"Content-Length: 4\r\n", _CHUNKED, b"\r\n", chunks, evil],
    )
    yield "chunks and length short", [_POST, _CHUNKED, b"Content-Length: 4\r\n\r\n", chunks]
    yield "half a body", [_POST, b"Content-Length: 500\r\n\r\n", body]
    yield "a body that does not come", [_POST, b"Content-Length: 500\r\n\r\n", body]


def _encodings(body: bytes, evil: bytes) -> Made:
    for value in (
        *(b"xchunked", b"chunked, identity", b"identity, chunked", b"gzip, chunked", b"CHUNKED"),
        *(b'"chunked"', b"chunked;q=1", b"chunked, chunked", b"\x0bchunked", b"chunked\x00", b""),
        *(b"identity", b"chunked,", b",chunked", b"chunked gzip", b"chun ked"),
    ):
        name = f"transfer {value.decode('latin-1')!r}"
        yield name, [_POST, b"Transfer-Encoding: ", value, b"\r\n\r\n", chunks, evil]
        yield (
            f"{name} and length",
            [_POST, b"Transfer-Encoding: ", value, b"\r\n", _LENGTH, b"\r\n", body],
        )
    for name, line in {
        "space before colon": b"Transfer-Encoding : chunked\r\n",
        "folded": b"Transfer-Encoding:\r\n chunked\r\n",
        "twice": _CHUNKED + b"Transfer-Encoding: identity\r\n",
        "underscore": b"Transfer_Encoding: chunked\r\n",
        "line feed": b"X: y\nTransfer-Encoding: chunked\r\n",
    }.items():
        yield f"transfer {name}", [_POST, line, _LENGTH, b"\r\n", body]
    old = _POST.replace(b"HTTP/1.1", b"HTTP/1.0")
    yield "chunks of HTTP/1.0", [old, _CHUNKED, b"\r\n", chunks]
    for value in (b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"identity, gzip", b"x"):
        line = b"Content-Encoding: " + value + b"\r\n"
        yield f"content {value.decode()}", [_POST, line, _LENGTH, b"\r\n", body]


def _chunked(body: bytes, evil: bytes) -> Made:
    head = [_POST, _CHUNKED, b"\r\n"]
    for size in (
        *(b"-1", b"0x@hex@", b"f" * 17, b"1" + b"0" * 16, b"2_9", b"", b"zz", b" @hex@", b"@hex@ "),
        *(
            b"+@hex@",
            b"@hex@;a=b",
            b"@hex@;a\nb",
            b"@hex@;" + b"a" * 100_000,
            b"@hex@\t",
            b"0@hex@",
        ),
    ):
        yield f"chunk {size[:20].decode()!r}", [*head, size, b"\r\n", body, b"\r\n0\r\n\r\n"]
    yield "chunk line feeds", [*head, lambda b: chunks(b, b"0\n\n", line=b"\n")]
    yield "chunk returns", [*head, lambda b: chunks(b, b"0\r\r", line=b"\r")]
    yield "chunk without end", [*head, b"@hex@\r\n", body, b"0\r\n\r\n", evil]
    yield "chunk too short", [*head, b"1\r\n", body, b"\r\n0\r\n\r\n", evil]
    yield "chunks that never end", [*head, lambda b: chunks(b, b"")]
    yield "half a chunk", [*head, b"fff\r\n", body]
    yield "byte by byte", [*head, lambda b: b"".join(b"1\r\n%c\r\n" % c for c in b) + b"0\r\n\r\n"]
    for name, trailer in {
        "length": b"Content-Length: 5\r\n",
        "transfer": b"Transfer-Encoding: x\r\n",
        "host": b"Host: evil\r\n",
        "long": b"X: " + b"y" * 200_000 + b"\r\n",
        "many": b"".join(b"X%d: y\r\n" % i for i in range(20_000)),
        "none": b"no colon\r\n",
    }.items():
        end = b"0\r\n" + trailer + b"\r\n"
        yield f"trailer {name}", [*head, lambda b, end=end: chunks(b, end)]


def _headers(body: bytes, evil: bytes) -> Made:
    for name, line in {
        "no colon": b"Foo", "space": b"Foo Bar: x", "no name": b": x", "nul": b"X-Request-Id: a\0b",
        "return": b"X-Request-Id: a\rX-Evil: 1", "feed": b"X-Request-Id: a\nX-Evil: 1",
        "folded": b"X-Request-Id: a\r\n X-Evil: 1", "tab folded": b"Authorization: a\r\n\tb",
        "high": b"X-Request-Id: \x85\xa0\xff\xc4\x8a",
        "line": "X-Request-Id: a\u2028X-Evil: 1".encode(),
        "looks like a line end": "X-Request-Id: a\u560d\u560aX-Evil: 1".encode(),
        "tabs": b"X-Request-Id: a\x0b\x0cb", "delete": b"traceparent: \x7f\x01\x1b[31m",
        "id twice": b"X-Request-Id: a\r\nX-Request-Id: b",
        "key twice": b"Authorization: a\r\nAuthorization: b",
        "hop": b"Connection: close, X-Request-Id\r\nX-Request-Id: a",
        "rank": b"X-data-parallel-rank: 7", "host twice": b"Host: b", "bracket": b"X[]: y",
        "upgrade": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA",
        "socket": b"Connection: Upgrade\r\nUpgrade: websocket", "expect": b"Expect: 100-continue",
        "expect another": b"Expect: 200-ok", "long": b"X: " + b"a" * 100_000,
        "many": b"\r\n".join(b"X%d: y" % i for i in range(5000)),
        "very many": b"\r\n".join(b"X%d: y" % i for i in range(100_000)),
        "nul name": b"X\0: y", "high name": b"\xff: y",
    }.items():  # fmt: skip
        yield f"header {name}", [_POST, line, b"\r\n", _LENGTH, b"\r\n", body]
    yield "no host", [_POST.replace(b"Host: a\r\n", b""), _LENGTH, b"\r\n", body]


def _lines(body: bytes, evil: bytes) -> Made:
    rest = [_LENGTH, b"\r\n", body]
    for version in (b"HTTP/1.2", b"HTTP/2.0", b"HTTP/11.1", b"http/1.1", b"HTTP/1", b"HTTP/1.1 x"):
        yield f"version {version.decode()}", [_POST.replace(b"HTTP/1.1", version), *rest]
    for method in (b"post", b"PO\x01ST", b"", b"POST " * 3, b"GET", b"HEAD", b"PUT", b"A" * 70_000):
        yield f"method {method[:9].decode('latin-1')!r}", [_POST.replace(b"POST", method, 1), *rest]
    for path in (
        *(b"http://evil/v1/completions", b"http://u:p@169.254.169.254/v1/completions", b"*", b""),
        *(b"/v1/x/%2e%2e/completions", b"/%761/completions?x=1#y", b"//v1/completions"),
        *(b"/v1/completions%0d%0aX-Evil:1", b"/v1/completions?a=%0d%0aX-Evil:1", b"/\xff\xfe"),
        *(b"/v1/completions /x", b"/" + b"a" * 100_000, b"/v1/completions\0", b"/v1/completions/"),
        *(b"/v1/models", b"/health", b"/workers", b"/v1/completions\tx", b"\\v1\\completions"),
    ):
        changed = _POST.replace(b"/v1/completions", path, 1)
        yield f"path {path[:40].decode('latin-1')!r}", [changed, *rest]
    for name, end in {"feeds": b"\n", "returns": b"\r"}.items():
        lines = (_POST + _LENGTH + b"\r\n").replace(b"\r\n", end)
        yield f"lines of {name}", [lines, body]


def _other(body: bytes, evil: bytes) -> Made:
    yield "plain", [_POST, _LENGTH, b"\r\n", body]
    yield "HTTP/0.9", [b"POST /v1/completions\r\n\r\n", body]
    yield "HTTP/2", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    yield "TLS", [bytes.fromhex("16030100d8010000d40303") + bytes(200)]
    yield "SSH", [b"SSH-2.0-OpenSSH_9.0\r\n"]
    yield "zeros", [bytes(4096)]
    yield "line ends first", [b"\r\n" * 10, _POST, _LENGTH, b"\r\n", body]
    yield "three in a row", [_POST, _LENGTH, b"\r\n", body] * 3
    yield "two hundred in a row", [_POST, _LENGTH, b"\r\n", body] * 200
    yield "a body of GET", [b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", evil]
    yield "CONNECT", [b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: a\r\n\r\n", evil]
    yield "OPTIONS", [b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"]
    yield "DELETE", [b"DELETE /workers HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"]
    yield "half a head", [_POST]
    yield "nothing, half", [b""]


# Bodies -----------------------------------------------------------------------------------------

_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")
_KEYS = (
    *("prompt", "messages", "text", "input_ids", "prompt_embeds", "input_embeds", "model", "n"),
    *("best_of", "use_beam_search", "sampling_params", "prompt_cache_key", "session_id", "user"),
    *("vllm_xargs", "kv_transfer_params", "ec_transfer_params", "stream_options", "max_tokens"),
    *("max_completion_tokens", "min_tokens", "rid", "cache_salt", "bootstrap_room", "tools"),
    *("routed_dp_rank", "input", "system", "instructions", "background", "extra_key"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**30, "", "x", "\0" * 9, [], [[]], [None], [True], [1, "a"]),
    *([[1], [2]], [[1, None]], [["a"]], {}, {"a": 1}, [{}], [{"n": 2}], {"n": []}, {"n": {}}),
    *([[[]]], {"text": None}, {"content": 7}, [{"content": [{}]}], {"host": _FORGED.decode()}),
)
_OWN = (
    *("kv_transfer_params", "ec_transfer_params", "bootstrap_room", "routed_dp_rank"),
    *("bootstrap_host", "bootstrap_port"),
)


def confused() -> Iterator[tuple[str, bytes]]:
    """Yield paths and bodies of which one field has a value of another type."""
    for path in _PATHS:
        for key in _KEYS:
            for value in _VALUES:
                yield path, json.dumps(_base(path) | {key: value}).encode()
        for value in _VALUES:
            part = {"type": "text", "text": value}
            for messages in (
                *([value], [{"role": "user", "content": value}], [{"content": {"text": value}}]),
                *([{"role": "user", "content": [value]}], [{"role": "user", "content": [part]}]),
            ):
                for key in ("messages", "input"):
                    yield path, json.dumps(_base(path) | {key: messages}).encode()


def _base(path: str) -> dict[str, Any]:
    text = "hello " * 30
    messages = [{"role": "user", "content": text}]
    fields: dict[str, Any] = {"model": "fake", "max_tokens": 1}
    if path in ("/v1/chat/completions", "/v1/messages"):
        return fields | {"messages": messages}
    return fields | {"input" if path == "/v1/responses" else "prompt": text}


def texts() -> Iterator[tuple[str, bytes]]:
    """Yield bodies whose JSON itself is hostile."""
    begin = b'{"model":"fake","prompt":"a","x":'
    for deep in (500, 900, 940, 960, 970, 975, 980, 985, 990, 1000, 5000, 100_000):
        yield "/v1/completions", begin + b"[" * deep + b"]" * deep + b"}"
        yield "/v1/completions", begin + b'{"a":' * deep + b"1" + b"}" * deep + b"}"
        yield "/v1/completions", b'{"model":"fake","prompt":' + b"[" * deep + b"]" * deep + b"}"
    for value in (
        *(
            b"9" * 4300,
            b"9" * 4301,
            b"1e999",
            b"-1e-999",
            b"NaN",
            b"-Infinity",
            b"01",
            b"1.",
            b"+1",
        ),
        *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff"', b'"\\x"', b'"\n"', b"'a'", b"{,}", b"[1,]"),
        *(b"//", b"/**/1", b"\x00", b'"\\u0000"', b'"' + b"\\" * 999 + b'"', b"nul", b"True"),
    ):
        for key in (b"x", b"prompt", b"model", b"user", b"messages"):
            body = b'{"model":"fake","prompt":"a","%b":%b}' % (key, value)
            yield "/v1/completions", body
    plain = json.dumps(_base("/v1/completions"))
    for raw in (
        *(
            b"",
            b"null",
            b"[]",
            b'"x"',
            b"true",
            b"1",
            b"{",
            b"}",
            b"{}",
            b'{"a"}',
            b"\xef\xbb\xbf{}",
        ),
        *(plain.encode("utf-16"), plain.encode("utf-32"), plain.encode() * 2, b" " * 10_000),
        b"{" + b",".join(b'"%d":1' % i for i in range(5000)) + b"}",
        b'{"kv_transfer_params":{},"kv_transfer_params":{"host":"%b"},"prompt":"a"}' % _FORGED,
        b'{"prompt":"a","kv_transfer_p\\u0061rams":{"host":"%b"}}' % _FORGED,
        b'{"prompt":"a","vllm_xargs":{"kv_transfer_params":{"host":"%b"}}}' % _FORGED,
        b'{"prompt":"a","vllm_xargs":{"a":1,"kv_transfer_params":[],"kv_tr\\u0061nsfer_params":"%b"}}'
        % _FORGED,
    ):
        for path in _PATHS:
            yield path, raw


# Playing ----------------------------------------------------------------------------------------


async def _malformed(router: Routed, cases: list[Request], outcome: Outcome) -> None:
    gate = asyncio.Semaphore(_MALFORMED_AT_ONCE)

    async def play(case: Request) -> None:
        async with gate:
            marks = re.findall(rb"(?:case|evil)-\d+\.", case.sent)
            try:
                got = await router.talk(case.sent, half=case.half)
            except TimeoutError:
                outcome.hangs += 1
                outcome.notes.append(f"{case.name}: no end")
                return
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", got)]
        seen = [body for _, body in router.decode.seen if any(mark in body for mark in set(marks))]
        answered = got.count(b'"text": "good"')
        if len(seen) > answered and not (case.half or "never" in case.name):
            outcome.smuggled += 1
            outcome.notes.append(f"{case.name}: engine saw {len(seen)}, answered {answered}")
        if any(status >= 500 for status in statuses):
            outcome.wrong += 1
            outcome.notes.append(f"{case.name}: {statuses}")
        if case.name == "plain" and statuses != [200]:
            outcome.wrong += 1
            outcome.notes.append(f"{case.name}: {statuses}")

    await asyncio.gather(*(play(case) for case in cases))
    injected = [head for head, _ in _all_seen(router) if re.search(rb"\r\nX-Evil", head)]
    odd = [*router.decode.odd, *router.prefill.odd]
    outcome.smuggled += len(injected) + len(odd)
    outcome.notes += [f"an engine got {head!r:.200}" for head in (*injected, *odd)]


async def _bodies(router: Routed, cases: list[tuple[str, bytes]], outcome: Outcome) -> None:
    left = iter(cases)

    async def play() -> None:
        session = Session(router.port)
        for path, body in left:
            try:
                status, said = await session.post(path, body)
            except TimeoutError:
                session.close()
                outcome.hangs += 1
                outcome.notes.append(f"{path} {body!r:.100}: no answer")
                continue
            if status not in (200, 400, 404):
                outcome.wrong += 1
                outcome.notes.append(f"{path} {body!r:.100}: {status} {said!r:.100}")
        session.close()

    await asyncio.gather(*(play() for _ in range(_AT_ONCE)))
    for _, body in _all_seen(router):
        if _FORGED in body and _is_told(body):
            outcome.smuggled += 1
            outcome.notes.append(f"an engine was told {body!r:.200}")


def _is_told(body: bytes) -> bool:
    """Whether an engine reads the address that a client named where it would go there."""
    try:
        came = json.loads(body)
    except (ValueError, RecursionError):
        return False
    extra = came.get("vllm_xargs")
    found = [came, extra] if isinstance(extra, dict) else [came]
    return any(_FORGED.decode() in json.dumps(each.get(name)) for each in found for name in _OWN)


async def _as_it_came(router: Routed, cases: list[tuple[str, bytes]], outcome: Outcome) -> None:
    """What reaches an engine is what was sent, but for what only the router may say."""
    session = Session(router.port)
    for path, body in cases:
        router.decode.seen.clear()
        status, _ = await session.post(path, body)
        if status != 200:
            continue
        dropped = DECISIONS[EngineKind.VLLM].dropped - {PRIORITY}  # who needs no key may set it
        sent = {k: v for k, v in json.loads(body).items() if k not in dropped.union(_OWN)}
        if isinstance(sent.get("vllm_xargs"), dict):
            sent["vllm_xargs"] = {k: v for k, v in sent["vllm_xargs"].items() if k not in _OWN}
        came = json.loads(router.decode.seen[-1][1])
        came.pop("kv_transfer_params", None)
        if came != sent:
            outcome.wrong += 1
            outcome.notes.append(
                f"{path}: {body!r:.150} came as {router.decode.seen[-1][1]!r:.150}"
            )
    session.close()


def _all_seen(router: Routed) -> list[tuple[bytes, bytes]]:
    return [*router.decode.seen, *router.prefill.seen]


async def run(limit: int | None = None) -> Outcome:
    """Play all, or ``limit`` of each kind spread over it."""
    outcome = Outcome()
    requests = list(malformed())
    bodies = [*texts(), *confused()]
    if limit is not None:
        chosen = requests[:: max(1, len(requests) // limit)]
        requests = [case for case in requests if case in chosen or case.name == "plain"]
        bodies = bodies[:: max(1, len(bodies) // limit)]
    outcome.cases = len(requests) + len(bodies)
    outcome.figures = {"requests": len(requests), "bodies": len(bodies)}
    policies = ("--prefill-policy", "cache_aware", "--decode-policy", "cache_aware")
    async with routed(*policies) as router:
        await _malformed(router, requests, outcome)
        await _bodies(router, bodies, outcome)
        step = max(1, len(bodies) // 500)
        known = [case for case in bodies[::step] if _readable(case[1])]
        await _as_it_came(router, known, outcome)
        crashes = router.crashes()
        outcome.crashes += len(crashes)
        outcome.notes += crashes
    return outcome


def _readable(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False
