"""What is decided about one request, without a server: attempts, and what engines are asked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kvconnect.errors import Refused
from kvconnect.router.decision import ChosenEngines, ClientRequest, Decision, Legs
from kvconnect.router.engine_spec import EngineSpec
from kvconnect.router.policy.choice import Mode, RoutingChoice, RoutingReason
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import EngineKind, EngineView, FleetView, Role, TargetLoad
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.requests.apis import APIS, COMPLETIONS, Api
from kvconnect.router.requests.body import prompt_of, read_body
from kvconnect.router.requests.engine_bodies import RANK_HEADER
from kvconnect.router.requests.fields import Permissions
from kvconnect.router.requests.retries import REFUSED_S, Retries, Withheld

CHAT = next(api for api in APIS if api.path == "/v1/chat/completions")
EMBEDDINGS = next(api for api in APIS if api.path == "/v1/embeddings")
GENERATE = next(api for api in APIS if api.path == "/generate")
PULL = RoutingRules(pull=True)
PARAMS = "kv_transfer_params"


def decision(
    api: Api = COMPLETIONS,
    rules: RoutingRules = PULL,
    retries: Retries | None = None,
    known: Any = None,
    **fields: Any,
) -> Decision:
    body = read_body(json.dumps({"model": "m", "prompt": "a", **fields}).encode())
    request = ClientRequest(api, body, prompt_of(body), 0, **known or {})
    ids = count(1)
    return Decision(request, rules, retries or Retries(), lambda: f"{next(ids):032x}")


def fleet(prefill: int = 2, decode: int = 2, **more: Any) -> FleetView:
    """Engines that are up; their prefill engines hold standing tickets."""
    return FleetView(
        tuple(EngineView(n, True, standing_tickets=(f"t{n}",), **more) for n in range(prefill)),
        tuple(EngineView(n, True, **more) for n in range(decode)),
    )


def chosen(asked: Decision, view: FleetView) -> RoutingChoice:
    choice = asked.choose(view)
    assert choice is not None
    return choice


def legs_of(
    asked: Decision, view: FleetView, kind: EngineKind = EngineKind.VLLM, **more: Any
) -> Legs:
    decode = EngineSpec("http://d:1", kind)
    prefill = EngineSpec("http://p:1", kind) if view.prefill else None
    return asked.legs(chosen(asked, view), ChosenEngines(decode, prefill, **more))


def sent(raw: bytes | None) -> dict[str, Any]:
    assert raw is not None
    return dict(json.loads(raw))


def test_it_is_decided_without_an_http_library() -> None:
    code = (
        "import sys; sys.modules['aiohttp'] = sys.modules['httptools'] = None; "
        "import kvconnect.router.{}"
    )

    def imported(name: str) -> subprocess.CompletedProcess[bytes]:
        asked = [sys.executable, "-c", code.format(name)]
        return subprocess.run(asked, capture_output=True, check=False)

    assert imported("decision").returncode == 0
    # Control: a module of the HTTP server needs them.
    assert b"httptools" in imported("http.exchange").stderr


@pytest.mark.parametrize("rule", Disaggregate)
@pytest.mark.parametrize("wish", [None, *Disaggregate])
def test_only_who_decides_by_measured_times_needs_them(
    rule: Disaggregate, wish: Disaggregate | None
) -> None:
    asked = decision(rules=RoutingRules(disaggregate=rule), known={"disaggregate": wish})
    assert asked.by_times is ((wish or rule) is Disaggregate.AUTO)


def test_push_asks_both_engines_for_one_transfer() -> None:
    asked = decision(rules=RoutingRules(), max_tokens=9, stream=True)
    legs = legs_of(asked, fleet())
    prefill, decode = sent(legs.prefill().body), sent(legs.decode(False).body)
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert (decode["max_tokens"], decode["stream"]) == (9, True)
    assert prefill[PARAMS]["transfer_id"] == decode[PARAMS]["transfer_id"]
    assert decode[PARAMS]["kvconnect_ticket"].startswith("t")
    again = sent(legs_of(asked, fleet()).prefill().body)
    assert again[PARAMS]["transfer_id"] != prefill[PARAMS]["transfer_id"] != ""
    # Nothing waits for prefill's answer, whatever it says.
    legs.prefilled(b'{"kv_transfer_params": {"a": 1}}')
    assert sent(legs.decode(False).body) == decode


def test_pull_gives_prefills_ticket_to_decode() -> None:
    legs = legs_of(decision(), fleet())
    legs.prefilled(b'{"kv_transfer_params": {"from": "prefill"}}')
    assert legs.choice.mode is Mode.PULL
    assert sent(legs.decode(False).body)[PARAMS] == {"from": "prefill"}


@pytest.mark.parametrize("ids", [False, True])
def test_a_chat_whose_text_the_client_wants_is_tokenized_by_decode_too(ids: bool) -> None:
    """vLLM has no text of a prompt that it gets as token ids."""
    answer = b'{"kv_transfer_params": {"from": "prefill"}, "prompt_token_ids": [7]}'
    more: dict[str, Any] = {"return_token_ids": True} if ids else {}
    legs = legs_of(decision(CHAT, return_prompt_text=True, **more), fleet())
    assert sent(legs.prefill().body).get("return_token_ids", False) == ids
    legs.prefilled(answer)
    assert sent(legs.decode(False).body)[PARAMS] == {"from": "prefill"}
    legs = legs_of(decision(CHAT, return_prompt_text=False, **more), fleet())
    legs.prefilled(answer)
    assert sent(legs.decode(False).body)[PARAMS]["prompt_token_ids"] == [7]


@pytest.mark.parametrize("answer", [b"{}", None])
def test_without_a_ticket_decode_serves_alone(answer: bytes | None) -> None:
    legs = legs_of(decision(), fleet())
    legs.prefilled(answer)
    assert (legs.choice.mode, legs.choice.reason) == (Mode.PLAIN, RoutingReason.NO_TICKET)
    assert PARAMS not in sent(legs.decode(False).body)


def test_an_answer_that_is_none_is_refused() -> None:
    with pytest.raises(Refused, match="not a JSON object"):
        legs_of(decision(), fleet()).prefilled(b"<html>")


def test_mooncakes_ticket_is_made_by_the_router() -> None:
    view = fleet(kind=EngineKind.MOONCAKE)
    legs = legs_of(decision(), view, EngineKind.MOONCAKE, engine_ids={0: "e0"})
    legs.prefilled(b"{}")
    ticket = sent(legs.decode(False).body)[PARAMS]
    assert ticket["remote_engine_id"] == "e0"
    assert ticket["transfer_id"] == sent(legs.prefill().body)[PARAMS]["transfer_id"]
    unknown = legs_of(decision(), view, EngineKind.MOONCAKE)
    unknown.prefilled(b"{}")
    assert unknown.choice.mode is Mode.PLAIN


def test_sglangs_engines_meet_in_one_room_and_keep_the_clients_id() -> None:
    asked = decision(GENERATE, rid="mine")
    legs = legs_of(asked, fleet(kind=EngineKind.SGLANG), EngineKind.SGLANG)
    prefill, decode = sent(legs.prefill().body), sent(legs.decode(False).body)
    assert prefill["bootstrap_room"] == decode["bootstrap_room"]
    assert prefill["rid"] == decode["rid"] != "mine"
    assert legs.client_ids is not None
    shown = legs.client_ids.shown(json.dumps({"id": decode["rid"]}).encode())
    assert json.loads(shown) == {"id": "mine"}
    again = legs_of(asked, fleet(kind=EngineKind.SGLANG), EngineKind.SGLANG)
    assert sent(again.decode(False).body)["rid"] != decode["rid"], "another id for each attempt"


def test_a_chosen_rank_and_the_clients_headers_are_named() -> None:
    ranks = (TargetLoad(9, 0), TargetLoad(0, 0))
    view = FleetView((EngineView(0, True, ranks),), (EngineView(0, True),))
    legs = legs_of(decision(known={"headers": {"traceparent": "x"}}), view)
    assert legs.prefill().headers == {"traceparent": "x", RANK_HEADER: "1"}
    assert legs.decode(False).headers == {"traceparent": "x"}


def test_fields_reach_engines_by_permission_alone() -> None:
    few = {"permissions": Permissions(listed_only=True, priority=False)}
    legs = legs_of(decision(known=few, priority=-1), fleet())
    assert legs.dropped == ("priority",)
    assert not {"priority"} & sent(legs.decode(False).body).keys()
    with pytest.raises(Refused, match="pass-field unheard_of"):
        legs_of(decision(known=few, unheard_of=1), fleet())
    assert sent(legs_of(decision(unheard_of=1), fleet()).decode(False).body)["unheard_of"] == 1


def test_token_ids_hints_and_receipts_are_asked_of_vllm() -> None:
    asked = decision(CHAT, known={"hints": {"retain": 60.0}})
    legs = legs_of(asked, fleet())
    prefill, decode = sent(legs.prefill().body), sent(legs.decode("nonce").body)
    assert prefill["return_token_ids"] and prefill[PARAMS]["kvconnect"] == {"retain": 60.0}
    assert decode[PARAMS]["kvconnect"] == {"retain": 60.0, "receipt": "nonce"}


@pytest.mark.parametrize(("api", "asked"), [(COMPLETIONS, True), (GENERATE, False)])
def test_sglang_is_asked_where_cached_tokens_were_if_its_api_tells(api: Api, asked: bool) -> None:
    legs = legs_of(decision(api), fleet(kind=EngineKind.SGLANG), EngineKind.SGLANG)
    assert sent(legs.decode(True).body).get("return_cached_tokens_details", False) == asked
    assert "return_cached_tokens_details" not in sent(legs.decode(False).body)


def test_what_decode_serves_alone_is_asked_for_as_it_is() -> None:
    asked = decision(EMBEDDINGS, input="a")
    legs = legs_of(asked, fleet(prefill=0))
    assert (legs.choice.prefill, legs.merges) == (None, False)
    assert sent(legs.decode(True).body) == {"model": "m", "prompt": "a", "input": "a"}


@pytest.mark.parametrize(
    ("api", "fields", "streams"),
    [
        (COMPLETIONS, {"stream": True}, True),
        (COMPLETIONS, {}, False),
        (COMPLETIONS, {"stream": True, "n": 2}, False),
        (EMBEDDINGS, {"stream": True}, False),
    ],
)
def test_streams_that_can_have_a_receipt(api: Api, fields: Any, streams: bool) -> None:
    assert decision(api, **fields).streams_receipt == streams


def test_after_a_failed_prefill_decode_is_kept() -> None:
    asked, view = decision(), fleet(decode=4)
    first = chosen(asked, view)
    assert first.prefill is not None
    retry = asked.failed(first, Role.PREFILL, "error", crashed="", now=0.0)
    second = chosen(asked, view)
    assert retry.follows and second.prefill is not None
    assert second.prefill.target != first.prefill.target
    assert second.decode.target == first.decode.target


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_error_of_one_of_sglangs_servers_may_be_the_other_ones(role: Role) -> None:
    """A prefill server reports that its decode server is lost as an error of its own."""
    asked, view = decision(), fleet(prefill=1, kind=EngineKind.SGLANG)
    first = chosen(asked, view)
    assert first.mode is Mode.BOOTSTRAP
    assert asked.failed(first, role, "error", crashed="", now=0.0).follows
    lost = first.decode.target.engine
    rest = FleetView(
        view.prefill, tuple(replace(engine, up=engine.index != lost) for engine in view.decode)
    )
    second = chosen(asked, rest)
    assert second.prefill == first.prefill
    assert second.decode.target.engine != lost
    again = asked.failed(second, role, "error", crashed="", now=0.0).follows
    assert not again or asked.choose(view) is None, "the same error again is final"


def test_another_one_of_sglangs_prefill_servers_is_tried_first() -> None:
    asked, view = decision(), fleet(kind=EngineKind.SGLANG)
    first = chosen(asked, view)
    assert asked.failed(first, Role.PREFILL, "error", crashed="", now=0.0).follows
    second = chosen(asked, view)
    assert first.prefill is not None and second.prefill is not None
    assert second.prefill.target != first.prefill.target


def test_control_an_error_of_vllms_prefill_engine_is_its_own() -> None:
    asked, view = decision(), fleet(prefill=1)
    asked.failed(chosen(asked, view), Role.PREFILL, "error", crashed="", now=0.0)
    assert asked.choose(view) is None


def test_an_error_of_decode_after_push_is_followed_by_pull_and_then_final() -> None:
    asked, view = decision(rules=RoutingRules()), fleet()
    first = chosen(asked, view)
    assert first.mode is Mode.PUSH
    assert asked.failed(first, Role.DECODE, "error", crashed="", now=0.0).follows
    second = chosen(asked, view)
    assert (second.mode, second.reason) == (Mode.PULL, RoutingReason.PUSH_FAILED)
    assert not asked.failed(second, Role.DECODE, "error", crashed="", now=0.0).follows


def test_a_request_that_loses_two_engines_gets_no_third() -> None:
    asked, view = decision(), fleet(decode=4)
    lost = {"crashed": "", "now": 0.0}
    assert asked.failed(chosen(asked, view), Role.DECODE, "lost", **lost).follows
    again = asked.failed(chosen(asked, view), Role.DECODE, "lost", **lost)
    assert again == (False, Withheld.LOST_AGAIN)


def test_a_body_that_crashed_two_engines_is_refused_for_a_while() -> None:
    retries = Retries()
    asked, view = decision(retries=retries), fleet(decode=4)
    for engine in ("http://d:1", "http://d:2"):
        retry = asked.failed(chosen(asked, view), Role.DECODE, "lost", crashed=engine, now=1.0)
    assert retry == (False, Withheld.DEADLY)
    assert decision(retries=retries).refused(2.0)
    assert not decision(retries=retries, max_tokens=2).refused(2.0), "another body"
    assert not decision(retries=retries).refused(2.0 + REFUSED_S)


def test_a_path_that_one_engine_lacks_is_asked_of_one_with_other_models() -> None:
    asked = decision(EMBEDDINGS)
    view = FleetView(
        (),
        (
            EngineView(0, True, models=frozenset({"m"})),
            EngineView(1, True, models=frozenset({"m", "n"})),
        ),
    )
    first = chosen(asked, view)
    assert not asked.rejected(view, first, 400), "the engine has the path"
    assert asked.rejected(view, first, 404)
    second = chosen(asked, view)
    assert second.decode.target != first.decode.target
    assert not asked.rejected(view, second, 404)
    assert asked.choose(view) is None


def test_why_there_is_no_engine() -> None:
    down = FleetView((EngineView(0, False),), (EngineView(0, True),))
    asked = decision()
    assert asked.choose(down) is None
    assert asked.explain(down) == "no prefill engine is up"
