"""Share tickets in vLLM's scheduler: what it issues, and which sources of requests it accepts."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvconnect.disaggregation.messages import PrefillSource
from kvconnect.engines.vllm.messages import WorkerHello
from kvconnect.engines.vllm.shares import SHARE_TICKET_S, ShareTickets
from kvconnect.protocol.tickets import MOST_SHARING, Scope, Ticket, issue, verify
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.security import Keys
from kvconnect.types import Endpoint

KEY = b"a key that all engines hold"
THERE = (("10.0.0.2", 7900),)


def share(host: str, port: int, expires: float, key: bytes = KEY) -> str:
    """A ticket of an engine with one worker."""
    endpoints = (Endpoint(0, 0, host, port),)
    ticket = Ticket(
        engine_id="p",
        epoch=5,
        endpoints=endpoints,
        tp=1,
        pp=1,
        expires=expires,
        scope=Scope.SHARE,
    )
    return issue(ticket, key)


def endpoints_of(text: object, now: float) -> tuple[Endpoint, ...]:
    return verify(text, [KEY], now, scope=Scope.SHARE).endpoints


def hellos(*ports: int | None) -> dict[tuple[int, int], WorkerHello]:
    """Hellos of the ranks of an engine, the last rank first."""
    found = {
        (0, rank): WorkerHello(1, 1, serves=("10.0.0.1", port) if port else None)
        for rank, port in enumerate(ports)
    }
    return dict(reversed(found.items()))


def engine(*ports: int | None, key: bytes = KEY) -> ShareTickets:
    made = ShareTickets(Keys(key), OffloadingConnectorStats())
    ports = ports or (7900,)
    made.greet(hellos(*ports), PrefillSource("e", 7, (), len(ports), 1))
    return made


def asked(tickets: ShareTickets, options: Any) -> dict[str, Any] | None:
    """What a request with these options is answered."""
    tickets.add_request("r", {"kvconnect": options})
    return tickets.finish("r", {"other": 1})


def source(tickets: ShareTickets, params: Mapping[str, Any]) -> Any:
    """The source that a request with these parameters is given."""
    tickets.add_request("r", params)
    return tickets.source("r")


def ignored(tickets: ShareTickets) -> int:
    counted = tickets._stats.data["counters"].get("ignored_cache_hints", {})
    return int(counted.get("invalid", 0))


def test_an_engine_s_ticket_has_the_addresses_of_all_its_workers_in_order() -> None:
    answer = asked(engine(7900, 7901), {"share": True})
    assert answer is not None
    assert (answer["other"], answer["kvconnect_share_expires_in"]) == (1, SHARE_TICKET_S)
    want = (Endpoint(0, 0, "10.0.0.1", 7900), Endpoint(1, 0, "10.0.0.1", 7901))
    now = time.time()
    assert endpoints_of(answer["kvconnect_share"], now) == want
    assert endpoints_of(answer["kvconnect_share"], now + SHARE_TICKET_S) == want


def test_a_ticket_of_ranks_that_keep_their_kv_once_has_the_address_of_the_one_that_serves() -> None:
    workers = {
        (0, 0): WorkerHello(1, 1, serves=("10.0.0.2", 7900)),
        (0, 1): WorkerHello(1, 1, stores=False),
    }
    tickets = ShareTickets(Keys(KEY), OffloadingConnectorStats())
    tickets.greet(workers, PrefillSource("e", 7, (), 2, 1))
    answer = asked(tickets, {"share": True})
    assert answer is not None
    assert source(engine(), {"kvconnect": {"source": answer["kvconnect_share"]}}) == THERE


@pytest.mark.parametrize(
    "tickets",
    [
        engine(None),
        engine(7900, None),
        engine(key=b""),
        engine(*range(1, MOST_SHARING + 2)),
        ShareTickets(Keys(KEY), OffloadingConnectorStats()),
    ],
)
def test_an_engine_that_serves_not_or_cannot_sign_issues_none(tickets: ShareTickets) -> None:
    assert asked(tickets, {"share": True}) == {"other": 1}


@pytest.mark.parametrize("options", [{"share": 1}, {"share": "true"}, {}, [], None, "share"])
def test_nothing_else_is_answered_with_a_ticket(options: object) -> None:
    assert asked(engine(), options) == {"other": 1}


def test_a_request_s_source_is_kept_until_its_end() -> None:
    tickets = engine()
    text = share("10.0.0.2", 7900, time.time() + 9)
    assert source(tickets, {"kvconnect": {"source": text}}) == THERE
    assert tickets.source("another") == ()
    assert tickets.finish("r", None) is None
    assert tickets.source("r") == ()
    assert ignored(tickets) == 0
    assert source(engine(None), {"kvconnect": {"source": text}}) == THERE, "it serves nothing"


def test_a_source_that_is_not_valid_is_ignored_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tickets, now = engine(), time.time()
    bad = [
        share("10.0.0.2", 7900, now + 9)[:-1],
        share("10.0.0.2", 7900, now - 60),
        share("10.0.0.2", 7900, now + 9, b"another key"),
        share("0.0.0.0", 1, now + 9),
        "10.0.0.2:7900",
        {"address": "10.0.0.2:7900"},
        None,
    ]
    with caplog.at_level(logging.INFO):
        for text in bad:
            assert source(tickets, {"kvconnect": {"source": text}}) == ()
    assert ignored(tickets) == len(bad)
    assert len(caplog.records) == 1
    keyless = engine(key=b"")
    assert source(keyless, {"kvconnect": {"source": bad[0]}}) == ()
    assert ignored(keyless) == 1


def test_an_engine_is_not_its_own_source() -> None:
    tickets = engine(7900, 7901)
    own = share("10.0.0.1", 7901, time.time() + 9)
    assert source(tickets, {"kvconnect": {"source": own}}) == ()
    assert ignored(tickets) == 0


def test_addresses_outside_of_a_ticket_are_not_read() -> None:
    claims = {"remote_host": "10.0.0.2", "remote_port": 7900, "kvconnect_share": "text"}
    assert source(engine(), {**claims, "source": share("10.0.0.2", 7900, 1e12)}) == ()
