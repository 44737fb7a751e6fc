"""Tickets: issued with the key, whole, in time, with addresses that make sense; or refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvconnect.errors import Misuse, Refused
from kvconnect.protocol.addresses import parse_host
from kvconnect.protocol.tickets import (
    CLOCK_SKEW_S,
    MAX_TICKET,
    MOST_SHARING,
    Scope,
    Ticket,
    issue,
    verify,
)
from kvconnect.types import Endpoint

KEY = b"a key that both sides hold"
NOW = 1_000_000.0
TRANSFER = bytes(range(16))
TICKET = Ticket(
    transfer=TRANSFER,
    engine_id="prefill-0",
    epoch=5,
    endpoints=(Endpoint(0, 0, "10.0.0.1", 7000), Endpoint(1, 0, "fd00::1", 7001)),
    tp=2,
    pp=1,
    tokens=99,
    expires=NOW + 30,
)
SHARE = replace(TICKET, transfer=b"", tokens=0, scope=Scope.SHARE)


def refused(text: object, key: bytes = KEY, now: float = NOW, **more: str) -> str:
    """The reason why a ticket is refused."""
    with pytest.raises(Refused) as caught:
        verify(text, (key,), now, **more)
    assert caught.value.field == "ticket"
    return str(caught.value)


def sealed(body: bytes, key: bytes = KEY) -> str:
    """A ticket's text around any body: what someone with the key could make."""
    mac = hmac.digest(key, b"kvconnect ticket\0" + body, hashlib.sha256)
    return base64.urlsafe_b64encode(body + mac).decode().rstrip("=")


@pytest.mark.parametrize("ticket", [TICKET, replace(TICKET, transfer=b"", tokens=0)])
@pytest.mark.parametrize("key", [KEY, b""])
def test_a_ticket_comes_out_as_it_went_in(ticket: Ticket, key: bytes) -> None:
    text = issue(ticket, key)
    assert verify(text, (key,), NOW) == ticket
    assert sealed(msgspec.msgpack.encode(ticket), key) == text


def test_every_changed_character_is_seen() -> None:
    text = issue(TICKET, KEY)
    for place, char in enumerate(text):
        for other in "A_-z9=+ é":
            if other != char:
                refused(text[:place] + other + text[place + 1 :])


def test_every_shorter_or_longer_ticket_is_refused() -> None:
    text = issue(TICKET, KEY)
    for length in range(len(text)):
        refused(text[:length])
    for more in ("A", "=", "\n", text):
        refused(text + more)


def test_another_key_is_refused() -> None:
    assert "key_file" in refused(issue(TICKET, b"other"))
    refused(issue(TICKET, b""))
    refused(issue(TICKET, KEY), key=b"")


@pytest.mark.parametrize("thing", [None, 5, b"bytes", ["list"], {"a": 1}, True])
def test_a_ticket_is_text(thing: object) -> None:
    assert "text" in refused(thing)


def test_a_long_ticket_is_refused_unread_and_never_issued() -> None:
    assert "at most" in refused("A" * (MAX_TICKET + 1))
    many = tuple(Endpoint(n, 0, "255.255.255.255", 65535) for n in range(1000))
    with pytest.raises(Misuse):
        issue(replace(TICKET, endpoints=many, tp=1000), KEY)


def test_a_ticket_for_200_workers_fits() -> None:
    many = tuple(Endpoint(n, 0, "255.255.255.255", 65535) for n in range(200))
    assert verify(issue(replace(TICKET, endpoints=many, tp=200), KEY), (KEY,), NOW).tp == 200


def test_a_share_ticket_for_the_most_workers_always_fits() -> None:
    longest = "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    most = tuple(Endpoint(n, 0, longest, 65535) for n in range(MOST_SHARING))
    ticket = replace(SHARE, engine_id="e" * 256, endpoints=most, tp=MOST_SHARING)
    assert verify(issue(ticket, KEY), (KEY,), NOW, scope=Scope.SHARE) == ticket


@pytest.mark.parametrize(("ticket", "other"), [(TICKET, Scope.SHARE), (SHARE, Scope.HANDOFF)])
def test_a_ticket_is_good_for_its_scope_alone(ticket: Ticket, other: Scope) -> None:
    text = issue(ticket, KEY)
    assert verify(text, (KEY,), NOW, scope=ticket.scope) == ticket  # the control
    with pytest.raises(Refused, match=f"has the scope {ticket.scope.value}, not {other.value}"):
        verify(text, (KEY,), NOW, scope=other)


def test_a_share_ticket_needs_a_key() -> None:
    """Without one anybody could sign it, so it is neither issued nor accepted."""
    with pytest.raises(Misuse, match="without a key"):
        issue(SHARE, b"")
    unsigned = sealed(msgspec.msgpack.encode(SHARE), b"")
    with pytest.raises(Refused, match="without a key"):
        verify(unsigned, (b"",), NOW, scope=Scope.SHARE)
    with pytest.raises(Refused, match="another key"):
        verify(unsigned, (KEY, b""), NOW, scope=Scope.SHARE)
    assert verify(issue(TICKET, b""), (KEY, b""), NOW) == TICKET  # the control


