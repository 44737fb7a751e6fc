"""The TCP transport: what other threads call, and all its peers."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvconnect.errors import ConfigError, Misuse, ProtocolError, Refused, TransferFailed
from kvconnect.protocol.auth import SESSION_BYTES, Opening
from kvconnect.transport import page_io
from kvconnect.transport.access_policy import AccessPolicy
from kvconnect.transport.base import (
    MAX_MESSAGE_BYTES,
    ConnectionOptions,
    Disconnect,
    Event,
    IncomingPages,
    Memory,
    OutgoingPages,
    PeerDown,
    PeerId,
    PeerMessage,
    Security,
    Transport,
)
from kvconnect.transport.event_queue import EventQueue
from kvconnect.transport.tcp.context import DIGEST_PERIOD, TransportContext
from kvconnect.transport.tcp.event_loop import EventLoop
from kvconnect.transport.tcp.listener import UNTRUSTED, Listener, PendingConnection
from kvconnect.transport.tcp.page_path import ConnectionContext, PagePath
from kvconnect.transport.tcp.peer import CLOSED, Peer
from kvconnect.transport.tcp.shared_port import SharedPort

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Data connections that one peer may open."""

DIED = "the transport's thread died: its error is in the log"
"""Reason of every ``PeerDown`` after the loop raised an error."""

_CLOSE_S = 10.0


