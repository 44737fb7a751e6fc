"""The router's decisions: bodies of both upstream requests, choice of engines, settings. No I/O."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, Refused
from kvconnect.router.engine_spec import EngineSpec, check_hosts, engine_specs
from kvconnect.router.fleet import reports
from kvconnect.router.options import EtcdServer, Intervals, RouterLimits, RouterOptions
from kvconnect.router.policy.choice import (
    MODES,
    FailedTargets,
    Mode,
    RoutedRequest,
    RoutingChoice,
    RoutingReason,
    choose,
)
from kvconnect.router.policy.fleet_view import (
    EngineKind,
    EngineView,
    FleetView,
    Role,
    Target,
    TargetLoad,
)
from kvconnect.router.policy.no_choice import explain_no_choice
from kvconnect.router.policy.ranking import RankingReason
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.body import prefix_of, prompt_of, read_body, token_ids_of

ID = "0123456789abcdef" * 2


def came(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body as the router has it."""
    return read_body(json.dumps(body).encode())


# Bodies -----------------------------------------------------------------------------------------


def test_prefill_is_asked_for_one_token_of_the_same_prompt() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 5,
        "structured_outputs": {"regex": "a+"},
        "temperature": 0.1,
        "made_up": {"kept": 1},
    }
    before = json.dumps(body)
    assert engine_bodies.prefill_body(body, ID) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "temperature": 0.1,
        "made_up": {"kept": 1},
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": ID,
        },
    }
    assert "max_completion_tokens" not in engine_bodies.prefill_body({"prompt": "a"}, ID)
    assert json.dumps(body) == before, "the client's body stays as it is"


def test_decode_is_asked_what_the_client_asked() -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 50}
    assert engine_bodies.push_body(body, ID, "standing") == body | {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": ID,
            "kvconnect_ticket": "standing",
        }
    }
    ticket = {"kvconnect_ticket": "t", "unknown": [None, {"x": 1}]}
    assert engine_bodies.pull_body(body, ticket) == body | {"kv_transfer_params": ticket}


def test_only_the_router_names_transfers() -> None:
    raw = {
        "prompt": "a",
        "kv_transfer_params": {"remote_host": "10.0.0.9", "remote_block_ids": [1]},
        "ec_transfer_params": {"peer_host": "10.0.0.9"},
        "vllm_xargs": {"kv_transfer_params": ["x"], "other": 1},
        "bootstrap_host": "10.0.0.9",
        "bootstrap_port": 1,
        "bootstrap_room": 2,
        "routed_dp_rank": 3,
        "disagg_prefill_dp_rank": 4,
        "data_parallel_rank": 5,
    }
    body = read_body(json.dumps(raw).encode())
    assert json.loads(engine_bodies.encoded(body)) == {
        "prompt": "a",
        "vllm_xargs": {"other": 1},
    }
    assert (
        read_body(json.dumps(raw).replace("params", "p\\u0061rams").encode()).keys() == body.keys()
    )


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "truncated"),
        (b'{"prompt": "a"', "truncated"),
        (b'{"prompt": a}', "byte 11"),
        (b"\xff\xfe\xfa", "utf-8"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": "' + b"a" * 2**20 + b'\xc3"}', "utf-8"),
        (b'["prompt"]', "Expected `object`"),
        (b"[" * 100_000, "Expected `object`"),
        (b'{"a":' + b"[" * 100_000, "recursion"),
        (b'{"temperature": NaN}', "malformed"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(1025)) + b"}", "more than 1024 fields"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(99_999)) + b"}", "more than 1024 fields"),
        (b'{"vllm_xargs": {' + b",".join(b'"%d":1' % i for i in range(1025)) + b"}}", "fields"),
    ],
)
def test_a_body_that_is_none_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(Refused, match=f"not a JSON object.*{says}"):
        read_body(raw)


