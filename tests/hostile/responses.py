"""Broken and hostile answers of a decode engine to a router.

The client gets an answer, or an error in its place; never half of one taken for a whole, nor what
was not sent for its request. The next client gets its own answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.hostile import Outcome
from tests.hostile.fleet import Routed, Session, answer_of, completed, routed

_MARK = b"MAGIC"
_JSON = b"Content-Type: application/json"
_OK = json.dumps({"id": "mine", "choices": [{"index": 0, "text": "mine"}]}).encode()
_EVIL = json.dumps({"id": "EVIL", "choices": [{"index": 0, "text": "another's"}]}).encode()
_CHUNKED = b"Transfer-Encoding: chunked"
_EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + _CHUNKED + b"\r\n\r\n"
_EVENT = b'data: {"choices":[{"text":"mine"}]}\n\n'
_DONE = b"data: [DONE]\n\n"
_AGAIN_S = 60.0

WHOLE, FAILS, ENGINES, STREAM, BROKEN = "whole", "fails", "engine's", "stream", "broken"
"""What a client gets: the answer; an error of the router; what the engine said; events; events and
then an error."""


class Said(NamedTuple):
    """One answer, and what may come of it; nothing said: the engine hangs up."""

    name: str
    sent: bytes
    may: tuple[str, ...]


def _bare(*headers: bytes, body: bytes = _OK, status: bytes = b"HTTP/1.1 200 OK") -> bytes:
    """Return an answer with these headers only."""
    return b"\r\n".join((status, _JSON, *headers)) + b"\r\n\r\n" + body


def _chunks(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


def answers() -> Iterator[Said]:
    """Yield all answers."""
    yield from _framing()
    yield from _heads()
    yield from _statuses()
    yield from _streams()


def _framing() -> Iterator[Said]:
    length = b"Content-Length: %d" % len(_OK)
    good = _bare(length)
    yield Said("good", good, (WHOLE,))
    yield Said("two in one piece", good + answer_of(_EVIL, _JSON), (WHOLE, FAILS))
    yield Said("one and a half", good + answer_of(_EVIL, _JSON)[:60], (WHOLE, FAILS))
    yield Said("one and garbage", good + b"EVIL garbage", (WHOLE, FAILS))
    yield Said("one and a line end", good + b"\r\n", (WHOLE,))
    yield Said("hundred in one piece", good + answer_of(_EVIL, _JSON) * 99, (WHOLE, FAILS))
    yield Said("length short", _bare(b"Content-Length: 5"), (ENGINES, FAILS))
    yield Said("length long", _bare(b"Content-Length: 500"), (FAILS,))
    yield Said("length twice", _bare(length, b"Content-Length: 3"), (FAILS,))
    yield Said("length negative", _bare(b"Content-Length: -5"), (FAILS,))
    yield Said("length huge", _bare(b"Content-Length: " + b"9" * 30), (FAILS,))
    yield Said("length and chunks", _bare(length, _CHUNKED), (FAILS,))
    yield Said("chunks", _bare(_CHUNKED, body=_chunks(_OK)), (WHOLE,))
    yield Said("chunks, two", _bare(_CHUNKED, body=_chunks(_OK) + answer_of(_EVIL)), (WHOLE, FAILS))
    yield Said("chunks twice", _bare(_CHUNKED, _CHUNKED, body=_chunks(_OK)), (WHOLE, FAILS))
    yield Said("identity", _bare(length, b"Transfer-Encoding: identity"), (WHOLE, FAILS))
    yield Said("chunk huge", _bare(_CHUNKED, body=b"f" * 17 + b"\r\n" + _OK), (FAILS,))
    yield Said("chunk negative", _bare(_CHUNKED, body=b"-5\r\n" + _OK), (FAILS,))
    yield Said("chunk of no number", _bare(_CHUNKED, body=b"zz\r\n" + _OK), (FAILS,))
    feeds = b"%x\n%b\n0\n\n" % (len(_OK), _OK)
    yield Said("chunk feeds", _bare(_CHUNKED, body=feeds), (WHOLE, FAILS))
    yield Said("chunks without end", _bare(_CHUNKED, body=_chunks(_OK, end=b"")), (FAILS,))
    yield Said("unframed, open", _bare(), (FAILS,))
    yield Said("unframed of 1.0, open", _bare(status=b"HTTP/1.0 200 OK"), (FAILS,))
    yield Said("kept and closed", _bare(length, b"Connection: keep-alive, close"), (WHOLE,))


def _heads() -> Iterator[Said]:
    good = answer_of(_OK, _JSON)
    yield Said("interim", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000 + good, (WHOLE, FAILS))
    hints = b"HTTP/1.1 103 Early Hints\r\nContent-Type: text/evil\r\nLink: x\r\n\r\n"
    yield Said("hints", hints + good, (WHOLE,))
    upgrade = b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
    yield Said("upgrade", upgrade + good, (WHOLE, FAILS))
    interim = b"HTTP/1.1 100 Continue\r\nContent-Length: 4\r\n\r\nEVIL"
    yield Said("interim with a body", interim + good, (WHOLE, FAILS))
    for name, line in {
        "feed": b"X: a\nSet-Cookie: evil=1", "return": b"X: a\rY: b", "nul": b"X: a\0b",
        "folded": b"X: a\r\n b", "no colon": b"X", "space": b"X Y: z", "cookie": b"Set-Cookie: a=b",
        "mode": b"X-KVConnect-Mode: evil", "zip": b"Content-Encoding: gzip",
        "kind twice": b"Content-Type: text/html", "kind empty": b"Content-Type: ",
    }.items():  # fmt: skip
        yield Said(f"head {name}", answer_of(_OK, _JSON, line), (WHOLE, FAILS))
    for name, kind in {
        "high": b"text/html\x80\xff", "nul": b"a\0b", "long": b"a" * 30_000, "latin": b"x; y=\xe4",
        "script": b"text/html",
    }.items():  # fmt: skip
        yield Said(f"kind {name}", answer_of(_OK, b"Content-Type: " + kind), (WHOLE, FAILS))
    many = [b"X%d: %b" % (i, b"y" * 1000) for i in range(20_000)]
    yield Said("20 MB of headers", answer_of(_OK, *many), (FAILS,))
    yield Said("a head without end", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 9, (FAILS,))
    for name, sent in {
        "SSH": b"SSH-2.0-x\r\n", "HTTP/0.9": _OK, "HTTP/2": b"\0\0\x12\x04\0\0\0\0\0",
        "TLS": b"\x15\x03\x01\0\x02\x02\x28", "nothing": b"", "zeros": bytes(5000),
        "line ends": b"\r\n" * 5000, "HTTP/9.9": good.replace(b"1.1", b"9.9"),
    }.items():  # fmt: skip
        yield Said(name, sent, (FAILS,))


def _statuses() -> Iterator[Said]:
    for status in (b"000", b"20", b"2000", b"-1", b"2x0", b"", b"\xff"):
        yield Said(
            f"status {status!r}", answer_of(_OK, _JSON, status=status + b" x"), (FAILS, WHOLE)
        )
    for status in (b"204", b"206", b"226", b"301", b"304", b"399", b"600", b"999"):
        yield Said(f"status {status!r}", answer_of(_OK, _JSON, status=status + b" x"), (FAILS,))
    for status in (b"400", b"407", b"418", b"499", b"500", b"503", b"599"):
        body = b'{"error": {"message": "said"}}'
        yield Said(
            f"status {status!r}", answer_of(body, _JSON, status=status + b" x"), (ENGINES, FAILS)
        )
    away = answer_of(_OK, b"Location: http://169.254.169.254/", status=b"302 Found")
    yield Said("sent away", away, (FAILS,))
    large = answer_of(b"x" * 5_000_000, _JSON, status=b"499 x")
    yield Said("5 MB of refusal", large, (ENGINES,))
    yield Said("reason with a return", answer_of(_OK, status=b"200 O\rK"), (WHOLE, FAILS))
    for name, body in {"empty": b"", "text": b"hello", "list": b"[1]", "html": b"<script>"}.items():
        yield Said(f"no object: {name}", answer_of(body, _JSON), (ENGINES, FAILS))


def _streams() -> Iterator[Said]:
    def events(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
        return _EVENTS + _chunks(*parts, end=end)

    yield Said("stream", events(_EVENT, _DONE), (STREAM,))
    yield Said("stream of two", events(_EVENT, _DONE) + answer_of(_EVIL), (STREAM, BROKEN))
    yield Said("stream without end", events(_EVENT, end=b""), (BROKEN,))
    yield Said("stream of half an event", events(b"data: mine"), (STREAM, BROKEN))
    yield Said("stream of returns", events(_EVENT.replace(b"\n", b"\r\n"), _DONE), (STREAM,))
    yield Said("stream cut in a chunk", events(_EVENT, end=b"10\r\nabc"), (BROKEN,))
    yield Said("stream with a bad chunk", events(_EVENT, end=b"zz\r\nabc"), (BROKEN,))
    for code in (b"500", b"599"):
        error = b'data: {"error":{"code":%b,"message":"said"}}\n\n' % code
        yield Said(f"stream of {code.decode()}", events(error), (ENGINES, FAILS))
    for code in (b"5e2", b"true", b'"500"', b"null", b"-500", b"9" * 30):
        error = b'data: {"error":{"code":%b,"message":"mine"}}\n\n' % code
        yield Said(f"stream of {code.decode()}", events(error), (STREAM, ENGINES, FAILS))
    deep = b"data: " + b"[" * 100_000 + b"mine\n\n"
    yield Said("stream of brackets", events(deep), (STREAM,))
    role = b'data: {"choices":[{"delta":{"role":"mine"}}]}\n\n'
    yield Said("stream of roles", events(*[role] * 2000), (STREAM,))
    yield Said("stream of empty events", events(*[b"\n\n"] * 2000, _EVENT), (STREAM,))
    long = b"data: mine" + b"x" * 2_000_000
    yield Said("stream of one long event", events(long, b"\n\n"), (STREAM,))


# Playing ----------------------------------------------------------------------------------------


def _kind(status: int, body: bytes) -> str:
    """Return what a client got."""
    if status == 200 and body.rstrip() == _OK:
        return WHOLE
    if b"data:" in body and status == 200:
        # The router's own, which names an engine.
        return BROKEN if b'"message": "decode engine' in body else STREAM
    ours = b'"type": "server_error"' in body and b'"message": "decode engine' in body
    return FAILS if ours and status >= 500 else ENGINES


async def _play(router: Routed, said: Said, outcome: Outcome) -> None:
    def reply(head: bytes, body: bytes) -> bytes:
        return said.sent if _MARK in body else completed(head, body)

    router.decode.reply = reply
    session, problems = Session(router.port), []
    ask = {"model": "fake", "prompt": _MARK.decode(), "stream": said.name.startswith("stream")}
    try:
        status, got = await session.post("/v1/completions", json.dumps(ask).encode())
        if _kind(status, got) not in said.may:
            outcome.wrong += 1
            problems.append(f"{status} {got!r:.100} is {_kind(status, got)}")
        after = await _next(session)
        if b"EVIL" in got + after:
            outcome.smuggled += 1
            problems.append(f"{got!r:.100}, then {after!r:.100}")
        if b'"good"' not in after:
            outcome.wrong += 1
            problems.append(f"the next client got {after!r:.100}")
    except TimeoutError:
        outcome.hangs += 1
        problems.append("no answer")
    session.close()
    outcome.notes += [f"{said.name}: {problem}" for problem in problems]


async def _next(session: Session) -> bytes:
    """Return what the next client gets, once the engine is taken to be up."""
    body = json.dumps({"model": "fake", "prompt": "next"}).encode()
    ends = time.monotonic() + _AGAIN_S
    while True:
        status, got = await session.post("/v1/completions", body)
        if status != 503 or time.monotonic() > ends:
            return got
        await asyncio.sleep(0.05)


async def run(limit: int | None = None) -> Outcome:
    """Play all, or ``limit`` of them, spread."""
    cases = list(answers())
    if limit is not None:
        cases = cases[:: max(1, len(cases) // limit)]
    outcome = Outcome(len(cases), figures={"responses": len(cases)})
    async with routed("--silence-timeout", "1") as router:
        for said in cases:
            await _play(router, said, outcome)
        crashes = router.crashes()
        outcome.crashes += len(crashes)
        outcome.notes += crashes
    return outcome
