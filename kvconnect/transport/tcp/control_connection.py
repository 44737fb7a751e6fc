"""The control connection of one peer: messages in both directions, and heartbeats."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from kvconnect.errors import KVConnectError, ProtocolError, contained
from kvconnect.protocol.codec import MessageReader, pack_message
from kvconnect.transport.base import Ends
from kvconnect.transport.tcp.event_loop import READ, WRITE, EventLoop
from kvconnect.transport.tcp.sockets import read_some, shut, write_some

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 8 << 20
"""Limit on unsent bytes; above it the peer counts as down."""

CLOSED_BY_PEER = "closed by the other side"

_STEP_BYTES = 64 << 10
_READS = 16  # at a time, so that one peer does not keep the others waiting


class ControlConnection:
    """Owns an authenticated socket. All methods are for the loop's thread.

    ``on_message`` gets each payload, ``b""`` for a heartbeat, and may raise :class:`ProtocolError`.
    ``on_end`` gets the reason when the connection cannot be used any more; it must call ``close``.
    ``heard_at`` and ``sent_at`` are times of the loop's clock.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.heard_at = self.sent_at = loop.now()
        self._sock = sock
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._reader = MessageReader()
        self._out = bytearray()
        self._last_reason = ""
        self._closed = False
        self._view = memoryview(bytearray(_STEP_BYTES))
        loop.watch(sock.fileno(), READ, self._on_ready)

    def ends(self) -> Ends | None:
        """Return the addresses of both sides; None if the connection is lost."""
        try:
            here, there = self._sock.getsockname(), self._sock.getpeername()
        except OSError:
            return None
        return (here[0], here[1]), (there[0], there[1])

    def send(self, payload: bytes) -> None:
        """Queue a message; messages stay in order."""
        if self._closed:
            return
        idle = not self._out
        self._out += pack_message(payload)
        self.sent_at = self._loop.now()
        if len(self._out) > MAX_QUEUED_BYTES:
            self._on_end(f"does not read its messages: {len(self._out)} bytes wait")
        elif idle:
            self._on_ready(WRITE)

    def finish(self, reason: str) -> None:
        """Close with ``reason`` once everything queued is written."""
        self._last_reason = reason
        if not self._closed:
            self._on_ready(WRITE)

    def close(self) -> None:
        """Close the socket."""
        if not self._closed:
            self._closed = True
            self._loop.unwatch(self._sock.fileno())
            shut(self._sock)
            self._sock.close()

    def feed(self, data: bytes) -> None:
        """Handle received bytes."""
        self.heard_at = self._loop.now()
        with contained(self._fail):
            for message in self._reader.feed(data):
                if not self._closed:
                    self._on_message(message)

    def _on_ready(self, mask: int) -> None:
        with contained(self._fail):
            if mask & WRITE:
                self._write()
            if mask & READ and not self._closed:
                self._read()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self._on_end(f"connection lost: {error}")
        elif isinstance(error, ProtocolError):
            self._on_end(f"broke the protocol: {error}")
        else:
            if not isinstance(error, KVConnectError):  # a bug here
                logger.error("internal error; the connection is closed", exc_info=error)
            self._on_end(f"{type(error).__name__}: {error}")

    def _write(self) -> None:
        count = 1
        while self._out and count:
            # In steps, because TLS reports no progress inside one write.
            count = write_some(self._sock, self._out[:_STEP_BYTES])
            del self._out[:count]
        if self._out:
            self._loop.watch(self._sock.fileno(), READ | WRITE, self._on_ready)
        elif self._last_reason:
            self._on_end(self._last_reason)
        else:
            self._loop.watch(self._sock.fileno(), READ, self._on_ready)

    def _read(self) -> None:
        for _ in range(_READS):
            count = read_some(self._sock, self._view)
            if count is None:
                return
            if count == 0:
                self._on_end(CLOSED_BY_PEER)
                return
            self.feed(bytes(self._view[:count]))
            if self._closed:
                return
        self._loop.call(self._read_on)  # TLS may hold bytes back that no selector sees

    def _read_on(self) -> None:
        if not self._closed:
            self._on_ready(READ)