@pytest.mark.parametrize(
    ("body", "single", "tokens"),
    [
        ({"prompt": "a" * 40}, True, 10),
        ({"prompt": ["a" * 40]}, True, 10),
        ({"prompt": [1, 2, 3]}, True, 3),
        ({"prompt": [[1, 2, 3]]}, True, 3),
        ({"prompt": "a", "n": 1, "best_of": 1}, True, 0),
        ({"prompt_embeds": "base64"}, True, 0),
        ({"messages": [{"role": "user", "content": "a" * 8}, {"content": "b" * 8}]}, True, 4),
        ({"messages": [{"content": [{"type": "text", "text": "a" * 8}, {"image": 1}]}]}, True, 2),
        ({"messages": "odd"}, True, 0),
        ({"prompt": ["a", "b"]}, False, 0),
        ({"prompt": [[1, 2], [3]]}, False, 3),
        ({"prompt": []}, False, 0),
        ({"prompt": "a", "prompt_embeds": ["b"]}, False, 0),
        ({"prompt": "a", "n": 2}, False, 0),
        ({"prompt": "a", "n": "2"}, False, 0),  # engines take it for a number
        ({"prompt": "a", "best_of": 3}, False, 0),
        ({"prompt": "a", "use_beam_search": True}, False, 0),
        ({"messages": [], "n": 2}, False, 0),
        ({"text": "a" * 40}, True, 10),
        ({"text": ["a" * 40, "b" * 40]}, False, 20),
        ({"input_ids": [1, 2, 3]}, True, 3),
        ({"input_ids": [1, 2, 3], "sampling_params": {"n": 2}}, False, 3),
        ({"input": "a" * 8}, True, 2),
        ({"input": [{"role": "user", "content": "a" * 8}], "instructions": "b" * 8}, True, 4),
        ({"input": "a", "previous_response_id": "r"}, False, 0),
        ({"input": "a", "background": True}, False, 0),
        ({"input": "a", "tools": [{"type": "function"}]}, True, 0),
        ({"input": "a", "tools": [{"type": "function"}, {"type": "mcp"}]}, False, 0),
        ({"input": "a", "tools": ["odd"]}, False, 0),
        ({"messages": [], "tools": [{"type": "custom"}], "system": "a" * 8}, True, 2),
        # One token of a forced call is no JSON, and vLLM refuses to say it.
        ({"messages": [], "tool_choice": {"type": "tool", "name": "look"}}, False, 0),
        ({"messages": [], "tool_choice": {"type": "any"}}, True, 0),
        ({"messages": [], "tool_choice": {"type": "function", "function": {}}}, True, 0),
        ({"messages": [], "tool_choice": "tool"}, True, 0),
        ({}, False, 0),
    ],
)
def test_what_routing_needs_to_know(body: dict[str, Any], single: bool, tokens: int) -> None:
    assert prompt_of(came(body))[:2] == (single, tokens)


@pytest.mark.parametrize(
    ("body", "sampled"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": "a", "n": 1}, False),
        ({"prompt": ["a", "b"], "n": None}, False),
        ({"prompt": "a", "n": 2}, True),
        ({"prompt": "a", "n": "2"}, True),
        ({"text": "a", "sampling_params": {"n": 2}}, True),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {}, 7]}, False),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, True),
    ],
)
def test_several_answers_are_told_from_several_prompts(body: dict[str, Any], sampled: bool) -> None:
    found = prompt_of(came(body))
    assert found.sampled == sampled
    assert not (found.single and sampled)


def test_model_and_session_of_a_body() -> None:
    assert prompt_of(came({"prompt": "a", "model": "m", "user": "u"}))[:4] == (True, 0, "m", "u")
    both = {"prompt": "a", "prompt_cache_key": "k", "user": "u"}
    assert prompt_of(came(both)).session == "k"
    assert prompt_of(came({"prompt": "a", "model": 7, "user": {}}))[:4] == (True, 0, "", "")


