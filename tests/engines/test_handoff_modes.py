"""Hand-offs between engines that run in other ways than plain ones do: with certificates, with data
parallelism on the prefill side, with speculative decoding on the decode side. Pipeline parallelism
is not among them: vLLM 0.32's CPU engine fails with it, without any connector."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.models import BLOCK_SIZE
from tests.engines.pd import (
    BLOCKS_EACH,
    LIMITS,
    SEND,
    Pair,
    assert_quiet,
    decode_config,
    one_clean_error,
    pair,
    prefill_config,
    pull,
    push,
    raw,
    received_bytes,
    refused,
    sent_bytes,
    side_by_side,
    standing_ticket,
)
from tests.engines.scenario import (
    COUNT,
    CROWD_NEW,
    HOST,
    NEW,
    assert_nothing_leaks,
    block_bytes,
    crowd,
    expected,
    hit_tokens,
    prompts,
    tokens,
)
from tests.engines.server import Server
from tests.links import make_certificates

DRAFTS = {  # from one token that occurred before; a random model takes none of them
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
CONTINUED = CROWD_NEW - 8  # tokens of an answer that become part of the next prompt


def assert_handed_off(p: Server, d: Server) -> None:
    """Half of the prompts are pulled, half are pushed, each whole and once: all get the tokens of
    a single engine, and nothing stays behind."""
    want = expected("llama").fresh
    assert len(set(want)) == COUNT  # else equality would prove little
    offer = standing_ticket(p)
    assert tokens([pull(p, d, prompt, NEW) for prompt in prompts()[:4]]) == want[:4]
    assert tokens([push(p, d, prompt, NEW, offer) for prompt in prompts()[4:]]) == want[4:]
    assert_quiet(p, d)
    assert received_bytes(d) == sent_bytes(p) == COUNT * BLOCKS_EACH * block_bytes("llama")


class Secured(NamedTuple):
    prefill: Server
    decode: Server
    stranger: Server
    """A decode engine that has the key and trusts the others' authority, but whose certificate
    is another's."""


@pytest.fixture(scope="class")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    expected("llama")  # before the machine is busy with other engines
    ours, theirs = (tmp_path_factory.mktemp(name) for name in ("ours", "theirs"))
    for folder in (ours, theirs):
        make_certificates(folder)
    shutil.copy(ours / "ca.crt", theirs)
    key = ours / "handoff.key"
    key.write_text(secrets.token_hex(32))

    def settings(folder: Path) -> dict[str, Any]:
        return {"tls_dir": str(folder), "key_file": str(key), **LIMITS}

    engines = Secured(
        Server("llama", prefill_config(**settings(ours))),
        Server("llama", decode_config(**settings(ours))),
        Server("llama", decode_config(**settings(theirs))),
    )
    with side_by_side(*engines):
        yield engines


class TestMutualTls:
    def test_pull_and_push(self, secured: Secured) -> None:
        assert_handed_off(secured.prefill, secured.decode)

    def test_a_certificate_of_another_authority_is_refused(self, secured: Secured) -> None:
        """With a ticket that is valid: the same key signs for all of them."""
        p, d, stranger = secured
        with one_clean_error():
            pull(p, stranger, prompts()[0], NEW)
        with one_clean_error():
            push(p, stranger, prompts()[1], NEW, standing_ticket(p))
        assert_quiet(p, stranger)
        assert stranger.metric("vllm:kvconnect_handoff_refused_total") > 0
        assert stranger.metric("vllm:kvconnect_handoff_failures_total", cause="refused") == 2
        assert received_bytes(stranger) == 0
        before = received_bytes(d)
        d.post("/reset_prefix_cache")
        assert pull(p, d, prompts()[0], NEW).tokens == expected("llama").fresh[0]
        assert received_bytes(d) > before
        assert_quiet(p, d)


def test_speculative_decoding() -> None:
    """Drafts that are not taken change no tokens, and the host tier keeps nothing of them. Those
    that are taken have a test in ``test_drafts.py``."""
    asked, want = crowd()[:16], expected("llama").crowd[:16]
    assert len(set(want)) == len(asked)
    decode = {
        "connector": decode_config(host_bytes=HOST, digest="full"),
        "args": ("--speculative-config", json.dumps(DRAFTS)),
    }
    with pair(decode=decode) as (p, d):
        offer = standing_ticket(p)
        pulled = [pull(p, d, prompt, CROWD_NEW) for prompt in asked[:8]]
        pushed = [push(p, d, prompt, CROWD_NEW, offer) for prompt in asked[8:]]
        assert tokens(pulled + pushed) == want
        assert_quiet(p, d)
        handed_off = sum(-(-(len(prompt) - 1) // BLOCK_SIZE) for prompt in asked)
        assert received_bytes(d) == sent_bytes(p) == handed_off * block_bytes("llama")
        assert d.metric("vllm:spec_decode_num_draft_tokens_total") > 0

        d.post("/reset_prefix_cache")
        before = hit_tokens(d)
        for prompt, answer in zip(asked, want, strict=True):
            again = d.complete([*prompt, *answer[:CONTINUED]], CROWD_NEW - CONTINUED)
            assert again.tokens == answer[CONTINUED:]
        # More than the full blocks of the prompts: also such that hold generated tokens.
        prompt_hits = sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in asked)
        assert hit_tokens(d) - before > prompt_hits
        assert_nothing_leaks(d)


@pytest.fixture(scope="class")
def replicas() -> Iterator[Pair]:
    expected("llama")
    sending, receiving = prefill_config(**LIMITS), decode_config(**LIMITS)
    prefill = {"connector": sending, "args": ("--data-parallel-size", "2")}
    with pair(prefill=prefill, decode={"connector": receiving}) as servers:
        yield servers


class TestDataParallelPrefill:
    """Two prefill engines behind one address; vLLM chooses which of them gets a prompt."""

    def test_pull(self, replicas: Pair) -> None:
        p, d = replicas
        want = expected("llama").fresh
        assert tokens([pull(p, d, prompt, NEW) for prompt in prompts()[:4]]) == want[:4]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda prompt: pull(p, d, prompt, NEW), prompts()[4:]))
        assert tokens(found) == want[4:]
        assert_quiet(p, d)
        assert received_bytes(d) == sent_bytes(p) == COUNT * BLOCKS_EACH * block_bytes("llama")
        name = "vllm:kvconnect_transfer_bytes_total"
        assert all(p.metric(name, **SEND, engine=engine) > 0 for engine in "01")

    def test_there_is_no_standing_ticket(self, replicas: Pair) -> None:
        """It would name one of the engines, and a push may reach the other. Whoever names the
        engine gets it (see ``test_data_parallel.py``)."""
        p, d = replicas
        before = refused(p, "params")
        wanted = {"do_remote_decode": True, "kvconnect_card": True}
        answer = raw(p, prompts()[0], 1, kv_transfer_params=wanted)
        assert answer["kv_transfer_params"] is None
        assert_quiet(p, d)
        assert refused(p, "params") == before + 1
