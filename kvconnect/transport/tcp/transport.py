"""The transport seam over TCP."""

from __future__ import annotations

import logging
import socket
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
from kvconnect.transport.tcp.context import DIGEST_PERIOD

logger = logging.getLogger(__name__)

_BACKLOG = 512
_CLOSE_S = 10.0


class TcpTransport(Transport):
    """Pages and notes over TCP; see :class:`~kvconnect.transport.base.Transport`.

    Orders for a peer that is still being connected wait for it. Everything that can go wrong with
    a peer ends in its ``PeerDown``.

    Raises:
        ConfigError: a network, certificate or option cannot be used.
    """

    def __init__(self, security: Security, options: ConnectionOptions) -> None:
        if not 1 <= options.connections <= MAX_CONNECTIONS:
            raise ConfigError("connections", options.connections, f"use 1 to {MAX_CONNECTIONS}")
        if options.digest not in DIGEST_PERIOD:
            raise ConfigError("digest", options.digest, f"use one of {', '.join(DIGEST_PERIOD)}")
        self._guard = AccessPolicy(security)
        page_io.check_digests(options.digest, tls=self._guard.tls(server=False) is not None)
        self._hub = ConnectionManager(self._guard, options)
        self._shared = self._hub.shared
        self._closed = False
        self._shared.loop.start()

    def register(self, memory: Memory) -> None:
        if self._shared.memory is not None:
            raise Misuse("the memory is registered already")
        self._shared.memory = memory

    def listen(self, host: str, port: int) -> tuple[str, int]:
        self._guard.check_listen(host)
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
        self._shared.loop.call(partial(self._hub.open, listener))
        return str(address[0]), int(address[1])

    def connect(self, host: str, port: int) -> PeerId:
        if self._closed:
            raise Misuse("the transport is closed")
        return self._hub.dial(host, port)

    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        peer = self._hub.find(order.peer)
        if peer is None:
            return
        if isinstance(order, PeerMessage):
            if not 0 < len(order.payload) <= MAX_MESSAGE_BYTES:
                raise Misuse(f"a note of {len(order.payload)} bytes, use 1 to {MAX_MESSAGE_BYTES}")
            self._shared.loop.call(partial(peer.note, order.payload))
        elif isinstance(order, Disconnect):
            self._shared.loop.call(partial(peer.hang_up, order.reason))
        else:
            self._shared.pages()  # raises before a thread would
            (peer.rail.submit if peer.rail else peer.move_plain)(order)

    def poll(self, timeout: float) -> list[Event]:
        """See the base class.

        Raises:
            TransferFailed: the loop's thread died, so that nothing would ever happen again.
        """
        if not (self._closed or self._shared.loop.alive):
            raise TransferFailed(DIED)
        return self._shared.events.drain(timeout)

    def cancel(self, peer: PeerId, read_id: int) -> None:
        found = self._hub.find(peer)
        if found:
            (found.rail or found.traffic).cancel(read_id)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._shared.loop.call(self._hub.close)
        if not self._shared.loop.join(_CLOSE_S):
            logger.warning("a transfer did not end within %g s of closing", _CLOSE_S)