def test_a_session_of_any_length_is_a_short_one() -> None:
    """As text, one character beyond Unicode's first plane makes each take four bytes."""
    one, other = ("s" * 2**20 + end for end in ("\U0001f600", "\U0001f601"))
    names = [prompt_of(came({"prompt": "a", "user": name})).session for name in (one, one, other)]
    assert names[0] == names[1] != names[2]
    assert all(0 < len(name) <= 32 for name in names)


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"prompt": [1, 2]}, [1, 2]),
        ({"prompt": [[1, 2]]}, [1, 2]),
        ({"input_ids": [3]}, [3]),
        ({"prompt": [[1, 2], [3]]}, []),
        ({"prompt": "text"}, []),
        ({"prompt": [1, "a"]}, []),
        ({"prompt": [True]}, []),
        ({}, []),
    ],
)
def test_token_ids_of_a_body(body: dict[str, Any], ids: list[int]) -> None:
    assert token_ids_of(came(body)) == ids


def test_sglangs_servers_are_told_where_to_meet_and_which_ranks() -> None:
    body = {"text": "a", "stream": True}
    meeting = engine_bodies.BootstrapRoom("10.0.0.1", 8998, 77, 3)
    met = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}
    ranks = {"disagg_prefill_dp_rank": 3}
    assert engine_bodies.bootstrap_body(body, meeting, 3) == body | met | ranks | {
        "routed_dp_rank": 3
    }
    assert engine_bodies.bootstrap_body(body, meeting, 1) == body | met | ranks | {
        "routed_dp_rank": 1
    }
    assert engine_bodies.bootstrap_body(body, meeting._replace(rank=None), None) == body | met


def test_mooncakes_decode_engine_is_told_where_the_kv_is() -> None:
    asked = engine_bodies.prefill_body({"prompt": "a"}, ID)
    assert engine_bodies.transfer_of(asked) == ID
    assert engine_bodies.mooncake_ticket(ID, "e0", "http://p:8998") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": ID,
        "remote_engine_id": "e0",
        "remote_bootstrap_addr": "http://p:8998",
    }


FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["prompt", "messages", "n", "prompt_embeds", "max_tokens", "content"])


@given(st.dictionaries(KEYS, JSON))
def test_any_json_object_can_be_looked_at(body: dict[str, Any]) -> None:
    parsed = came(body)
    assert json.loads(engine_bodies.encoded(parsed)) == body
    assert prompt_of(parsed).tokens >= 0
    assert len(prefix_of(parsed).chunk_hashes) <= len(json.dumps(body))
    assert (
        json.loads(engine_bodies.encoded(engine_bodies.prefill_body(parsed, ID)))["max_tokens"] == 1
    )


@pytest.mark.parametrize(
    ("answer", "ticket"),
    [
        ({"kv_transfer_params": {"kvconnect_ticket": "t"}}, {"kvconnect_ticket": "t"}),
        (
            {"kv_transfer_params": {"kvconnect_ticket": "t"}, "prompt_token_ids": [3, 1]},
            {"kvconnect_ticket": "t", "prompt_token_ids": [3, 1]},
        ),
        (
            {"kv_transfer_params": {"kvconnect_ticket": "t"}, "prompt_token_ids": None},
            {"kvconnect_ticket": "t"},
        ),
        ({"kv_transfer_params": None, "prompt_token_ids": [3, 1]}, None),
        ({"kv_transfer_params": None}, None),
        ({"kv_transfer_params": {}}, None),
        ({"choices": []}, None),
    ],
)
def test_ticket_of_an_answer(answer: dict[str, Any], ticket: dict[str, Any] | None) -> None:
    found = engine_bodies.ticket_of(json.dumps(answer).encode())
    assert (found and json.loads(engine_bodies.encoded(found))) == ticket


