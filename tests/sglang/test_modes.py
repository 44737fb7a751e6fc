"""KVConnect under a built-in name, the decode server's own prefix cache, and several tokenizers.

Latent attention is not run on a server: SGLang's attention for the CPU does not know it. How its
pages are handed off is in ``tests/unit/engines/test_sglang_disaggregation.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.models import prompt_tokens
from tests.sglang.pd import LAYERWISE, ask, ask_all, decode_server, prefill_server, side_by_side
from tests.sglang.scenario import (
    CROWD,
    MOST_ROW_BYTES,
    NEW,
    Fleet,
    assert_quiet,
    moved_so_far,
    page_bytes,
    prompts,
    tokens,
    traded,
)
from tests.sglang.server import PAGE, SglangServer

Pair = tuple[SglangServer, SglangServer]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A pair that believes it uses the built-in backend ``nixl``. Only so may a server have more
    than one tokenizer: those processes load no plugins."""
    takeover = {"KVCONNECT_TAKEOVER": "nixl"}
    servers = (
        prefill_server(backend="nixl", env={**takeover, **LAYERWISE}),
        decode_server(
            backend="nixl",
            env=takeover,
            args=("--disaggregation-decode-enable-radix-cache", "--tokenizer-worker-num", "2"),
        ),
    )
    with side_by_side(*servers):
        yield servers


def test_taken_over(pair: Pair, fleet: Fleet) -> None:
    p, d = pair
    want = [fleet.single.complete(prompt, NEW).tokens for prompt in prompts()]
    assert tokens([ask(p, d, prompt, NEW) for prompt in prompts()]) == want
    # Once more, of what both servers' prefix caches have.
    assert tokens(ask_all(p, d, prompts(), NEW, CROWD)) == want
    assert p.metric("sglang:kvconnect_transfer_bytes_total", transfer_type="SEND") > 0


def test_a_prefix_the_decode_server_has_is_not_sent(pair: Pair, fleet: Fleet) -> None:
    p, d = pair
    start, more = prompt_tokens(20 * PAGE, start=9000), prompt_tokens(6 * PAGE, start=15_000)
    both = start + more
    for prompt, new_pages in ((more, 6), (start, 20), (both, 6)):
        before = moved_so_far(p, d)
        assert ask(p, d, prompt, NEW).tokens == fleet.single.complete(prompt, NEW).tokens
        nbytes = new_pages * page_bytes()
        assert traded(p, d, before, nbytes) - nbytes < MOST_ROW_BYTES
    # All of it: hardly anything is left to send but the first token.
    assert ask(p, d, both, NEW).tokens == fleet.single.complete(both, NEW).tokens
    assert_quiet(p, d)
