"""Addresses of workers that tickets and other engines name: IP addresses, never names."""

from __future__ import annotations

import ipaddress

from kvconnect.errors import Refused

Addresses = tuple[tuple[str, int], ...]
"""(IP address, port) of each worker of an engine."""


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


def source_of(host: str) -> str:
    """Return the key by which connections and bytes of others are counted: the address, or an
    IPv6 address's /64."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and not address.ipv4_mapped:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
