"""Draft models: their KV is stored, loaded and handed off with the model's own.

The target checks each draft, so wrong KV of a draft model changes no token: it makes drafts wrong.
The draft model here has the weights of the target, so that every draft is right if its KV is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.engines.models import model_dir
from tests.engines.pd import (
    BLOCKS_EACH,
    LIMITS,
    assert_quiet,
    pull,
    push,
    received_bytes,
    refused,
    sent_bytes,
    side_by_side,
    standing_ticket,
)
from tests.engines.scenario import (
    COUNT,
    FULL,
    HOST,
    NEW,
    ask,
    block_bytes,
    expected,
    hit_tokens,
    prompts,
    tokens,
)
from tests.engines.server import Server, kv_transfer

BLOCK = block_bytes("llama")  # of the model; the draft model's is as large
HALF = COUNT // 2
DRAFTS = 3  # per step
FAULTY = "tests.engines.faulty"


class Engines(NamedTuple):
    drafting: Server
    faulty: Server
    """As ``drafting``, but loads from its host tier empty the draft model's layers."""
    plain: Server


def server(drafts: bool, connector: str = "KVConnect", module: str | None = None) -> Server:
    settings = {"host_bytes": HOST, "digest": "off", "transport": "tcp", **LIMITS}
    draft = {"model": str(model_dir("llama")), "method": "draft_model"}
    config = json.dumps({**draft, "num_speculative_tokens": DRAFTS})
    args = ("--speculative-config", config) if drafts else ()
    return Server("llama", kv_transfer(connector, module, **settings), args=args)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    expected("llama")  # before the machine is busy with other engines
    found = Engines(server(True), server(True, "ForgetsDrafts", FAULTY), server(False))
    with side_by_side(*found):
        yield found


def right_drafts(engine: Server) -> tuple[float, float]:
    """Return how many drafts were right so far, and how many there were."""
    accepted = engine.metric("vllm:spec_decode_num_accepted_tokens_total")
    return accepted, engine.metric("vllm:spec_decode_num_draft_tokens_total")


def forget(engine: Server, host: bool) -> None:
    """Empty the device's prefix cache, and the host tier, too, if ``host``."""
    engine.settle()
    engine.post(f"/reset_prefix_cache?reset_external={str(host).lower()}")


def stores_and_loads(engine: Server) -> tuple[float, float]:
    """All prompts are computed, then loaded from the host tier to the block; both times they get
    the tokens of a single engine. Return the shares of right drafts."""
    forget(engine, host=True)
    marks, hits = [right_drafts(engine)], []
    for _ in range(2):
        before = hit_tokens(engine)
        assert tokens(ask(engine)) == expected("llama").fresh
        hits.append(hit_tokens(engine) - before)
        marks.append(right_drafts(engine))
        forget(engine, host=False)
    assert hits == [0, COUNT * FULL]
    (a, b, c) = marks
    return (b[0] - a[0]) / (b[1] - a[1]), (c[0] - b[0]) / (c[1] - b[1])


def test_the_host_tier_has_the_drafts_kv(engines: Engines) -> None:
    assert stores_and_loads(engines.drafting) == (1, 1)
    assert_quiet(engines.drafting)


def test_negative_control_without_its_kv_a_draft_model_is_wrong(engines: Engines) -> None:
    computed, loaded = stores_and_loads(engines.faulty)
    assert computed == 1 and loaded < 0.5


def hand_off(p: Server, d: Server) -> float:
    """Half of the prompts are pulled, half are pushed, all get the tokens of a single engine.
    Return the bytes that decode received."""
    for engine in (p, d):
        forget(engine, host=True)
    want, offer = expected("llama").fresh, standing_ticket(p)
    before, sent = received_bytes(d), sent_bytes(p)
    assert tokens([pull(p, d, prompt, NEW) for prompt in prompts()[:HALF]]) == want[:HALF]
    assert tokens([push(p, d, prompt, NEW, offer) for prompt in prompts()[HALF:]]) == want[HALF:]
    assert_quiet(p, d)
    assert sent_bytes(p) - sent == received_bytes(d) - before
    return received_bytes(d) - before


def test_both_draft(engines: Engines) -> None:
    """All drafts of decode are right, since it has the draft model's KV of the prompt; except those
    of a request's first step, for which vLLM 0.32 has placeholders if one token is left."""
    right, drafts = right_drafts(engines.faulty)
    assert hand_off(engines.drafting, engines.faulty) == 2 * COUNT * BLOCKS_EACH * BLOCK
    more_right, more = right_drafts(engines.faulty)
    assert more_right - right == more - drafts - COUNT * DRAFTS > 0


def test_prefill_alone_drafts(engines: Engines) -> None:
    assert hand_off(engines.drafting, engines.plain) == COUNT * BLOCKS_EACH * BLOCK


def test_decode_alone_drafts(engines: Engines) -> None:
    """The hand-off is refused with one line that names the layers. Decode computes the prompt, so
    its drafts are right."""
    p, d = engines.plain, engines.drafting
    forget(d, host=True)
    right, drafts = right_drafts(d)
    bytes_before, before = received_bytes(d), refused(d, "layers")
    assert pull(p, d, prompts()[0], NEW).tokens == expected("llama").fresh[0]
    more_right, more = right_drafts(d)
    assert more_right - right == more - drafts > 0
    assert received_bytes(d) == bytes_before
    assert refused(d, "layers") == before + 1
    said = [line for line in d.log.read_text().splitlines() if "layers is" in line]
    assert said and all("draft_model.model.layers.0" in line for line in said)
    assert "Traceback" not in d.log.read_text()
