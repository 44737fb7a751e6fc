"""Engines without a model, and a client, as light as asyncio allows: what stands on both sides of a
router that is being measured. Run as a program, it is one process with all engines of a fleet.

A fake engine answers what vLLM (``--kind vllm``: with a hand-off in its answer) or SGLang's servers
would, at once, or as a stream of events. All streams get an event at the same moments, every
``--every`` seconds, as from a model's steps; 0: as fast as their clients read.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
from functools import partial
from typing import Any, cast

import uvloop

MODEL = "fake"
TICKET = {"do_remote_prefill": True, "kvconnect_ticket": "t" * 200}
STANDING_TICKET = {"kvconnect_card": "c" * 200, "kvconnect_card_expires_in": 3600}
_HEAD_END = b"\r\n\r\n"


def _http(body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _json(value: object) -> bytes:
    return _http(json.dumps(value).encode())


def _choice(text: str) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}],
    }


_USAGE = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
_DONE = {**_choice("hello"), "text": "hello", "meta_info": {"finish_reason": None}, "usage": _USAGE}
_LOADS = {"dp_rank": 0, "num_used_tokens": 0, "num_waiting_uncached_tokens": 0}
_GETS = {
    b"/health": _http(b"", "text/plain"),
    b"/v1/models": _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
    b"/version": _json({"version": "1"}),
    b"/metrics/": _http(b'vllm:kv_cache_usage_perc{engine="0"} 0.0\n', "text/plain"),
    b"/v1/loads": _json({"loads": [_LOADS]}),
    b"/server_info": _json({"version": "1", "model_path": MODEL, "served_model_name": MODEL}),
    b"/get_server_info": _json({"version": "1", "model_path": MODEL, "served_model_name": MODEL}),
    b"/model_info": _json({"model_path": MODEL, "is_generation": True}),
    b"/get_model_info": _json({"model_path": MODEL, "is_generation": True}),
}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_EVENT = _chunk(b"data: " + json.dumps(_choice(" token")).encode() + b"\n\n")
_FLOOD = 64  # events at once of an engine that does not wait between them
_LONG_BYTES = 64 << 20  # of decode's answer to a named user, unless it is a stream


@functools.cache
def _long_answer() -> bytes:
    return _json({**_DONE, **_choice("a" * _LONG_BYTES)})


_LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Steps:
    """What all streams of an engine get, and when: an event every so many seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._left: dict[Engine, int] = {}  # events of each stream
        self._due = 0.0

    def join(self, stream: Engine, left: int) -> None:
        """Give a stream so many events from the next step on, and its end."""
        loop = asyncio.get_running_loop()
        if not self._left:
            self._due = loop.time() + self._every_s
            loop.call_at(self._due, self._step)
        self._left[stream] = left

    def _step(self) -> None:
        for stream, left in list(self._left.items()):
            if not stream.reads:
                continue
            if left:
                self._left[stream] -= 1
            else:
                del self._left[stream]
            stream.write(_EVENT if left else _LAST)
        if self._left:
            self._due += self._every_s
            asyncio.get_running_loop().call_at(self._due, self._step)