def test_while_keys_are_changed_both_are_good() -> None:
    for text in (issue(TICKET, KEY), issue(TICKET, b"the next key")):
        assert verify(text, (KEY, b"the next key"), NOW) == TICKET


def test_a_ticket_expires_with_room_for_clocks_that_differ() -> None:
    text = issue(TICKET, KEY)
    last = TICKET.expires + CLOCK_SKEW_S
    verify(text, (KEY,), last)
    assert "expired 31 s ago" in refused(text, now=last + 1)


def test_a_ticket_for_one_engine_is_of_no_use_to_others() -> None:
    text = issue(replace(TICKET, peer="decode-1"), KEY)
    assert verify(text, (KEY,), NOW, reader="decode-1").peer == "decode-1"
    assert "decode-2" in refused(text, reader="decode-2")
    refused(text)


@pytest.mark.parametrize(
    ("places", "good"),
    [
        ([(0, 0)], True),
        ([(1, 1), (0, 1)], True),
        ([(tp, pp) for tp in range(2) for pp in range(2)], True),
        ([], False),
        ([(0, 0), (0, 0)], False),
        ([(2, 0)], False),
        ([(0, 2)], False),
        ([(-1, 0)], False),
        ([(0, -1)], False),
    ],
)
def test_a_share_ticket_has_the_addresses_of_those_that_serve(
    places: list[tuple[int, int]], good: bool
) -> None:
    """Of ranks that have the same KV, one serves it. A hand-off needs them all."""
    endpoints = tuple(Endpoint(tp, pp, "10.0.0.1", 7900) for tp, pp in places)
    text = issue(replace(SHARE, endpoints=endpoints, tp=2, pp=2), KEY)
    if good:
        assert verify(text, (KEY,), NOW, scope=Scope.SHARE).endpoints == endpoints
    else:
        with pytest.raises(Refused, match="that are not one each"):
            verify(text, (KEY,), NOW, scope=Scope.SHARE)
    handoff = issue(replace(TICKET, endpoints=endpoints, tp=2, pp=2), KEY)
    if len(places) < 4:
        assert "that are not one each" in refused(handoff)
    else:
        assert verify(handoff, (KEY,), NOW).endpoints == endpoints


def test_an_address_of_ipv4_in_ipv6_is_spelt_as_sockets_do() -> None:
    assert str(parse_host("::ffff:10.0.0.1").ipv4_mapped) == "10.0.0.1"  # type: ignore[union-attr]


def host(address: object) -> dict[str, Any]:
    return {"endpoints": ((0, 0, address, 7000),), "tp": 1}


def port(number: object) -> dict[str, Any]:
    return {"endpoints": ((0, 0, "10.0.0.1", number),), "tp": 1}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (host("prefill.example.org"), "no IP address"),
        (host("10.0.0.1:7000"), "no IP address"),
        (host(""), "no IP address"),
        (host("127.1"), "no IP address"),
        (host("::1%\0"), "no IP address"),
        (host("::1%" + "é" * 80), "no IP address"),
        (host("fe80::1%eth0"), "no IP address"),
        (host("FD00::1"), "no IP address"),
        (host("0.0.0.0"), "cannot be connected to"),
        (host("::"), "cannot be connected to"),
        (host("224.0.0.1"), "cannot be connected to"),
        (host(7), "cannot be read"),
        (port(0), "port 0"),
        (port(-1), "port -1"),
        (port(65536), "port 65536"),
        ({"tp": 1}, "2 addresses"),
        ({"tp": 4}, "2 addresses"),
        ({"pp": 2}, "2 addresses"),
        ({"endpoints": TICKET.endpoints[:1] * 2}, "2 addresses"),
        ({"endpoints": ()}, "0 addresses"),
        ({"tp": 0}, "cannot be read"),
        ({"tp": 1 << 40}, "cannot be read"),
        ({"epoch": -1}, "cannot be read"),
        ({"tokens": -1}, "cannot be read"),
        ({"engine_id": ""}, "cannot be read"),
        ({"engine_id": "line\nbreak"}, "cannot be read"),
        ({"peer": "line\nbreak"}, "cannot be read"),
        ({"engine_id": "x" * 257}, "cannot be read"),
        ({"expires": float("nan")}, "cannot be read"),
        ({"expires": float("inf")}, "cannot be read"),
        ({"transfer": b"short"}, "5 bytes, not 16"),
        ({"transfer": bytes(17)}, "cannot be read"),
        ({"version": 1}, "version 1"),
        ({"version": 3}, "version 3"),
    ],
)
def test_a_ticket_that_makes_no_sense_is_refused_whoever_issued_it(
    wrong: dict[str, Any], reason: str
) -> None:
    assert reason in refused(issue(replace(TICKET, **wrong), KEY))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91" * 3000, b"\xdd\xff\xff\xff\xff", b"\x9a\x01\xa2\xff\xff"]
)
def test_a_body_that_is_no_ticket_is_refused_whoever_sealed_it(body: bytes) -> None:
    assert "cannot be read" in refused(sealed(body))


@given(st.text(max_size=200) | st.binary(max_size=200).map(sealed))
def test_any_text_is_refused(text: str) -> None:
    refused(text)
