"""Two tenants of a router in front of two engines: their blocks, and what they may say."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.engines.models import prompt_tokens
from tests.engines.pd import side_by_side
from tests.engines.scenario import HOST
from tests.engines.server import Router, Server, kv_transfer

KEYS = {"a": "sk-0123456789abcdef", "b": "sk-4a7f0c2be19d4e5f"}
PROMPT = prompt_tokens(160, start=4000)
LEAST_CACHED = 96  # of PROMPT, in whole blocks


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
    args = ("--unified", "--api-key-file", str(path))
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