def test_standing_ticket_of_an_answer() -> None:
    def ticket(**params: object) -> engine_bodies.EngineTicket:
        return engine_bodies.standing_ticket_of(json.dumps({"kv_transfer_params": params}).encode())

    assert ticket(kvconnect_card="c", kvconnect_card_expires_in=120) == engine_bodies.EngineTicket(
        "c", 120.0
    )
    for params in (
        {"kvconnect_card": "c"},
        {"kvconnect_card": 7, "kvconnect_card_expires_in": 120},
        {"kvconnect_card": "c", "kvconnect_card_expires_in": 0},
        {"kvconnect_card": "\ud800", "kvconnect_card_expires_in": 9},
        {"kvconnect_card": "c", "kvconnect_card_expires_in": "120"},
    ):
        with pytest.raises(Refused, match="no usable kvconnect_card"):
            ticket(**params)
    for answer in (b"{}", b'{"kv_transfer_params": []}'):
        with pytest.raises(Refused, match="is KVConnect its KV connector"):
            engine_bodies.standing_ticket_of(answer)
    for answer in (b"[]", b"<html>"):
        with pytest.raises(Refused):
            engine_bodies.standing_ticket_of(answer)


def test_share_ticket_of_an_answer() -> None:
    def ticket(**params: object) -> engine_bodies.EngineTicket | None:
        return engine_bodies.share_ticket_of(json.dumps({"kv_transfer_params": params}).encode())

    found = ticket(kvconnect_share="s", kvconnect_share_expires_in=120)
    assert found == engine_bodies.EngineTicket("s", 120.0)
    assert ticket() is None
    assert ticket(kvconnect_share="s") is None
    assert ticket(kvconnect_share=7, kvconnect_share_expires_in=120) is None
    assert ticket(kvconnect_share="s", kvconnect_share_expires_in=-1) is None
    assert ticket(kvconnect_card="s", kvconnect_card_expires_in=120) is None
    assert engine_bodies.share_ticket_of(b"{}") is None
    for answer in (b"[]", b"<html>"):
        with pytest.raises(Refused):
            engine_bodies.share_ticket_of(answer)


def test_both_tickets_are_asked_for_at_once() -> None:
    standing, share = engine_bodies.TicketKind
    both = engine_bodies.tickets_body("m", 1, [standing, share])["kv_transfer_params"]
    card = {"do_remote_decode": True, "kvconnect_card": True, "kvconnect_card_rank": 1}
    assert both == {**card, "kvconnect": {"share": True}}
    one = engine_bodies.tickets_body("m", None, [share])
    assert one["kv_transfer_params"] == {"kvconnect": {"share": True}}


ABORTED = (
    b'data: {"text": "", "meta_info": {"finish_reason": '
    b'{"type": "%s", "message": "m", "status_code": %s, "err_type": null}}}'
)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error": {"message": "m", "code": 500}}', 500),
        (b'data:{"error": {"message": "m", "code": 503}}\n', 503),
        (b'data: {"error": {"message": "m", "code": 400}}', None),
        (b'event: error\ndata: {"type": "error", "error": {"message": "m"}}', 500),
        (ABORTED % (b"abort", b"500"), 500),
        (ABORTED % (b"abort", b"400"), None),
        (ABORTED % (b"abort", b"null"), None),  # by its client
        (ABORTED % (b"stop", b"500"), None),
        (b'data: {"text": "a", "meta_info": {"finish_reason": null}}', None),
        (b'data: {"choices": [{"text": "error"}]}', None),
        (b"data: [DONE]", None),
        (b": comment", None),
        (b"", None),
    ],
)
def test_an_engines_failure_in_a_stream(event: bytes, status: int | None) -> None:
    found = engine_bodies.error_in(event)
    assert (found and found[0]) == status
    if found:
        assert json.loads(found[1])["error"]["message"] == "m"


ROLE = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}


