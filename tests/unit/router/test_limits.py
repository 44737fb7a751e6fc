"""Bounds of what clients ask engines for: what is beyond one is refused, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvconnect.errors import Refused
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.limits import refuse_beyond_limits
from tests.fakes.engine import FakeEngine, bench, on_loop, says
from tests.unit.router.refused_fields import refused, refused_as

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
PATHS = (COMPLETIONS, CHAT, GENERATE)
VLLM = tuple(kind for kind in EngineKind if kind is not EngineKind.SGLANG)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
TOOL = {"type": "function", "function": {"name": "x"}}
STRICT = {"type": "function", "function": {"name": "x", "strict": True}}
TOPS = {
    GENERATE: "top_logprobs_num",
    COMPLETIONS: "logprobs",
    CHAT: "top_logprobs",
    "/v1/responses": "top_logprobs",
}
SPACES = "spaces_between_special_tokens"


BEYOND: list[tuple[str, Any, Any]] = [
    *(("n", many, 128) for many in (129, 10**9, "129", 1e9, -1, 10**400)),
    *(("top_k", many, 2**30) for many in (2**31, str(2**31), 2.0**31, -2)),
    *(("temperature", hot, 100) for hot in (1e39, "1e39", "nan", "inf", 101, -0.1)),
    *(("repetition_penalty", small, 1e-3) for small in (1e-50, "1e-50", 9e-4, 0, -1, "nan")),
    ("repetition_penalty", 2.1, 2),
    *(("logit_bias", {"5": bias}, {"5": -1e9}) for bias in (1e39, -2e9, "nan", "1", True)),
    ("stop", "x" * 5000, "x" * 4000),
    ("stop", ["x" * 3000] * 2, ["x" * 100] * 32),
    ("stop", [["a"]], ["a"]),
    ("stop", {"a": 1}, "a"),
    ("max_dynamic_patch", 129, 128),
    ("image_max_dynamic_patch", 10**6, 12),
    ("video_max_dynamic_patch", "200", 0),
    ("stop_token_ids", list(range(1025)), list(range(1024))),
    ("regex", "x" * 300_000, "x" * 260_000),
    ("ebnf", "x" * 300_000, "x"),
    ("json_schema", "x" * 300_000, "{}"),
    ("structural_tag", "x" * 300_000, "{}"),
    ("response_format", {**SCHEMA, "x": "x" * 300_000}, SCHEMA),
    ("tools", ["x" * 1_100_000], ["x" * 1_000_000]),
    ("tools", [{"properties": {f"p{n}": {} for n in range(8192)}}], [{"x": [{}] * 8000}]),
]
"""Field, what is beyond its bound, and what is at it or within."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "beyond", "within"), BEYOND, ids=[f"{each[0]}{n}" for n, each in enumerate(BEYOND)]
)
def test_a_field_beyond_its_bound_is_refused(
    path: str, name: str, beyond: Any, within: Any
) -> None:
    plain, escaped = f'"{name}"'.encode(), f'"\\u{ord(name[0]):04x}{name[1:]}"'.encode()
    nested = [{name: beyond}, [{name: beyond}], [{}, None, {name: beyond}]]
    for sent in ({name: beyond}, *({"sampling_params": each} for each in nested)):
        raw = json.dumps(sent).encode()
        for body in (raw, raw.replace(plain, escaped)):
            assert refused_as(path, body) == name
        assert refused_as(path, raw, name) == "", "the operator lets it pass"
        for kind in VLLM:
            assert refused_as(path, raw, kind=kind) == ""
    for sent in ({name: within}, {"sampling_params": {name: within}}, {name: None}):
        assert refused(path, **sent) == ""


@pytest.mark.parametrize("params", ["x", 5, ["x"], [[]], True])
def test_sampling_parameters_are_objects(params: Any) -> None:
    assert refused(GENERATE, sampling_params=params) == "sampling_params"
    for empty in (None, {}, [], [None]):
        assert refused(GENERATE, sampling_params=empty) == ""


