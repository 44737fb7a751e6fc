"""``--disaggregate``: which engines a router asks for a prompt, and who is told why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from kvconnect.errors import ConfigError
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.options import Listening, RouterOptions
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.prompt_times import FEWEST, LinearTime, PromptTimer, PromptTimes
from kvconnect.router.requests.disaggregation import HEADER
from tests.fakes.engine import (
    ASK,
    Bench,
    FakeEngine,
    bench,
    decodes,
    hangs,
    on_loop,
    prefills,
    says,
    until,
)

LONG = {"model": "tiny", "prompt": "many words " * 2000, "max_tokens": 5, "stream": True}
MEDIUM = {**LONG, "prompt": "words " * 700}  # computing it takes longer than a hand-off
SHORT = {**ASK, "stream": True}
REASON = "x-kvconnect-handoff-reason"
KEY, OTHER = "k" * 16, "o" * 16
RULES: dict[str, dict[str, Any]] = {rule: {"disaggregate": rule} for rule in Disaggregate}
AUTO, ALWAYS, NEVER = RULES["auto"], RULES["always"], RULES["never"]


async def decodes_alone(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A decode engine that cannot receive KV."""
    if body.get("kv_transfer_params"):
        return await says(500, {"error": {"message": "no KV"}})(engine, request, body)
    return await decodes(engine, request, body)


async def hangs_on_long(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A decode engine that never answers long prompts."""
    long = body["prompt"] == LONG["prompt"]
    return await (hangs if long else decodes)(engine, request, body)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All engines are known to compute 1,000 tokens a second; a hand-off takes half a second."""
    known = PromptTimer.at
    arrival = {"push": LinearTime(0.5, 0.0), "pull": LinearTime(0.5, 0.0)}

    def at(timer: PromptTimer, now: float) -> PromptTimes:
        return known(timer, now)._replace(compute=LinearTime(0.0, 0.001), arrival=arrival)

    monkeypatch.setattr(PromptTimer, "at", at)
    yield


async def decided(router: Bench, decision: str, reason: str) -> float:
    return await router.metric("handoff_decisions_total", decision=decision, reason=reason)


async def served(router: Bench, body: object, **options: Any) -> tuple[int, str, str]:
    """Return status, mode and the reason that the client is told."""
    reply = await router.post(body, **options)
    return reply.status, reply.headers.get("x-kvconnect-mode", ""), reply.headers.get(REASON, "")


@on_loop
@pytest.mark.usefixtures("times")
async def test_a_short_prompt_is_left_to_decode() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], **AUTO, listening=Listening(hit_headers=True)) as router:
        assert await served(router, SHORT) == (200, "plain", "sooner")
        assert (len(p.asked), len(d.asked)) == (0, 1)
        assert "kv_transfer_params" not in d.asked[0]
        assert await decided(router, "alone", "sooner") == 1
        labels = {"mode": "plain", "reason": "sooner", "outcome": "ok"}
        assert await router.metric("requests_total", **labels) == 1
        # The same again without a stream.
        assert await served(router, ASK) == (200, "plain", "sooner")
    # Control: the rule says always.
    async with bench([p], [d], **ALWAYS) as router:
        assert await served(router, SHORT) == (200, "push", "rule")
        assert await decided(router, "handed_off", "rule") == 1
        await until(lambda: len(p.asked) == 1)


@on_loop
@pytest.mark.usefixtures("times")
async def test_clients_are_not_told_what_depends_on_cached_tokens() -> None:
    async with bench([FakeEngine(prefills)], [FakeEngine(decodes)], **AUTO) as router:
        assert await served(router, SHORT) == (200, "plain", "")
        asked = {HEADER: "always"}
        assert await served(router, SHORT, headers=asked) == (200, "push", "asked")


@on_loop
@pytest.mark.usefixtures("times")
async def test_while_decode_computes_others_are_handed_off() -> None:
    """The queue of a decode engine counts until its prompts are computed, or have ended."""
    p, d = FakeEngine(prefills), FakeEngine(hangs_on_long)
    async with bench([p], [d], **AUTO) as router:
        long = asyncio.create_task(router.post(LONG, headers={HEADER: "never"}))
        await until(lambda: len(d.asked) == 1)
        assert await served(router, MEDIUM) == (200, "push", "")
        assert await decided(router, "handed_off", "sooner") == 1
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long
        await until(lambda: d.dropped == 1)

        async def alone() -> bool:
            return (await served(router, MEDIUM))[1] == "plain"

        await until(alone)


@on_loop
@pytest.mark.parametrize("rule", ["auto", "always"])
@pytest.mark.usefixtures("times")
async def test_cached_tokens_are_looked_up_whatever_the_policy(rule: str) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], **RULES[rule], listening=Listening(hit_headers=True)) as router:
        await router.post(MEDIUM)
        hit = (await router.post(MEDIUM)).headers.get("x-kvconnect-decode-hit", "0")
        assert (int(hit) > 1000) is (rule == "auto")


