"""The router's decisions: bodies of both legs, choice of engines, settings. No I/O."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, Refused
from kvconnect.router import legs
from kvconnect.router.options import Options, base_urls
from kvconnect.router.policy import MODES, Choice, Mode, Reason, Tried, choose, round_robin
from kvconnect.router.view import Role, UpstreamView, View

ID = "0123456789abcdef" * 2


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
        "temperature": 0.1,
        "made_up": {"kept": 1},
    }
    before = json.dumps(body)
    assert legs.prefill_body(body, ID) == {
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
    assert "max_completion_tokens" not in legs.prefill_body({"prompt": "a"}, ID)
    assert json.dumps(body) == before, "the client's body stays as it is"


def test_decode_is_asked_what_the_client_asked() -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 50}
    assert legs.push_body(body, ID, "card") == body | {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": ID,
            "kvconnect_ticket": "card",
        }
    }
    ticket = {"kvconnect_ticket": "t", "unknown": [None, {"x": 1}]}
    assert legs.pull_body(body, ticket) == body | {"kv_transfer_params": ticket}


def test_only_the_router_names_transfers() -> None:
    raw = {
        "prompt": "a",
        "kv_transfer_params": {"remote_host": "10.0.0.9", "remote_block_ids": [1]},
        "vllm_xargs": {"kv_transfer_params": ["x"], "other": 1},
    }
    assert legs.parse_body(json.dumps(raw).encode()) == {"prompt": "a", "vllm_xargs": {"other": 1}}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": "a"', "not valid JSON.*char 14"),
        (b"\xff\xfe\xfa", "not valid JSON"),
        (b'["prompt"]', "not a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_is_none_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(Refused, match=says):
        legs.parse_body(raw)


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
        ({"prompt": [[1, 2], [3]]}, False, 2),
        ({"prompt": []}, False, 0),
        ({"prompt": "a", "prompt_embeds": ["b"]}, False, 0),
        ({"prompt": "a", "n": 2}, False, 0),
        ({"prompt": "a", "n": "2"}, False, 0),  # engines take it for a number
        ({"prompt": "a", "best_of": 3}, False, 0),
        ({"prompt": "a", "use_beam_search": True}, False, 0),
        ({"messages": [], "n": 2}, False, 0),
        ({}, False, 0),
    ],
)
def test_what_routing_needs_to_know(body: dict[str, Any], single: bool, tokens: int) -> None:
    assert legs.look_at(body) == legs.Prompt(single, tokens)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["prompt", "messages", "n", "prompt_embeds", "max_tokens", "content"])


@given(st.dictionaries(KEYS, JSON))
def test_any_json_object_can_be_looked_at(body: dict[str, Any]) -> None:
    parsed = legs.parse_body(json.dumps(body).encode())
    assert parsed == body
    assert legs.look_at(parsed).tokens >= 0
    assert legs.prefill_body(parsed, ID)["max_tokens"] == 1


@pytest.mark.parametrize(
    ("answer", "ticket"),
    [
        ({"kv_transfer_params": {"kvconnect_ticket": "t"}}, {"kvconnect_ticket": "t"}),
        ({"kv_transfer_params": None}, None),
        ({"kv_transfer_params": {}}, None),
        ({"choices": []}, None),
    ],
)
def test_ticket_of_an_answer(answer: dict[str, Any], ticket: dict[str, Any] | None) -> None:
    assert legs.ticket_of(json.dumps(answer).encode()) == ticket


def test_card_of_an_answer() -> None:
    def card(**params: object) -> legs.Card:
        return legs.card_of(json.dumps({"kv_transfer_params": params}).encode())

    assert card(kvconnect_card="c", kvconnect_card_expires_in=120) == legs.Card("c", 120.0)
    for params in (
        {"kvconnect_card": "c"},
        {"kvconnect_card": 7, "kvconnect_card_expires_in": 120},
        {"kvconnect_card": "c", "kvconnect_card_expires_in": 0},
        {"kvconnect_card": "c", "kvconnect_card_expires_in": "120"},
    ):
        with pytest.raises(Refused, match="no usable kvconnect_card"):
            card(**params)
    for answer in (b"{}", b'{"kv_transfer_params": []}'):
        with pytest.raises(Refused, match="is KVConnect its KV connector"):
            legs.card_of(answer)
    for answer in (b"[]", b"<html>"):
        with pytest.raises(Refused):
            legs.card_of(answer)


def test_model_of_an_answer() -> None:
    assert legs.model_of(b'{"data": [{"id": "a"}, {"id": "b"}]}') == "a"
    for answer in (b'{"data": []}', b'{"data": [{"id": 3}]}', b"{}", b""):
        with pytest.raises(Refused):
            legs.model_of(answer)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error": {"message": "m", "code": 500}}', 500),
        (b'data:{"error": {"message": "m", "code": 503}}\n', 503),
        (b'data: {"error": {"message": "m", "code": 400}}', None),
        (b'data: {"choices": [{"text": "error"}]}', None),
        (b"data: [DONE]", None),
        (b": comment", None),
        (b"", None),
    ],
)
def test_an_engines_failure_in_a_stream(event: bytes, status: int | None) -> None:
    found = legs.error_in(event)
    assert (found and found[0]) == status
    if found:
        assert json.loads(found[1])["error"]["message"] == "m"


# Choice -----------------------------------------------------------------------------------------

ONE = legs.Prompt(single=True, tokens=100)
OPTIONS = Options(("http://p",), ("http://d",))


def view(prefill: str, decode: str) -> View:
    """One letter per engine: c(ard), u(p), d(own)."""

    def engines(states: str) -> tuple[UpstreamView, ...]:
        return tuple(
            UpstreamView(i, state != "d", f"card {i}" if state == "c" else None)
            for i, state in enumerate(states)
        )

    return View(engines(prefill), engines(decode))


def test_round_robin_spreads_over_those_that_are_left() -> None:
    engines = view("uudu", "").prefill
    turns = [round_robin(engines, turn, {0}) for turn in range(4)]
    assert [upstream and upstream.index for upstream in turns] == [1, 3, 1, 3]
    assert round_robin(engines, 0, {0, 1, 3}) is None


def test_push_by_default_and_pull_where_it_must_be() -> None:
    seen = view("c", "u")
    push = Choice(Mode.PUSH, Reason.DEFAULT, 0, 0, "card 0")
    assert choose(seen, 0, Tried(), ONE, OPTIONS) == push
    forced = Options(("http://p",), ("http://d",), pull=True)
    assert choose(seen, 0, Tried(), ONE, forced) == Choice(Mode.PULL, Reason.FORCED, 0, 0)
    long = Options(("http://p",), ("http://d",), push_min_tokens=101)
    assert choose(seen, 0, Tried(), ONE, long) == Choice(Mode.PULL, Reason.SHORT, 0, 0)
    just = Options(("http://p",), ("http://d",), push_min_tokens=100)
    assert choose(seen, 0, Tried(), ONE, just) == push
    cardless = choose(view("u", "u"), 0, Tried(), ONE, OPTIONS)
    assert cardless == Choice(Mode.PULL, Reason.NO_CARD, 0, 0)


def test_several_prompts_need_no_prefill_engine() -> None:
    several = legs.Prompt(single=False, tokens=100)
    plain = Choice(Mode.PLAIN, Reason.MULTI, None, 1)
    assert choose(view("d", "du"), 0, Tried(), several, OPTIONS) == plain
    assert choose(view("d", "du"), 0, Tried(), ONE, OPTIONS) is None
    assert choose(view("c", "dd"), 0, Tried(), several, OPTIONS) is None


def test_every_mode_has_its_series() -> None:
    assert {reason for _, reason in MODES} == set(Reason)


def test_what_is_missing() -> None:
    assert view("du", "u").missing() == []
    assert view("dd", "u").missing() == [Role.PREFILL]
    assert view("", "d").missing() == [Role.PREFILL, Role.DECODE]


def test_which_failures_are_worth_another_attempt() -> None:
    first = Choice(Mode.PUSH, Reason.DEFAULT, 0, 0)
    tried = Tried()
    assert tried.note(first, Role.PREFILL, "unreachable") and tried.prefill == {0}
    assert tried.note(first, Role.DECODE, "unreachable") and tried.decode == {0}
    assert tried.note(first, Role.PREFILL, "error"), "every prefill engine gets its try"
    assert tried.note(first, Role.DECODE, "error"), "its hand-off may have failed"
    assert not tried.note(first, Role.DECODE, "error"), "once"
    plain = Choice(Mode.PLAIN, Reason.MULTI, None, 0)
    assert not Tried().note(plain, Role.DECODE, "error"), "no hand-off failed here"


# Settings ---------------------------------------------------------------------------------------


def test_urls_lose_their_slash() -> None:
    urls = ["http://a:1/", "https://b", "http://[::1]:3/base/"]
    assert base_urls("prefill", urls) == ("http://a:1", "https://b", "http://[::1]:3/base")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:1",
        "ftp://a",
        "http://",
        "http://a:port",
        "http://a:99999",
        "http://u:p@a",
        "http://a?b",
    ],
)
def test_what_is_no_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill=.*use a URL such as"):
        base_urls("prefill", [url])


def test_an_engine_is_named_once() -> None:
    with pytest.raises(ConfigError, match="once"):
        base_urls("decode", ["http://a", "http://b", "http://a/"])


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("push-min-tokens", {"push_min_tokens": -1}),
        ("timeout", {"timeout_s": 0.0}),
        ("timeout", {"timeout_s": float("nan")}),
        ("timeout", {"timeout_s": 1e9}),
    ],
)
def test_settings_out_of_range_are_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(("http://a",), ("http://b",), **settings)
    assert caught.value.field == field
