"""The contract of a second path for a peer's pages, beside its TCP data connections."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvconnect.protocol.frames import digested
from kvconnect.protocol.nixl_messages import NixlMessage
from kvconnect.transport import page_io
from kvconnect.transport.base import (
    IncomingPages,
    Memory,
    OutgoingPages,
    PageUser,
    PeerId,
    Unit,
)
from kvconnect.transport.event_queue import EventQueue
from kvconnect.transport.tcp.send_queue import SendQueue
from kvconnect.transport.tcp.stall_watchdog import StallWatchdog


class PagePath(Protocol):
    """A path for pages beside TCP. ``submit`` and ``cancel`` are for any thread, the rest is for
    the loop's thread.

    ``name`` is the path's name in ``PeerUp``. ``path_error`` says, once settled, why the path
    cannot be used; "" if it can.
    """

    name: str
    path_error: str

    def offer(self) -> bytes:
        """Return the bytes to add to the greeting."""

    def settle(self, theirs: bytes, period: int) -> None:
        """Take the other side's offer and the agreed digest period; raises
        :class:`ProtocolError` if the bytes are no offer."""

    def submit(self, order: IncomingPages | OutgoingPages) -> None:
        """Carry out an order, on this path or over TCP."""

    def cancel(self, read_id: int) -> None:
        """See :meth:`Transport.cancel`."""

    def on_message(self, payload: bytes) -> None:
        """Handle a message of the other side's path; raises :class:`ProtocolError`."""

    def close(self, reason: str, done: Callable[[], None]) -> None:
        """End everything. ``done`` is called, on any thread, once the other side can write no more
        into this memory."""


@dataclass(frozen=True)
class ConnectionContext:
    """One peer's connection, as its page path sees it. All functions are for any thread.

    Attributes:
        session: id of the connection, the same on both sides.
        inbound: whether the other side connected.
        say: sends a message to the other side; messages stay in order.
        fail: closes the connection for a reason.
        tcp: takes the orders that go over TCP.
        watch: closes the connection when an operation takes too long.
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
    tcp: SendQueue

    def notification(self, number: int) -> bytes:
        """Return the NIXL notification that write ``number`` of the source is complete."""
        return self.session + number.to_bytes(8, "little")

    def digests(
        self,
        unit: Unit,
        number: int,
        first: int,
        ids: array[int],
        period: int,
        gone: Callable[[], bool],
    ) -> bytes:
        """Return the digests of wire blocks from ``first`` on, as a TCP frame has them; none if
        they are ``gone``, not needed any more, before this side has memory to read them."""
        chosen = array("q", (ids[i - first] for i in digested(first, len(ids), number, period)))
        if not chosen:
            return b""
        pieces = self.pages().outgoing(unit, chosen, PageUser(self.peer, gone))
        return b"".join(map(page_io.digest_pages, pieces))