@pytest.mark.parametrize(
    ("said", "opens"),
    [
        ({"choices": [ROLE]}, True),
        ({"choices": [ROLE | {"logprobs": None}, ROLE | {"index": 1}], "usage": {}}, True),
        ({"choices": [ROLE | {"delta": {"role": "assistant", "tool_calls": None}}]}, True),
        ({"choices": [ROLE | {"delta": {"role": "assistant", "content": "a"}}]}, False),
        ({"choices": [ROLE, ROLE | {"delta": {"content": "a"}}]}, False),
        ({"choices": [ROLE | {"delta": {"content": ""}}]}, False),  # a token without text
        ({"choices": [ROLE | {"finish_reason": "stop"}]}, False),
        ({"choices": [{"text": ""}]}, False),
        ({"choices": [1]}, False),
        ({"choices": []}, False),  # usage
        ({"error": {"code": 500}}, False),
        ({"type": "message_start", "message": {}}, True),
        ({"type": "response.created", "response": {}}, True),
        ({"type": "content_block_start"}, False),
        (7, False),
    ],
)
def test_the_event_of_a_chat_that_only_names_the_role(said: object, opens: bool) -> None:
    assert engine_bodies.opens_without_content(b"data: " + json.dumps(said).encode()) == opens


def test_what_is_no_chunk_opens_nothing() -> None:
    for event in (b"data: [DONE]", b"data: " + b"[" * 99_999, b": comment\ndata: 7"):
        assert not engine_bodies.opens_without_content(event)


def test_comments_are_no_content() -> None:
    for event in (b"", b": keep-alive", b":\n: two"):
        assert engine_bodies.opens_without_content(event)


# Choice -----------------------------------------------------------------------------------------

EPHEMERAL: dict[str, Any] = {"type": "ephemeral"}


def marked(ttl: str | None = None, **more: Any) -> dict[str, Any]:
    return {"cache_control": EPHEMERAL | ({} if ttl is None else {"ttl": ttl}), **more}


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"prompt": "a"}, 0),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "for ever"}, 0),
        ({"prompt_cache_retention": {"24h": 1}}, 0),
        ({"system": [marked(type="text", text="s")]}, 300),
        ({"system": "cache_control"}, 0),
        ({"messages": [{"role": "user", "content": [marked("1h", type="text", text="t")]}]}, 3600),
        ({"messages": [{"role": "user", "content": 'say "cache_control":{"ttl":"1h"}'}]}, 0),
        ({"messages": [{"content": [{"type": "tool_result", "content": [marked()]}]}]}, 300),
        ({"tools": [marked("5m", name="t"), marked("1h", name="u")], "system": [marked()]}, 3600),
        (marked(), 300),
        (marked("2h"), 0),
        ({"tools": [marked("1h") | {"cache_control": None}]}, 0),
        ({"cache_control": 7, "tools": 7, "messages": [7]}, 0),
        ({"tools": [{"cache_control": {"ttl": 7}}]}, 0),
    ],
)
def test_how_long_a_client_asks_to_keep_a_prompt(body: dict[str, Any], seconds: float) -> None:
    assert prompt_of(came(body)).retention_s == seconds


def test_marks_that_are_nested_deeply_or_too_many_are_not_followed() -> None:
    deep: dict[str, Any] = marked("1h")
    for _ in range(3):
        deep = {"content": [deep]}
    assert prompt_of(came({"messages": [deep]})).retention_s == 0
    assert prompt_of(came({"messages": deep["content"]})).retention_s == 3600
    many = [marked()] * 5000
    assert prompt_of(came({"tools": many})).retention_s == 0
    assert prompt_of(came({"tools": many[:1000]})).retention_s == 300


ONE = RoutedRequest(0, 100)
RULES = RoutingRules()


def view(prefill: str, decode: str) -> FleetView:
    """One letter per engine: c(ard), u(p), d(own)."""

    def engines(states: str) -> tuple[EngineView, ...]:
        return tuple(
            EngineView(i, state != "d", standing_tickets=(f"ticket {i}",) if state == "c" else ())
            for i, state in enumerate(states)
        )

    return FleetView(engines(prefill), engines(decode))


def mode_of(
    seen: FleetView, request: RoutedRequest = ONE, rules: RoutingRules = RULES
) -> tuple[Mode, RoutingReason, str] | None:
    found = choose(seen, request, FailedTargets(), rules)
    return found and (found.mode, found.reason, found.standing_ticket)