@on_loop
async def test_what_was_not_measured_is_handed_off_until_it_is() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], **AUTO, listening=Listening(hit_headers=True)) as router:
        for _ in range(FEWEST):
            assert await served(router, SHORT) == (200, "push", "no_data")
        assert (await served(router, SHORT))[2] == "sooner"
        known = await decided(router, "alone", "sooner")
        assert known + await decided(router, "handed_off", "sooner") == 1


@on_loop
async def test_only_streams_tell_when_the_first_token_came() -> None:
    async with bench([FakeEngine(prefills)], [FakeEngine(decodes)], **AUTO) as router:
        for _ in range(2 * FEWEST):
            assert await served(router, ASK) == (200, "push", "no_data")


@on_loop
@pytest.mark.parametrize("rule", ["auto", "always"])
async def test_without_prefill_decode_is_alone(rule: str) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    p.standing_ticket_lifetime_s = 0.0
    p.well = False
    async with bench([p], [d], **RULES[rule]) as router:
        alone = rule == "auto"
        await until(lambda: router.answers("/health", 200 if alone else 503))
        if alone:
            await until(lambda: router.answers("/v1/models", 200))
            assert await served(router, SHORT) == (200, "plain", "no_handoff")
            assert await decided(router, "alone", "no_handoff") == 1
        else:  # control
            assert (await router.post(SHORT)).status == 503
        assert len(d.asked) == int(alone) and not p.asked


@on_loop
@pytest.mark.parametrize("rule", ["auto", "always"])
async def test_a_prefill_engine_that_fails_leaves_the_prompt_to_decode(rule: str) -> None:
    broken = says(500, {"error": {"message": "broken"}})
    p, d = FakeEngine(broken), FakeEngine(decodes)
    async with bench([p], [d], **RULES[rule], handoff="pull") as router:
        reply = await router.post(SHORT)
        assert len(p.asked) == 1
        if rule == "auto":
            assert (reply.status, reply.headers["x-kvconnect-mode"]) == (200, "plain")
            assert reply.headers[REASON] == "no_handoff"
            assert "kv_transfer_params" not in d.asked[-1]
        else:  # control
            assert reply.status == 502


@on_loop
@pytest.mark.parametrize("rule", ["auto", "always"])
async def test_a_hand_off_that_fails_leaves_the_prompt_to_decode(rule: str) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes_alone)
    async with bench([p], [d], **RULES[rule]) as router:
        reply = await router.post(SHORT)
        if rule == "auto":
            assert (reply.status, reply.headers[REASON]) == (200, "no_handoff")
        else:  # control: once more, by pull
            assert (reply.status, len(d.asked)) == (500, 2)
        assert await router.metric("retries_total", role="decode", cause="error") == 1


@on_loop
async def test_an_error_of_decode_alone_is_final() -> None:
    broken = FakeEngine(says(500, {"error": {"message": "broken"}}))
    p = FakeEngine(prefills)
    async with bench([p], [broken], **NEVER) as router:
        reply = await router.post(SHORT)
        assert (reply.status, len(broken.asked), len(p.asked)) == (500, 1, 0)
        assert b"broken" in reply.body


@on_loop
async def test_with_never_prefill_engines_are_not_asked() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], **NEVER) as router:
        assert await served(router, SHORT) == (200, "plain", "rule")
        assert await served(router, SHORT, headers={HEADER: "always"}) == (200, "push", "asked")
        await until(lambda: (len(p.asked), len(d.asked)) == (1, 2))


@on_loop
async def test_a_client_decides_with_the_permission_of_its_key() -> None:
    keys = (ApiKey(KEY, "alice", disaggregate=True), ApiKey(OTHER, "bob"))
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], listening=Listening(api_keys=keys)) as router:

        async def asked(key: str, value: str) -> tuple[int, str, str]:
            headers = {"Authorization": f"Bearer {key}", HEADER: value}
            return await served(router, SHORT, headers=headers)

        assert await asked(KEY, "never") == (200, "plain", "asked")
        assert await asked(OTHER, "never") == (200, "push", "rule")
        assert await asked(OTHER, "sometimes") == (200, "push", "rule")
        assert (await asked(KEY, "sometimes"))[0] == 400
        headers = {"Authorization": f"Bearer {KEY}", HEADER: "sometimes"}
        assert b"always, auto, never" in (await router.post(SHORT, headers=headers)).body
        # It is for the router alone.
        assert all(HEADER.lower() not in sent for sent in (*p.headers, *d.headers))


@on_loop
async def test_engines_of_both_roles_take_turns_and_share_their_load() -> None:
    first, second = FakeEngine(_does_both), FakeEngine(_does_both)
    async with bench([first, second], [first, second], handoff="pull") as router:
        for _ in range(6):
            reply = await router.post(ASK)
            assert reply.status == 200
            roles = ("x-kvconnect-prefill", "x-kvconnect-decode")
            assert len({reply.headers[role] for role in roles}) == 2
    assert len(first.asked) == len(second.asked) == 6


async def _does_both(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    wanted = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
    return await (prefills if wanted else decodes)(engine, request, body)


def test_unified_engines_hand_nothing_off_anyway() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        RouterOptions((), (), handoff="none", disaggregate=Disaggregate.AUTO)
    assert RouterOptions((), (), handoff="none").disaggregate is Disaggregate.ALWAYS
