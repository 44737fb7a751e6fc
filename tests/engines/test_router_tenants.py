"""Two tenants of a router in front of two engines: their blocks, and what they may say."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.engines.models import prompt_tokens
from tests.engines.pd import side_by_side
from tests.engines.scenario import HOST
from tests.engines.server import Router, Server, events, kv_transfer

KEYS = {"a": "sk-0123456789abcdef", "b": "sk-4a7f0c2be19d4e5f"}
PROMPT = prompt_tokens(160, start=4000)
LEAST_CACHED = 96  # of PROMPT, in whole blocks
SHARE = 3  # requests that a tenant may have open
LONG = 600  # tokens: as a stream, they take seconds
LONGER = 800  # all that fits beside another: stays open while others ask, on a busy machine too


class Tenants(NamedTuple):
    servers: tuple[Server, Server]
    a: Router
    b: Router


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    servers = tuple(Server("llama", kv_transfer(host_bytes=HOST)) for _ in range(2))
    args = ("--unified", "--api-key-file", str(path), "--client-concurrent", str(SHARE))
    with side_by_side(*servers), Router([], servers, args) as router:
        asked = (
            Router([], servers, port=router.port, headers={"Authorization": f"Bearer {key}"})
            for key in KEYS.values()
        )
        yield Tenants((servers[0], servers[1]), *asked)


def test_tenants_share_no_blocks_whatever_salts_they_send(tenants: Tenants) -> None:
    for _ in range(4):  # also at the other engine
        tenants.b.complete(PROMPT, 2)
    assert min(tenants.b.complete(PROMPT, 2).cached for _ in range(2)) >= LEAST_CACHED, "control"
    for own in ({}, {"cache_salt": "b"}, {"cache_salt": KEYS["b"]}):
        assert tenants.a.complete(PROMPT, 2, **own).cached == 0


def test_unknown_fields_are_refused_and_priority_is_dropped(tenants: Tenants) -> None:
    assert len(tenants.a.complete(PROMPT[:20], 2, priority=-9).tokens) == 2
    assert tenants.a.metric("kvconnect_router_dropped_fields_total", field="priority") == 1
    with pytest.raises(urllib.error.HTTPError) as refused:
        tenants.a.complete(PROMPT[:20], 2, top_q=1)
    assert refused.value.code == 400 and b"--pass-field top_q" in refused.value.read()


def test_requests_that_a_tenant_leaves_end_no_other_ones_with_the_same_id(tenants: Tenants) -> None:
    """vLLM aborts a request by its id, which clients may choose."""
    same = {"request_id": "same"}
    alone = tenants.b.complete(PROMPT, LONG, **same).tokens
    body = tenants.b.body(PROMPT, LONG, stream=True, **same)
    with tenants.b.open("/v1/completions", body, **{"X-Request-Id": "same"}) as reply:
        chunks = events(reply)
        found = list(next(chunks)["choices"][0]["token_ids"])
        for _ in range(2 * SHARE):  # at both engines
            tenants.a.abort(PROMPT, after_chunks=1, max_tokens=LONG, **same)
        for chunk in chunks:
            found += [token for choice in chunk["choices"] for token in choice["token_ids"]]
    assert tuple(found) == alone
    for server in tenants.servers:
        server.settle()


def test_a_tenant_with_its_share_of_open_requests_takes_none_of_the_others(
    tenants: Tenants,
) -> None:
    with ExitStack() as stack:
        body = tenants.a.body(PROMPT, LONGER, stream=True)
        replies = [
            stack.enter_context(tenants.a.open("/v1/completions", body)) for _ in range(SHARE)
        ]
        with pytest.raises(urllib.error.HTTPError) as refused:
            tenants.a.complete(PROMPT, 2)
        assert refused.value.code == 429
        assert "open requests" in refused.value.read().decode()
        assert len(tenants.b.complete(PROMPT, 2).tokens) == 2
        for reply in replies:
            assert sum(len(each["choices"][0]["token_ids"]) for each in events(reply)) == LONGER
    assert len(tenants.a.complete(PROMPT, 2).tokens) == 2