def test_push_by_default_and_pull_where_it_must_be() -> None:
    seen, push = view("c", "u"), (Mode.PUSH, RoutingReason.DEFAULT, "ticket 0")
    assert mode_of(seen) == push
    forced = RoutingRules(pull=True)
    assert mode_of(seen, rules=forced) == (Mode.PULL, RoutingReason.FORCED, "")
    long = RoutingRules(push_min_tokens=101)
    assert mode_of(seen, rules=long) == (Mode.PULL, RoutingReason.SHORT, "")
    just = RoutingRules(push_min_tokens=100)
    assert mode_of(seen, rules=just) == push
    assert mode_of(view("u", "u")) == (Mode.PULL, RoutingReason.NO_STANDING_TICKET, "")


def test_a_card_is_one_ranks() -> None:
    two = EngineView(
        0, True, (TargetLoad(9, 0), TargetLoad(0, 0)), standing_tickets=(None, "ticket of 1")
    )
    seen = FleetView((two,), (EngineView(0, True),))
    assert mode_of(seen) == (Mode.PUSH, RoutingReason.DEFAULT, "ticket of 1")
    assert mode_of(FleetView((replace(two, standing_tickets=("ticket of 0",)),), seen.decode)) == (
        Mode.PULL,
        RoutingReason.NO_STANDING_TICKET,
        "",
    )


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (EngineKind.NIXL, (Mode.PULL, RoutingReason.CONNECTOR, "")),
        (EngineKind.MOONCAKE, (Mode.PULL, RoutingReason.CONNECTOR, "")),
        (EngineKind.SGLANG, (Mode.BOOTSTRAP, RoutingReason.DEFAULT, "")),
    ],
)
def test_connectors_decide_how_engines_hand_over(kind: EngineKind, want: object) -> None:
    assert mode_of(FleetView(*[(EngineView(0, True, kind=kind),)] * 2)) == want


def test_several_prompts_need_no_prefill_engine() -> None:
    several = ONE._replace(single=False)
    found = choose(view("d", "du"), several, FailedTargets(), RULES)
    assert found is not None and found.prefill is None
    assert (found.mode, found.reason) == (Mode.PLAIN, RoutingReason.MULTI)
    assert found.decode.target == Target(1)
    assert mode_of(view("d", "du")) is None
    assert mode_of(view("c", "dd"), several) is None


def test_engines_of_a_unified_router_serve_alone() -> None:
    engine = replace(view("", "du"), unified=True)
    several = ONE._replace(single=False, sampled=True)
    for request in (ONE, several):
        assert mode_of(engine, request) == (Mode.PLAIN, RoutingReason.UNIFIED, "")
    assert (engine.missing(), view("", "du").missing()) == ([], [Role.PREFILL])
    down = replace(view("", "d"), unified=True)
    assert mode_of(down) is None
    assert explain_no_choice(down, ONE) == "no decode engine is up"


def test_every_mode_has_its_series() -> None:
    assert {reason for _, reason in MODES} == set(RoutingReason)


def test_what_is_missing() -> None:
    assert view("du", "u").missing() == []
    assert view("dd", "u").missing() == [Role.PREFILL]
    assert view("", "d").missing() == [Role.PREFILL, Role.DECODE]


def test_which_failures_are_worth_another_attempt() -> None:
    here = TargetChoice(Target(0), RankingReason.ONLY)
    first = RoutingChoice(Mode.PUSH, RoutingReason.DEFAULT, here, here)
    tried = FailedTargets()
    assert tried.add(first, Role.PREFILL, "unreachable") and tried.prefill == {0}
    assert tried.add(first, Role.DECODE, "unreachable") and tried.decode == {0}
    assert tried.add(first, Role.PREFILL, "error"), "every prefill engine gets its try"
    assert tried.add(first, Role.DECODE, "error"), "its hand-off may have failed"
    assert tried.pushed == 0 and FailedTargets().pushed is None
    assert not tried.add(first, Role.DECODE, "error"), "once"
    plain = RoutingChoice(Mode.PLAIN, RoutingReason.MULTI, None, here)
    assert not FailedTargets().add(plain, Role.DECODE, "error"), "no hand-off failed here"