def test_fields_with_too_many_parts_are_not_decoded() -> None:
    many = {str(number): 1 for number in range(70_000)}
    assert refused(COMPLETIONS, logit_bias=many) == "logit_bias"
    assert refused(GENERATE, sampling_params={"logit_bias": many}) == "sampling_params"
    assert refused(GENERATE, logprob_start_len=[0] * 70_000) == "logprob_start_len"


@pytest.mark.parametrize("start", [-2, [-1, -5], "-2.0"])
def test_a_start_of_logprobs_before_the_prompt_is_refused(start: Any) -> None:
    prompts = {"text": ["a", "b"]} if isinstance(start, list) else {"text": "a"}
    assert refused(GENERATE, logprob_start_len=start, **prompts) == "logprob_start_len"
    for fine in (-1, 0, 10**6, None):
        assert refused(GENERATE, logprob_start_len=fine, **prompts) == ""
    assert refused(GENERATE, logprob_start_len=[-1, 5], text=["a", "b"]) == ""


def test_ids_whose_probabilities_are_asked_for_are_counted_for_each_prompt() -> None:
    most = list(range(4096))
    for fine in (most, [most, most], None, [], 5, [[], None]):
        assert refused(GENERATE, token_ids_logprob=fine) == ""
    for many in ([*most, 1], [most, [*most, 1]], [[*most, 1], []], [5] * 70_000):
        assert refused(GENERATE, token_ids_logprob=many) == "token_ids_logprob"
    assert refused(GENERATE, token_ids_logprob=[[5]] * 70_000) == "token_ids_logprob"


def test_labels_of_many_items_are_counted_for_each_item() -> None:
    most = list(range(4096))
    for fine in (most, [most, most], [list(range(100))] * 1000):
        assert refused("/v1/score", label_token_ids=fine) == ""
    for many in ([*most, 1], [[5], [*most, 1]]):
        assert refused("/v1/score", label_token_ids=many) == "label_token_ids"
        assert refused("/v1/score", "label_token_ids", label_token_ids=many) == ""


@pytest.mark.parametrize(
    "form",
    [
        *({name: "a"} for name in ("regex", "ebnf", "json_schema", "structural_tag")),
        *({"response_format": {"type": kind}} for kind in ("json_object", "json_schema")),
        *({"tool_choice": choice} for choice in ("required", TOOL)),
        {"tools": [STRICT], "tool_choice": "auto"},
        {"tools": [STRICT]},
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"messages": [{"role": "system", "content": "a", "tools": [STRICT]}]},
    ],
)
def test_a_least_number_of_tokens_is_refused_beside_a_grammar(form: dict[str, Any]) -> None:
    for path in (COMPLETIONS, CHAT):
        assert refused(path, min_tokens=1, **form) == "min_tokens"
        assert refused(path, "min_tokens", min_tokens=1, **form) == ""
        assert refused(path, min_tokens=0, **form) == refused(path, **form) == ""
    if form.keys() & {"regex", "ebnf", "json_schema", "structural_tag"}:
        params = {"min_new_tokens": "1", **form}
        assert refused(GENERATE, sampling_params=[{}, params]) == "min_new_tokens"
        assert refused(GENERATE, sampling_params=form) == ""


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        *({"tool_choice": choice} for choice in ("auto", "none", None)),
        {"regex": None, "ebnf": ""},
        {"tools": [STRICT], "tool_choice": "none"},
        *({"tools": none, "tool_choice": "auto"} for none in ([], None)),
        {"messages": [{"role": "user", "content": '"tools" \u00e9'}]},
        {"messages": [{"role": "system", "content": "tools", "tools": None}]},
    ],
)
def test_a_least_number_of_tokens_passes_without_a_grammar(form: dict[str, Any]) -> None:
    assert refused(CHAT, min_tokens=5, **form) == ""


