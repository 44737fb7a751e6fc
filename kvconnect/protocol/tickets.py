"""Tickets, which allow a decode engine one hand-off.

A ticket travels through routers and clients inside ``kv_transfer_params``. It is text: base64url
of msgpack and an HMAC-SHA256 over it. Nothing else in that dict is trusted: addresses, sizes and
block ids there belong to other connectors' protocols. The key is the one that engines prove to
each other on connections. With an empty key, a ticket is only as trustworthy as the network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvconnect.errors import Misuse, ProtocolError, Refused
from kvconnect.protocol.codec import NO_CONTROLS, decode_struct
from kvconnect.types import Endpoint

MAX_TICKET = 8192
"""Limit on a ticket's text, in characters: fits the addresses of about 200 workers."""

CLOCK_SKEW_S = 30.0
"""Seconds that a reader's clock may be ahead of the issuer's."""

_DOMAIN = b"kvconnect ticket\0"
_VERSION = 1
_INT64_MAX = (1 << 63) - 1
_MAC_BYTES = 32
_Engine = Annotated[str, Meta(max_length=256, pattern=NO_CONTROLS)]
_Size = Annotated[int, Meta(ge=1, le=1024)]
_Number = Annotated[int, Meta(ge=0, le=_INT64_MAX)]
_T = TypeVar("_T")


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The right to read one transfer, or an engine's standing ticket.

    Attributes:
        transfer: transfer id of 16 bytes; empty on a standing ticket, as each request has its own.
        engine_id, epoch: the issuer and its incarnation.
        endpoints: addresses of the issuer's workers, one per rank of ``tp`` x ``pp``.
        tokens: prompt tokens that are offered; 0 on a standing ticket.
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


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Ticket)


def issue(ticket: Ticket, key: bytes) -> str:
    """Return a ticket's signed text.

    Raises:
        Misuse: the text would be longer than ``MAX_TICKET``.
    """
    return seal(_ENCODER.encode(ticket), key, _DOMAIN)


def verify(
    text: object, key: bytes, now: float, reader: str = "", also: Sequence[bytes] = ()
) -> Ticket:
    """Verify a ticket's text and return the ticket.

    Args:
        text: the ticket as a client sent it; of any type.
        now: Unix time in seconds.
        reader: id of the engine that uses the ticket.
        also: other accepted keys, while keys are changed.

    Raises:
        Refused: field ``ticket``; the message says what is wrong.
    """
    ticket = unseal(text, (key, *also), _DOMAIN, _DECODER)
    if ticket.version != _VERSION:
        raise _refused(f"is of version {ticket.version}, version {_VERSION} is known here")
    if ticket.expires + CLOCK_SKEW_S < now:
        raise _refused(f"expired {now - ticket.expires:.0f} s ago: the decode engine was too late")
    if ticket.peer not in (None, reader):
        raise _refused(f"is for engine {ticket.peer!r}, not for {reader!r}")
    if len(ticket.transfer) not in (0, 16):
        raise _refused(f"names a transfer of {len(ticket.transfer)} bytes, not 16")
    _check_endpoints(ticket)
    return ticket


def seal(body: bytes, key: bytes, domain: bytes) -> str:
    """Return the signed text of a ticket's bytes. ``domain`` is the kind of ticket.

    Raises:
        Misuse: the text would be longer than ``MAX_TICKET``.
    """
    text = _text(body + _mac(body, key, domain))
    if len(text) > MAX_TICKET:
        raise Misuse(f"a ticket of {len(text)} characters, at most {MAX_TICKET} are allowed")
    return text


def unseal(
    text: object, keys: Sequence[bytes], domain: bytes, decoder: msgspec.msgpack.Decoder[_T]
) -> _T:
    """Return the ticket in a text that :func:`seal` made with one of the keys.

    Raises:
        Refused: field ``ticket``; the message says what is wrong.
    """
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
    if not any(hmac.compare_digest(_mac(body, key, domain), mac) for key in keys):
        raise _refused("was cut, changed, or issued with another key: check key_file on both sides")
    try:
        return decode_struct(decoder, body)
    except ProtocolError as error:
        raise _refused(f"cannot be read: {error}") from error


def parse_host(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address in its usual spelling.

    Raises:
        ValueError: ``host`` is anything else. A zone ("::1%eth0") is refused because it may be any
            text, on which sockets fail.
    """
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    # Sockets write a mapped IPv4 address with dots; Python does so from 3.13 on.
    if "%" in host or host not in (str(address), f"::ffff:{mapped}"):
        raise ValueError(f"{host!r} has a zone or is not the usual spelling")
    return address


def _check_endpoints(ticket: Ticket) -> None:
    # The count is checked first: a short ticket can name a million ranks.
    fits = len(ticket.endpoints) == ticket.tp * ticket.pp
    if not fits or sorted((e.tp_rank, e.pp_rank) for e in ticket.endpoints) != [
        (tp, pp) for tp in range(ticket.tp) for pp in range(ticket.pp)
    ]:
        raise _refused(
            f"has {len(ticket.endpoints)} addresses that are not one each for {ticket.tp} tensor "
            f"parallel ranks in {ticket.pp} pipeline stages"
        )
    for endpoint in ticket.endpoints:
        check_address(endpoint.host, endpoint.port)


def check_address(host: str, port: int, source: str = "the ticket") -> None:
    """Raise :class:`Refused` (field ``ticket``) unless a worker may listen at this address, which
    ``source`` names."""
    try:
        address = parse_host(host)
    except ValueError as error:
        why = f"{source} names a host that is no IP address: {error}"
        raise Refused("ticket", why) from error
    if address.is_unspecified or address.is_multicast:
        raise Refused("ticket", f"{source} names a host that cannot be connected to: {address}")
    if not 1 <= port <= 0xFFFF:
        raise Refused("ticket", f"{source} names port {port}")


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _mac(body: bytes, key: bytes, domain: bytes) -> bytes:
    return hmac.digest(key, domain + body, hashlib.sha256)


def _refused(why: str) -> Refused:
    return Refused("ticket", f"the ticket {why}")
