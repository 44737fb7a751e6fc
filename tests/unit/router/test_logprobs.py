"""Log probabilities of a prompt that SGLang handed over: prefill's, in decode's answer."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest

from kvconnect.errors import Refused
from kvconnect.router import decision
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.logprobs import (
    needs_own_prompt,
    wants_prompt_logprobs,
    with_prompt_logprobs,
)
from tests.fakes.engine import FakeEngine, bench, on_loop, says

ALL = {"return_logprob": True, "logprob_start_len": 0}
TOPS = {
    "/generate": "top_logprobs_num",
    "/v1/completions": "logprobs",
    "/v1/chat/completions": "top_logprobs",
    "/v1/responses": "top_logprobs",
}


def wants(path: str = "/generate", **fields: Any) -> bool:
    return wants_prompt_logprobs(path, read_body(msgspec.json.encode(fields)))


def told(prompt: list[Any], first: Any = None, **more: Any) -> dict[str, Any]:
    """SGLang's answer, with so many log probabilities of the prompt."""
    meta = {"id": "x", "input_token_logprobs": prompt, "output_token_ids_logprobs": [first, [-3.0]]}
    return {"text": "a", "meta_info": meta | more}


def test_only_prompts_log_probabilities_need_prefills_answer() -> None:
    assert wants(**ALL) and wants(return_logprob=True, token_ids_logprob=[5])
    assert wants(return_logprob=[True, True], logprob_start_len=[0, 0])
    assert not wants() and not wants(return_logprob=True)
    assert not wants(return_logprob=True, logprob_start_len=-1)
    assert not wants(logprob_start_len=0, return_logprob=False)
    assert not wants("/v1/completions", logprobs=1) and not wants("/v1/completions", echo=True)
    assert not wants("/v1/completions", echo=True, logprobs=0)


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(Refused, match="streams"):
        wants(**ALL, stream=True)
    with pytest.raises(Refused, match="echo"):
        wants("/v1/completions", echo=True, logprobs=1)


def own(**fields: Any) -> bool:
    return needs_own_prompt(read_body(msgspec.json.encode(fields)))


def test_vllm_computes_a_prompt_itself_whose_log_probabilities_it_tells() -> None:
    for value in (0, 1, -1, False):  # vLLM takes false for 0
        assert own(prompt_logprobs=value)
    assert own(echo=True, logprobs=0) and own(echo=True, messages=[])
    for other in ({}, {"prompt_logprobs": None}, {"echo": True}, {"logprobs": 1}):
        assert not own(**other)
    assert not own(echo=True, logprobs=None) and not own(echo=False, messages=[])


@pytest.mark.parametrize("many", [False, True])
def test_prefills_are_put_into_decodes_answer(many: bool) -> None:
    answer, prefilled = told([], text_offset=1), told([[None, 5], [-0.5, 6]], first=[-1.0])
    sent = [json.dumps([each] * 2 if many else each).encode() for each in (answer, prefilled)]
    found = json.loads(with_prompt_logprobs(*sent))
    for each in found if many else [found]:
        meta = each["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 5], [-0.5, 6]]
        assert meta["output_token_ids_logprobs"] == [[-1.0], [-3.0]]
        assert (each["text"], meta["id"], meta["text_offset"]) == ("a", "x", 1)


def test_prompts_that_did_not_ask_for_them_are_answered_as_they_are() -> None:
    without = {"text": "b", "meta_info": {"id": "y"}}
    answer, prefilled = [told([]), without], [told([[None, 5]]), {**without, "text": "c"}]
    found = json.loads(with_prompt_logprobs(*(json.dumps(s).encode() for s in (answer, prefilled))))
    assert found[0]["meta_info"]["input_token_logprobs"] == [[None, 5]]
    assert found[1] == without


def test_an_answer_without_them_is_an_error_and_not_silence() -> None:
    for answer in (b"[1]", b"{}", b"no", b'[{"meta_info":{}}]'):
        with pytest.raises(Refused):
            with_prompt_logprobs(answer, json.dumps(told([[None, 5]])).encode())
        with pytest.raises(Refused):
            with_prompt_logprobs(json.dumps(told([])).encode(), answer)


@on_loop
async def test_a_router_merges_and_serves_lists_of_prompts() -> None:
    p, d = FakeEngine(says(200, told([[None, 5]]))), FakeEngine(says(200, told([])))
    p.settings = d.settings = ",engine=sglang"
    p.standing_ticket_lifetime_s = 0
    async with bench([p], [d]) as router:
        _, said, _ = await router.post({"input_ids": [1], **ALL}, "/generate")
        assert json.loads(said)["meta_info"]["input_token_logprobs"] == [[None, 5]]
        _, said, _ = await router.post({"input_ids": [1]}, "/generate")
        assert json.loads(said)["meta_info"]["input_token_logprobs"] == []
        p.answer = d.answer = says(200, [told([]), told([])])  # type: ignore[arg-type]
        status, said, headers = await router.post({"input_ids": [[1], [2]]}, "/generate")
        assert (status, len(json.loads(said))) == (200, 2)
        assert headers["x-kvconnect-mode"] == "bootstrap"
        status, _, _ = await router.post({"input_ids": [1], **ALL, "stream": True}, "/generate")
        assert status == 400


@on_loop
async def test_neither_server_is_asked_for_what_ends_it() -> None:
    p, d = FakeEngine(says(200, told([]))), FakeEngine(says(200, told([])))
    p.settings = d.settings = ",engine=sglang"
    p.standing_ticket_lifetime_s = 0
    async with bench([p], [d]) as router:
        for path, name in TOPS.items():
            ask = {"model": "tiny", "prompt": "a", "input_ids": [1]}
            status, said, _ = await router.post(ask | {name: 129}, path)
            assert (status, b"use 128 or less" in said) == (400, True)
        assert p.asked == d.asked == []
        assert (await router.post({"input_ids": [1]}, "/generate")).status == 200


@on_loop
async def test_answers_are_merged_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.Thread] = []

    def noted(answer: bytes, prefilled: bytes) -> bytes:
        seen.append(threading.current_thread())
        return with_prompt_logprobs(answer, prefilled)

    monkeypatch.setattr(decision, "with_prompt_logprobs", noted)
    p, d = FakeEngine(says(200, told([[None, 5]]))), FakeEngine(says(200, told([])))
    p.settings = d.settings = ",engine=sglang"
    p.standing_ticket_lifetime_s = 0
    async with bench([p], [d]) as router:
        assert (await router.post({"input_ids": [1], **ALL}, "/generate")).status == 200
    assert len(seen) == 1 and seen[0] is not threading.current_thread()
