"""Whom to talk to: addresses, and the TLS contexts of both sides."""

from __future__ import annotations

import ipaddress
import logging
import ssl

from kvconnect.errors import ConfigError
from kvconnect.transport.base import Security
from kvconnect.transport.security import Changes, Keys
from kvconnect.transport.tcp.sockets import TlsSocket
from kvconnect.wire.tickets import parse_host

logger = logging.getLogger(__name__)

_FIX = (
    "no one would have to prove anything there: set key_file (or tls_dir), "
    "or name the networks to trust in peers"
)


class Guard:
    """The address rule and TLS of one transport.

    Raises:
        ConfigError: a network, or a certificate or key file, cannot be used.
    """

    def __init__(self, security: Security) -> None:
        self.keys = Keys(security.key, security.key_file)
        self._security = security
        files = [security.tls_cert, security.tls_key, security.tls_ca]
        self._changes = Changes(files if any(files) else [])
        self._contexts = _contexts(security) if any(files) else (None, None)
        self._networks = [_network(text) for text in security.allowed]
        self._proven = bool(self.keys.current()[0]) or any(files)

    def tls(self, server: bool) -> ssl.SSLContext | None:
        """Return the context of a new connection, None without TLS. Files that changed are read
        again; where they cannot be used, those before are. For one thread at a time."""
        if self._changes.found():
            try:
                self._contexts = _contexts(self._security)
                logger.info("the certificates in %s were read again", self._security.tls_cert)
            except ConfigError as error:
                logger.error("the certificates stay as they were: %s", error)
        return self._contexts[0 if server else 1]

    def admits(self, host: str) -> bool:
        """Say whether to talk to the IP address ``host`` at all; False for anything else."""
        try:
            address = _address(host)
        except ValueError:
            return False
        trusted = address.is_loopback or any(address in network for network in self._networks)
        return self._proven or trusted

    def check_listen(self, host: str) -> None:
        """Raise :class:`ConfigError` if ``host`` is not an address to listen at."""
        try:
            address = _address(host)
        except ValueError as error:
            raise ConfigError("listen", host, f"use an IP address: {error}") from error
        if address.is_unspecified:
            fix = "name the address of this machine that peers reach: it is announced to them"
            raise ConfigError("listen", host, fix)
        if not (self._proven or self._networks or address.is_loopback):
            raise ConfigError("listen", host, _FIX)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = parse_host(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped
    return address


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        fix = f'use networks such as "10.0.0.0/8": {error}'
        raise ConfigError("peers", text, fix) from error


def _contexts(security: Security) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of the side that listens and of the one that connects."""
    server = _context(ssl.PROTOCOL_TLS_SERVER, security)
    return server, _context(ssl.PROTOCOL_TLS_CLIENT, security)


def _context(protocol: int, security: Security) -> ssl.SSLContext:
    """A context of one side that shows our certificate and demands one of the same authority.

    Names are not checked here, as peers are found by address: whoever holds a certificate of this
    authority is one. Addresses in a certificate are, by :class:`Handshake`.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are not resumed
    files = (security.tls_cert, security.tls_key, security.tls_ca)
    try:
        context.load_cert_chain(security.tls_cert, security.tls_key)
        context.load_verify_locations(security.tls_ca)
    except OSError as error:  # also what ssl raises
        fix = f"certificate, key and authority must be readable PEM files that match: {error}"
        raise ConfigError("tls_dir", files, fix) from error
    return context
