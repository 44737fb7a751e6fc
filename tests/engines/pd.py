"""Prefill and decode engines for tests: who asks whom for what, without a router."""

from __future__ import annotations

import json
import secrets
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.engines.models import BLOCK_SIZE, model_dir
from tests.engines.scenario import PROMPT
from tests.engines.server import Answer, Server, kv_transfer, value_in

SEND = {"transfer_type": "SEND"}
RECV = {"transfer_type": "RECV"}
HANDED_OFF = PROMPT - 1  # the decode engine computes the last token itself
BLOCKS_EACH = -(-HANDED_OFF // BLOCK_SIZE)
LEASE_S = 10.0  # long enough for a busy machine
DEADLINE_S = 10.0
LIMITS = {"lease_s": LEASE_S, "deadline_s": DEADLINE_S}
Pair = tuple[Server, Server]


def prefill_config(connector: str = "KVConnect", module: str | None = None, **extra: Any) -> str:
    settings = {"host_bytes": "off", "transport": "tcp", **extra}
    return kv_transfer(connector, module, role="kv_producer", **settings)


def decode_config(**extra: Any) -> str:
    return kv_transfer(role="kv_consumer", **{"host_bytes": "off", "transport": "tcp", **extra})


@contextmanager
def pair(
    model: str = "llama",
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **both: Any,
) -> Iterator[Pair]:
    """Start one prefill and one decode engine side by side. ``prefill`` and ``decode`` are
    arguments of :class:`Server`, ``both`` those of either."""
    p = Server(model, **{"connector": prefill_config(), **both, **(prefill or {})})
    d = Server(model, **{"connector": decode_config(), **both, **(decode or {})})
    with side_by_side(p, d):
        yield p, d


@contextmanager
def side_by_side(*servers: Server) -> Iterator[None]:
    """Start servers at the same time; if one does not come up, stop all and raise its error."""
    for server in servers:
        model_dir(server.model)  # once, not by all of them
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(stack.enter_context, servers))
        yield


def prefill(server: Server, prompt: list[int], transfer: str | None = None) -> dict[str, Any]:
    """Run a prompt on a prefill engine; return the parameters for the decode engine."""
    wanted: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if transfer is not None:
        wanted["transfer_id"] = transfer
    params: dict[str, Any] = raw(server, prompt, 1, kv_transfer_params=wanted)["kv_transfer_params"]
    return params


def standing_ticket(server: Server) -> str:
    """Return the standing ticket of a prefill engine."""
    wanted = {"do_remote_decode": True, "kvconnect_card": True}
    text: str = raw(server, [1, 1], 1, kv_transfer_params=wanted)["kv_transfer_params"][
        "kvconnect_card"
    ]
    return text


def pull(p: Server, d: Server, prompt: list[int], new: int) -> Answer:
    """Prefill, then decode."""
    return d.complete(prompt, new, kv_transfer_params=prefill(p, prompt))


def push(p: Server, d: Server, prompt: list[int], new: int, offer: str) -> Answer:
    """Ask both at the same time. ``offer`` is the prefill engine's standing ticket."""
    transfer = secrets.token_hex(16)
    first = threading.Thread(target=prefill, args=(p, prompt, transfer))
    first.start()
    try:
        return d.complete(prompt, new, kv_transfer_params=push_params(transfer, offer))
    finally:
        first.join()


def push_params(transfer: str, offer: str) -> dict[str, Any]:
    """Return the decode engine's parameters of a push."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer,
        "kvconnect_ticket": offer,
    }


def raw(server: Server, prompt: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """Return the whole answer to a completion."""
    body = server.body(prompt, max_tokens, **extra)
    answer: dict[str, Any] = json.loads(server.post("/v1/completions", body))
    return answer


def received_bytes(server: Server) -> float:
    return server.metric("vllm:kvconnect_transfer_bytes_total", **RECV)


def sent_bytes(server: Server) -> float:
    return server.metric("vllm:kvconnect_transfer_bytes_total", **SEND)


def assert_quiet(*servers: Server) -> None:
    """After quiescence, and at the latest when leases have run out, nobody holds anything."""
    for server in servers:
        server.settle()
        deadline = time.monotonic() + 2 * (LEASE_S + DEADLINE_S)
        while server.metric("vllm:kvconnect_ledger_held_blocks") and time.monotonic() < deadline:
            time.sleep(0.1)
        now = server.scrape()
        for owner in ("store", "load", "send", "recv"):
            assert value_in(now, "vllm:kvconnect_ledger_held_blocks", owner=owner) == 0
        assert value_in(now, "vllm:kv_cache_usage_perc") == 0


@contextmanager
def one_clean_error() -> Iterator[None]:
    """The engine answers with an error, and is done with the request."""
    with pytest.raises(urllib.error.HTTPError) as failed:
        yield
    with failed.value as error:
        assert error.code == 500


def refused(server: Server, field: str) -> float:
    return server.metric("vllm:kvconnect_handoff_refused_total", field=field)