def test_tools_of_a_message_are_seen_behind_an_escape() -> None:
    message = b'{"role": "system", "content": "a", "\\u0074ools": [{}]}'
    assert refused_as(CHAT, b'{"min_tokens": 1, "messages": [%b]}' % message) == "min_tokens"
    many = b",".join([message] * 30_000)
    assert refused_as(CHAT, b'{"min_tokens": 1, "messages": [%b]}' % many) == "messages"
    assert refused_as(CHAT, b'{"min_tokens": 0, "messages": [%b]}' % many) == ""


@pytest.mark.parametrize("value", [1, "x", [], {}])
def test_a_template_value_that_ends_the_detokenizer_is_refused(value: Any) -> None:
    name = "chat_template_kwargs"
    raw = json.dumps({name: {"a": 1, SPACES: value}}).encode()
    for sent in (raw, raw.replace(b"spaces_b", b"spaces\\u005fb")):
        assert refused_as(CHAT, sent) == name
        assert refused_as(CHAT, sent, name) == ""
    for fine in ({SPACES: True}, {SPACES: None}, {"a": value, "b": "\\"}, None, value):
        assert refused(CHAT, **{name: fine}) == ""


@pytest.mark.parametrize("path", PATHS)
def test_a_template_of_a_client_is_refused(path: str) -> None:
    """It is a program, and SGLang runs it for responses, in its HTTP process."""
    sent = json.dumps({"chat_template_kwargs": {"chat_template": "{% for %}"}}).encode()
    for body in (sent, sent.replace(b'"chat_template"', b'"chat\\u005ftemplate"')):
        assert refused_as(path, body) == "chat_template_kwargs"
    assert refused_as(path, sent, "chat_template_kwargs") == "", "the operator lets it pass"
    assert refused(path, chat_template_kwargs={"enable_thinking": False}) == ""


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
def test_tiles_of_one_part_of_a_message_are_bounded(kind: str) -> None:
    def asked(most: Any) -> bytes:
        part = {"type": kind, kind: {"url": "data:,", "max_dynamic_patch": most}}
        text = {"type": "text", "text": "x"}
        return json.dumps({"messages": [{"role": "user", "content": [text, part]}]}).encode()

    hides = asked(129).replace(b'"text": "x"', b'"text": "x", "image_url": 5, "video_url": [{}]')
    for body in (asked(129), asked(129).replace(b'"max_d', b'"\\u006dax_d'), hides):
        assert refused_as(CHAT, body) == "max_dynamic_patch"
    assert refused_as(CHAT, asked(12)) == refused_as(CHAT, asked(None)) == ""
    plain = {"role": "user", "content": "max_dynamic_patch: 129"}
    assert refused(CHAT, messages=[plain, {"role": "user", "content": [5]}]) == ""


@pytest.mark.parametrize("kind", VLLM)
def test_repetitions_that_vllm_looks_for_after_each_token_are_bounded(kind: EngineKind) -> None:
    name = "repetition_detection"
    for size in (1025, 10**9, "1025", -1):
        asked = {name: {"max_pattern_size": size, "min_count": 2}}
        assert refused(COMPLETIONS, kind=kind, **asked) == name
        assert refused(COMPLETIONS, name, kind=kind, **asked) == ""
    for fine in ({"max_pattern_size": 1024}, {}, None, {"max_pattern_size": None}):
        assert refused(COMPLETIONS, kind=kind, **{name: fine}) == ""


@pytest.mark.parametrize("path", TOPS)
@pytest.mark.parametrize("many", [129, "130", 2e2, [0, 129], 10**400, "inf", "nan"])
def test_more_likely_tokens_than_a_hand_off_has_room_for_are_refused(path: str, many: Any) -> None:
    name = TOPS[path]
    asked: dict[str, Any] = {"text": ["a", "b"], name: many}
    assert refused(path, handed_over=True, **asked) == name
    assert refused(path, name, handed_over=True, **asked) == name, "always"
    assert refused(path, handed_over=True, **{**asked, name: 128}) == ""


