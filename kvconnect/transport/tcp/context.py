"""What all parts of one TCP transport have in common."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvconnect.errors import Misuse
from kvconnect.protocol.codec import digested
from kvconnect.protocol.nixl_messages import NixlMessage
from kvconnect.transport import page_io
from kvconnect.transport.base import (
    ConnectionOptions,
    EventQueue,
    IncomingPages,
    Memory,
    OutgoingPages,
    PeerId,
    Unit,
)
from kvconnect.transport.tcp.event_loop import EventLoop
from kvconnect.transport.tcp.send_queue import StallWatchdog

DIGEST_PERIOD = {"off": 0, "sampled": 16, "full": 1}


@dataclass
class TransportContext:
    """Made once; only ``memory`` and ``make_rail`` are set later."""

    options: ConnectionOptions
    events: EventQueue
    loop: EventLoop
    memory: Memory | None = None
    make_rail: Callable[[ConnectionContext], PagePath] | None = (
        None  # another path for pages, beside these
    )

    def pages(self) -> Memory:
        """Return the registered memory; :class:`Misuse` if there is none."""
        if self.memory is None:
            raise Misuse("register the memory before pages move")
        return self.memory


# Another path for a peer's pages, beside its data connections: what it does and what it gets.


class PagePath(Protocol):
    """``submit`` and ``cancel`` are for any thread, the rest is for the loop's. ``lacking``: why
    this path is not to be had, "" if it is; once settled."""

    lacking: str

    def offer(self) -> bytes:
        """Return what goes with the greeting."""

    def settle(self, theirs: bytes, period: int) -> None:
        """Take the other side's offer and the agreed digest period; :class:`ProtocolError` if it
        is none."""

    def submit(self, order: IncomingPages | OutgoingPages) -> None:
        """Take an order, for whichever path."""

    def cancel(self, read_id: int) -> None:
        """See :meth:`Transport.cancel`."""

    def on_note(self, payload: bytes) -> None:
        """Take what the other side says; raises :class:`ProtocolError` if it may not."""

    def close(self, reason: str, done: Callable[[], None]) -> None:
        """End everything; ``done`` is called, on any thread, once no write of the other side can
        land here."""


@dataclass(frozen=True)
class ConnectionContext:
    """The connection a rail belongs to. All functions are for any thread.

    Attributes:
        session: of the connection, the same on both sides.
        inbound: whether the other side asked for the connection.
        say: sends a message to the other side, behind those before it.
        fail: ends the connection for a reason.
        plain, cancel_plain: give an order to the data connections, or take it back.
        watch: makes the connection end when something in it takes too long.
    """

    peer: PeerId
    name: str
    session: bytes
    inbound: bool
    events: EventQueue
    pages: Callable[[], Memory]
    watch: StallWatchdog
    say: Callable[[NixlMessage], None]
    fail: Callable[[str], None]
    plain: Callable[[IncomingPages | OutgoingPages], None]
    cancel_plain: Callable[[int], None]

    def mark(self, number: int) -> bytes:
        """Return what says that write ``number`` of the source is complete."""
        return self.session + number.to_bytes(8, "little")

    def digests(self, unit: Unit, number: int, first: int, ids: array[int], period: int) -> bytes:
        """Return the digests of wire blocks from ``first`` on, as a frame would have them."""
        chosen = array("q", (ids[i - first] for i in digested(first, len(ids), number, period)))
        if not chosen:
            return b""
        pieces = self.pages().outgoing(unit, chosen)
        return b"".join(map(page_io.digest_pages, pieces))


# Log lines about whom was turned away: they neither fill the log nor ever fall silent.


logger = logging.getLogger(__name__)

MAX_KINDS = 1024
AGAIN_S = 300.0
"""After which the same kind of trouble with the same address is worth another line."""

LINES_PER_MINUTE = 20


class RejectionLog:
    """Not thread-safe. ``now`` is in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}  # when, by address and kind; oldest first
        self._minute = 0.0
        self._lines = 0  # in that minute
        self._kept_back = 0  # since the last line

    def say(self, host: str, text: str, now: float) -> None:
        """Log that ``host`` was turned away, unless that was said lately, or much else was."""
        kind = f"{host}: {text.partition(':')[0]}"
        if now - self._minute >= 60.0:
            self._minute, self._lines = now, 0
        known = now - self._said.get(kind, -AGAIN_S) < AGAIN_S
        if known or self._lines >= LINES_PER_MINUTE:
            self._kept_back += 1
            return
        self._said.pop(kind, None)
        self._said[kind] = now
        if len(self._said) > MAX_KINDS:
            del self._said[next(iter(self._said))]
        more = f" ({self._kept_back} more were since the last such line)" if self._kept_back else ""
        self._lines, self._kept_back = self._lines + 1, 0
        logger.warning("%s: turned away: %s%s", host, text, more)
