"""Probes of hand-offs between fake engines: what they ask, and what their outcome changes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.api_keys import ApiKey
from kvconnect.router.fleet import handoff_probes, pairing
from kvconnect.router.fleet.reports import refused_handoffs, vllm_received
from kvconnect.router.options import Intervals, Listening
from tests.fakes.engine import (
    ASK,
    Bench,
    FakeEngine,
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

# With engines -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(handoff_probes, "LOOK_S", 0.01)
    monkeypatch.setattr(pairing, "RETRY_S", 0.05)


OFTEN = {"intervals": Intervals(probe_s=0.1), "handoff": "pull"}


async def probes(router: Bench, outcome: str) -> float:
    return await router.metric("probes_total", outcome=outcome)


async def received(router: Bench, outcome: str, more: int = 2) -> None:
    """Wait for further probes with this outcome."""
    before = await probes(router, outcome)

    async def came() -> bool:
        return await probes(router, outcome) >= before + more

    await until(came)


@pytest.mark.parametrize("engine", ["vllm", "nixl", "sglang"])
@on_loop
async def test_a_probe_is_a_short_request_through_both(engine: str) -> None:
    p, d = FakeEngine(prefills if engine != "sglang" else decodes), FakeEngine(decodes)
    for each in (p, d):
        each.settings = f",engine={engine}"
    if engine != "vllm":
        p.standing_ticket_lifetime_s = d.standing_ticket_lifetime_s = 0
    async with bench([p], [d], **OFTEN) as router:
        await received(router, "ok")
    for asked, answered in zip(p.asked, d.asked, strict=False):
        if engine == "sglang":
            assert asked["sampling_params"] == answered["sampling_params"] == {"max_new_tokens": 1}
            assert asked["bootstrap_room"] == answered["bootstrap_room"]
        else:
            assert asked["max_tokens"] == answered["max_tokens"] == 1
            assert answered["kv_transfer_params"]["do_remote_prefill"] is True
        prompt = "input_ids" if engine == "sglang" else "prompt"
        assert asked[prompt] == answered[prompt] and len(asked[prompt]) == handoff_probes.TOKENS
    assert p.asked[0][prompt] != p.asked[1][prompt]


def told(cached: int) -> Any:
    return says(200, {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}})


@on_loop
async def test_a_prompt_that_decode_computed_itself_is_no_proof() -> None:
    p, d = FakeEngine(prefills), FakeEngine(told(127))
    async with bench([p], [d], **OFTEN) as router:
        await received(router, "ok")
        d.answer = told(0)
        await received(router, "computed")


@on_loop
async def test_an_engine_s_counts_tell_where_its_answers_do_not() -> None:
    p, d, tokens = FakeEngine(prefills), FakeEngine(decodes), itertools.count(step=127)
    counting = True

    async def metrics(*arguments: Any) -> web.Response:
        value = next(tokens) if counting else 500
        return web.Response(text=f"{COUNTS.format(value)}")

    d.extra["/metrics"] = metrics
    async with bench([p], [d], **OFTEN) as router:
        await received(router, "ok")
        counting = False
        await received(router, "computed", 1)


COUNTS = (
    'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} 7\n'
    'vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {}\n'
    'vllm:prompt_tokens_by_source_total{{engine="1",source="external_kv_transfer"}} 3\n'
)


def test_received_tokens_are_those_of_all_ranks() -> None:
    assert vllm_received(COUNTS.format(4.0)) == 7.0
    assert vllm_received("vllm:prompt_tokens_total 4\n") is None


BROKEN = says(500, {"error": {"message": "out of order"}})


@pytest.mark.parametrize(
    ("bad", "outcome"), [(BROKEN, "failed"), (told(0), "computed"), (hangs, "late")]
)
@on_loop
async def test_requests_go_around_an_engine_that_fails_its_probe(
    bad: Any, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_probes, "TIMEOUT_S", 1.0)
    ps, ds = [FakeEngine(prefills)], [FakeEngine(told(127)) for _ in range(2)]

    async def fails_probes(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        answer = bad if len(body["prompt"]) == handoff_probes.TOKENS else decodes
        return await answer(engine, request, body)

    ds[1].answer = fails_probes
    async with bench(ps, ds, **OFTEN) as router:
        await received(router, outcome, 1)
        await received(router, "ok", 2)
        for _ in range(6):
            status, _, headers = await router.post(ASK)
            assert (status, headers["x-kvconnect-decode"]) == (200, "0")
        ds[1].answer = told(127)

        async def back() -> bool:
            return (await router.post(ASK)).headers["x-kvconnect-decode"] == "1"

        await until(back)


@on_loop
async def test_health_says_that_no_engines_can_hand_over_and_why() -> None:
    p, d = FakeEngine(prefills), FakeEngine(BROKEN)
    key = ApiKey("sk-0123456789abcdef")
    async with bench([p], [d], listening=Listening(api_keys=(key,)), **OFTEN) as router:
        await received(router, "failed", 1)
        status, body, _ = await router.get("/health")
        assert (status, json.loads(body)) == (200, {"status": "degraded", "missing": []})
        headers = {"Authorization": f"Bearer {key.key}"}
        async with router.client.get(router.url + "/health", headers=headers) as answer:
            said = await answer.json()
        (pair,) = said["handoffs"]
        assert (pair["prefill"], pair["decode"]) == (p.url, d.url) and "500" in pair["error"]
        assert said["decode"] == {d.url: True}
        d.answer = told(127)

        async def well() -> bool:
            return json.loads((await router.get("/health")).body)["status"] == "ok"

        await until(well)


@on_loop
async def test_what_says_nothing_about_kv_blames_nobody() -> None:
    p, d = FakeEngine(says(401, {"error": "who are you?"})), FakeEngine(decodes)
    p.standing_ticket_lifetime_s = 0
    async with bench([p], [d], **OFTEN) as router:
        await received(router, "refused")
        assert d.asked == []
        assert json.loads((await router.get("/health")).body)["status"] == "ok"


@on_loop
async def test_a_failed_request_has_its_pair_probed() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], intervals=Intervals(probe_s=3600.0), handoff="pull") as router:

        async def probed() -> bool:
            return await probes(router, "ok") == 1

        await until(probed)
        d.answer = BROKEN
        assert (await router.post(ASK)).status == 500
        await received(router, "failed", 1)


@on_loop
async def test_a_failed_probe_names_what_the_engine_refused() -> None:
    p, d, refusals = FakeEngine(prefills), FakeEngine(decodes), itertools.count()
    d.answer = BROKEN

    async def metrics(*arguments: Any) -> web.Response:
        return web.Response(text=REFUSALS.format(next(refusals)))

    d.extra["/metrics"] = metrics
    async with administered([p], [d], **OFTEN) as admin:

        async def told() -> bool:
            first, _ = await admin.listed()
            return "refused the hand-off: weights, see its log" in first["broken"].get(d.url, "")

        await until(told)


REFUSALS = (
    'vllm:kvconnect_handoff_refused_total{{engine="0",field="model"}} 2\n'
    'vllm:kvconnect_handoff_refused_total{{engine="0",field="weights"}} {}\n'
)


def test_refusals_are_read_by_field_of_both_engines() -> None:
    text = REFUSALS.format(3) + 'sglang:kvconnect_handoff_refused_total{field="weights"} 1\n'
    assert refused_handoffs(text) == {"model": 2, "weights": 4}
    assert refused_handoffs("vllm:kvconnect_handoff_sent_total 1\n") == {}


@on_loop
async def test_administrators_see_what_probes_showed() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with administered([p], [d], **OFTEN) as admin:

        async def shows(proven: bool, broken: int) -> bool:
            return all(
                (each["proven"], len(each["broken"])) == (proven, broken)
                for each in await admin.listed()
            )

        await until(lambda: shows(True, 0))
        d.answer = BROKEN
        await until(lambda: shows(False, 1))
        first, second = await admin.listed()
        assert "decode answered 500" in first["broken"][d.url]
        assert first["broken"][d.url] == second["broken"][p.url]
