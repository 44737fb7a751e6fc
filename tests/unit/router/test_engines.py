"""The router in front of engines of several kinds: what each is asked, on which rank."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.fleet import watch
from kvconnect.router.options import Intervals
from kvconnect.router.policy.ranking import RankingPolicy
from tests.fakes.engine import (
    ASK,
    DONE,
    EVENTS,
    Bench,
    FakeEngine,
    Handler,
    administered,
    bench,
    decodes,
    hangs,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)

PARAMS = "kv_transfer_params"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(watch, "LEARN_EVERY_S", 0.05)


def sglang(answer: Handler, tokens: list[int]) -> FakeEngine:
    """A server with a rank for each number, which is its load."""
    engine = FakeEngine(answer)
    engine.settings, engine.standing_ticket_lifetime_s = ",engine=sglang,bootstrap=9123", 0
    loads = [{"dp_rank": rank, "num_used_tokens": used} for rank, used in enumerate(tokens)]
    engine.extra["/v1/loads"] = says(200, {"loads": loads})
    engine.extra["/server_info"] = says(200, {"version": "1"})
    return engine


def vllm(answer: Handler, shares: list[float], settings: str = "") -> FakeEngine:
    """An engine with a rank for each number, the share of its cache in use."""
    engine = FakeEngine(answer)
    engine.settings = settings
    if settings:
        engine.standing_ticket_lifetime_s = 0
    lines = []
    for rank, share in enumerate(shares):
        lines.append(f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {share}')
        cache = f'block_size="16",engine="{rank}",num_gpu_blocks="{100 * len(shares)}"'
        lines.append(f"vllm:cache_config_info{{{cache}}} 1.0")

    async def metrics(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        names = request.query.getall("name[]", [])
        if request.path == "/metrics":  # whatever the names are
            return web.Response(text="\n".join(lines))
        return web.Response(
            text="\n".join(line for line in lines if line.partition("{")[0] in names)
        )

    engine.extra["/metrics"] = engine.extra["/metrics/"] = metrics
    return engine


async def engines_are_known(router: Bench) -> None:
    """Wait until the router knows what every engine is and how busy."""
    for role, engines in (("prefill", router.prefill), ("decode", router.decode)):
        for engine in engines:
            await until(lambda e=engine, n=role: _known(router, n, e))


async def _known(router: Bench, role: str, engine: FakeEngine) -> bool:
    if engine.got["/version"] + engine.got["/server_info"] < 2:
        return False  # it is asked again only once its first answers are taken
    return await router.metric("foreign_tokens", role=role, upstream=engine.url, rank="0") >= 0


# SGLang -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@on_loop
async def test_sglangs_servers_meet_on_the_ranks_with_the_fewest_tokens(path: str) -> None:
    ps = [sglang(decodes, [50, 20]), sglang(decodes, [90, 90])]
    ds = [sglang(decodes, [90]), sglang(decodes, [7, 5, 3])]
    evil = {"bootstrap_host": "10.6.6.6", "routed_dp_rank": 9}
    async with bench(ps, ds) as router:
        await engines_are_known(router)
        status, _, headers = await router.post(ASK | evil, path)
        assert (status, headers["x-kvconnect-mode"]) == (200, "bootstrap")
        (p,), (d,) = ps[0].asked, ds[1].asked
        room = p["bootstrap_room"]
        assert 0 <= room < 2**63
        rid = p["rid"]
        assert re.fullmatch("[0-9a-f]{32}", rid)
        met = {
            "rid": rid,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 9123,
            "bootstrap_room": room,
        }
        assert p == ASK | met | {"disagg_prefill_dp_rank": 1, "routed_dp_rank": 1}
        assert d == ASK | met | {"disagg_prefill_dp_rank": 1, "routed_dp_rank": 2}
        assert (headers["x-kvconnect-prefill"], headers["x-kvconnect-prefill-rank"]) == ("0", "1")
        assert (headers["x-kvconnect-decode"], headers["x-kvconnect-decode-rank"]) == ("1", "2")
        assert headers["x-kvconnect-decode-reason"] == "least_tokens"
        assert ps[0].paths == ds[1].paths == [path]
        await until(lambda: _no_tokens_in_flight(router))


async def _no_tokens_in_flight(router: Bench) -> bool:
    text = (await router.get("/metrics")).body
    lines = [line for line in text.decode().splitlines() if "router_tokens_in_flight{" in line]
    assert lines
    return all(line.endswith(" 0.0") for line in lines)


@on_loop
async def test_streams_and_several_prompts_of_sglang() -> None:
    p, d = sglang(decodes, [0]), sglang(decodes, [0])
    async with bench([p], [d]) as router:
        status, body, _ = await router.post(ASK | {"stream": True, "prompt": ["a", "b"]})
        assert (status, body) == (200, b"".join((*EVENTS, DONE)))
        assert "routed_dp_rank" not in p.asked[0], "it has but one rank"
        assert p.asked[0]["bootstrap_room"] == d.asked[0]["bootstrap_room"]


@on_loop
async def test_several_answers_of_sglang_are_refused() -> None:
    p, d = sglang(decodes, [0]), sglang(decodes, [0])
    async with bench([p], [d]) as router:
        for body, path in (
            (ASK | {"n": 2}, "/v1/completions"),
            ({"text": "a", "sampling_params": {"n": 2}}, "/generate"),
        ):
            status, answer, _ = await router.post(body, path)
            assert status == 400
            assert "without n" in json.loads(answer)["error"]["message"]
        assert p.asked == d.asked == []


@on_loop
async def test_a_failed_prefill_of_sglang_is_retried_with_the_same_decode_server() -> None:
    wrong = says(500, {"error": {"message": "out of memory"}})
    ps = [sglang(wrong, [0]), sglang(decodes, [10])]
    ds = [sglang(decodes, [10]), sglang(hangs, [0])]

    async def after_the_first(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        engine.answer = decodes
        return await hangs(engine, request, body)

    ds[1].answer = after_the_first
    async with bench(ps, ds) as router:
        await engines_are_known(router)
        status, _, headers = await router.post(ASK)
        assert (status, headers["x-kvconnect-prefill"]) == (200, "1")
        assert headers["x-kvconnect-decode"] == "1"
        rooms = [body["bootstrap_room"] for body in ds[1].asked]
        assert len(set(rooms)) == 2, "a room is used once"
        assert ds[0].asked == []


@on_loop
async def test_each_attempt_has_an_id_of_its_own() -> None:
    ps = [sglang(says(500, {}), [0]), sglang(decodes, [10])]

    async def once(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        """SGLang, which knows an id until it has seen that the request was ended."""
        if [asked.get("rid") for asked in engine.asked].count(body.get("rid")) > 1:
            return web.json_response({"message": "Duplicate request ID"}, status=400)
        return await (hangs if len(engine.asked) == 1 else decodes)(engine, request, body)

    d = sglang(once, [0])
    async with bench(ps, [d]) as router:
        await engines_are_known(router)
        status, _, headers = await router.post(ASK | {"rid": "mine"})
        assert (status, headers["x-kvconnect-prefill"]) == (200, "1")
        ids = [asked["rid"] for asked in d.asked]
        assert ids == [asked["rid"] for asked in ps[0].asked + ps[1].asked]
        assert len(set(ids)) == 2 and "mine" not in ids


class Reticent(FakeEngine):
    """An engine that does not say what it serves until it may."""

    def __init__(self, answer: Handler) -> None:
        super().__init__(answer)
        self.may_tell = asyncio.Event()

    async def _models(self, request: web.Request) -> web.Response:
        self.got["/v1/models"] += 1
        await self.may_tell.wait()
        return await super()._models(request)


async def is_up(router: Bench, engine: FakeEngine) -> bool:
    role = "prefill" if engine in router.prefill else "decode"
    return await router.metric("upstream_up", role=role, upstream=engine.url) == 1


async def is_down(router: Bench, engine: FakeEngine) -> bool:
    return not await is_up(router, engine)


@on_loop
async def test_an_engine_gets_no_request_until_it_says_what_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "FIRST_LEARN_S", 0.01)
    some, others = FakeEngine(decodes), Reticent(decodes)
    some.settings = others.settings = ",engine=sglang"
    others.models = ("other",)
    async with bench([], [some, others], handoff="none") as router:
        await until(lambda: is_up(router, others))
        await until(lambda: router.answers("/v1/models", 200))
        asked = [ASK, {"prompt": "hello"}] * 3
        assert {(await router.post(body)).status for body in asked} == {200}
        status, said, _ = await router.post(ASK | {"model": "other"})
        assert (status, b"serves the model 'other'" in said) == (503, True)
        assert (len(some.asked), others.asked) == (len(asked), [])
        others.may_tell.set()

        async def served() -> bool:
            return (await router.post(ASK | {"model": "other"})).status == 200

        await until(served)
        assert len(some.asked) == len(asked)
        # It comes back with another model.
        others.well = False
        await until(lambda: is_down(router, others))
        others.models, count = ("third",), len(others.asked)
        others.may_tell.clear()
        others.well = True
        await until(lambda: is_up(router, others))
        assert (await router.post(ASK | {"model": "other"})).status == 503
        assert (await router.post(ASK)).status == 200
        assert len(others.asked) == count


@on_loop
async def test_engines_that_never_say_what_they_serve_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "FIRST_LEARN_S", 0.01)
    p, d = Reticent(decodes), Reticent(decodes)
    p.settings, d.settings = ",engine=sglang,bootstrap=9123", ",engine=sglang"
    p.standing_ticket_lifetime_s = 0
    async with bench([p], [d]) as router:
        await until(lambda: router.answers("/health", 200))
        assert (await router.post(ASK)).status == 200
        p.may_tell.set()
        asked = p.got["/v1/models"]
        await until(lambda: p.got["/v1/models"] > asked + 1)
        assert (await router.post(ASK)).status == 200, "the only one of its role"


@on_loop
async def test_an_engine_is_up_when_it_has_said_what_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "FIRST_LEARN_S", 60.0)
    d = Reticent(decodes)
    d.well = False
    async with bench([], [d], handoff="none") as router:
        d.well = True
        await until(lambda: d.got["/v1/models"] > 0)
        assert not await is_up(router, d)
        d.may_tell.set()
        await until(lambda: is_up(router, d))
        assert await router.answers("/v1/models", 200)


# vLLM -------------------------------------------------------------------------------------------


async def finds_none(_: FakeEngine, request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response()


@pytest.mark.parametrize(
    "by_name",
    [
        pytest.param("these", id="as vLLM does"),
        pytest.param(None, id="behind a proxy that passes on the one path"),
        pytest.param(finds_none, id="several processes serve the API"),
    ],
)
@on_loop
async def test_vllm_is_asked_only_for_the_metrics_of_its_load(by_name: Any) -> None:
    p, d = vllm(prefills, [0.5, 0.1]), vllm(decodes, [0.0])
    selects = by_name == "these"
    if by_name is None:
        del p.extra["/metrics/"]
    elif not selects:
        p.extra["/metrics/"] = by_name
    async with bench([p], [d], intervals=Intervals(0.01, 0)) as router:
        asked = "/metrics/" if selects else "/metrics"
        await until(lambda: p.got[asked] > 3)
        assert (
            await router.metric("foreign_tokens", role="prefill", upstream=p.url, rank="0") == 800
        )
        assert p.got["/metrics"] == 0 if selects else p.got["/metrics/"] == 1


@on_loop
async def test_ranks_that_are_not_told_at_once_are_asked_for_again() -> None:
    d = vllm(decodes, [0.0, 0.0])
    told = d.extra["/metrics/"]

    async def fails(*_: Any) -> web.StreamResponse:
        return web.Response(status=500)

    d.extra["/metrics/"] = fails
    async with bench([], [d], intervals=Intervals(0, 0), handoff="none") as router:
        await until(lambda: d.got["/metrics/"] > 1)
        d.extra["/metrics/"] = told

        async def second_rank() -> bool:
            _, _, headers = await router.post(ASK)
            return headers.get("x-kvconnect-decode-rank") == "1"

        await until(second_rank)
        asked = d.got["/metrics/"]
        await router.post(ASK)
        assert d.got["/metrics/"] == asked, "once it is known, it is not asked for"


@on_loop
async def test_ranks_of_vllm_are_named_in_a_header_and_have_cards_of_their_own() -> None:
    p, d = vllm(prefills, [0.5, 0.1]), vllm(decodes, [0.0, 0.0, 0.2])
    async with bench([p], [d]) as router:
        await engines_are_known(router)
        await until(lambda: p.standing_tickets >= 2)
        ranks = []
        for _ in range(2):
            status, _, headers = await router.post(ASK)
            assert (status, headers["x-kvconnect-mode"]) == (200, "push")
            ranks.append((headers["x-kvconnect-prefill-rank"], headers["x-kvconnect-decode-rank"]))
        assert ranks == [("1", "0"), ("1", "1")], "ties take turns"
        assert [h["x-data-parallel-rank"] for h in p.headers] == ["1", "1"]
        assert [h["x-data-parallel-rank"] for h in d.headers] == ["0", "1"]
        given = d.asked[0][PARAMS]["kvconnect_ticket"]
        assert given == p.ticket_of_rank["1"], "the ticket of the rank that computes"


@on_loop
async def test_ranks_are_those_since_the_restart() -> None:
    p, d = vllm(prefills, [0.5, 0.1]), vllm(decodes, [0.0, 0.0, 0.2])
    async with bench([p], [d]) as router:
        await engines_are_known(router)
        await until(lambda: p.standing_tickets >= 2)
        p.well = d.well = False
        await until(lambda: is_down(router, d))
        await until(lambda: is_down(router, p))
        p.ticket_of_rank.clear()
        d.extra["/metrics"] = d.extra["/metrics/"] = hangs
        p.well = d.well = True
        await until(lambda: router.answers("/health", 200))
        await until(lambda: p.ticket_of_rank.keys() == {"0", "1"})
        assert (await router.post(ASK)).status == 200
        assert "x-data-parallel-rank" not in d.headers[-1], "how many it has is unknown"


@on_loop
async def test_one_leg_after_the_other_for_nixl() -> None:
    p, d = vllm(prefills, [0.0], ",engine=nixl"), vllm(decodes, [0.0], ",engine=nixl")
    async with bench([p], [d]) as router:
        status, _, headers = await router.post(ASK)
        assert (status, headers["x-kvconnect-mode"]) == (200, "pull")
        assert d.asked[0][PARAMS]["odd"] == [1, {}], "word for word"
        assert await router.metric("requests_total", mode="pull", reason="connector", outcome="ok")
        assert p.standing_tickets == 0


@on_loop
async def test_mooncakes_decode_engine_is_told_what_its_prefill_engine_does_not_say() -> None:
    p, d = vllm(says(200, {"choices": []}), [0.0, 0.0]), vllm(decodes, [0.0], ",engine=mooncake")
    p.standing_ticket_lifetime_s = 0
    p.extra["/query"] = says(200, {"0": {"engine_id": "e0"}, "1": {"engine_id": "e1"}})
    await p.start()  # its bootstrap server is on its own port here
    p.settings = f",engine=mooncake,bootstrap={p.port}"
    await p.stop()
    async with bench([p], [d]) as router:
        await engines_are_known(router)
        for _ in range(2):
            status, _, headers = await router.post(ASK)
            assert (status, headers["x-kvconnect-mode"]) == (200, "pull")
        for body, asked, rank in zip(d.asked, p.asked, (0, 1), strict=True):
            assert body[PARAMS] == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": asked[PARAMS]["transfer_id"],
                "remote_engine_id": f"e{rank}",
                "remote_bootstrap_addr": f"http://127.0.0.1:{p.port}",
            }


@on_loop
async def test_a_mixed_fleet_is_paired() -> None:
    ps = [vllm(prefills, [0.0]), sglang(decodes, [0])]
    ds = [sglang(decodes, [0]), vllm(decodes, [0.0])]
    async with bench(ps, ds) as router:
        await engines_are_known(router)
        modes = set()
        for _ in range(4):
            _, _, headers = await router.post(ASK)
            pair = headers["x-kvconnect-prefill"], headers["x-kvconnect-decode"]
            modes.add((headers["x-kvconnect-mode"], *pair))
        assert modes == {("push", "0", "1"), ("bootstrap", "1", "0")}


@on_loop
async def test_versions_that_engines_tell_keep_them_apart() -> None:
    ps = [vllm(prefills, [0.0]) for _ in range(2)]
    ds = [vllm(decodes, [0.0]) for _ in range(2)]
    for n, engine in enumerate([*ps, *reversed(ds)]):
        engine.extra["/version"] = says(200, {"version": f"0.{n % 2}"})
    async with bench(ps, ds) as router:
        await engines_are_known(router)
        pairs = set()
        for _ in range(4):
            _, _, headers = await router.post(ASK)
            pairs.add((headers["x-kvconnect-prefill"], headers["x-kvconnect-decode"]))
        assert pairs == {("0", "1"), ("1", "0")}


@on_loop
async def test_an_adapter_that_is_loaded_while_engines_run() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        await until(lambda: router.answers("/v1/models", 200))
        adapter = ASK | {"model": "adapter"}
        assert (await router.post(adapter)).status == 404
        p.models = d.models = ("tiny", "adapter")

        async def served() -> bool:
            return (await router.post(adapter)).status == 200

        await until(served)


@on_loop
async def test_a_model_that_nobody_serves_is_named() -> None:
    async with bench([FakeEngine(prefills)], [FakeEngine(decodes)]) as router:
        await until(lambda: router.answers("/v1/models", 200))

        async def told() -> bool:
            status, body, _ = await router.post(ASK | {"model": "huge"})
            error = json.loads(body)["error"]
            return status == 404 and "`huge` does not exist" in error["message"]

        await until(told)


# Loads ------------------------------------------------------------------------------------------


@on_loop
async def test_loads_are_read_and_own_requests_are_not_counted_twice() -> None:
    p, d = vllm(hangs, [0.25]), vllm(decodes, [0.5])
    async with bench(
        [p], [d], intervals=Intervals(0.02, 0), handoff="pull", timeout_s=3.0
    ) as router:
        await engines_are_known(router)
        labels = {"role": "prefill", "upstream": p.url, "rank": "0"}
        assert await router.metric("foreign_tokens", **labels) == 400
        prompt = [1] * 300
        asking = asyncio.create_task(router.post(ASK | {"prompt": prompt}))
        await until(lambda: bool(p.asked))
        assert await router.metric("tokens_in_flight", **labels) == 300

        async def subtracted() -> bool:
            return await router.metric("foreign_tokens", **labels) == 100

        await until(subtracted)
        asking.cancel()
        await until(lambda: _no_tokens_in_flight(router))


@pytest.mark.parametrize(
    "answer",
    [says(200, {"loads": [{"dp_rank": 0, "num_used_tokens": -1}]}), says(500, {})],
    ids=["negative", "error"],
)
@on_loop
async def test_a_load_that_is_not_told_is_unknown(answer: Handler) -> None:
    p, d = sglang(decodes, [0]), sglang(decodes, [0])
    p.extra["/v1/loads"] = answer
    async with bench([p], [d], intervals=Intervals(0.02, 0)) as router:

        async def heard() -> bool:
            outcomes = ("discarded", "failed")
            labels = {"role": "prefill", "upstream": p.url}
            return (
                sum(
                    [
                        await router.metric("load_reports_total", **labels, outcome=outcome)
                        for outcome in outcomes
                    ]
                )
                > 0
            )

        await until(heard)
        labels = {"role": "prefill", "upstream": p.url, "rank": "0"}
        assert await router.metric("foreign_tokens", **labels) == -1
        assert (await router.post(ASK)).status == 200


@on_loop
async def test_a_request_that_waits_for_prefill_is_a_load_of_its_decode_engine() -> None:
    p, ds = vllm(hangs, [0.0]), [vllm(decodes, [0.0]), vllm(decodes, [0.25])]
    async with administered([p], ds, handoff="pull") as admin:
        await engines_are_known(admin.router)
        body = ASK | {"prompt": [1] * 100}
        asking = [asyncio.create_task(admin.router.post(body)) for _ in range(10)]
        await until(lambda: len(p.asked) == len(asking))
        listed = [await admin.of(d.url) for d in ds]
        assert [each["requests"] for (each,) in listed] == [7, 3], "400 tokens were there before"
        for task in asking:
            task.cancel()
        await until(lambda: _no_tokens_in_flight(admin.router))


@on_loop
async def test_a_session_stays_with_its_engines() -> None:
    ps, ds = [FakeEngine(prefills) for _ in range(3)], [FakeEngine(decodes) for _ in range(3)]
    policy = {"prefill_policy": RankingPolicy.SESSION, "decode_policy": RankingPolicy.SESSION}
    async with bench(ps, ds, **policy) as router:
        found = set()
        for turn in range(6):
            named = {"headers": {"X-Session-Id": "s"}} if turn % 2 else {}
            body = ASK if turn % 2 else ASK | {"user": "s"}
            _, _, headers = await router.post(body, **named)
            assert headers["x-kvconnect-prefill-reason"] == "sticky"
            found.add((headers["x-kvconnect-prefill"], headers["x-kvconnect-decode"]))
        assert len(found) == 1
