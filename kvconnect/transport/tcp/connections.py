"""All peers of one TCP transport, and the peer that each new connection belongs to."""

from __future__ import annotations

import itertools
import os
import socket
import threading

from kvconnect.errors import ProtocolError, Refused
from kvconnect.protocol.auth import SESSION_BYTES, Opening
from kvconnect.transport.base import (
    UNAUTHENTICATED,
    ConnectionOptions,
    EventQueue,
    PeerDown,
    PeerId,
)
from kvconnect.transport.security import AccessPolicy
from kvconnect.transport.tcp.context import TransportContext
from kvconnect.transport.tcp.event_loop import EventLoop
from kvconnect.transport.tcp.listener import UNTRUSTED, Listener, PendingConnection
from kvconnect.transport.tcp.peer import CLOSED, Peer

MAX_CONNECTIONS = 16
"""Data connections that one peer may open."""

MAX_INBOUND = 256
"""Limit on inbound peers; each costs threads and file descriptors."""

DIED = "the transport's thread died: its error is in the log"
"""Reason of every ``PeerDown`` after the loop raised an error."""


class ConnectionManager:
    """Owns the event loop, the listener and all peers.

    ``dial``, ``find`` and ``shared`` are for any thread; the rest is for the loop's. The loop ends
    when everything is closed.
    """

    def __init__(self, access: AccessPolicy, options: ConnectionOptions) -> None:
        loop = EventLoop(self._tick, options.heartbeat_s / 2, lambda: self.close(DIED))
        self.shared = TransportContext(options, EventQueue(), loop)
        self._access = access
        self._listener = Listener(loop, access, options, self._on_proven, self._on_refused)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._peers: dict[PeerId, Peer] = {}
        self._inbound: dict[bytes, Peer] = {}  # by session
        self._closing = False

    def find(self, number: PeerId) -> Peer | None:
        """Return a peer that is not down."""
        with self._lock:
            return self._peers.get(number)

    def open(self, listener: socket.socket) -> None:
        """Accept peers from a listening socket."""
        self._listener.open(listener)

    def dial(self, host: str, port: int) -> PeerId:
        """Start to connect to a peer."""
        number = PeerId(next(self._numbers))
        if not self._access.admits(host):
            self.shared.events.put(PeerDown(number, f"{host}: {UNTRUSTED}", "address"))
            return number
        opening = Opening("control", os.urandom(SESSION_BYTES), 0, self.shared.options.connections)
        peer = self._make(number, opening, f"{host}:{port}", inbound=False)
        self.shared.loop.call(lambda: self._dial(peer, opening, host, port))
        return number

    def close(self, reason: str = CLOSED) -> None:
        """Close the listener and every peer; the loop ends with the last peer."""
        self._closing = True
        self._listener.close()
        for peer in self._all():
            peer.fail(reason)
        self._end_if_empty()

    def _make(self, number: PeerId, opening: Opening, address: str, *, inbound: bool) -> Peer:
        peer = Peer(number, opening, address, self.shared, inbound=inbound, on_gone=self._on_gone)
        with self._lock:
            self._peers[number] = peer
        return peer

    def _dial(self, peer: Peer, opening: Opening, host: str, port: int) -> None:
        if self._closing:
            peer.fail(CLOSED)
        if self.find(peer.number) is None:
            return
        numbers = range(opening.connections)
        openings = [opening, *(opening._replace(channel="data", number=n) for n in numbers)]
        try:
            for each in openings:
                self._listener.dial(peer, each, host, port)
        except OSError as error:
            peer.fail(f"cannot connect: {error}")

    def _on_proven(self, pending: PendingConnection, opening: Opening) -> None:
        peer = pending.peer or self._inbound.get(opening.session)
        if peer is None:
            if opening.connections > MAX_CONNECTIONS:
                raise ProtocolError(
                    f"peer requested {opening.connections} connections; limit is {MAX_CONNECTIONS}"
                )
            if len(self._inbound) >= MAX_INBOUND:
                raise Refused("other", f"{MAX_INBOUND} peers are connected already")
            number = PeerId(next(self._numbers))
            peer = self._make(number, opening, pending.address, inbound=True)
            self._inbound[opening.session] = peer
        peer.join(opening, pending.handshake.sock, pending.handshake.auth.rest)

    def _on_refused(self, reason: str, refused: str) -> None:
        self.shared.events.put(PeerDown(UNAUTHENTICATED, reason, refused))

    def _on_gone(self, peer: Peer) -> None:
        self._listener.drop(peer)
        self._inbound.pop(peer.session, None)
        with self._lock:
            self._peers.pop(peer.number, None)
        self._end_if_empty()

    def _all(self) -> list[Peer]:
        with self._lock:
            return list(self._peers.values())

    def _tick(self, now: float) -> None:
        self._listener.tick(now)
        for peer in self._all():
            peer.tick(now)

    def _end_if_empty(self) -> None:
        if self._closing and not self._all():
            self.shared.loop.stop()
