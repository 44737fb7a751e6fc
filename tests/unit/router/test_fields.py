"""Which fields reach engines: every one that an engine knows has been decided about."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvconnect.errors import ConfigError, Refused
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.options import Listening
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.fields import (
    ANTHROPIC,
    DECISIONS,
    DROPPED,
    OPENAI,
    Permissions,
    check_named,
    permitted,
)
from scripts.engine_api.fields import VLLM_TYPES, read_text, request_fields
from tests.fakes.engine import FakeEngine, bench, decodes, on_loop, prefills

LAST = Path(__file__).resolve().parents[2] / "engine_api" / "vllm-0.33-fields.txt"
KEYED = Permissions(listed_only=True, priority=False)
SECOND = "sk-4a7f0c2be19d4e5f"


def undecided(engine: EngineKind, known: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Fields that an engine knows and no list has."""
    found = {path: names - DECISIONS[engine].decided(path) for path, names in known.items()}
    return {path: names for path, names in found.items() if names}


def test_every_field_of_the_installed_vllm_is_decided() -> None:
    vllm = pytest.importorskip("vllm")
    known = request_fields(Path(vllm.__file__).parents[1], "vllm")
    assert undecided(EngineKind.VLLM, known) == {}
    # The sources were read as pydantic reads them.
    for path, types in VLLM_TYPES.items():
        models = (getattr(importlib.import_module(module), name) for module, name in types)
        assert known[path] == {field for model in models for field in model.model_fields}


def test_every_field_of_the_last_supported_vllm_is_decided() -> None:
    known = read_text(LAST.read_text())
    assert known.keys() == VLLM_TYPES.keys()
    assert undecided(EngineKind.VLLM, known) == {}
    # Control: a field that a version adds is found.
    more = {**known, "/v1/completions": known["/v1/completions"] | {"kv_home"}}
    assert undecided(EngineKind.VLLM, more) == {"/v1/completions": {"kv_home"}}


def test_lists_have_no_fields_that_no_version_knows() -> None:
    known = read_text(LAST.read_text())
    clients = {*OPENAI.split(), *ANTHROPIC.split(), "max_chunks_per_doc", "return_documents"}
    for path, names in known.items():
        assert DECISIONS[EngineKind.VLLM].passed[path] - names <= clients, path


def body_of(**fields: Any) -> dict[str, Any]:
    return read_body(msgspec.json.encode(fields))


def kept(engine: EngineKind, path: str, permissions: Permissions, **fields: Any) -> set[str]:
    return set(permitted(engine, path, body_of(**fields), permissions).body)


DANGEROUS = ("custom_labels", "kv_hints", "mm_hashes", "http_worker_ipc", "background", "no_logs")


@pytest.mark.parametrize("permissions", [KEYED, Permissions()])
def test_dangerous_fields_are_dropped_and_named(permissions: Permissions) -> None:
    body = body_of(text="a", **{name: {"a": "b"} for name in DANGEROUS}, rid="0")
    found = permitted(EngineKind.SGLANG, "/generate", body, permissions)
    assert found.body.keys() == {"text"}
    assert set(found.dropped) == {*DANGEROUS} and set(found.dropped) <= set(DROPPED)
    # The operator may let one pass, but none that only the router sets.
    named = permissions._replace(named=check_named(["custom_labels"]))
    assert "custom_labels" in permitted(EngineKind.SGLANG, "/generate", body, named).body
    for name in ("rid", "kv_transfer_params", "bootstrap_host"):
        with pytest.raises(ConfigError, match=name):
            check_named([name])


def test_a_field_that_no_list_has_is_refused_where_keys_are_set_and_passes_else() -> None:
    for engine in EngineKind:
        with pytest.raises(Refused, match="--pass-field top_q"):
            kept(engine, "/v1/completions", KEYED, prompt="a", top_q=1)
        named = KEYED._replace(named=frozenset({"top_q"}))
        for permissions in (named, Permissions()):
            found = kept(engine, "/v1/completions", permissions, prompt="a", top_q=1)
            assert found == {"prompt", "top_q"}


def test_a_field_that_runs_code_or_names_sessions_needs_the_operator() -> None:
    for name in ("session_params", "custom_logit_processor"):
        for permissions in (KEYED, Permissions()):
            with pytest.raises(Refused, match=f"--pass-field {name}"):
                kept(EngineKind.SGLANG, "/generate", permissions, text="a", **{name: "x"})


@pytest.mark.parametrize("name", ["stop_regex", "stop\\u005fregex"])
def test_a_pattern_that_sglang_tries_after_each_token_needs_the_operator(name: str) -> None:
    raw, named = name.encode(), Permissions(named=frozenset({"stop_regex"}))
    nested = b'{"sampling_params":%b}'
    for path, sent in (
        ("/v1/completions", b'{"%b":"(a+)+$"}' % raw),
        ("/v1/chat/completions", b'{"%b":["(a+)+$"]}' % raw),
        ("/generate", nested % (b'{"%b":"(a+)+$"}' % raw)),
        ("/generate", nested % (b'[{},{"%b":["(a+)+$"]}]' % raw)),
    ):
        body = read_body(sent)
        for permissions in (KEYED, Permissions()):
            with pytest.raises(Refused, match="--pass-field stop_regex"):
                permitted(EngineKind.SGLANG, path, body, permissions)
        found = permitted(EngineKind.SGLANG, path, body, named).body
        assert b'"stop_regex":' in msgspec.json.encode(found)
    for empty in (b"null", b"[]"):  # SGLang's own client always sends the field
        body = read_body(nested % (b'{"%b":%b}' % (raw, empty)))
        found = permitted(EngineKind.SGLANG, "/generate", body, KEYED).body
        assert msgspec.json.encode(found) == nested % (b'{"stop_regex":%b}' % empty)


