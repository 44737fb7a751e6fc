"""Settings that are network addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Annotated

from kvconnect.errors import ConfigError
from kvconnect.settings.quantities import Rule

_MOST_ADDRESSES = 256


def listen_address(value: object) -> tuple[str, int] | None:
    """Return (host, port) of a ``listen`` setting, None for ``off``.

    Raises:
        ConfigError: not an IP address and a port, or a wildcard address.
    """
    if value == "off":
        return None
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError as error:
        fix = 'use an IP address and a port such as "10.1.2.3:14580", or "off"'
        raise ConfigError("listen", value, fix) from error
    if address.is_unspecified or not 0 <= number < 2**16:
        fix = "name the address of this machine that peers reach, and a port under 65536"
        raise ConfigError("listen", value, fix)
    return str(address), number


Listen = Annotated[
    str,
    Rule('use an IP address and a port such as "10.1.2.3:14580", or "off"', check=listen_address),
]


def check_networks(texts: Sequence[str]) -> None:
    """Raise :class:`ConfigError` unless all ``texts`` are networks such as ``10.0.0.0/8``."""
    for text in texts:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            fix = f'use networks such as "10.0.0.0/8": {error}'
            raise ConfigError("peers", text, fix) from error


def worker_addresses(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return (IP address, port) of all workers in ``texts``: ``IP:PORT`` or ``IP:FIRST-LAST``.

    Raises:
        ConfigError: one is not an IP address and a port, or there are too many.
    """
    found: list[tuple[str, int]] = []
    for text in texts:
        host, _, ports = text.rpartition(":")
        first, _, last = ports.partition("-")
        try:
            address = str(ipaddress.ip_address(host.strip("[]")))
            numbers = range(int(first), int(last or first) + 1)
        except ValueError as error:
            fix = f"use an IP address and a port such as 10.1.2.3:7900 ({error})"
            raise ConfigError("ask", text, fix) from error
        if not numbers or not 0 < numbers[0] <= numbers[-1] < 2**16:
            raise ConfigError("ask", text, "use ports from 1 to 65535, the first one first")
        found += [(address, number) for number in numbers]
    if len(found) > _MOST_ADDRESSES:
        raise ConfigError("ask", len(found), f"name at most {_MOST_ADDRESSES} workers")
    return found


def server_addresses(text: str) -> list[tuple[str, int]]:
    """Return (host, port) of each server in ``text``, separated by commas; as server_address."""
    return [server_address(each) for each in text.split(",")]


def server_address(text: str) -> tuple[str, int]:
    """Return (host, port) of ``HOST:PORT``; IPv6 addresses may stand in brackets.

    Raises:
        ValueError: it is something else.
    """
    host, _, port = text.strip().rpartition(":")
    good = host and {"/", "@"}.isdisjoint(host) and port.isdecimal() and 0 < int(port) < 2**16
    if not good:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
