"""Where connections come in and go out: until they have proven themselves or are turned away."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvconnect.errors import ProtocolError, Refused, contained
from kvconnect.protocol.auth import NONCE_BYTES, ClientAuth, Opening, ServerAuth
from kvconnect.transport.base import ConnectionOptions
from kvconnect.transport.security import AccessPolicy
from kvconnect.transport.tcp.context import RejectionLog
from kvconnect.transport.tcp.event_loop import EventLoop
from kvconnect.transport.tcp.handshake import READ, Handshake
from kvconnect.transport.tcp.peer import Peer
from kvconnect.transport.tcp.sockets import prepare

logger = logging.getLogger(__name__)

MAX_IN_AUTH = 256  # connections that have not proven themselves yet
_ACCEPTS = 16  # at a time
UNTRUSTED = "its address is neither loopback nor in peers, and no key is set"


@dataclass(eq=False)
class PendingConnection:
    """A connection on its way in; or out, if it is one of ``peer``, to be used as ``opening``."""

    handshake: Handshake
    address: str
    begun: float
    source: str = ""  # of one that came in
    peer: Peer | None = None
    opening: Opening | None = None


class Listener:
    """All methods are for the loop's thread.

    ``on_proven`` is told what a proven connection is for; it takes the socket over or raises
    :class:`ProtocolError`. ``on_refused`` gets the reason and its bounded cause for each stranger
    that is not who it has to be.
    """

    def __init__(
        self,
        loop: EventLoop,
        guard: AccessPolicy,
        options: ConnectionOptions,
        on_proven: Callable[[PendingConnection, Opening], None],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._guard = guard
        self._options = options
        self._on_proven = on_proven
        self._on_refused = on_refused
        self._listener: socket.socket | None = None
        self._guests: dict[PendingConnection, None] = {}  # oldest first
        self._complaints = RejectionLog()

    def open(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket, which it owns from now on."""
        self._listener = listener
        self._listen()

    def dial(self, peer: Peer, opening: Opening, host: str, port: int) -> None:
        """Start to connect one connection of a peer.

        Raises:
            OSError: the network refuses at once.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(sock, self._options.dead_after_s)
            sock.connect((host, port))
        except BlockingIOError:
            pass  # under way
        except OSError:
            sock.close()
            raise
        key, _ = self._guard.keys.current()
        auth = ClientAuth(key, opening, os.urandom(NONCE_BYTES))
        handshake = Handshake(sock, auth, self._guard.tls(server=False), host)
        self._let_in(
            PendingConnection(handshake, peer.address, self._loop.now(), "", peer, opening)
        )

    def tick(self, now: float) -> None:
        """Turn away who takes too long; a peer that is dialled has a deadline of its own."""
        limit = self._options.silent_s
        for guest in self._strangers():
            if now - guest.begun > limit:
                self._turn_away(guest, f"not authenticated within {limit:g} s")
        self._listen()

    def drop(self, peer: Peer) -> None:
        """Close what is on its way to a peer that went down."""
        for guest in [guest for guest in self._guests if guest.peer is peer]:
            self._leave(guest)
            guest.handshake.sock.close()

    def close(self) -> None:
        """Close the listener and every connection that is not proven yet."""
        if self._listener:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for guest in list(self._guests):
            self._leave(guest)
            guest.handshake.sock.close()

    def _strangers(self) -> list[PendingConnection]:
        return [guest for guest in self._guests if guest.peer is None]

    def _listen(self) -> None:
        if self._listener:
            self._loop.watch(self._listener.fileno(), READ, self._accept)

    def _accept(self, _: int) -> None:
        assert self._listener
        try:
            for _ in range(_ACCEPTS):
                sock, (host, port, *_) = self._listener.accept()
                self._receive(sock, host, port)
        except BlockingIOError:
            pass
        except OSError as error:  # too many open files, for instance: not again before a tick
            text = f"cannot accept a connection: {error}"
            self._complaints.say("somebody", text, self._loop.now())
            self._loop.unwatch(self._listener.fileno())

    def _receive(self, sock: socket.socket, host: str, port: int) -> None:
        if not self._guard.admits(host):
            self._complaints.say(host, UNTRUSTED, self._loop.now())
            sock.close()
            return
        try:
            prepare(sock, self._options.dead_after_s)
        except OSError:  # gone again
            sock.close()
            return
        key, also = self._guard.keys.current()
        auth = ServerAuth(key, os.urandom(NONCE_BYTES), also)
        handshake = Handshake(sock, auth, self._guard.tls(server=True))
        strangers = self._strangers()
        if len(strangers) >= MAX_IN_AUTH:  # idle ones must not keep others out
            crowding = "too many newer connections before it proved itself"
            self._turn_away(first_to_go(strangers), crowding)
        guest = PendingConnection(handshake, f"{host}:{port}", self._loop.now(), source_of(host))
        self._let_in(guest)

    def _let_in(self, guest: PendingConnection) -> None:
        self._guests[guest] = None
        self._advance(guest, 0)

    def _advance(self, guest: PendingConnection, _: int) -> None:
        with contained(partial(self._fail, guest)):
            handshake = guest.handshake
            mask = handshake.advance()
            if mask:
                self._loop.watch(handshake.fd, mask, partial(self._advance, guest))
                return
            self._leave(guest)
            opening = guest.opening
            if isinstance(handshake.auth, ServerAuth):
                opening = handshake.auth.opening
            assert opening
            self._on_proven(guest, opening)

    def _fail(self, guest: PendingConnection, error: Exception) -> None:
        if isinstance(error, Refused):
            self._turn_away(guest, str(error), error.field)
        elif isinstance(error, ProtocolError):
            self._turn_away(guest, f"broke the protocol: {error}")
        elif isinstance(error, EOFError | OSError):
            self._turn_away(guest, f"cannot connect: {error}")
        else:  # a bug here that this stranger found
            logger.error("an error of KVConnect's own; a connection ends", exc_info=error)
            self._turn_away(guest, f"{type(error).__name__}: {error}")

    def _leave(self, guest: PendingConnection) -> None:
        self._guests.pop(guest, None)
        self._loop.unwatch(guest.handshake.fd)

    def _turn_away(self, guest: PendingConnection, reason: str, refused: str = "") -> None:
        self._leave(guest)
        guest.handshake.sock.close()
        if guest.peer:
            guest.peer.fail(reason, refused)
        else:
            host = guest.address.rpartition(":")[0]
            self._complaints.say(host, reason, self._loop.now())
            if refused:
                self._on_refused(reason, refused)


def source_of(host: str) -> str:
    """Return what connections count together for: an address, of IPv6 the network of one site."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and not address.ipv4_mapped:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def first_to_go(strangers: Sequence[PendingConnection]) -> PendingConnection:
    """Return whom to give up for somebody newer: of the source that has most connections the
    oldest that has said nothing, or the oldest. So a flood turns itself away."""
    sources = Counter(guest.source for guest in strangers)
    most = max(sources, key=lambda source: sources[source])
    crowd = [guest for guest in strangers if guest.source == most]
    return next((guest for guest in crowd if not guest.handshake.heard), crowd[0])
