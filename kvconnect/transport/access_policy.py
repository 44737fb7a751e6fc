"""Whom a transport admits: trusted addresses, and the TLS contexts of both sides."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from typing import Any

from kvconnect.changed_files import Reread
from kvconnect.errors import ConfigError
from kvconnect.protocol.addresses import parse_host
from kvconnect.transport.base import Security
from kvconnect.transport.security import Keys

_FIX = (
    "no one would have to prove anything there: set key_file (or tls_dir), "
    "or name the networks to trust in peers"
)


class AccessPolicy:
    """The trusted addresses, keys and TLS contexts of one transport.

    Raises:
        ConfigError: a network, certificate or key file cannot be used.
    """

    def __init__(self, security: Security) -> None:
        self.keys = Keys(security.key, security.key_file)
        files = [security.tls_cert, security.tls_key, security.tls_ca]
        self._contexts: Reread[tuple[ssl.SSLContext | None, ssl.SSLContext | None]] = Reread(
            files if any(files) else [],
            lambda: _contexts(security) if any(files) else (None, None),
            "the certificates stay as they were",
            f"the certificates in {security.tls_cert} were read again",
        )
        self._networks = [_network(text) for text in security.allowed]
        self._proven = bool(self.keys.current()[0]) or any(files)

    def tls(self, server: bool) -> ssl.SSLContext | None:
        """Return the TLS context of a new connection, None without TLS.

        Changed files are read again; if they cannot be used, the old certificates stay in use.
        """
        return self._contexts.current()[0 if server else 1]

    def admits(self, host: str) -> bool:
        """Return whether connections with ``host`` are allowed; False if it is no IP address."""
        try:
            address = _address(host)
        except ValueError:
            return False
        trusted = address.is_loopback or any(address in network for network in self._networks)
        return self._proven or trusted

    def check_listen(self, host: str) -> None:
        """Raise :class:`ConfigError` if this transport must not listen at ``host``."""
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
    """Return the TLS contexts of the side that listens and of the side that connects."""
    server = _context(ssl.PROTOCOL_TLS_SERVER, security)
    return server, _context(ssl.PROTOCOL_TLS_CLIENT, security)


def _context(protocol: int, security: Security) -> ssl.SSLContext:
    """Return a context that sends our certificate and requires one of the same authority.

    Host names are not checked, because peers are found by address: whoever has a certificate of
    this authority is a peer. :class:`Handshake` checks the addresses in a certificate.
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
    except OSError as error:  # includes ssl.SSLError
        fix = f"certificate, key and authority must be readable PEM files that match: {error}"
        raise ConfigError("tls_dir", files, fix) from error
    return context


class TlsSocket(ssl.SSLSocket):
    """A TLS connection that one thread may read while another writes.

    OpenSSL allows one call at a time per connection, hence the lock. The socket does not block, so
    no direction holds the lock while it waits for the network.
    """

    turn: threading.Lock  # set by ``wrap``: SSLContext creates these objects without __init__

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        with self.turn:
            return super().recv_into(buffer, nbytes, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        with self.turn:
            return super().send(data, flags)


def wrap(sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> ssl.SSLSocket:
    """Return the connected ``sock`` as a TLS socket; its handshake is not done yet."""
    wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    assert isinstance(wrapped, TlsSocket)
    wrapped.turn = threading.Lock()
    return wrapped
