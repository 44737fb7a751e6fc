"""Two tenants of a router in front of real servers, and what a hand-off must not lose."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sglang
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.fields import DECISIONS, INTERNAL_SAMPLING, REFUSED_SAMPLING
from scripts.engine_api.fields import request_fields
from tests.engines.models import prompt_tokens
from tests.engines.ranks import until
from tests.sglang.pd import decode_server, prefill_server, side_by_side
from tests.sglang.server import PAGE, GenerateRouter, SglangServer

KEYS = {"a": "sk-0123456789abcdef", "b": "sk-4a7f0c2be19d4e5f"}
DIGITS = "0123456789abcdef"
LONG = 160  # tokens that take a while
ENDLESS = 1500  # more than a test takes
OTHERS = 6


SAMPLING = frozenset(
    [
        "max_new_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "n",
        "beam_width",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        "logit_bias",
        "sampling_seed",
        "custom_params",
        "watermark",
    ]
)
"""Sampling parameters that clients may set."""


class Tenants(NamedTuple):
    """A router with API keys in front of two servers, as each of its two tenants asks it."""

    servers: tuple[SglangServer, SglangServer]
    args: tuple[str, ...]
    a: GenerateRouter
    b: GenerateRouter


def as_tenant(router: GenerateRouter, name: str) -> GenerateRouter:
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    asked = GenerateRouter(router.prefill, router.decode, port=router.port, headers=headers)
    return asked


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    servers = SglangServer(), SglangServer()
    args = ("--unified", "--api-key-file", str(path))
    with side_by_side(*servers), GenerateRouter([], list(servers), args) as router:
        yield Tenants(servers, args, as_tenant(router, "a"), as_tenant(router, "b"))


def answer(client: Any, body: dict[str, Any]) -> Any:
    with client.open("/generate", body) as reply:
        return json.load(reply)


def finish(client: Any, prompt: list[int], **extra: Any) -> str:
    found = answer(client, client.body(prompt, LONG, **extra))
    return str(found["meta_info"]["finish_reason"]["type"])


def test_a_client_that_leaves_ends_no_other_tenants_requests(tenants: Tenants) -> None:
    asked = [prompt_tokens(20, start=100 * number) for number in range(OTHERS)]
    with ThreadPoolExecutor(OTHERS) as pool:
        open_now = [pool.submit(finish, tenants.b, prompt) for prompt in asked]
        until(lambda: sum(map(running, tenants.servers)) >= 2, "requests of tenant b run")
        for digit in DIGITS:
            tenants.a.abort(prompt_tokens(10), 0, rid=digit)
        assert [each.result() for each in open_now] == ["length"] * OTHERS


def running(server: SglangServer) -> float:
    return server.metric("sglang:num_running_reqs")


def test_labels_and_hints_of_a_client_reach_no_server(tenants: Tenants) -> None:
    evil = {"custom_labels": {"x": "y"}, "kv_hints": {"version": "1", "actions": []}}
    found = answer(tenants.a, tenants.a.body(prompt_tokens(10), 4, **evil))
    assert found["meta_info"]["finish_reason"]["type"] == "length"
    for server in tenants.servers:
        assert len(server.complete(prompt_tokens(10), 4).tokens) == 4, "it is there"
    assert tenants.a.metric("kvconnect_router_dropped_fields_total", field="custom_labels") == 1


def test_unknown_fields_are_refused_where_keys_are_set(tenants: Tenants) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        answer(tenants.a, tenants.a.body([1, 2, 3], 4, session_params={"id": "b's"}))
    with refused.value as error:
        assert error.code == 400
        assert b"--pass-field session_params" in error.read()


def test_clients_see_their_own_ids(tenants: Tenants) -> None:
    prompt = prompt_tokens(10)
    assert answer(tenants.a, tenants.a.body(prompt, 4, rid="0"))["meta_info"]["id"] == "0"
    both = answer(tenants.a, tenants.a.body([prompt, prompt[:5]], 4, rid=["x", "y"]))
    assert [each["meta_info"]["id"] for each in both] == ["x", "y"]
    with tenants.a.open("/generate", tenants.a.body(prompt, 4, rid="mine", stream=True)) as lines:
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert {event["meta_info"]["id"] for event in events} == {"mine"}


def test_tenants_share_no_blocks_whatever_salts_they_send(tenants: Tenants) -> None:
    prompt = prompt_tokens(8 * PAGE, start=5000)
    seen: set[str] = set()

    def at_both() -> bool:
        with tenants.b.open("/generate", tenants.b.body(prompt, 2)) as reply:
            reply.read()
            seen.add(reply.headers["X-KVConnect-Decode"])
        return len(seen) == 2

    until(at_both, "both servers have the blocks")
    cached = [tenants.b.complete(prompt, 2).cached for _ in range(2)]
    assert min(cached) >= 7 * PAGE, "the control: its own blocks"
    for own in ({}, {"cache_salt": "b"}, {"cache_salt": KEYS["b"]}):
        assert tenants.a.complete(prompt, 2, **own).cached == 0


def test_one_tenant_s_open_requests_are_limited_and_leave_room_for_others(
    tenants: Tenants,
) -> None:
    """By a router with a limit in front of the same servers; without one, all are served."""
    args = (*tenants.args, "--client-concurrent", "2")
    prompt = prompt_tokens(20)
    with GenerateRouter([], list(tenants.servers), args) as limited:
        a, b = as_tenant(limited, "a"), as_tenant(limited, "b")
        with streaming(b, prompt), streaming(b, prompt):
            with pytest.raises(urllib.error.HTTPError) as refused:
                answer(b, b.body(prompt, 1))
            refused.value.close()
            assert refused.value.code == 429
            assert len(a.complete(prompt, 1).tokens) == 1
    with streaming(tenants.b, prompt), streaming(tenants.b, prompt):  # the control
        assert len(tenants.b.complete(prompt, 1).tokens) == 1


@contextmanager
def streaming(client: GenerateRouter, prompt: list[int]) -> Iterator[None]:
    """A request that is answered as long as the context lasts."""
    with client.open("/generate", client.body(prompt, ENDLESS, stream=True)) as lines:
        assert lines.readline().startswith(b"data: ")
        yield


@pytest.fixture(scope="module")
def handed_over() -> Iterator[GenerateRouter]:
    servers = prefill_server(), decode_server()
    with side_by_side(*servers), GenerateRouter([servers[0]], [servers[1]]) as router:
        yield router


def test_a_list_of_prompts_is_handed_over(handed_over: GenerateRouter, tenants: Tenants) -> None:
    asked = [prompt_tokens(length, start=length) for length in (20, 70, 150)]
    found = answer(handed_over, handed_over.body(asked, 8))
    single = tenants.servers[0]
    assert [tuple(each["output_ids"]) for each in found] == [
        single.complete(prompt, 8).tokens for prompt in asked
    ]


@pytest.mark.parametrize(
    "extra", [{"logprob_start_len": 0}, {"logprob_start_len": 0, "top_logprobs_num": 2}]
)
@pytest.mark.parametrize("many", [False, True])
def test_a_hand_off_loses_no_logprobs_of_the_prompt(
    handed_over: GenerateRouter, tenants: Tenants, many: bool, extra: dict[str, Any]
) -> None:
    prompt: Any = prompt_tokens(100, start=300)
    prompt = [prompt, prompt[:40]] if many else prompt
    body = handed_over.body(prompt, 4, return_logprob=True, **extra)
    found, wanted = (answer(client, body) for client in (handed_over, tenants.servers[0]))
    for mine, theirs in zip(
        *([each] if not many else each for each in (found, wanted)), strict=True
    ):
        for name in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs"):
            assert close(mine["meta_info"].get(name), theirs["meta_info"].get(name)), name
        assert len(mine["meta_info"]["input_token_logprobs"]) >= 39


def test_token_ids_logprobs_of_the_first_token_are_there(
    handed_over: GenerateRouter, tenants: Tenants
) -> None:
    body = handed_over.body(prompt_tokens(60), 4, return_logprob=True, token_ids_logprob=[5, 6, 7])
    found, wanted = (
        answer(client, body)["meta_info"] for client in (handed_over, tenants.servers[0])
    )
    name = "output_token_ids_logprobs"
    assert close(found[name], wanted[name])


def test_a_stream_with_logprobs_of_the_prompt_is_refused(handed_over: GenerateRouter) -> None:
    body = handed_over.body([1, 2], 4, return_logprob=True, logprob_start_len=0, stream=True)
    with pytest.raises(urllib.error.HTTPError) as refused:
        answer(handed_over, body)
    refused.value.close()
    assert refused.value.code == 400


@pytest.mark.parametrize("many", [129, "130", 2e2, [129]])
def test_more_likely_tokens_than_a_hand_off_has_room_for_end_no_server(
    handed_over: GenerateRouter, many: Any
) -> None:
    prompt = prompt_tokens(20, start=700)
    asked = [prompt] if isinstance(many, list) else prompt
    body = handed_over.body(asked, 2, return_logprob=True, top_logprobs_num=many)
    with pytest.raises(urllib.error.HTTPError) as refused:
        answer(handed_over, body)
    with refused.value as error:
        assert (error.code, b"use 128 or less" in error.read()) == (400, True)
    body = handed_over.body(prompt, 2, return_logprob=True, top_logprobs_num=128)
    found = answer(handed_over, body)["meta_info"]["output_top_logprobs"]
    assert [len(tokens) for tokens in found] == [128, 128], "both servers are there"


def close(one: Any, other: Any) -> bool:
    """Whether two nested lists are the same but for rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 2e-3
    return bool(one == other)


def test_every_field_of_the_installed_sglang_is_decided() -> None:
    """In a process of its own: what other tests did to SGLang's types is not looked at."""
    call = f"from {__name__} import check_fields; check_fields()"
    subprocess.run([sys.executable, "-c", call], check=True, timeout=300)


def check_fields() -> None:
    known = request_fields(Path(sglang.__file__).parents[1], "sglang")
    decided = {path: DECISIONS[EngineKind.SGLANG].decided(path) for path in known}
    assert {
        path: known[path] - decided[path] for path in known if known[path] - decided[path]
    } == {}
    # The sources were read as the server reads them.
    assert known["/generate"] == {field.name for field in fields(GenerateReqInput)}
    decided_sampling = SAMPLING | INTERNAL_SAMPLING | REFUSED_SAMPLING
    assert {*SamplingParams.__struct_fields__} == decided_sampling, "decide about it"
