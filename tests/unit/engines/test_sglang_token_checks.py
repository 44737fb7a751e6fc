"""Token ids of SGLang's requests, checked where they are tokenized."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvconnect.engines.sglang.token_checks import before_validate

SIZE = 100


WIDTH = 4


def check(
    prompt: list[int] | None = None, *, processor: Any = None, media: bool = False, **fields: Any
) -> None:
    model = SimpleNamespace(vocab_size=SIZE, hidden_size=WIDTH)
    manager = SimpleNamespace(model_config=model, mm_processor=processor)
    known = {"input_ids": None, "sampling_params": {}, "top_logprobs_num": None, "stream": False}
    request = SimpleNamespace(**{**known, **fields}, contains_mm_input=lambda: media)
    before_validate(manager, request, prompt)


@pytest.mark.parametrize("ids", [[SIZE], [-1], [1, 2, 10**9, 3], [0, -(2**63)]])
def test_ids_that_the_vocabulary_lacks_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="input_ids: use ids from 0 to 99"):
        check(input_ids=ids)
    with pytest.raises(ValueError, match="stop_token_ids: use ids from 0 to 99"):
        check(sampling_params={"stop_token_ids": ids})
    # A server without a processor takes a request with media for one without.
    with pytest.raises(ValueError, match="input_ids"):
        check(input_ids=ids, media=True)
    check(input_ids=ids, media=True, processor=object())


def test_ids_of_the_vocabulary_pass() -> None:
    for ids in (None, [], [0], [SIZE - 1], list(range(SIZE))):
        check(input_ids=ids, sampling_params={"stop_token_ids": ids}, top_logprobs_num=SIZE)
    check(sampling_params={"stop_token_ids": [None, "5"]})  # as SGLang takes them
    request = SimpleNamespace(input_ids=[1], sampling_params={}, contains_mm_input=lambda: False)
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=2), mm_processor=None)
    before_validate(manager, request)  # for an embedding


def test_an_empty_prompt_is_refused() -> None:
    cases: list[dict[str, Any]]
    cases = [{}, {"input_ids": []}, {"session_params": None}, {"media": True}]
    for fields in cases:
        with pytest.raises(ValueError, match="prompt: use one token or more"):
            check([], **fields)
    check([5])
    check([], session_params={"id": "x"})  # whose history is the prompt
    check([], media=True, processor=object())


ROW = [0.5, -1, 0.0, 100.0]


@pytest.mark.parametrize(
    "rows",
    [
        *([], [[]], [ROW[:3]], [[*ROW, 1.0]], [ROW, ROW[:3]], [[ROW]], ROW, "abcd"),
        *([[*ROW[:3], odd]] for odd in ("1", None, [1.0], 1e39, 10**400)),
        *([[float(odd), *ROW[:3]]] for odd in ("inf", "-inf", "nan")),
    ],
    ids=str,
)
def test_embeddings_that_are_not_of_the_models_width_are_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="input_embeds: use one vector or more, each of 4 numbers"):
        check(input_embeds=rows)


def test_embeddings_of_the_models_width_pass() -> None:
    for rows in (None, [ROW], [ROW, [65_504.0, 0, 0, 0]]):
        check(input_embeds=rows)


def test_embeddings_are_no_prompt_that_is_embedded() -> None:
    """SGLang's scheduler gets no prompt then."""
    model = SimpleNamespace(vocab_size=SIZE, hidden_size=WIDTH)
    manager = SimpleNamespace(model_config=model, mm_processor=None)
    known = {"input_ids": None, "sampling_params": {}, "input_embeds": [ROW]}
    request = SimpleNamespace(**known, contains_mm_input=lambda: False)
    with pytest.raises(ValueError, match="input_embeds: use text or ids"):
        before_validate(manager, request, None)
    before_validate(manager, request, [5])  # a text's, which counts


def test_more_likely_tokens_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match="top_logprobs_num: use 100 or less"):
        check(top_logprobs_num=SIZE + 1)
