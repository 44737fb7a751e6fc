"""Requests to SGLang's gRPC API, which look like HTTP to the router."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.router.connections import pool, sglang_grpc
from kvconnect.router.connections.engine_connection import (
    READ_BYTES,
    BaseUrl,
    ClosedByEngine,
    ConnectionLost,
    Exhausted,
    Interrupted,
    NotTaken,
    Unreachable,
    read,
)
from kvconnect.router.connections.grpc_connection import GrpcConnection
from kvconnect.router.connections.http1 import request_head
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.connections.sglang_messages import message
from kvconnect.router.engine_spec import engine_spec
from kvconnect.router.policy.fleet_view import EngineKind
from tests.fakes.engine import on_loop, until
from tests.fakes.grpc_engine import GrpcEngine, chunk, fails, never, says, serving
from tests.files import no_file_left

STREAM = b'{"model":"model","stream":true}'
WHOLE = b'{"model":"model"}'
EVENTS = [b'{"n":%d}' % number for number in range(3)]


@asynccontextmanager
async def asking(
    engine: GrpcEngine, silence_s: float = 30.0
) -> AsyncIterator[tuple[ConnectionPool, BaseUrl]]:
    client = ConnectionPool(silence_s)
    try:
        yield client, BaseUrl.of(engine.url)
    finally:
        client.close()


def head_of(base: BaseUrl, path: str, body: bytes, **headers: str) -> bytes:
    return request_head(base, "POST", path, headers, len(body))


async def ask(
    client: ConnectionPool, base: BaseUrl, body: bytes, path: str = "/v1/completions"
) -> tuple[int, str, bytes]:
    connection = await client.open(base, head_of(base, path, body), body)
    try:
        whole = await read(connection)
        return connection.response.status, connection.response.headers["content-type"], whole
    finally:
        client.release(base, connection)


@on_loop
async def test_a_stream_becomes_events() -> None:
    said = says(*map(chunk, EVENTS), chunk(last=True))
    async with serving(Complete=said) as engine, asking(engine) as (client, base):
        status, kind, whole = await ask(client, base, STREAM)
    assert (status, kind) == (200, "text/event-stream")
    assert whole == b"".join(b"data: %b\n\n" % each for each in [*EVENTS, b"[DONE]"])
    (_, request), *_ = engine.asked
    assert message("OpenAIRequest").FromString(request).json_body == STREAM


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/v1/completions", "Complete"),
        ("/v1/chat/completions", "ChatComplete"),
    ],
)
@on_loop
async def test_a_whole_answer_stays_one(path: str, call: str) -> None:
    said = says(chunk(b'{"id":"a"}', last=True))
    async with serving(**{call: said}) as engine, asking(engine) as (client, base):
        assert await ask(client, base, WHOLE, path) == (200, "application/json", b'{"id":"a"}')
    assert [name for name, _ in engine.asked] == [call]


@on_loop
async def test_calls_with_one_answer_have_a_status() -> None:
    said = says(message("OpenAIResponse")(json_body=b"[1]", status_code=422))
    async with serving(Score=said) as engine, asking(engine) as (client, base):
        assert await ask(client, base, WHOLE, "/v1/score") == (422, "application/json", b"[1]")


@on_loop
async def test_headers_go_along() -> None:
    said = says(chunk(b"{}", last=True))
    async with serving(Complete=said) as engine, asking(engine) as (client, base):
        head = head_of(base, "/v1/completions", WHOLE, traceparent="00-1-2-01")
        client.release(base, await client.open(base, head, WHOLE))
        await until(lambda: bool(engine.asked))
    pairs = message("OpenAIRequest").FromString(engine.asked[0][1]).trace_headers
    assert {pair.key: pair.value for pair in pairs} == {"traceparent": "00-1-2-01"}


ERROR = b'{"object":"error","message":"too long","type":"BadRequestError","code":400}'


@pytest.mark.parametrize("body", [WHOLE, STREAM])
@on_loop
async def test_an_error_in_place_of_an_answer_has_its_status(body: bytes) -> None:
    said = says(chunk(ERROR, last=True))
    async with serving(Complete=said) as engine, asking(engine) as (client, base):
        assert await ask(client, base, body) == (400, "application/json", ERROR)


@pytest.mark.parametrize(
    ("code", "why", "status"),
    [
        (StatusCode.INTERNAL, "1 validation error for CompletionRequest\nmax_tokens", 400),
        (StatusCode.INTERNAL, "temperature must be a non-negative finite number, got -1.0.", 400),
        (StatusCode.INTERNAL, "Failed to compile regex grammar: (", 400),
        (StatusCode.INTERNAL, "Request a exceeds the maximum number of tokens", 400),
        (StatusCode.INTERNAL, "LoRA adapter 'b' was requested, but LoRA is not enabled.", 400),
        (StatusCode.INTERNAL, "Decode transfer failed for request rank=0", 500),
        (StatusCode.INTERNAL, "Engine must be restarted", 500),
        (StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", 500),
        (StatusCode.OUT_OF_RANGE, "decoded message length too large", 413),
        (StatusCode.UNIMPLEMENTED, "", 404),
        (StatusCode.DATA_LOSS, "gone", 500),
    ],
)
@on_loop
async def test_errors_of_calls_are_told_by_their_status(
    code: StatusCode, why: str, status: int
) -> None:
    said = says(then=fails(code, why))
    async with serving(Complete=said) as engine, asking(engine) as (client, base):
        answered, _, body = await ask(client, base, WHOLE)
    assert answered == status
    assert json.loads(body)["error"]["message"] == (why or code.name)


@on_loop
async def test_a_stream_that_breaks_off_is_lost() -> None:
    said = says(*map(chunk, EVENTS), then=fails(StatusCode.INTERNAL, "no more"))
    async with serving(Complete=said) as engine, asking(engine) as (client, base):
        with pytest.raises(ConnectionLost, match="no more"):
            await ask(client, base, STREAM)


@on_loop
async def test_an_engine_that_ends_has_closed_the_connection() -> None:
    async with (
        serving(Complete=says(chunk(EVENTS[0]), then=never)) as engine,
        asking(engine) as (client, base),
    ):
        connection = await client.open(base, head_of(base, "/v1/completions", STREAM), STREAM)
        assert EVENTS[0] in await connection.readany()
        await engine.stop()
        with pytest.raises(ClosedByEngine):
            await connection.readany()
        client.release(base, connection)
        with pytest.raises(Unreachable):
            await ask(client, base, STREAM)
        await engine.start()

        async def is_back() -> bool:
            try:
                return (await client.get(base, "/health", 60.0))[0] == 200
            except Unreachable:
                return False

        await until(is_back)


@on_loop
async def test_an_engine_is_not_blamed_for_files_that_are_used_up() -> None:
    async with (
        serving(Complete=says(chunk(last=True))) as engine,
        asking(engine) as (client, base),
    ):
        with no_file_left(), pytest.raises(Exhausted):
            await ask(client, base, STREAM)
        assert engine.asked == []

        async def is_reached() -> bool:
            try:
                return (await ask(client, base, STREAM))[0] == 200
            except Exhausted:
                raise
            except Unreachable:  # gRPC waits before it tries again
                return False

        await until(is_reached)


@on_loop
async def test_who_hangs_up_ends_the_call() -> None:
    async with (
        serving(Complete=says(chunk(EVENTS[0]), then=never)) as engine,
        asking(engine) as (client, base),
    ):
        connection = await client.open(base, head_of(base, "/v1/completions", STREAM), STREAM)
        assert engine.ended == []
        client.release(base, connection)
        await until(lambda: engine.ended == ["Complete"])
        waiting = asyncio.create_task(ask(client, base, STREAM))
        await until(lambda: len(engine.asked) == 2)
        waiting.cancel()
        await until(lambda: engine.ended == ["Complete"] * 2)


@on_loop
async def test_silence_ends_a_call_of_an_engine_that_is_down() -> None:
    async with (
        serving(Complete=says(then=never)) as engine,
        asking(engine, silence_s=0.2) as (client, base),
    ):
        client.mark(base, up=False)
        with pytest.raises(ConnectionLost, match="sent nothing for"):
            await ask(client, base, STREAM)
        await until(lambda: engine.ended == ["Complete"])


@on_loop
async def test_control_an_engine_that_is_well_may_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, listen = 0, GrpcConnection._listen

    def count(connection: GrpcConnection, silence_s: float) -> None:
        nonlocal looks
        looks += 1
        listen(connection, silence_s)

    monkeypatch.setattr(GrpcConnection, "_listen", count)
    async with (
        serving(Complete=says(then=never)) as engine,
        asking(engine, silence_s=0.1) as (client, base),
    ):
        waiting = asyncio.create_task(ask(client, base, STREAM))
        await until(lambda: looks > 3)
        assert not waiting.done()
        monkeypatch.setattr(pool, "END_SILENT_S", 0.0)
        client.mark(base, up=False)
        with pytest.raises(ConnectionLost):
            await waiting


@on_loop
async def test_no_timer_stays_behind() -> None:
    async with serving(Complete=says(chunk(b"{}", last=True))) as engine:
        async with asking(engine, silence_s=3600.0) as (client, base):
            await ask(client, base, WHOLE)
            assert (await client.get(base, "/nothing", 60.0))[0] == 404
        await until(lambda: not [each for each in gc.get_objects() if _listens(each)])


def _listens(found: object) -> bool:
    if type(found) is not GrpcConnection:  # isinstance would ask each object for its class
        return False
    return not (found._timer is None or found._timer.cancelled())


@on_loop
async def test_little_is_kept_of_what_nobody_reads() -> None:
    event, sent = b'{"t":"%b"}' % (b"a" * 60_000), 0

    async def flood(_: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield chunk(event).SerializeToString()
        yield chunk(last=True).SerializeToString()

    async with serving(Complete=flood) as engine, asking(engine) as (client, base):
        connection = await client.open(base, head_of(base, "/v1/completions", STREAM), STREAM)
        await until(lambda: connection._paused)
        assert READ_BYTES < sum(map(len, connection.response.chunks)) <= READ_BYTES + 70_000
        assert sent < 300, "the engine waits, too"
        whole = await read(connection)
        client.release(base, connection)
    assert whole.count(event) == 1000
    assert whole.endswith(b"data: [DONE]\n\n")


@on_loop
async def test_a_read_can_be_interrupted_and_goes_on() -> None:
    go_on = asyncio.Event()

    async def answer(_: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield chunk(EVENTS[0]).SerializeToString()
        await go_on.wait()
        yield chunk(EVENTS[1], last=True).SerializeToString()

    async with serving(Complete=answer) as engine, asking(engine) as (client, base):
        connection = await client.open(base, head_of(base, "/v1/completions", STREAM), STREAM)
        await connection.readany()
        connection.interrupt()
        with pytest.raises(Interrupted):
            await connection.readany()
        go_on.set()
        assert EVENTS[1] in await read(connection)
        client.release(base, connection)


@on_loop
async def test_what_the_router_asks_about_an_engine() -> None:
    loads = b'[{"dp_rank":0,"num_used_tokens":7}]'
    told = says(message("GetLoadResponse")(json_info=loads))
    async with serving(GetLoad=told) as engine, asking(engine) as (client, base):
        assert (await client.get(base, "/health", 60.0))[0] == 200
        models = json.loads((await client.get(base, "/v1/models", 60.0))[1])
        assert [model["id"] for model in models["data"]] == ["model"]
        assert await client.get(base, "/v1/loads?include=core", 60.0) == (
            200,
            b'{"loads":%b}' % loads,
        )
        assert (await client.get(base, "/metrics", 60.0))[0] == 404
    unwell = says(message("HealthCheckResponse")(healthy=False))
    async with serving(HealthCheck=unwell) as engine, asking(engine) as (client, base):
        assert (await client.get(base, "/health", 60.0))[0] == 503


@on_loop
async def test_a_message_that_is_none_is_a_lost_connection() -> None:
    class Garbage:
        def SerializeToString(self) -> bytes:
            return b"\x0a\xff"

    async with serving(Complete=says(Garbage())) as engine, asking(engine) as (client, base):
        with pytest.raises(ConnectionLost, match="invalid message"):
            await ask(client, base, STREAM)
    async with serving(Complete=says()) as engine, asking(engine) as (client, base):
        with pytest.raises(ConnectionLost, match="empty"):
            await ask(client, base, STREAM)


@on_loop
async def test_a_path_without_a_call_asks_nobody() -> None:
    async with serving() as engine, asking(engine) as (client, base):
        with pytest.raises(NotTaken) as caught:
            await ask(client, base, WHOLE, "/v1/responses")
    assert (caught.value.status, engine.asked) == (404, [])
    assert "/v1/responses" in str(caught.value)


@on_loop
async def test_an_engine_that_is_down_gets_a_new_channel() -> None:
    """A connection can be dead without a sign: then no probe would ever pass."""
    async with serving() as engine, asking(engine) as (client, base):
        for up in (True, False):
            await client.get(base, "/health", 60.0)
            channel = client._channels[base]
            client.mark(base, up=up)
            assert (client._channels.get(base) is channel) is up


@on_loop
async def test_an_error_in_mid_stream_is_no_good_end() -> None:
    said = says(chunk(EVENTS[0]), chunk(ERROR, last=True))
    async with serving(Complete=said) as engine, asking(engine) as (client, base):
        with pytest.raises(ConnectionLost, match="mid-stream"):
            await ask(client, base, STREAM)


@pytest.mark.parametrize("stream", [1, "true", 1.0])
def test_what_only_the_engine_takes_for_a_stream_is_refused(stream: object) -> None:
    raw = json.dumps({"stream": stream}).encode()
    with pytest.raises(NotTaken) as caught:
        sglang_grpc.call_for(head_of(BaseUrl.of("grpc://engine:1"), "/v1/completions", raw), raw)
    assert "stream" in str(caught.value)


def test_a_refusal_repeats_little_of_the_request() -> None:
    for body in ({"text": "a", "b" * 2**20: 1}, {"input_ids": "a" * 2**20}):
        with pytest.raises(NotTaken) as caught:
            generate(**body)
        assert len(str(caught.value)) < 1000


def test_a_prompt_over_grpc_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_grpc, "MOST_IDS", 10)
    generate(input_ids=[1] * 9)
    with pytest.raises(NotTaken) as caught:
        generate(input_ids=[1] * 12)
    assert caught.value.status == 413


def test_fields_that_are_null_are_not_set() -> None:
    _, asked = generate(text=None, input_ids=[1], image_data=None, priority=None)
    assert (list(asked.input_ids), asked.HasField("priority")) == ([1], False)


def test_engines_are_never_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):  # a machine's own may exempt the engine
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    @on_loop
    async def run() -> None:
        async with serving() as engine, asking(engine) as (client, base):
            assert (await client.get(base, "/health", 60.0))[0] == 200

    run()


# /generate, whose fields have types --------------------------------------------------------------


def generate(**body: Any) -> tuple[str, Any]:
    raw = json.dumps(body).encode()
    head = head_of(BaseUrl.of("grpc://engine:1"), "/generate", raw)
    call = sglang_grpc.call_for(head, raw)
    return call.name, message(f"{call.name}Request").FromString(call.request)


def test_generate_with_token_ids_in_a_room() -> None:
    room = {"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 2**62}
    sampling = {"temperature": 0, "max_new_tokens": 4, "stop": "x", "min_p": None}
    name, asked = generate(input_ids=[1, 2], sampling_params=sampling, routed_dp_rank=3, **room)
    assert name == "Generate"
    assert list(asked.input_ids) == [1, 2]
    assert asked.sampling_params.HasField("temperature")  # 0 is not "unset"
    assert not asked.sampling_params.HasField("min_p")
    assert list(asked.sampling_params.stop) == ["x"]
    meeting = asked.disaggregated_params
    told = (meeting.bootstrap_host, meeting.bootstrap_port, meeting.bootstrap_room)
    assert (told, asked.routed_dp_rank) == (("p", 8998, 2**62), 3)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.integers(0, 2**63 - 1))
def test_numbers_arrive_as_they_are(ids: list[int], room: int) -> None:
    _, asked = generate(input_ids=ids, bootstrap_room=room)
    assert (list(asked.input_ids), asked.disaggregated_params.bootstrap_room) == (ids, room)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*message("TextGenerateRequest").DESCRIPTOR.fields_by_name, "input_ids"]
SAMPLING = [*message("SamplingParams").DESCRIPTOR.fields_by_name]


@given(
    st.sampled_from(["/generate", "/v1/completions", "/v1/score"]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    st.none() | st.dictionaries(st.sampled_from(SAMPLING), JSON, max_size=3),
)
def test_any_body_is_a_call_or_is_refused(
    path: str, body: dict[str, Any], sampling: dict[str, Any] | None
) -> None:
    if sampling is not None:
        body["sampling_params"] = sampling
    raw = json.dumps(body).encode()
    try:
        call = sglang_grpc.call_for(head_of(BaseUrl.of("grpc://engine:1"), path, raw), raw)
    except NotTaken as error:
        assert len(str(error)) < 1000
        return
    assert call.streams is (path != "/v1/score" and body.get("stream") is True)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"a":' + b"[" * 100_000])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_what_is_no_object_is_refused(path: str, raw: bytes) -> None:
    with pytest.raises(NotTaken):
        sglang_grpc.call_for(head_of(BaseUrl.of("grpc://engine:1"), path, raw), raw)


def test_generate_with_text() -> None:
    name, asked = generate(text="hello", stream=True)
    assert (name, asked.text, asked.stream) == ("TextGenerate", "hello", True)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"text": "a", "sampling_params": {"tempo": 1}}, "tempo"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "b"}}, "max_new_tokens"),
        ({"text": "a", "disagg_prefill_dp_rank": 1}, "disagg_prefill_dp_rank"),
        ({"text": "a", "disaggregated_params": {"bootstrap_host": "b"}}, "disaggregated_params"),
        ({"text": "a", "sampling_params": [{"temperature": 1}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": 1e300}}, "temperature"),
        ({"text": "a", "sampling_params": {"n": 2**31}}, r"sampling_params\.n"),
        ({"input_ids": [1], "return_text_in_logprobs": True}, "return_text_in_logprobs"),
    ],
)
def test_what_generate_cannot_say_is_refused(body: dict[str, Any], named: str) -> None:
    with pytest.raises(NotTaken) as caught:
        generate(**body)
    assert caught.value.status == 400
    assert re.search(named, str(caught.value))


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_generate_answers_as_over_http(stream: bool) -> None:
    info = [{"key": "id", "value": '"a"'}, {"key": "finish_reason", "value": "null"}]
    said = [
        message("GenerateResponse")(output_ids=[5], meta_info=info),
        message("GenerateResponse")(output_ids=[5, 6], meta_info=info, finished=True),
    ]
    body = json.dumps({"input_ids": [1], "stream": stream}).encode()
    want = {"output_ids": [5, 6], "meta_info": {"id": "a", "finish_reason": None}}
    parts = said if stream else said[1:]
    async with serving(Generate=says(*parts)) as engine, asking(engine) as (client, base):
        status, kind, whole = await ask(client, base, body, "/generate")
    assert status == 200
    if stream:
        first, last, done = whole.removesuffix(b"\n\n").split(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["output_ids"] == [5]
        assert json.loads(last.removeprefix(b"data: ")) == want
        assert (kind, done) == ("text/event-stream", b"data: [DONE]")
    else:
        assert (kind, json.loads(whole)) == ("application/json", want)


# On the command line -----------------------------------------------------------------------------


def test_a_grpc_engine_is_sglang() -> None:
    spec = engine_spec("decode", "grpc://10.0.0.1:40000")
    assert (spec.url, spec.kind) == ("grpc://10.0.0.1:40000", EngineKind.SGLANG)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("grpc://10.0.0.1:40000,engine=vllm", "use http://"),
        ("grpc://10.0.0.1", "use host and port"),
        ("grpc://10.0.0.1:1/v1", "use host and port"),
        ("grpcs://10.0.0.1:1", "use a URL such as"),
    ],
)
def test_other_grpc_engines_are_refused(text: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        engine_spec("decode", text)


def test_the_packages_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.extras.EXTRAS", {"grpc": ("no_such_module.part",)})
    with pytest.raises(ConfigError, match=r"pip install 'kvconnect\[grpc\]'"):
        engine_spec("decode", "grpc://10.0.0.1:40000")
