"""The TCP transport."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

from kvconnect.errors import ConfigError, Misuse, TransferFailed
from kvconnect.transport import page_io
from kvconnect.transport.base import (
    MAX_MESSAGE_BYTES,
    ConnectionOptions,
    Disconnect,
    Event,
    IncomingPages,
    Memory,
    OutgoingPages,
    PeerId,
    PeerMessage,
    Security,
    Transport,
)
from kvconnect.transport.security import AccessPolicy
from kvconnect.transport.tcp.connections import DIED, MAX_CONNECTIONS, ConnectionManager
from kvconnect.transport.tcp.context import DIGEST_PERIOD, ConnectionContext, PagePath

logger = logging.getLogger(__name__)

_BACKLOG = 512
_CLOSE_S = 10.0


class TcpTransport(Transport):
    """Pages and messages over TCP; see :class:`~kvconnect.transport.base.Transport`.

    Orders for a peer that is still connecting are kept until it is up. Every failure of a peer ends
    in its ``PeerDown``.

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
        self._connections = ConnectionManager(self._access, options)
        self._shared = self._connections.shared
        self._closed = False
        self._shared.loop.start()

    def register(self, memory: Memory) -> None:
        if self._shared.memory is not None:
            raise Misuse("the memory is registered already")
        self._shared.memory = memory

    def add_page_path(self, make: Callable[[ConnectionContext], PagePath]) -> None:
        """Give every new peer a second path for pages, made by ``make``."""
        self._shared.make_page_path = make

    def listen(self, host: str, port: int) -> tuple[str, int]:
        self._access.check_listen(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A restarted worker gets its port back while old connections are still fading.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            fix = f"use an address of this machine and a free port: {error}"
            raise ConfigError("listen", f"{host}:{port}", fix) from error
        address = listener.getsockname()
        self._shared.loop.call(partial(self._connections.open, listener))
        return str(address[0]), int(address[1])

    def connect(self, host: str, port: int) -> PeerId:
        if self._closed:
            raise Misuse("the transport is closed")
        return self._connections.dial(host, port)

    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        peer = self._connections.find(order.peer)
        if peer is None:
            return
        if isinstance(order, PeerMessage):
            if not 0 < len(order.payload) <= MAX_MESSAGE_BYTES:
                raise Misuse(
                    f"a message of {len(order.payload)} bytes, use 1 to {MAX_MESSAGE_BYTES}"
                )
            self._shared.loop.call(partial(peer.send_message, order.payload))
        elif isinstance(order, Disconnect):
            self._shared.loop.call(partial(peer.disconnect, order.reason))
        else:
            self._shared.pages()  # raises before a thread would
            (peer.page_path.submit if peer.page_path else peer.submit_tcp)(order)

    def poll(self, timeout: float) -> list[Event]:
        """See the base class.

        Raises:
            TransferFailed: the loop's thread died, so that nothing would ever happen again.
        """
        if not (self._closed or self._shared.loop.alive):
            raise TransferFailed(DIED)
        return self._shared.events.drain(timeout)

    def cancel(self, peer: PeerId, read_id: int) -> None:
        found = self._connections.find(peer)
        if found:
            (found.page_path or found.send_queue).cancel(read_id)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._shared.loop.call(self._connections.close)
        if not self._shared.loop.join(_CLOSE_S):
            logger.warning("a transfer did not end within %g s of closing", _CLOSE_S)
