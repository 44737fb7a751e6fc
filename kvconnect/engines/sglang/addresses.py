"""Which bootstrap servers a decode rank asks: their address comes from the client."""

from __future__ import annotations

import ipaddress
import socket
import time

from kvconnect.config import Config

_REMEMBERED_S = 60.0  # how long a name's address is believed
_REFUSED_S = 3.0  # then one that did not fit is asked again: it may have been restarted
_MOST_NAMES = 1024


class Addresses:
    """Not synchronised: for the scheduler's thread. ``own`` is this machine's address."""

    def __init__(self, config: Config, own: str) -> None:
        self._networks = [ipaddress.ip_network(peer) for peer in config.peers]
        self._own = own
        self._names: dict[str, tuple[str, float]] = {}  # address and when that was found out
        self._refused: dict[str, tuple[str, float]] = {}

    def objection(self, bootstrap: str) -> str:
        """Return why a server ``HOST:PORT`` is not asked, "" if it may be."""
        why, since = self._refused.get(bootstrap, ("", 0.0))
        if why and time.monotonic() - since < _REFUSED_S:
            return f"prefill engine {bootstrap} does not fit this one: {why}"
        host = bootstrap.rpartition(":")[0].strip("[]")
        try:
            address = ipaddress.ip_address(self._address(host))
        except (OSError, ValueError) as error:
            return f"bootstrap address {bootstrap!r} cannot be used: {error}"
        if (
            address.is_loopback
            or str(address) == self._own
            or any(address in network for network in self._networks)
        ):
            return ""
        return (
            f"bootstrap address {bootstrap!r} is not allowed: only this machine and the networks "
            f"of `peers` are asked; add {address} to it in KVCONNECT_CONFIG"
        )

    def refuse(self, bootstrap: str, why: str) -> None:
        """A server that may be asked does not fit this engine."""
        self._refused[bootstrap] = why, time.monotonic()

    def _address(self, host: str) -> str:
        """Return a host's address; asking for it may take a while, so it is remembered.

        Raises:
            OSError: there is none.
        """
        try:
            ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            return host
        found, since = self._names.get(host, ("", 0.0))
        if not found or time.monotonic() - since > _REMEMBERED_S:
            found = str(socket.getaddrinfo(host, None)[0][4][0])
            self._names[host] = found, time.monotonic()
            if len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]
        return found