@pytest.mark.parametrize("permissions", [KEYED, Permissions()])
def test_a_refused_field_without_a_value_is_left_out(permissions: Permissions) -> None:
    sent = b'{"text":"a","stop_regex":[],"session_params":null,"stop\\u005fregex":[]}'
    for path, text in (("/generate", {"text"}), ("/v1/responses", {"text"})):
        found = permitted(EngineKind.SGLANG, path, read_body(sent), permissions)
        assert (set(found.body), found.dropped) == (text, ())


EMBEDS = ("embed_override_token_id", "embed_overrides", "item_embed_overrides")


@pytest.mark.parametrize("permissions", [KEYED, Permissions()])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify", "/score", "/v1/score"])
@pytest.mark.parametrize("name", [*EMBEDS, "query_embed_overrides"])
def test_vectors_that_may_not_be_of_the_models_width_need_the_operator(
    permissions: Permissions, path: str, name: str
) -> None:
    with pytest.raises(Refused, match=f"--pass-field {name}"):
        kept(EngineKind.SGLANG, path, permissions, model="m", **{name: [[1.0, 2.0]]})
    named = permissions._replace(named=check_named([name]))
    assert kept(EngineKind.SGLANG, path, named, model="m", **{name: [[1.0]]}) == {"model", name}


def test_priority_passes_with_the_permission_of_the_key() -> None:
    for engine, path in ((EngineKind.VLLM, "/v1/completions"), (EngineKind.SGLANG, "/generate")):
        assert kept(engine, path, KEYED, priority=-9) == set()
        assert kept(engine, path, KEYED._replace(priority=True), priority=-9) == {"priority"}


@pytest.mark.parametrize("name", ["is_normalized", "is\\u005fnormalized"])
def test_sglangs_internal_sampling_fields_do_not_pass(name: str) -> None:
    one = b'{"%b": true, "temperature": 0.10}' % name.encode()
    for sent, wanted in (
        (one, b'{"temperature":0.10}'),
        (b"[%b]" % one, b'[{"temperature":0.10}]'),
    ):
        body = read_body(b'{"text": "a", "sampling_params": %b}' % sent)
        found = permitted(EngineKind.SGLANG, "/generate", body, KEYED).body
        assert msgspec.json.encode(found["sampling_params"]) == wanted
    with pytest.raises(Refused):
        body = read_body(b'{"sampling_params": "is_normalized"}')
        permitted(EngineKind.SGLANG, "/generate", body, KEYED)


@on_loop
async def test_a_router_drops_counts_and_refuses() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    keys = (ApiKey("sk-0123456789abcdef", "a"), ApiKey(SECOND, "b", priority=True))
    ask = {"model": "tiny", "prompt": "a", "priority": 3, "session_id": "theirs"}
    async with bench([p], [d], listening=Listening(api_keys=keys)) as router:
        for key in keys:
            headers = {"Authorization": f"Bearer {key.key}", "X-Vllm-Priority": "3"}
            assert (await router.post(ask, headers=headers)).status == 200
            for engine in (p, d):
                assert ("priority" in engine.asked[-1]) is key.priority
                assert ("x-vllm-priority" in engine.headers[-1]) is key.priority
                assert "session_id" not in engine.asked[-1]
                assert "authorization" not in engine.headers[-1]
        assert await router.metric("dropped_fields_total", field="priority") == 1
        assert await router.metric("dropped_fields_total", field="session_id") == 2
        status, said, _ = await router.post(ask | {"top_q": 1}, headers=headers)
        assert status == 400 and "--pass-field top_q" in json.loads(said)["error"]["message"]
        assert len(d.asked) == 2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify", "/score", "/rerank"])
def test_the_routers_salt_is_left_out_where_sglang_takes_none(path: str) -> None:
    body = read_body(b'{"model":"m","cache_salt":"T.1","user_field":1}')
    with pytest.raises(Refused, match="user_field"):
        permitted(EngineKind.SGLANG, path, body, KEYED)
    del body["user_field"], body["model"]
    assert permitted(EngineKind.SGLANG, path, body, KEYED) == ({}, ())
    for kind, salted in ((EngineKind.VLLM, path), (EngineKind.SGLANG, "/v1/completions")):
        assert permitted(kind, salted, body, KEYED).body == body


@pytest.mark.parametrize(
    "many", [b'[{"\\u0061":1}%b]' % (b",{}" * 40_000), b'{"\\u0061":1%b}' % (b',"a":0' * 70_000)]
)
def test_sampling_parameters_with_too_many_parts_are_refused_before_they_are_decoded(
    many: bytes,
) -> None:
    body = read_body(b'{"text":"a","sampling_params":%b}' % many)
    with pytest.raises(Refused, match="too many parts: ask about fewer prompts"):
        permitted(EngineKind.SGLANG, "/generate", body, Permissions())
    few = read_body(b'{"text":"a","sampling_params":[{"\\u0061":1}%b]}' % (b",{}" * 1_000))
    found = permitted(EngineKind.SGLANG, "/generate", few, Permissions()).body
    assert len(json.loads(msgspec.json.encode(found))["sampling_params"]) == 1_001
