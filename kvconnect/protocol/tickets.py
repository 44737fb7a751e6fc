"""Tickets: the right to one hand-off, and where an engine serves the blocks of its host memory.

A ticket travels through routers and clients inside ``kv_transfer_params``. It is text: base64url
of msgpack and an HMAC-SHA256 over it. Nothing else in that dict is trusted: addresses, sizes and
block ids there belong to other connectors' protocols. The key is the one that engines prove to
each other on connections. With an empty key, a ticket of a hand-off is only as trustworthy as the
network, and no other one is issued or accepted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect.errors import Misuse, ProtocolError, Refused
from kvconnect.protocol.addresses import check_address
from kvconnect.protocol.codec import NO_CONTROLS, decode_struct
from kvconnect.types import Endpoint

MAX_TICKET = 12288
"""Limit on a ticket's text, in characters: fits the addresses of about 300 workers."""

MOST_SHARING = 128
"""Limit on the workers in a ticket of the scope ``share``: as many always fit."""

CLOCK_SKEW_S = 30.0
"""Seconds that a reader's clock may be ahead of the issuer's."""

_DOMAIN = b"kvconnect ticket\0"
_VERSION = 2
_INT64_MAX = (1 << 63) - 1
_MAC_BYTES = 32
_Engine = Annotated[str, Meta(max_length=256, pattern=NO_CONTROLS)]
_Size = Annotated[int, Meta(ge=1, le=1024)]
_Number = Annotated[int, Meta(ge=0, le=_INT64_MAX)]


class Scope(StrEnum):
    """What a ticket is for."""

    HANDOFF = "handoff"  # read one transfer, or with a standing ticket one of each request
    SHARE = "share"  # ask for blocks of host memory, which a peer with the key may do anyway


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A ticket of an engine.

    Attributes:
        transfer: transfer id of 16 bytes; empty on a standing ticket, as each request has its own,
            and where nothing is handed off.
        engine_id, epoch: the issuer and its incarnation.
        endpoints: addresses of the issuer's workers, one per rank of ``tp`` x ``pp``; of the scope
            ``share``, of those ranks that serve blocks.
        tokens: prompt tokens that are offered; 0 without ``transfer``.
        expires: Unix time in seconds.
        peer: the only engine that may use the ticket; None allows any.
    """

    version: int = _VERSION
    transfer: Annotated[bytes, Meta(max_length=16)] = b""
    engine_id: _Engine
    epoch: _Number
    endpoints: tuple[Endpoint, ...]
    tp: _Size
    pp: _Size
    tokens: _Number = 0
    expires: Annotated[float, Meta(ge=0, le=1 << 40)]
    peer: _Engine | None = None
    scope: Scope = Scope.HANDOFF


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Ticket)


def issue(ticket: Ticket, key: bytes) -> str:
    """Return a ticket's signed text.

    Raises:
        Misuse: the text would be longer than ``MAX_TICKET``, or anybody could sign such a ticket
            because ``key`` is empty.
    """
    if ticket.scope is not Scope.HANDOFF and not key:
        raise Misuse(f"a ticket of the scope {ticket.scope.value} is not issued without a key")
    body = _ENCODER.encode(ticket)
    text = _text(body + _mac(body, key))
    if len(text) > MAX_TICKET:
        raise Misuse(f"a ticket of {len(text)} characters, at most {MAX_TICKET} are allowed")
    return text


def verify(
    text: object,
    keys: Sequence[bytes],
    now: float,
    reader: str = "",
    scope: Scope = Scope.HANDOFF,
) -> Ticket:
    """Verify a ticket's text and return the ticket.

    Args:
        text: the ticket as a client sent it; of any type.
        keys: those that are accepted: several while keys are changed.
        now: Unix time in seconds.
        reader: id of the engine that uses the ticket.
        scope: what it is used for.

    Raises:
        Refused: field ``ticket``; the message says what is wrong.
    """
    if scope is not Scope.HANDOFF:
        keys = [key for key in keys if key]
        if not keys:
            raise _refused("cannot be checked without a key: set key_file")
    ticket = _unseal(text, keys)
    if ticket.version != _VERSION:
        raise _refused(f"is of version {ticket.version}, version {_VERSION} is known here")
    if ticket.scope is not scope:
        raise _refused(f"has the scope {ticket.scope.value}, not {scope.value}")
    if ticket.expires + CLOCK_SKEW_S < now:
        raise _refused(f"expired {now - ticket.expires:.0f} s ago: it was used too late")
    if ticket.peer not in (None, reader):
        raise _refused(f"is for engine {ticket.peer!r}, not for {reader!r}")
    if len(ticket.transfer) not in (0, 16):
        raise _refused(f"names a transfer of {len(ticket.transfer)} bytes, not 16")
    _check_endpoints(ticket)
    return ticket


def _unseal(text: object, keys: Sequence[bytes]) -> Ticket:
    if not isinstance(text, str):
        raise _refused(f"is missing or no text (a {type(text).__name__})")
    if len(text) > MAX_TICKET:
        raise _refused(f"has {len(text)} characters, at most {MAX_TICKET} are allowed")
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise _refused(f"is not base64url: {error}") from error
    if _text(raw) != text:  # stray bits after the last byte, or the other base64 alphabet
        raise _refused("is not base64url")
    body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    if not any(hmac.compare_digest(_mac(body, key), mac) for key in keys):
        raise _refused("was cut, changed, or issued with another key: check key_file on both sides")
    try:
        return decode_struct(_DECODER, body)
    except ProtocolError as error:
        raise _refused(f"cannot be read: {error}") from error


def _check_endpoints(ticket: Ticket) -> None:
    places = {(e.tp_rank, e.pp_rank) for e in ticket.endpoints}
    ranks = ticket.tp * ticket.pp  # a short ticket can name a million
    all_there = len(places) == ranks or (ticket.scope is Scope.SHARE and places)
    exist = all(0 <= tp < ticket.tp and 0 <= pp < ticket.pp for tp, pp in places)
    if len(ticket.endpoints) != len(places) or not all_there or not exist:
        raise _refused(
            f"has {len(ticket.endpoints)} addresses that are not one each for {ticket.tp} tensor "
            f"parallel ranks in {ticket.pp} pipeline stages"
        )
    for endpoint in ticket.endpoints:
        check_address(endpoint.host, endpoint.port)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + body, hashlib.sha256)


def _refused(why: str) -> Refused:
    return Refused("ticket", f"the ticket {why}")
