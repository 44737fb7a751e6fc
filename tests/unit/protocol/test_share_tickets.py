"""Share tickets: issued with a key, whole, in time, with addresses that make sense; or refused."""

from __future__ import annotations

import base64
import hashlib
import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Refused
from kvconnect.protocol.share_tickets import (
    MOST_WORKERS,
    Addresses,
    ShareTicket,
    issue_share,
    verify_share,
)
from kvconnect.protocol.tickets import CLOCK_SKEW_S, MAX_TICKET, Ticket, issue, verify
from kvconnect.types import Endpoint

KEY, OTHER = b"a key that all engines hold", b"another key"
NOW = 1_000_000.0
ADDRESSES = (("10.0.0.1", 7900), ("fd00::1", 7901))


def refused(text: object, *keys: bytes, now: float = NOW) -> str:
    """The reason why a ticket is refused."""
    with pytest.raises(Refused) as caught:
        verify_share(text, keys or (KEY,), now)
    assert caught.value.field == "ticket"
    return str(caught.value)


def sealed(body: bytes) -> str:
    """A ticket's text around any body: what someone with the key could make."""
    mac = hmac.digest(KEY, b"kvconnect share ticket\0" + body, hashlib.sha256)
    return base64.urlsafe_b64encode(body + mac).decode().rstrip("=")


def made(addresses: object = ADDRESSES, expires: object = NOW + 30, version: object = 1) -> str:
    return sealed(msgspec.msgpack.encode([version, addresses, expires]))


def test_a_ticket_comes_out_as_it_went_in() -> None:
    text = issue_share(ADDRESSES, NOW + 30, KEY)
    assert verify_share(text, [KEY], NOW) == verify_share(text, [OTHER, KEY], NOW) == ADDRESSES
    assert text == made()


def test_every_changed_cut_or_longer_ticket_is_refused() -> None:
    text = issue_share(ADDRESSES, NOW + 30, KEY)
    for place, char in enumerate(text):
        for other in "A_-z9=+ é":
            if other != char:
                refused(text[:place] + other + text[place + 1 :])
        refused(text[:place])
    for more in ("A", "=", "\n", text):
        refused(text + more)


def test_a_ticket_needs_the_key() -> None:
    assert "key_file" in refused(issue_share(ADDRESSES, NOW + 30, OTHER))
    # Without a key anybody could sign, so such tickets are neither issued nor accepted.
    body = msgspec.msgpack.encode(ShareTicket(addresses=ADDRESSES, expires=NOW + 30))
    mac = hmac.digest(b"", b"kvconnect share ticket\0" + body, hashlib.sha256)
    unsigned = base64.urlsafe_b64encode(body + mac).decode().rstrip("=")
    assert "without a key" in refused(unsigned, b"")
    assert "another key" in refused(unsigned, KEY, b"")
    with pytest.raises(AssertionError):
        issue_share(ADDRESSES, NOW + 30, b"")


def test_a_ticket_of_a_hand_off_is_of_no_use() -> None:
    endpoints = (Endpoint(0, 0, "10.0.0.1", 7000),)
    handoff = Ticket(engine_id="p", epoch=5, endpoints=endpoints, tp=1, pp=1, expires=NOW + 30)
    refused(issue(handoff, KEY))
    with pytest.raises(Refused):
        verify(issue_share(ADDRESSES, NOW + 30, KEY), KEY, NOW)


def test_a_ticket_expires_with_room_for_clocks_that_differ() -> None:
    text = issue_share(ADDRESSES, NOW, KEY)
    assert verify_share(text, [KEY], NOW + CLOCK_SKEW_S) == ADDRESSES
    assert "expired 31 s ago" in refused(text, now=NOW + CLOCK_SKEW_S + 1)


@pytest.mark.parametrize("thing", [None, 5, b"bytes", ["list"], {"a": 1}, True])
def test_a_ticket_is_text(thing: object) -> None:
    assert "text" in refused(thing)


def test_a_ticket_has_so_many_addresses() -> None:
    longest = "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    most: Addresses = tuple((longest, 65535 - n) for n in range(MOST_WORKERS))
    assert verify_share(issue_share(most, NOW, KEY), [KEY], NOW) == most
    with pytest.raises(AssertionError):
        issue_share((*most, ("10.0.0.1", 1)), NOW, KEY)
    assert "cannot be read" in refused(made([["10.0.0.1", 1]] * (MOST_WORKERS + 1)))
    assert "at most" in refused("A" * (MAX_TICKET + 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (made([["somewhere.example.org", 80]]), "no IP address"),
        (made([["127.1", 80]]), "no IP address"),
        (made([["::1%\0", 80]]), "no IP address"),
        (made([["0.0.0.0", 80]]), "cannot be connected to"),
        (made([["224.0.0.1", 80]]), "cannot be connected to"),
        (made([["10.0.0.1", 80], ["::", 80]]), "cannot be connected to"),
        (made([["10.0.0.1", 0]]), "port 0"),
        (made([["10.0.0.1", 65536]]), "port 65536"),
        (made([[7, 80]]), "cannot be read"),
        (made([["10.0.0.1", "80"]]), "cannot be read"),
        (made([]), "cannot be read"),
        (made(expires=float("nan")), "cannot be read"),
        (made(version=2), "version 2"),
        (sealed(b""), "cannot be read"),
        (sealed(b"\xdd\xff\xff\xff\xff"), "cannot be read"),
    ],
)
def test_a_ticket_that_makes_no_sense_is_refused_whoever_signed_it(text: str, reason: str) -> None:
    assert reason in refused(text)


@given(st.text(max_size=200) | st.binary(max_size=200).map(sealed))
def test_any_text_is_refused(text: str) -> None:
    refused(text)