@pytest.mark.parametrize("path", TOPS)
def test_a_server_that_computes_its_own_prompts_tells_more_likely_tokens(path: str) -> None:
    for many, name in ((4096, ""), (4097, TOPS[path])):
        asked: dict[str, Any] = {TOPS[path]: many}
        assert refused(path, **asked) == name


@pytest.mark.parametrize("odd", [None, "many", -1, [None, [1]], {}, [], True])
def test_what_is_no_large_number_is_left_to_the_server(odd: Any) -> None:
    for path, name in TOPS.items():
        asked: dict[str, Any] = {"text": ["a", "b"], name: odd}
        assert refused(path, handed_over=True, **asked) == ""
        assert refused("/v1/embeddings", input=["a"], **asked) == ""


def test_a_list_with_too_many_parts_is_refused_before_it_is_decoded() -> None:
    asked = {"text": ["a"], "top_logprobs_num": [1] * 70_000}
    with pytest.raises(Refused, match="too many parts: ask about fewer prompts"):
        body = read_body(json.dumps(asked).encode())
        refuse_beyond_limits(EngineKind.SGLANG, GENERATE, body, (), handed_over=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_routed_experts", True),
        ("return_indexer_topk", True),
        ("return_hidden_states", True),
        ("return_hidden_states", 1),
        ("return_hidden_states", ["last", True]),
    ],
)
def test_states_of_the_prompt_that_a_hand_off_loses_are_refused(name: str, value: Any) -> None:
    asked: dict[str, Any] = {"text": ["a", "b"], name: value}
    body = read_body(json.dumps(asked).encode())
    with pytest.raises(Refused, match=f"^{name}: .*loses the prompt's"):
        refuse_beyond_limits(EngineKind.SGLANG, GENERATE, body, (), handed_over=True)
    assert refused(GENERATE, **asked) == ""
    for fewer in (False, None, *(("last", ["last", False]) if "hidden" in name else ())):
        assert refused(GENERATE, handed_over=True, **{**asked, name: fewer}) == ""


def test_what_is_no_number_is_left_to_the_server() -> None:
    for odd in (None, "many", {}, [], True):
        for name in ("n", "top_k", "temperature", "min_tokens"):
            assert refused(COMPLETIONS, **{name: odd}) == ""


def test_a_usual_request_passes() -> None:
    usual: dict[str, Any] = {
        **{"model": "m", "temperature": 0.7, "top_p": 0.9, "top_k": -1, "n": 1, "max_tokens": 99},
        **{"stop": ["\n\n", "END"], "logit_bias": {"5": -100, "6": 100}, "min_tokens": 0},
        **{"tools": [TOOL], "tool_choice": "auto", "seed": 5, "stream": True, "lora_path": "a"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert refused(CHAT, messages=[{"role": "user", "content": "a"}], **usual) == ""
    params = {"max_new_tokens": 9, "temperature": 0, "stop": None, "stop_token_ids": [2]}
    assert refused(GENERATE, text="a", sampling_params=params, return_logprob=True) == ""
    raw = msgspec.json.encode({"text": "a", "sampling_params": params})
    body = read_body(raw)
    refuse_beyond_limits(EngineKind.SGLANG, GENERATE, body, (), handed_over=True)
    assert msgspec.json.encode(body) == raw, "it is sent on as it came"


@on_loop
async def test_a_router_answers_400_and_asks_no_engine() -> None:
    engine = FakeEngine(says(200, {"text": "a", "meta_info": {}}))
    engine.settings = ",engine=sglang"
    async with bench([], [engine], handoff="none") as router:
        for path, ask in (
            (GENERATE, {"text": "a", "sampling_params": {"temperature": 1e39}}),
            (COMPLETIONS, {"model": "tiny", "prompt": "a", "logprobs": 5000}),
        ):
            asked = len(engine.asked)
            status, said, _ = await router.post(ask, path)
            assert (status, len(engine.asked)) == (400, asked), said
        assert (await router.post({"text": "a"}, GENERATE)).status == 200
