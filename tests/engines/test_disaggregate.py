"""Real engines behind ``kvconnect router --disaggregate``: the same tokens, whoever computes the
prompt."""

from __future__ import annotations

import urllib.error

import pytest

from tests.engines.pd import decode_config, prefill_config, received_bytes, side_by_side
from tests.engines.ranks import until
from tests.engines.scenario import PROMPT
from tests.engines.server import Answer, Router, Server

NEW = 8
HEADER = "X-KVConnect-Disaggregate"


def prompt(number: int, tokens: int = PROMPT) -> list[int]:
    return [10 + (number * 7919 + at * 31) % 1000 for at in range(tokens)]


def decided(router: Router, decision: str, reason: str) -> float:
    name = "kvconnect_router_handoff_decisions_total"
    return router.metric(name, decision=decision, reason=reason)


def shown(answer: Answer) -> str:
    return answer.headers["X-KVConnect-Mode"]


def test_every_way_gives_the_same_tokens() -> None:
    p, d = Server("llama", prefill_config()), Server("llama", decode_config())
    auto = Router([p], [d], ("--disaggregate", "auto"))
    with side_by_side(p, d), auto, Router([p], [d]) as always:
        tickets = "kvconnect_router_standing_ticket_fetches_total"
        for router in (auto, always):
            until(lambda router=router: router.metric(tickets, outcome="ok") > 0, "a ticket")
        right = [d.complete(prompt(number), NEW).tokens for number in range(8)]
        d.post("/reset_prefix_cache")

        # The client decides.
        auto.headers = {HEADER: "never"}
        alone = auto.complete(prompt(0), NEW)
        assert (alone.tokens, shown(alone)) == (right[0], "plain")
        assert received_bytes(d) == 0
        auto.headers = {HEADER: "always"}
        pushed = auto.complete(prompt(1), NEW)
        assert (pushed.tokens, shown(pushed)) == (right[1], "push")
        assert received_bytes(d) > 0
        auto.headers = {}

        # The router measures, and then expects.
        for number, tokens in enumerate(right):
            assert auto.stream(prompt(number), NEW)[1].tokens == tokens
        both = [decided(auto, decision, "sooner") for decision in ("handed_off", "alone")]
        assert sum(both) + decided(auto, "handed_off", "no_data") == len(right)
        assert sum(both) > 0

        # Without a prefill engine, decode computes the prompt.
        p.kill()
        until(lambda: auto.metric("kvconnect_router_upstream_up", role="prefill") == 0, "down")
        left = auto.complete(prompt(2), NEW)
        assert (left.tokens, shown(left)) == (right[2], "plain")
        assert decided(auto, "alone", "no_handoff") == 1
        # Control: with the rule "always", it is needed.
        until(lambda: always.metric("kvconnect_router_upstream_up", role="prefill") == 0, "down")
        with pytest.raises(urllib.error.HTTPError) as failed:
            always.complete(prompt(2), NEW)
        with failed.value as error:
            assert error.code == 503
