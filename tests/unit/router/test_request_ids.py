"""Ids of requests at SGLang: the router's own there, the client's in the answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvconnect.errors import Refused
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.request_ids import (
    RESPONSE_ID,
    RID,
    ClientIds,
    client_ids,
    with_request_id,
)
from tests.fakes.engine import FakeEngine, begin_stream, bench, on_loop

RANDOM = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2


def test_ids_are_replaced_wherever_a_stream_is_cut() -> None:
    event = b'data: {"id":"%b","text":"a"}\n\n' % RANDOM.encode()
    shown = event.replace(RANDOM.encode(), b'cli\\"ent')
    for cut in range(len(event)):
        ids = ClientIds(RID, RANDOM, 'cli"ent')
        parts = [ids.feed(event[:cut]), ids.feed(event[cut:]), ids.feed(event), ids.rest()]
        assert b"".join(parts) == shown * 2, cut
    assert b"".join((ids.feed(b"[DONE]"), ids.rest())) == b"[DONE]", "what is held back comes"
    # Control: another request's id, and text that is no id, stay.
    other = event.replace(RANDOM.encode(), OTHER.encode()) + RANDOM.encode()
    assert ClientIds(RID, RANDOM, "mine").shown(other) == other


def test_each_prompt_has_an_id() -> None:
    answer = msgspec.json.encode([{"id": f"{RANDOM}_{n}"} for n in range(3)])
    one = ClientIds(RID, RANDOM, "mine").shown(answer)
    assert [each["id"] for each in json.loads(one)] == ["mine_0", "mine_1", "mine_2"]
    both = ClientIds(RID, RANDOM, ["a", "b"]).shown(answer)
    assert [each["id"] for each in json.loads(both)] == ["a", "b", f"{RANDOM}_2"]


@pytest.mark.parametrize("own", [None, 7, "", [], [1], {"a": 1}])
def test_what_is_no_id_is_not_shown(own: Any) -> None:
    body = read_body(msgspec.json.encode({"rid": own}))
    assert client_ids(body, RID, RANDOM) is None
    assert with_request_id(body, RID, RANDOM) == {RID: RANDOM}
    assert with_request_id({}, RESPONSE_ID, RANDOM) == {RESPONSE_ID: f"resp_{RANDOM}"}


async def tells_its_id(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Answers as SGLang does, with the request's id, as a stream in two pieces."""
    meta = {"meta_info": {"id": body["rid"]}}
    if not body.get("stream"):
        return web.json_response(meta)
    stream = await begin_stream(request)
    event = b"data: " + json.dumps(meta).encode() + b"\n\n"
    for piece in (event, event[:30], event[30:], b"data: [DONE]\n\n"):
        await stream.write(piece)
    return stream


@on_loop
async def test_a_client_sees_its_own_id_and_the_engine_another() -> None:
    d = FakeEngine(tells_its_id)
    d.settings = ",engine=sglang"
    async with bench([], [d], handoff="none") as router:
        for own in ("0", None):
            for stream in (False, True):
                ask = {"text": "a", "stream": stream, **({"rid": own} if own else {})}
                status, said, _ = await router.post(ask, "/generate")
                sent = d.asked[-1]["rid"]
                assert status == 200 and len(sent) == 32 and sent != own
                shown = (own or sent).encode()
                assert said.count(b'"%b"' % shown) == (2 if stream else 1)
                assert not own or sent.encode() not in said
                assert not stream or said.endswith(b"data: [DONE]\n\n")


def test_a_long_id_and_too_many_are_refused() -> None:
    """An answer has a client's id many times."""

    def ids(own: Any) -> ClientIds | None:
        return client_ids(read_body(json.dumps({RID: own}).encode()), RID, RANDOM)

    for own in ("a" * 256, ["a", "b" * 256], ["a"] * 60_000):
        assert ids(own) is not None
    for own in ("a" * 257, ["a", "b" * 257]):
        with pytest.raises(Refused, match="rid has more than 256 characters"):
            ids(own)
    with pytest.raises(Refused, match="too many parts"):
        ids(["a"] * 70_000)


@on_loop
async def test_a_long_id_is_the_clients_fault() -> None:
    d = FakeEngine(tells_its_id)
    d.settings = ",engine=sglang"
    async with bench([], [d], handoff="none") as router:
        status, said, _ = await router.post({"text": "a", "rid": "a" * 257}, "/generate")
        assert status == 400 and b"256" in said and not d.asked
