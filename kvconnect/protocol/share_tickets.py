"""Share tickets: where an engine serves the blocks of its host memory to other engines.

A router requests one with ``{"kvconnect": {"share": true}}`` in ``kv_transfer_params``, and names
the engine to another one with ``{"kvconnect": {"source": TICKET}}``. The text is signed and checked
as that of :mod:`kvconnect.protocol.tickets`. A ticket allows nothing that a peer with the key may
not do: it says where to ask for blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect.errors import Refused
from kvconnect.protocol.tickets import CLOCK_SKEW_S, check_address, seal, unseal

SHARE_TICKET_KEY = "kvconnect_share"
SHARE_EXPIRY_KEY = "kvconnect_share_expires_in"

Addresses = tuple[tuple[str, int], ...]
"""(IP address, port) of each worker of an engine."""

MOST_WORKERS = 128
"""Limit on the workers in a ticket: as many always fit."""

_DOMAIN = b"kvconnect share ticket\0"
_VERSION = 1


class ShareTicket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where the workers of one engine serve blocks, until ``expires``, Unix time in seconds."""

    version: int = _VERSION
    addresses: Annotated[Addresses, Meta(min_length=1, max_length=MOST_WORKERS)]
    expires: Annotated[float, Meta(ge=0, le=1 << 40)]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ShareTicket)


def issue_share(addresses: Addresses, expires: float, key: bytes) -> str:
    """Return the signed text of a ticket for at most ``MOST_WORKERS`` addresses. ``key`` is not
    empty: anybody could sign then."""
    assert key and 0 < len(addresses) <= MOST_WORKERS
    return seal(_ENCODER.encode(ShareTicket(addresses=addresses, expires=expires)), key, _DOMAIN)


def verify_share(text: object, keys: Sequence[bytes], now: float) -> Addresses:
    """Verify a ticket's text, of any type; return the addresses in it. ``now``: Unix time.

    Raises:
        Refused: field ``ticket``; the message says what is wrong.
    """
    keys = [key for key in keys if key]
    if not keys:
        raise Refused("ticket", "the ticket cannot be checked without a key: set key_file")
    ticket = unseal(text, keys, _DOMAIN, _DECODER)
    if ticket.version != _VERSION:
        why = f"is of version {ticket.version}, version {_VERSION} is known here"
        raise Refused("ticket", f"the ticket {why}")
    if ticket.expires + CLOCK_SKEW_S < now:
        raise Refused("ticket", f"the ticket expired {now - ticket.expires:.0f} s ago")
    for address in ticket.addresses:
        check_address(*address)
    return ticket.addresses