class TcpTransport(Transport):
    """Pages and messages over TCP; see :class:`~kvconnect.transport.base.Transport`.

    Orders for a peer that is still connecting are kept until it is up. Every failure of a peer ends
    in its ``PeerDown``. The event loop's thread sets connections up and ends with the last peer.

    Raises:
        ConfigError: a network, certificate or option cannot be used.
    """

    def __init__(self, security: Security, options: ConnectionOptions) -> None:
        if not 1 <= options.connections <= MAX_CONNECTIONS:
            raise ConfigError("connections", options.connections, f"use 1 to {MAX_CONNECTIONS}")
        if options.digest not in DIGEST_PERIOD:
            raise ConfigError("digest", options.digest, f"use one of {', '.join(DIGEST_PERIOD)}")
        self._access = AccessPolicy(security)
        page_io.check_digests(options.digest, tls=self._access.tls(server=False) is not None)
        loop = EventLoop(self._tick, options.heartbeat_s / 2, partial(self._close_peers, DIED))
        self._shared = TransportContext(options, EventQueue(), loop)
        self._port = options.port or SharedPort()
        self._listener = Listener(self._shared, self._access, self._port, self._adopt)
        self._numbers = itertools.count(1)
        self._peers: dict[PeerId, Peer] = {}  # any thread: each use is one atomic operation
        self._closed = False
        # For the loop's thread.
        self._inbound: dict[bytes, Peer] = {}  # by session, oldest first
        self._sources: dict[bytes, str] = {}  # the same, see source_of
        self._ending = False
        loop.start()

    def register(self, memory: Memory) -> None:
        if self._shared.memory is not None:
            raise Misuse("the memory is registered already")
        self._shared.memory = memory

    def add_page_path(self, make: Callable[[ConnectionContext], PagePath | None]) -> None:
        """Give every new peer a second path for pages, if ``make`` returns one."""
        self._shared.make_page_path = make

    def listen(self, host: str, port: int) -> tuple[str, int]:
        self._access.check_listen(host)
        return self._port.join(self._shared.options.service, self, host, port)

    def accept_from(self, listener: socket.socket) -> None:
        """See :class:`~kvconnect.transport.tcp.shared_port.PortMember`."""
        self._shared.loop.call(partial(self._listener.open, listener))

    def take(self, pending: PendingConnection, opening: Opening) -> None:
        """See :class:`~kvconnect.transport.tcp.shared_port.PortMember`."""
        self._shared.loop.call(partial(self._listener.take, pending, opening))

    def connect(self, host: str, port: int) -> PeerId:
        if self._closed:
            raise Misuse("the transport is closed")
        number = PeerId(next(self._numbers))
        if not self._access.admits(host):
            self._shared.events.put(PeerDown(number, f"{host}: {UNTRUSTED}", "address"))
            return number
        options = self._shared.options
        session = os.urandom(SESSION_BYTES)
        opening = Opening("control", session, 0, options.connections, options.service)
        peer = self._add_peer(number, opening, f"{host}:{port}", inbound=False)
        peer.call(partial(self._dial, peer, opening, host, port))
        return number

    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        peer = self._peers.get(order.peer)
        if peer is None:
            return
        if isinstance(order, PeerMessage):
            if not 0 < len(order.payload) <= MAX_MESSAGE_BYTES:
                raise Misuse(
                    f"a message of {len(order.payload)} bytes, use 1 to {MAX_MESSAGE_BYTES}"
                )
            peer.call(partial(peer.send_message, order.payload))
        elif isinstance(order, Disconnect):
            peer.call(partial(peer.disconnect, order.reason))
        else:
            self._shared.pages()  # raises before a thread would
            peer.pages.submit(order)

    def poll(self, timeout: float) -> list[Event]:
        """See the base class.

        Raises:
            TransferFailed: the loop's thread died, so that nothing would ever happen again.
        """
        if not (self._closed or self._shared.loop.alive):
            raise TransferFailed(DIED)
        return self._shared.events.drain(timeout)

    def wake(self) -> None:
        self._shared.events.wake()

    def cancel(self, peer: PeerId, read_id: int) -> None:
        found = self._peers.get(peer)
        if found:
            found.pages.cancel(read_id)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._shared.loop.call(partial(self._close_peers, CLOSED))
        if not self._shared.loop.join(_CLOSE_S):
            logger.warning("a transfer did not end within %g s of closing", _CLOSE_S)

    def _add_peer(self, number: PeerId, opening: Opening, address: str, *, inbound: bool) -> Peer:
        peer = Peer(number, opening, address, self._shared, inbound=inbound, on_gone=self._on_gone)
        self._peers[number] = peer
        return peer

    def _dial(self, peer: Peer, opening: Opening, host: str, port: int) -> None:
        if self._ending:
            peer.fail(CLOSED)
        if peer.number not in self._peers:
            return
        numbers = range(opening.connections)
        openings = [opening, *(opening._replace(channel="data", number=n) for n in numbers)]
        try:
            for each in openings:
                self._listener.dial(peer, each, host, port)
        except OSError as error:
            peer.fail(f"cannot connect: {error}")

    def _adopt(self, pending: PendingConnection, opening: Opening) -> None:
        """Give an authenticated connection to its peer; the first one of a session makes it."""
        peer = pending.peer or self._inbound.get(opening.session)
        if peer is None:
            if opening.connections > MAX_CONNECTIONS:
                raise ProtocolError(
                    f"peer requested {opening.connections} connections; limit is {MAX_CONNECTIONS}"
                )
            if len(self._inbound) >= self._shared.options.max_peers:
                self._make_room(pending.source)
            number = PeerId(next(self._numbers))
            peer = self._add_peer(number, opening, pending.address, inbound=True)
            self._inbound[opening.session] = peer
            self._sources[opening.session] = pending.source
        peer.join(opening, pending.handshake.sock, pending.handshake.auth.rest)

    def _make_room(self, source: str) -> None:
        """End the newest peer of the address that has most, so that no address uses up the places
        of others.

        Raises:
            Refused: no address has more than ``source`` would have.
        """
        most = self._shared.options.max_peers
        counts = Counter(self._sources.values())
        busiest = max(counts, key=lambda each: counts[each])
        if counts[busiest] <= counts[source] + 1:
            raise Refused("other", f"{most} peers are connected already (max_peers)")
        session = next(key for key in reversed(self._sources) if self._sources[key] == busiest)
        del self._sources[session]
        held = f"{busiest} had {counts[busiest]} of {most} places (max_peers)"
        self._inbound.pop(session).fail(f"{held}, and another address needs one")

    def _tick(self, now: float) -> None:
        self._listener.tick(now)
        for peer in list(self._peers.values()):
            peer.run(partial(peer.tick, now))

    def _on_gone(self, peer: Peer) -> None:
        self._listener.drop(peer)
        if self._inbound.get(peer.session) is peer:
            del self._inbound[peer.session], self._sources[peer.session]
        self._peers.pop(peer.number, None)
        if self._ending and not self._peers:
            self._shared.loop.stop()

    def _close_peers(self, reason: str) -> None:
        self._ending = True
        self._port.leave(self, self._listener.close())
        for peer in list(self._peers.values()):
            peer.run(partial(peer.fail, reason))
        if not self._peers:
            self._shared.loop.stop()
