"""Each kind of request is answered through a router, by two engines, as by one engine alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engines.pd import decode_config, prefill_config, received_bytes, side_by_side
from tests.engines.ranks import until
from tests.engines.request_kinds import KINDS, Kind, comparable, differences
from tests.engines.server import Router, Server

AT_ONCE = 4
WHOLE_PROMPTS = ("--max-num-batched-tokens", "2048")
"""vLLM's CPU engine ends when it computes a prompt with a seed in parts: torch's generator of CPUs
has no offset to go back to."""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server, Router]]:
    configs = prefill_config(), decode_config()
    p, d = (Server("llama", config, args=WHOLE_PROMPTS) for config in configs)
    with side_by_side(p, d), Router([p], [d]) as router:
        yield p, d, router


def ask(url: str, name: str, kind: Kind) -> tuple[int, str, Any]:
    """Return status, type and what is to be compared of an answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + kind.path, kind.asked(name), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
            return answer.status, answer.headers["Content-Type"], comparable(text)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode()
            return error.code, error.headers["Content-Type"], comparable(text)


def test_every_kind_is_answered_as_by_one_engine(pair: tuple[Server, Server, Router]) -> None:
    p, d, router = pair
    with ThreadPoolExecutor(AT_ONCE) as pool:
        through = list(pool.map(lambda item: ask(router.url, *item), KINDS.items()))
        alone = list(pool.map(lambda item: ask(p.url, *item), KINDS.items()))
    compared = zip(KINDS, alone, through, strict=True)
    found = {name: differences(one, other) for name, one, other in compared}
    assert not {name: some for name, some in found.items() if some}
    assert len(KINDS) >= 40
    statuses = dict(zip(KINDS, (status for status, _, _ in alone), strict=True))
    refused = {name for name, status in statuses.items() if status != 200}
    assert refused == set(list(KINDS)[list(KINDS).index("no prompt") :])  # and nothing else
    until(
        lambda: router.metric("kvconnect_router_requests_total", mode="push", outcome="ok") >= 40,
        "answers by both engines",
    )
    assert received_bytes(d) > 0
    # Control: another prompt, and another number of tokens, are seen.
    completion = KINDS["completion"]
    fewer = Kind(completion.path, {**completion.body, "max_tokens": 7})
    for other in (ask(p.url, "another", completion), ask(p.url, "completion", fewer)):
        assert differences(alone[0], other)
