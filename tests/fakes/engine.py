"""Engines and a router on loopback, for tests of the router: HTTP without any model."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from functools import wraps
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web

from kvconnect.router import server
from kvconnect.router.engine_spec import engine_specs
from kvconnect.router.fleet import watch
from kvconnect.router.options import AdminAccess, Intervals, RouterLimits, RouterOptions
from tests.servers import free_port

Handler = Callable[["FakeEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

ADMIN_TOKEN = "0123456789abcdef"
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
LIMITS = tuple(each.name for each in fields(RouterLimits))
EVENTS = (b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[{"text":"b"}]}\n\n')
TOKEN_IDS = [3, 1, 4]  # of any prompt
DONE = b"data: [DONE]\n\n"


_ACCEPTING = 8
"""Turns of the loop within which asyncio gives a connection that it has accepted to the server. Who
is cleaned up before would not close it."""


class FakeEngine:
    """One engine; ``answer`` decides what completions get and may be replaced at any time."""

    def __init__(self, answer: Handler, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.tls = tls
        self.asked: list[dict[str, Any]] = []  # bodies of completions; not for standing tickets
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.got: Counter[str] = Counter()  # paths of questions that only some tests answer
        self.dropped = 0  # requests whose connection was closed before their end
        self.standing_tickets = 0  # given out; 0 lifetime: none
        self.ticket_of_rank: dict[str, str] = {}
        self.standing_ticket_lifetime_s = 100.0
        self.share_tickets = 0  # the same
        self.share_ticket_lifetime_s = 0.0
        self.models: tuple[str, ...] = ("tiny",)
        self.context: int | None = 4096  # most tokens of prompt and answer
        self.well = True
        self.completes = True  # else it has no such path, as of a model that embeds
        self.silent = 0  # to so many probes
        self.port = 0
        self.settings = ""  # after the URL, as on the command line
        self.extra: dict[str, Handler] = {}  # answers to other paths
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def named(self) -> str:
        return self.url + self.settings

    async def start(self) -> None:
        """Listen; again on the same port after :meth:`stop`."""
        app = web.Application(client_max_size=2**27)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/generate", self._complete)
        app.router.add_post("/v1/responses", self._complete)
        app.router.add_post("/v1/messages", self._complete)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls).start()
        self.port = self._runner.addresses[0][1]

    async def stop_listening(self) -> None:
        """Take no further connection."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self.stop_listening()
            for _ in range(_ACCEPTING):
                await asyncio.sleep(0)
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.got["/health"] += 1
        if self.silent:
            self.silent -= 1
            await asyncio.Event().wait()
        return web.Response(status=200 if self.well else 503)

    async def _models(self, request: web.Request) -> web.Response:
        listed = [{"id": name, "max_model_len": self.context} for name in self.models]
        return web.json_response({"data": listed})

    def detokenizes(self, text_of_ids: Callable[[list[int]], str]) -> None:
        """Answer what the text of token ids is."""

        async def answer(engine: FakeEngine, request: web.Request, body: Any) -> web.Response:
            return web.json_response({"prompt": text_of_ids(body["tokens"])})

        self.extra["/detokenize"] = answer

    async def _other(self, request: web.Request) -> web.StreamResponse:
        self.got[request.path] += 1
        answer = self.extra.get(request.path)
        if answer is None:
            return web.Response(status=404)
        body = await request.json() if request.method == "POST" else {}
        return await answer(self, request, body)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not self.completes:
            self.got[request.path] += 1
            return web.Response(status=404)
        params = body.get("kv_transfer_params") or {}
        if params.get("kvconnect_card") or params.get("kvconnect", {}).get("share"):
            return self._tickets(request, body)
        self.asked.append(body)
        self.headers.append(lower(request.headers))
        self.paths.append(request.path)
        try:
            return await self.answer(self, request, body)
        except asyncio.CancelledError:
            self.dropped += 1
            raise

    def _tickets(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        assert body["model"] == "tiny" and body["prompt"] == [1, 1] and body["max_tokens"] == 1
        asked, params = body["kv_transfer_params"], {}
        if asked.get("kvconnect_card") and self.standing_ticket_lifetime_s:
            self.standing_tickets += 1
            text = f"standing {self.standing_tickets} of {self.port}"
            self.ticket_of_rank[request.headers.get("x-data-parallel-rank", "")] = text
            params["kvconnect_card"] = text
            params["kvconnect_card_expires_in"] = self.standing_ticket_lifetime_s
        if "kvconnect" in asked and self.share_ticket_lifetime_s:
            self.share_tickets += 1
            params["kvconnect_share"] = f"share {self.share_tickets} of {self.port}"
            params["kvconnect_share_expires_in"] = self.share_ticket_lifetime_s
        if not params:
            return web.json_response({"choices": []})
        return web.json_response({"choices": [], "kv_transfer_params": params})


# What engines may do ----------------------------------------------------------------------------


async def prefills(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.Response:
    """A good prefill engine: its answer offers a ticket for the transfer it was asked for."""
    transfer = body["kv_transfer_params"]["transfer_id"]
    ticket = {"do_remote_prefill": True, "kvconnect_ticket": f"ticket {transfer}", "odd": [1, {}]}
    answer = {"choices": [{"text": "x"}], "kv_transfer_params": ticket}
    if body.get("return_token_ids"):
        answer["prompt_token_ids"] = TOKEN_IDS
    return web.json_response(answer)


async def decodes(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A good decode engine: a stream or a whole answer, as asked."""
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "ab"}]})
    stream = await begin_stream(request)
    for event in (*EVENTS, DONE):
        await stream.write(event)
    return stream


async def begin_stream(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8"}
    stream = web.StreamResponse(headers=headers)
    await stream.prepare(request)
    return stream


async def hangs(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.Response:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


def says(status: int, body: dict[str, Any]) -> Handler:
    """Answers everything with one JSON object."""

    async def answer(
        engine: FakeEngine, request: web.Request, asked: dict[str, Any]
    ) -> web.Response:
        return web.json_response(body, status=status)

    return answer


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test, within minutes."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 180))

    return run


# The router -------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """What the router answered; names of headers are in lower case."""

    status: int
    body: bytes
    headers: dict[str, str]


class Bench:
    """A router between fake engines, and a client."""

    def __init__(
        self, url: str, client: aiohttp.ClientSession, engines: Sequence[Sequence[FakeEngine]]
    ) -> None:
        self.url = url
        self.client = client
        self.prefill, self.decode = engines

    async def post(self, body: object, path: str = "/v1/completions", **options: Any) -> Reply:
        data = io.BytesIO(json.dumps(body).encode())
        async with self.client.post(self.url + path, data=data, **options) as answer:
            return Reply(answer.status, await answer.read(), lower(answer.headers))

    async def get(self, path: str) -> Reply:
        async with self.client.get(self.url + path) as answer:
            return Reply(answer.status, await answer.read(), lower(answer.headers))

    async def answers(self, path: str, status: int) -> bool:
        """Whether a GET is answered with that status."""
        return (await self.get(path)).status == status

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of one series; -1 if it does not exist."""
        text = (await self.get("/metrics")).body
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        for line in text.decode().splitlines():
            series, _, value = line.rpartition(" ")
            found, _, rest = series.partition("{")
            if found == f"kvconnect_router_{name}" and wanted == set(rest[:-1].split(",")) - {""}:
                return float(value)
        return -1.0

    async def standing_tickets_are_held(self) -> None:
        """Wait until the router can push to every prefill engine that has standing tickets."""
        for engine in self.prefill:
            if engine.standing_ticket_lifetime_s:
                await until(lambda url=engine.url: self.fetched(url, "ok"))

    async def fetched(self, url: str, outcome: str) -> bool:
        """Whether a standing ticket was asked for with that outcome."""
        return await self.metric("standing_ticket_fetches_total", upstream=url, outcome=outcome) > 0


def lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@asynccontextmanager
async def bench(
    prefill: Sequence[FakeEngine], decode: Sequence[FakeEngine], **options: Any
) -> AsyncIterator[Bench]:
    """Run engines and a router between them; wait until it holds the engines' standing tickets."""
    async with AsyncExitStack() as ends:
        for engine in dict.fromkeys((*prefill, *decode)):
            await engine.start()
            ends.push_async_callback(engine.stop)
        options = {"intervals": Intervals(probe_s=0), **options}
        limits = RouterLimits(**{k: options.pop(k) for k in LIMITS if k in options})
        named = (engine_specs("test", [e.named for e in engines]) for engines in (prefill, decode))
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made = RouterOptions(*named, limits=limits, **options)
        await ends.enter_async_context(server.serving(made, listener, 0.1))
        client = await ends.enter_async_context(aiohttp.ClientSession())
        router = Bench(url, client, (prefill, decode))
        await router.standing_tickets_are_held()
        yield router


class Admin:
    """A client of a router's admin API."""

    def __init__(self, router: Bench, port: int) -> None:
        self.router, self.url = router, f"http://127.0.0.1:{port}/workers"
        self.token = ADMIN_TOKEN

    async def ask(self, method: str, body: object = None, path: str = "") -> tuple[int, Any]:
        """Return status and body."""
        headers = {"Authorization": f"Bearer {self.token}"}
        call = self.router.client.request(method, self.url + path, json=body, headers=headers)
        async with call as answer:
            return answer.status, json.loads(await answer.read())

    async def listed(self) -> list[dict[str, Any]]:
        """Return what the router says of its engines."""
        _, listed = await self.ask("GET")
        return list(listed)

    async def of(self, url: str) -> list[dict[str, Any]]:
        """Return what the router says of one engine."""
        return [each for each in await self.listed() if each["url"] == url]


@asynccontextmanager
async def administered(
    prefill: Sequence[FakeEngine], decode: Sequence[FakeEngine], **options: Any
) -> AsyncIterator[Admin]:
    """Run engines and a router with an admin API between them; wait until all are up."""
    port = free_port()
    access = AdminAccess(port=port, token=ADMIN_TOKEN)
    async with bench(prefill, decode, admin=access, **options) as router:
        admin = Admin(router, port)

        async def up() -> bool:
            listed = await admin.listed()
            return bool(listed) and all(each["up"] and each["models"] for each in listed)

        await until(up)
        yield admin


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have routers look after engines more often than one would in earnest."""
    monkeypatch.setattr(watch, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(watch, "PROBE_FIRST_S", 0.02)
    monkeypatch.setattr(watch, "RETRY_S", 0.02)
    # A busy machine must not decide a verdict.
    monkeypatch.setattr(watch, "PROBE_TIMEOUT_S", 30.0)


async def until(true: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for a condition that must come true."""
    for _ in range(5000):
        found = true()
        if await found if isinstance(found, Awaitable) else found:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")