class Engine(asyncio.Protocol):
    """One connection to a fake engine. ``steps``: of its streams; None: they have no steps."""

    def __init__(self, tokens: int, steps: Steps | None) -> None:
        self._tokens, self._steps = tokens, steps
        self._have = b""
        self.reads = True  # whether the client takes what is written
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self.reads = False

    def resume_writing(self) -> None:
        self.reads = True

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.reads = True  # its stream ends with the steps that are left

    def write(self, data: bytes) -> None:
        """Send data, unless the client has left."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._have += data
        while True:
            head, found, rest = self._have.partition(_HEAD_END)
            if not found:
                return
            lower = head.lower()
            length = 0
            if b"transfer-encoding: chunked" in lower:
                body, done, rest = rest.partition(b"0\r\n\r\n")
                if not done:
                    return
            else:
                if b"content-length:" in lower:
                    length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                if len(rest) < length:
                    return
                body, rest = rest[:length], rest[length:]
            self._have = rest
            self._answer(head.split(b" ", 2)[1].partition(b"?")[0], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path in _GETS:
            self._transport.write(_GETS[path])
        elif b'"kvconnect_card"' in body:
            self._transport.write(_json({"choices": [], "kv_transfer_params": STANDING_TICKET}))
        elif b'"do_remote_decode": true' in body or b'"do_remote_decode":true' in body:
            self._transport.write(_json({**_DONE, "kv_transfer_params": TICKET}))
        elif b'"stream": true' in body or b'"stream":true' in body:
            self._transport.write(_STREAM_HEAD)
            if self._steps is None:
                self._flood(self._tokens)
            else:
                self._transport.write(_EVENT)
                self._steps.join(self, self._tokens - 1)
        elif b'"user"' in body and self._tokens > 1:
            self._transport.write(_long_answer())
        else:
            self._transport.write(_json(_DONE))

    def _flood(self, left: int) -> None:
        if self._transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        if left == 0:
            self._transport.write(_LAST)
        elif self.reads:
            count = min(_FLOOD, left)
            self._transport.write(_EVENT * count)
            loop.call_soon(self._flood, left - count)
        else:
            loop.call_later(0.01, self._flood, left)


class Ranks:
    """Data-parallel ranks of SGLang's prefill and decode servers, both in this process: prefill
    computes prompts in order at ``rate`` tokens per second; decode answers when it has."""

    def __init__(self, ranks: int, rate: float) -> None:
        self.waiting = [0] * ranks
        self._free_at = [0.0] * ranks
        self._rate = rate
        self._done: dict[int, asyncio.Event] = {}
        self._area = [0.0] * ranks  # token seconds
        self._at = 0.0

    def room(self, number: int) -> asyncio.Event:
        """Return what is set when a room's prompt is computed."""
        return self._done.setdefault(number, asyncio.Event())

    async def compute(self, body: dict[str, Any]) -> None:
        """Compute a prompt on the rank that the request names, else on the room's."""
        loop = asyncio.get_running_loop()
        room, tokens = body["bootstrap_room"], len(body["input_ids"])
        rank = body.get("routed_dp_rank", room % len(self.waiting))
        self._pass(loop.time())
        self.waiting[rank] += tokens
        self._free_at[rank] = max(loop.time(), self._free_at[rank]) + tokens / self._rate
        await asyncio.sleep(self._free_at[rank] - loop.time())
        self._pass(loop.time())
        self.waiting[rank] -= tokens
        self.room(room).set()

    def loads(self) -> bytes:
        """What ``/v1/loads`` answers; with the token seconds so far."""
        self._pass(asyncio.get_running_loop().time())
        loads = [
            {"dp_rank": rank, "num_used_tokens": waiting, "area": area}
            for rank, (waiting, area) in enumerate(zip(self.waiting, self._area, strict=True))
        ]
        return _json({"loads": loads})

    def _pass(self, now: float) -> None:
        span, self._at = now - (self._at or now), now
        self._area = [a + w * span for a, w in zip(self._area, self.waiting, strict=True)]


class RankedEngine(Engine):
    """One connection to a server whose ranks take their time."""

    def __init__(self, ranks: Ranks, prefill: bool) -> None:
        super().__init__(1, None)
        self._ranks, self._prefill = ranks, prefill
        self._tasks: set[asyncio.Task[None]] = set()

    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/v1/loads" and self._prefill:
            self._transport.write(self._ranks.loads())
        elif path == b"/generate":
            task = asyncio.ensure_future(self._generate(json.loads(body)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            super()._answer(path, body)

    async def _generate(self, body: dict[str, Any]) -> None:
        if self._prefill:
            await self._ranks.compute(body)
        else:
            await self._ranks.room(body["bootstrap_room"]).wait()
        self._transport.write(_json(_DONE))


async def serve_ranked(prefill: int, decode: int, ranks: Ranks) -> None:
    """Serve one prefill and one decode server on these ports until cancelled."""
    loop = asyncio.get_running_loop()
    for port, first in ((prefill, True), (decode, False)):
        await loop.create_server(lambda first=first: RankedEngine(ranks, first), "127.0.0.1", port)
    await asyncio.Event().wait()


async def serve(ports: list[int], prefill: int, tokens: int, every_s: float) -> None:
    """Serve engines on ``ports`` of loopback until cancelled. The first ``prefill`` of them are
    prefill engines: their streams have one token, at once."""
    loop = asyncio.get_running_loop()
    for place, port in enumerate(ports):
        count = 1 if place < prefill else tokens
        steps = Steps(every_s) if every_s and place >= prefill else None
        make = partial(Engine, count, steps)
        await loop.create_server(make, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", nargs="+", type=int)
    parser.add_argument(
        "--prefill", type=int, default=1, help="how many of them are, from the first"
    )
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--every", type=float, default=0.02)
    parser.add_argument("--ranks", type=int, default=0, help="prefill and decode, with a queue")
    parser.add_argument("--rate", type=float, default=20_000.0)
    arguments = parser.parse_args()
    if arguments.ranks:
        prefill, decode = arguments.ports
        uvloop.run(serve_ranked(prefill, decode, Ranks(arguments.ranks, arguments.rate)))
    else:
        engines = serve(arguments.ports, arguments.prefill, arguments.tokens, arguments.every)
        uvloop.run(engines)


if __name__ == "__main__":
    main()