# What engines say of themselves -----------------------------------------------------------------

METRICS = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:kv_cache_usage_perc_total{engine="2",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",note="a \\"b\\"",num_gpu_blocks="320"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="320"} 1.0
sglang:num_used_tokens{dp_rank="0",tp_rank="0"} 7.0
sglang:num_used_tokens{dp_rank="0",tp_rank="1"} 7.0
sglang:num_used_tokens{dp_rank="1",tp_rank="0"} 9.0
"""


def test_tokens_in_metrics() -> None:
    """Both ranks together have 320 blocks: vLLM gives the sum with each of them."""
    assert reports.vllm_tokens(METRICS) == {0: 640.0, 1: 1280.0}
    other_node = METRICS.replace('engine="0"', 'engine="4"').replace('engine="1"', 'engine="5"')
    assert reports.vllm_tokens(other_node) == {0: 640.0, 1: 1280.0}
    assert reports.sglang_metric_tokens(METRICS) == {0: 7.0, 1: 9.0}
    unknown = METRICS.replace('num_gpu_blocks="320"', 'num_gpu_blocks="None"')
    assert reports.vllm_tokens(unknown) == {}
    half = METRICS.replace('cache_config_info{block_size="16",engine="1"', "other{")
    assert reports.vllm_tokens(half) == {}
    assert reports.vllm_tokens("vllm:kv_cache_usage_perc{ odd\n<html>") == {}


@pytest.mark.parametrize(("told", "tokens"), [("4000", 1000.0), ("None", 640.0)])
def test_tokens_of_a_cache_whose_blocks_do_not_tell_them(told: str, tokens: float) -> None:
    """A hybrid model's groups share the blocks; each rank's tokens are its own, not the sum."""
    blocks = 'num_gpu_blocks="320"'
    said = METRICS.replace(blocks, f'kv_cache_size_tokens="{told}",{blocks}')
    assert reports.vllm_tokens(said) == {0: tokens, 1: 2 * tokens}


def test_tokens_in_sglangs_loads() -> None:
    def tokens(*loads: dict[str, object]) -> dict[int, float]:
        return reports.sglang_tokens(json.dumps({"loads": loads}).encode())

    assert tokens(
        {"dp_rank": 0, "num_used_tokens": 5, "num_total_tokens": 9},
        {"dp_rank": 1, "num_used_tokens": 5, "num_waiting_uncached_tokens": 3},
        {"dp_rank": 2, "num_used_tokens": -1},
    ) == {0: 9, 1: 8, 2: -1}
    for odd in ({"dp_rank": 0}, {"num_used_tokens": 0}, {"dp_rank": 0, "num_used_tokens": "1"}):
        with pytest.raises(Refused, match=r"num_used_tokens|dp_rank"):
            tokens(odd)
    with pytest.raises(Refused, match="`loads`"):
        reports.sglang_tokens(b"{}")


def test_models_version_and_engine_ids() -> None:
    listed = b'{"data": [{"id": "a", "max_model_len": 7}, {"id": "b"}, {"id": 3}, 4]}'
    assert reports.models_of(listed) == {"a": {"id": "a", "max_model_len": 7}, "b": {"id": "b"}}
    for answer in (b'{"data": []}', b'{"data": [{"id": 3}]}', b"{}", b"", b'{"data": 1}'):
        with pytest.raises(Refused):
            reports.models_of(answer)
    assert reports.version_of(b'{"version": "0.33.0"}') == "0.33.0"
    with pytest.raises(Refused, match=r"\$.version"):
        reports.version_of(b'{"version": 1}')
    assert reports.engine_ids_of(b'{"0": {"engine_id": "e0"}, "1": {"engine_id": "e1"}}') == {
        0: "e0",
        1: "e1",
    }
    with pytest.raises(Refused, match="no engine"):
        reports.engine_ids_of(b'{"x": 1, "0": {"engine_id": 1}}')


# Settings ---------------------------------------------------------------------------------------


def test_urls_lose_their_slash() -> None:
    urls = ["http://a:1/", "https://b", "http://[::1]:3/base/"]
    found = [spec.url for spec in engine_specs("prefill", urls)]
    assert found == ["http://a:1", "https://b", "http://[::1]:3/base"]


def test_what_stands_after_a_url() -> None:
    text = "http://[::1]:3/,engine=sglang,bootstrap=9000,version=v2,events=5557,replay=5558"
    (found,) = engine_specs("prefill", [text])
    assert found == EngineSpec("http://[::1]:3", EngineKind.SGLANG, 9000, "v2", 5557, 5558)
    assert (found.host, found.bootstrap_url) == ("[::1]", "http://[::1]:9000")
    for wrong, says in (
        ("engine=tgi", "use one of vllm, nixl, mooncake, sglang"),
        ("bootstrap=x", "use a port"),
        ("events=0", "use a port"),
        ("boot=1", "use engine, bootstrap"),
        ("", "use engine, bootstrap"),
    ):
        with pytest.raises(ConfigError, match=says):
            engine_specs("prefill", [f"http://a,{wrong}"])


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:1",
        "ftp://a",
        "http://",
        "http://a:port",
        "http://a:99999",
        "http://a?b",
    ],
)
def test_what_is_no_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill=.*use a URL such as"):
        engine_specs("prefill", [url])


@pytest.mark.parametrize("before", ["u:secret", ":secret", "secret", "u:sec/ret", "u:se@cret", ""])
def test_a_url_has_no_password(before: str) -> None:
    """It would stand in /health, in metrics and in logs; so not in the message either."""
    for refuse in (lambda url: engine_specs("prefill", [url]), lambda url: EtcdServer(url + "/k")):
        with pytest.raises(ConfigError, match="leave user and password out") as error:
            refuse(f"http://{before}@a:1")
        assert "sec" not in str(error.value) and "ret" not in str(error.value)
        assert "a:1" in str(error.value)


def test_an_engine_is_named_once() -> None:
    with pytest.raises(ConfigError, match="once"):
        engine_specs("decode", ["http://a", "http://b", "http://a/"])


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("timeout", {"timeout_s": 0.0}),
        ("timeout", {"timeout_s": float("nan")}),
        ("silence-timeout", {"silence_s": 1e9}),
        ("queue-timeout", {"queue_s": -1.0}),
        ("drain-timeout", {"drain_s": 0.0}),
        ("max-concurrent", {"concurrent": -1}),
        ("queue", {"queue": -1}),
    ],
)
def test_limits_out_of_range_are_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterLimits(**settings)
    assert caught.value.field == field


def test_a_dns_name_has_a_port() -> None:
    assert check_hosts("prefill-dns", ["http://a:1,engine=sglang"]) == ("http://a:1,engine=sglang",)
    with pytest.raises(ConfigError, match="name the port too"):
        check_hosts("prefill-dns", ["http://a"])


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("worker-load-check-interval", {"load_s": -1.0}),
        ("worker-load-check-interval", {"load_s": float("nan")}),
        ("probe-interval", {"probe_s": 3601.0}),
    ],
)
def test_intervals_out_of_range_are_refused(field: str, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        Intervals(**settings)
    assert caught.value.field == field


def test_a_negative_push_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match="push-min-tokens"):
        RouterOptions((), (), push_min_tokens=-1)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_byte_order_mark_before_a_body_is_skipped(kind: type[bytes] | type[bytearray]) -> None:
    mark, body = b"\xef\xbb\xbf", '{"prompt": "é"}'.encode()
    assert read_body(kind(mark + body)) == read_body(kind(body))
    for wrong in (mark + mark + body, b"{" + mark + body[1:], mark):
        with pytest.raises(Refused, match="not a JSON object"):
            read_body(kind(wrong))
