"""A router that reaches its servers over SGLang's gRPC API only."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.engines.lost_streams import Fleet, count, survive_a_kill, two_routers
from tests.engines.models import prompt_tokens
from tests.engines.ranks import RANKS, until
from tests.engines.server import Router
from tests.engines.streams import TEXT, Ask, said
from tests.sglang.pd import decode_server, prefill_server, room, side_by_side
from tests.sglang.server import SglangServer

STREAMS, NEW = 8, 960
LONG, ANSWER = 2400, 5600  # tokens of somebody else's request: as many as the model takes
ASKED = 6  # beside it


class Servers(NamedTuple):
    prefill: SglangServer
    decode: tuple[SglangServer, SglangServer]
    fleet: Fleet
    over_http: Router


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    size: Any = {"texts": True, "tokens": 16384, "grpc": True}
    prefill = prefill_server(**size)
    decode = decode_server(dp=2, **size), decode_server(**size)
    with side_by_side(prefill, *decode), two_routers(prefill, decode) as fleet:
        flags = ["--prefill", f"{prefill.url},engine=sglang,bootstrap={prefill.bootstrap_port}"]
        flags += ["--decode", *(f"{server.url},engine=sglang" for server in decode)]
        with Router([], [], tuple(flags)) as over_http:
            yield Servers(prefill, decode, fleet, over_http)


def asked(number: int, new: int = NEW) -> Ask:
    """Return the path and the body of a stream."""
    body = {"model": "model", "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text = TEXT * (4 + number)
    if number % 2:
        turns = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {**body, "messages": turns}
    return "/v1/completions", {**body, "prompt": text}


OWN = ("id", "created", "metadata", "meta_info")
"""What two answers to the same request differ in."""


def answer(router: Router, ask: Ask) -> Any:
    path, body = ask
    with router.open(path, body) as reply:
        if not body.get("stream"):
            return _plain(json.load(reply))
        lines = [line for line in reply.read().split(b"\n\n") if line]
    assert lines.pop() == b"data: [DONE]"
    return [_plain(json.loads(line.removeprefix(b"data: "))) for line in lines]


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name not in OWN}


def native(stream: bool, **prompt: Any) -> Ask:
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    return "/generate", {**prompt, "stream": stream, "sampling_params": sampling}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_over_http(servers: Servers, stream: bool) -> None:
    for number in range(2):
        path, body = asked(number, new=5)
        ask = path, {**body, "stream": stream}
        if not stream:
            ask[1].pop("stream_options")
        over_http = answer(servers.over_http, ask)
        assert answer(servers.fleet.control, ask) == over_http
        other = path, {**ask[1], "max_tokens": 4}  # control
        assert answer(servers.fleet.control, other) != over_http


@pytest.mark.parametrize(
    ("prompt", "field"),
    [({"text": TEXT * 5}, "text"), ({"input_ids": prompt_tokens(70)}, "output_ids")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_generate_says_the_same_as_over_http(
    servers: Servers, prompt: dict[str, Any], field: str, stream: bool
) -> None:
    ask = native(stream, **prompt)
    both = [answer(router, ask) for router in (servers.fleet.control, servers.over_http)]
    got, want = [each[-1] if stream else each for each in both]
    assert got[field] == want[field]
    assert want[field]


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (("/v1/completions", {"model": "model", "prompt": "a", "max_tokens": "b"}), "max_tokens"),
        (("/v1/completions", {"model": "model", "prompt": "a", "max_tokens": 10**6}), "length"),
        (("/generate", {"text": "a", "sampling_params": {"temperature": -1}}), "temperature"),
        (("/generate", {"text": "a", "image_data": "b"}), "image_data"),
        (("/generate", {"text": "", "sampling_params": {"max_new_tokens": 2}}), "empty"),
        (("/generate", {"input_ids": [], "sampling_params": {"max_new_tokens": 2}}), "empty"),
        (("/v1/completions", {"model": "model", "prompt": [[1], []]}), "empty"),
        (("/v1/completions", {"model": "model", "prompt": [10**9]}), "input_ids"),
        (("/generate", {"input_ids": [10**9], "sampling_params": {}}), "input_ids"),
        (("/generate", {"text": "a", "sampling_params": {"top_k": 2**31}}), "top_k"),
        (("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [-1]}}), "stop_token"),
    ],
)
def test_bad_requests_are_refused_and_no_server_is_blamed(
    servers: Servers, ask: Ask, named: str
) -> None:
    router = servers.fleet.control
    for _ in range(4):  # more failures than a server may have
        with pytest.raises(urllib.error.HTTPError) as caught, router.open(*ask):
            pass
        with caught.value as refused:
            assert refused.code == 400
            assert named in refused.read().decode()
    states = {
        (role, outcome): count(router, "upstream_requests", role=role, outcome=outcome)
        for role in ("prefill", "decode")
        for outcome in ("error", "unreachable")
    }
    assert set(states.values()) == {0}, states
    assert answer(router, asked(0, new=3))


def test_requests_go_to_the_rank_with_the_fewest_tokens(servers: Servers) -> None:
    busy, free = servers.decode
    router = servers.fleet.control

    def loads() -> list[float]:
        name = "kvconnect_router_foreign_tokens"
        return [
            router.metric(name, role="decode", upstream=f"grpc://127.0.0.1:{port}", rank=str(rank))
            for port, rank in [*((busy.grpc_port, rank) for rank in RANKS), (free.grpc_port, 0)]
        ]

    def target(number: int) -> tuple[str, str]:
        with router.open(*asked(number, new=3)) as reply:
            reply.read()
            name = "X-KVConnect-Decode"
            return reply.headers[name], reply.headers.get(f"{name}-Rank", "0")

    found: list[tuple[str, str]] = []
    while len(found) < ASKED:
        until(lambda: loads() == [0, 0, 0], "all ranks are known, and idle")
        body = busy.body(prompt_tokens(LONG, start=30_000), ANSWER, stream=True, routed_dp_rank=0)
        body |= room(servers.prefill)
        with servers.prefill.open("/generate", body), busy.open("/generate", body):
            until(lambda: loads()[0] > LONG / 2, "the busy rank is known")
            while len(found) < ASKED:
                chosen = target(len(found))
                if loads()[0] <= LONG / 2:
                    break  # the long request has ended: it says nothing of this one
                found.append(chosen)
    assert ("0", "0") not in found


def test_streams_survive_kill_9_of_their_server(servers: Servers) -> None:
    want = survive_a_kill(servers.fleet, [asked(number) for number in range(STREAMS)], said)
    assert all(each.text for each in want)
