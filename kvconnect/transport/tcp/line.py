"""Another path for a peer's pages, beside its data connections: what it does and what it gets."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvconnect.transport import pump
from kvconnect.transport.base import Incoming, Memory, Outgoing, PeerId, Unit
from kvconnect.transport.mailbox import Mailbox
from kvconnect.transport.tcp.watch import Watch
from kvconnect.wire.codec import digested
from kvconnect.wire.rails import RailMessage


class Rail(Protocol):
    """``submit`` and ``cancel`` are for any thread, the rest is for the loop's. ``lacking``: why
    this path is not to be had, "" if it is; once settled."""

    lacking: str

    def offer(self) -> bytes:
        """Return what goes with the greeting."""

    def settle(self, theirs: bytes, period: int) -> None:
        """Take the other side's offer and the agreed digest period; :class:`ProtocolError` if it
        is none."""

    def submit(self, order: Incoming | Outgoing) -> None:
        """Take an order, for whichever path."""

    def cancel(self, want: int) -> None:
        """See :meth:`Transport.cancel`."""

    def on_note(self, payload: bytes) -> None:
        """Take what the other side says; raises :class:`ProtocolError` if it may not."""

    def close(self, reason: str, done: Callable[[], None]) -> None:
        """End everything; ``done`` is called, on any thread, once no write of the other side can
        land here."""


@dataclass(frozen=True)
class Line:
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
    events: Mailbox
    pages: Callable[[], Memory]
    watch: Watch
    say: Callable[[RailMessage], None]
    fail: Callable[[str], None]
    plain: Callable[[Incoming | Outgoing], None]
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
        return b"".join(map(pump.digest_pages, pieces))
