"""Bounds of the prompts in a request: how many there are, and that none is empty."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from kvconnect.errors import Refused
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests import prompt_limits
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.prompt_limits import refuse_many_prompts
from tests.fakes.engine import FakeEngine, bench, on_loop, says
from tests.unit.router.refused_fields import refused, refused_as

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
EMBEDDINGS, CLASSIFY = "/v1/embeddings", "/classify"


BY_PROMPT = {
    "logprob_start_len": [0],
    "top_logprobs_num": [5],
    "return_hidden_states": [False],
    "lora_path": ["known"],
}
ONE: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"text": "a"}),
    (GENERATE, {"input_ids": [1, 2]}),
    (GENERATE, {"text": None, "input_ids": [1], "prompt": ["x"]}),
    (GENERATE, {"input_embeds": [[0.5], [0.1]]}),
    (COMPLETIONS, {"prompt": "a", "text": ["x"]}),
    (COMPLETIONS, {"prompt": [1], "input_ids": [[1]]}),
    (CHAT, {"messages": [], "prompt": ["a"]}),
    ("/v1/embeddings", {"input": "a"}),
]
SEVERAL: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"text": ["a"]}),
    (GENERATE, {"input_ids": [[1]]}),
    (GENERATE, {"input_embeds": [[[0.5]]]}),
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (COMPLETIONS, {"prompt": [[1]]}),
    ("/v1/embeddings", {"input": ["a"]}),
]


@pytest.mark.parametrize(("name", "value"), BY_PROMPT.items())
def test_a_list_is_refused_where_there_is_one_prompt(name: str, value: Any) -> None:
    for path, prompt in ONE:
        assert refused(path, **prompt, **{name: value}) == name
        assert refused(path, name, **prompt, **{name: value}) == ""
        assert refused(path, **prompt, **{name: None}) == ""
    spaced = b'{"input_ids": [ %b 1], "%b": [ ]}' % (b" " * 200, name.encode())
    assert refused_as(GENERATE, spaced) == name
    for path, prompt in SEVERAL:
        assert refused(path, **prompt, **{name: value}) == ""


EMPTY = [
    *((GENERATE, f'{{"text": {text}}}') for text in ('""', '["a", ""]', "[]", '["a,\\"", ""]')),
    *((GENERATE, f'{{"input_ids": {ids}}}') for ids in ("[ ]", "[[1], [ ]]", "[\n[],[1]]")),
    (GENERATE, '{"text": null, "input_ids": []}'),
    *((COMPLETIONS, f'{{"prompt": {each}}}') for each in ('""', "[]", '["a", ""]', '["",\n"a"]')),
    *((COMPLETIONS, f'{{"prompt": {each}}}') for each in ("[[1],[]]", "[[], [1]]", '["[", ""]')),
]


EMPTY += [
    (EMBEDDINGS, '{"input": [[1], []]}'),
    (EMBEDDINGS, '{"input": [[ ],[1]]}'),
    (CLASSIFY, '{"input_ids": [[1], []]}'),
    *((path, '{"query": [], "items": [[1], []]}') for path in ("/score", "/v1/score")),
    *(("/v1/score", f'{{{query}"items": [[]]}}') for query in ("", '"query": null, ')),
]


@pytest.mark.parametrize(("path", "sent"), EMPTY)
def test_empty_prompts_are_refused(path: str, sent: str) -> None:
    assert refused_as(path, sent.encode()) == "body"
    assert refused_as(path, sent.encode(), kind=EngineKind.VLLM) == ""


TEXTS = ("a", None, 3, '[] ""', ["a, ", ' ""', '[""]', "[]", " "], ["[", "[]"])


@pytest.mark.parametrize("prompt", [*TEXTS, [0], [[1], [2]]])
def test_control_other_prompts_are_left_to_the_engine(prompt: Any) -> None:
    assert refused(GENERATE, text=prompt) == refused(COMPLETIONS, prompt=prompt) == ""
    assert refused(GENERATE, input_ids=prompt) == refused(GENERATE) == ""


@pytest.mark.parametrize("media", ["audio_data", "image_data", "video_data"])
def test_a_prompt_may_be_media_alone(media: str) -> None:
    for text in ("", ["", ""]):
        assert refused(GENERATE, **{"text": text, media: "data:,"}) == ""
        for none in (None, []):
            assert refused(GENERATE, **{"text": text, media: none}) == "body"
    assert refused(GENERATE, **{"input_ids": [], media: "data:,"}) == "body"


@pytest.mark.parametrize("items", [[""], ["a", ""], [[1]], [[1], [2]], "", []])
def test_control_texts_that_are_embedded_or_scored_are_left_to_the_tokenizer(items: Any) -> None:
    assert refused(EMBEDDINGS, input=items) == refused(CLASSIFY, text=items) == ""
    assert refused("/v1/score", query="", items=items) == ""
    assert refused("/v1/score", query=[5], items=[*items, []] if items else []) == ""


def many(**fields: Any) -> str:
    try:
        refuse_many_prompts(read_body(json.dumps(fields).encode()))
    except Refused as refused:
        return refused.field
    return ""


ANSWERED = ("prompt", "text", "input_ids", "prompt_embeds")
POOLED = ("input", "items", "documents", "queries", "text_1", "text_2", "data_1", "data_2")


@pytest.mark.parametrize("name", [*ANSWERED, *POOLED])
@pytest.mark.parametrize("prompt", ["", 'a "quoted\\" \\\\', [1], [1] * 9])
def test_prompts_are_counted(name: str, prompt: Any) -> None:
    most = 4096 if name in ANSWERED else 65_536
    assert many(**{name: [prompt] * most}) == ""
    assert many(**{name: [prompt] * (most + 1)}) == name


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("number", [128, "64", 127.5, 16_384])
def test_answers_to_all_prompts_are_counted(name: str, number: Any) -> None:
    most = 65_536 // math.ceil(float(number))
    assert many(**{name: ["a"] * most}, n=number) == ""
    # A little over it may pass where the number is no whole one, which engines refuse.
    assert many(**{name: ["a"] * (most + 3)}, n=number) == name
    assert many(**{name: "a"}, n=number) == many(**{name: [5] * 9000}, n=number) == ""


@pytest.mark.parametrize("name", POOLED)
def test_what_is_pooled_has_no_answers(name: str) -> None:
    assert many(**{name: ["a"] * 4096}, n=128) == ""


@pytest.mark.parametrize("odd", [None, "many", "nan", -5, 0, 1, [128], {}])
def test_odd_numbers_of_answers_are_left_to_the_engine(odd: Any) -> None:
    assert many(prompt=["a"] * 4096, n=odd) == ""


def test_more_answers_than_anything_has_room_for_are_refused() -> None:
    for number in (65_537, 10**400, "inf"):
        assert many(prompt=["a"], n=number) == "prompt"


def test_answers_are_counted_in_sglangs_sampling_parameters() -> None:
    for count, name in ((512, ""), (513, "text")):
        for params in ({"n": 128}, [{"n": 128}] * count, [None, {"n": "128"}]):
            assert refused(GENERATE, text=["a"] * count, sampling_params=params) == name
    assert refused(GENERATE, "n", text=["a"] * 512, sampling_params={"n": 129}) == "text"


def test_spaces_are_read_once() -> None:
    """A pattern that gives spaces back takes a body of nothing else twice or thrice."""
    patterns = [value for value in vars(prompt_limits).values() if isinstance(value, re.Pattern)]
    assert len(patterns) == 4
    for pattern in patterns:
        for repeat in (rb"\s*", rb"\s+"):
            assert pattern.pattern.count(repeat) == pattern.pattern.count(repeat + b"+")


@pytest.mark.parametrize("prompt", [[1] * 50_000, '"[,' * 50_000, ['"' * 20_000], [{"a": "b"}], 5])
def test_long_prompts_are_not_many(prompt: Any) -> None:
    assert many(prompt=prompt, text=prompt, input_ids=prompt) == ""


@on_loop
async def test_a_router_answers_400_and_asks_no_engine() -> None:
    engine = FakeEngine(says(200, {"text": "a", "meta_info": {}}))
    engine.settings = ",engine=sglang"
    async with bench([], [engine], handoff="none") as router:
        for path, ask in (
            (COMPLETIONS, {"model": "tiny", "prompt": [[1], []]}),
            (COMPLETIONS, {"model": "tiny", "prompt": [[1]] * 5000}),
            (COMPLETIONS, {"model": "tiny", "prompt": [[1]] * 2000, "n": 100}),
        ):
            status, said, _ = await router.post(ask, path)
            assert (status, engine.asked) == (400, []), said
        assert (await router.post({"text": "a"}, GENERATE)).status == 200
