"""Inbound and outbound connections until they are authenticated or rejected."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvconnect.errors import ProtocolError, Refused, contained
from kvconnect.protocol.addresses import source_of
from kvconnect.protocol.auth import NONCE_BYTES, ClientAuth, Opening, ServerAuth
from kvconnect.protocol.codec import pack_message, pack_refusal
from kvconnect.transport.access_policy import AccessPolicy
from kvconnect.transport.base import UNAUTHENTICATED, PeerDown
from kvconnect.transport.tcp.context import TransportContext
from kvconnect.transport.tcp.event_loop import READ
from kvconnect.transport.tcp.handshake import Handshake
from kvconnect.transport.tcp.peer import Peer
from kvconnect.transport.tcp.rejection_log import RejectionLog
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.transport.tcp.sockets import prepare, write_some

logger = logging.getLogger(__name__)

MAX_IN_AUTH = 256  # connections that have not proven themselves yet
_ACCEPTS = 16  # at a time
UNTRUSTED = "its address is neither loopback nor in peers, and no key is set"


@dataclass(eq=False)
class PendingConnection:
    """A connection that is not authenticated yet. An outbound one has ``peer`` and ``opening``."""

    handshake: Handshake
    address: str
    begun: float
    source: str = ""  # key of an inbound one, see source_of
    peer: Peer | None = None
    opening: Opening | None = None


class Listener:
    """Sets connections up. All methods are for the loop's thread.

    ``on_proven`` gets an authenticated connection and its opening; it takes the socket over or
    raises :class:`ProtocolError`. An inbound connection that fails authentication ends in a
    ``PeerDown`` of ``UNAUTHENTICATED``.
    """

    def __init__(
        self,
        shared: TransportContext,
        access: AccessPolicy,
        port: SharedPort,
        on_proven: Callable[[PendingConnection, Opening], None],
    ) -> None:
        self._loop = shared.loop
        self._options = shared.options
        self._events = shared.events
        self._access = access
        self._port = port
        self._on_proven = on_proven
        self._closed = False
        self._socket: socket.socket | None = None
        self._pending: dict[PendingConnection, None] = {}  # oldest first
        self._rejections = RejectionLog()

    def open(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket; takes ownership of it."""
        if self._closed:
            listener.close()
            return
        self._socket = listener
        self._listen()

    def take(self, pending: PendingConnection, opening: Opening) -> None:
        """Take over an authenticated connection that another transport of the port accepted."""
        if self._closed:
            pending.handshake.sock.close()
            return
        with contained(partial(self._fail, pending)):
            self._on_proven(pending, opening)

    def dial(self, peer: Peer, opening: Opening, host: str, port: int) -> None:
        """Start one outbound connection of a peer.

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
        except (OSError, ValueError, OverflowError):  # of a port out of range
            sock.close()
            raise
        key, _ = self._access.keys.current()
        auth = ClientAuth(key, opening, os.urandom(NONCE_BYTES))
        handshake = Handshake(sock, auth, self._access.tls(server=False), host)
        self._add(PendingConnection(handshake, peer.address, self._loop.now(), "", peer, opening))

    def tick(self, now: float) -> None:
        """Reject inbound connections that take too long; peers bound outbound ones themselves."""
        limit = self._options.silent_s
        for pending in self._unproven():
            if now - pending.begun > limit:
                self._reject(pending, f"not authenticated within {limit:g} s")
        self._listen()

    def drop(self, peer: Peer) -> None:
        """Close the pending connections of a peer that went down."""
        for pending in [pending for pending in self._pending if pending.peer is peer]:
            self._release(pending)
            pending.handshake.sock.close()

    def close(self) -> socket.socket | None:
        """Close every pending connection; return the listening socket, which is the caller's."""
        self._closed = True
        listener, self._socket = self._socket, None
        if listener:
            self._loop.unwatch(listener.fileno())
        for pending in list(self._pending):
            self._release(pending)
            pending.handshake.sock.close()
        return listener

    def _unproven(self) -> list[PendingConnection]:
        return [pending for pending in self._pending if pending.peer is None]

    def _listen(self) -> None:
        if self._socket:
            self._loop.watch(self._socket.fileno(), READ, self._accept)

    def _accept(self, _: int) -> None:
        assert self._socket
        try:
            for _ in range(_ACCEPTS):
                sock, (host, port, *_) = self._socket.accept()
                with contained(partial(self._on_receive_error, sock)):
                    self._receive(sock, host, port)
        except BlockingIOError:
            pass
        except OSError as error:  # too many open files, for instance: not again before a tick
            text = f"cannot accept a connection: {error}"
            self._rejections.say("listener", text, self._loop.now())
            self._loop.unwatch(self._socket.fileno())

    def _on_receive_error(self, sock: socket.socket, error: Exception) -> None:
        logger.error("internal error of KVConnect; the connection is closed", exc_info=error)
        sock.close()

    def _receive(self, sock: socket.socket, host: str, port: int) -> None:
        if not self._access.admits(host):
            self._rejections.say(host, UNTRUSTED, self._loop.now())
            sock.close()
            return
        try:
            prepare(sock, self._options.dead_after_s)
        except OSError:  # already closed
            sock.close()
            return
        key, also = self._access.keys.current()
        auth = ServerAuth(key, os.urandom(NONCE_BYTES), also)
        handshake = Handshake(sock, auth, self._access.tls(server=True))
        unproven = self._unproven()
        if len(unproven) >= MAX_IN_AUTH:  # idle ones must not keep others out
            crowding = "too many newer connections before it was authenticated"
            self._reject(oldest_of_busiest(unproven), crowding)
        pending = PendingConnection(handshake, f"{host}:{port}", self._loop.now(), source_of(host))
        self._add(pending)

    def _add(self, pending: PendingConnection) -> None:
        self._pending[pending] = None
        self._advance(pending, 0)

    def _advance(self, pending: PendingConnection, _: int) -> None:
        with contained(partial(self._fail, pending)):
            handshake = pending.handshake
            mask = handshake.advance()
            if mask:
                self._loop.watch(handshake.fd, mask, partial(self._advance, pending))
                return
            self._release(pending)
            opening = pending.opening
            if isinstance(handshake.auth, ServerAuth):
                opening = handshake.auth.opening
            assert opening
            if pending.peer or opening.service == self._options.service:
                self._on_proven(pending, opening)
            elif (member := self._port.find(opening.service)) is not None:
                member.take(pending, opening)
            else:
                self._refuse_service(handshake, opening)

    def _refuse_service(self, handshake: Handshake, opening: Opening) -> None:
        """Tell the other side, on its control connection, what is served here, and raise that."""
        served = ", ".join(map(repr, self._port.services())) or "nothing"
        reason = f"nothing here serves the service {opening.service!r}; served is {served}"
        if opening.channel == "control":
            write_some(handshake.sock, pack_message(pack_refusal(reason)))
        raise Refused("other", reason)

    def _fail(self, pending: PendingConnection, error: Exception) -> None:
        if isinstance(error, Refused):
            self._reject(pending, str(error), error.field)
        elif isinstance(error, ProtocolError):
            self._reject(pending, f"broke the protocol: {error}")
        elif isinstance(error, EOFError | OSError):
            self._reject(pending, f"cannot connect: {error}")
        else:  # a bug here
            logger.error("internal error of KVConnect; the connection is closed", exc_info=error)
            self._reject(pending, f"{type(error).__name__}: {error}")

    def _release(self, pending: PendingConnection) -> None:
        self._pending.pop(pending, None)
        self._loop.unwatch(pending.handshake.fd)

    def _reject(self, pending: PendingConnection, reason: str, refused: str = "") -> None:
        self._release(pending)
        pending.handshake.sock.close()
        if pending.peer:
            pending.peer.fail(reason, refused)
        else:
            host = pending.address.rpartition(":")[0]
            self._rejections.say(host, reason, self._loop.now())
            if refused:
                self._events.put(PeerDown(UNAUTHENTICATED, reason, refused))


def oldest_of_busiest(unproven: Sequence[PendingConnection]) -> PendingConnection:
    """Return the connection to drop for a newer one, from the source that has most: the oldest
    that has sent nothing, else the oldest. So a flood displaces itself."""
    sources = Counter(pending.source for pending in unproven)
    most = max(sources, key=lambda source: sources[source])
    busiest = [pending for pending in unproven if pending.source == most]
    return next((pending for pending in busiest if not pending.handshake.heard), busiest[0])
