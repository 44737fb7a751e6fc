"""The transport seam with a NIXL path beside the data connections of TCP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from kvconnect.errors import ProtocolError
from kvconnect.protocol import nixl_messages
from kvconnect.protocol.nixl_messages import (
    Destinations,
    PagesWritten,
    StopWriting,
    UnitLocations,
    UseTcp,
    WritesStopped,
)
from kvconnect.transport.base import (
    ConnectionOptions,
    IncomingPages,
    Memory,
    OutgoingPages,
    Security,
)
from kvconnect.transport.nixl.agent import NixlAgent
from kvconnect.transport.nixl.receive import InboundWrites
from kvconnect.transport.nixl.send import OutboundWrites
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.tcp import TcpTransport
from kvconnect.transport.tcp.context import ConnectionContext


class NixlTransport(TcpTransport):
    """Peers that have NIXL too get the path ``nixl``; all have ``tcp``.

    The source writes, the reader never reads: destinations are the reader's own words, and what a
    reader has to wait for before it uses a block again is the source's word, or the end of the
    agent that writes come through.
    """

    def __init__(self, security: Security, options: ConnectionOptions) -> None:
        super().__init__(security, options)
        self._mover: NixlWorker | None = None

    def register(self, memory: Memory) -> None:
        """See the base class.

        Raises:
            ConfigError: NIXL, its backend or this memory cannot be used.
        """
        super().register(memory)
        options = self._shared.options
        self._mover = NixlWorker(options.backend, memory.regions(), local=options.local)
        self._shared.make_rail = partial(NixlPath, self._mover)

    def close(self) -> None:
        super().close()
        if self._mover:
            self._mover.close()


# One peer's NIXL path: which wants go over it, and what the two sides say about them.


Order = IncomingPages | OutgoingPages


class NixlPath:
    """``submit`` and ``cancel`` are for any thread, the rest is for the loop's.

    Until both sides have greeted, orders wait here. Where they cannot work together, all of them
    go over the data connections; where they can, the reader says of each read_id which way it goes.
    """

    def __init__(self, mover: NixlWorker, line: ConnectionContext) -> None:
        self._line = line
        self._mover = mover
        self._landings = InboundWrites(line, mover)
        self._launches = OutboundWrites(line, mover)
        self._lock = threading.Lock()
        self._early: list[Order] = []
        self._usable: bool | None = None
        self.lacking = ""
        self._offer = mover.join(self._lost)  # last: it may be lost at once

    def offer(self) -> bytes:
        """Return what goes with the greeting; nothing if there is no agent now. A reader is told
        nothing that lets it reach memory here: this side writes, it does not."""
        if self._offer is None:
            return b""
        told = replace(self._offer, metadata=b"") if self._line.inbound else self._offer
        return nixl_messages.encode(told)

    def settle(self, theirs: bytes, period: int) -> None:
        """Take the other side's offer and the agreed digest period.

        Raises:
            ProtocolError: what came is no offer.
        """
        self.lacking = self._misfit(theirs)
        if not self.lacking:
            self._launches.settle(nixl_messages.decode_offer(theirs), period)
            self._landings.settle(period)
            self._mover.call(lambda agent: agent.expect_marks(self._line.session))
        with self._lock:  # kept, so that a cancel comes before or after an order
            self._usable = not self.lacking
            early, self._early = self._early, []
            for order in early:
                self._route(order)

    def submit(self, order: Order) -> None:
        """Take an order."""
        with self._lock:
            if self._usable is None:
                self._early.append(order)
                return
        self._route(order)

    def _route(self, order: Order) -> None:
        lacking = self.lacking or ("it connected, so it reads" if self._line.inbound else "")
        if lacking and isinstance(order, IncomingPages) and order.path != "tcp":
            self._line.fail(f"{order.path} is no path to this peer: {lacking}")
        elif not self._usable:
            self._line.plain(order)
        elif isinstance(order, IncomingPages):
            self._landings.expect(order)
        else:
            self._launches.send(order)

    def cancel(self, read_id: int) -> None:
        """See :meth:`Transport.cancel`."""
        with self._lock:
            self._early = [order for order in self._early if order.read_id != read_id]
            usable = self._usable
        if not usable:
            self._line.cancel_plain(read_id)
        elif not self._landings.cancel(read_id):
            self._launches.cancel(read_id)

    def on_note(self, payload: bytes) -> None:
        """Take what the other side says; raises :class:`ProtocolError` if it may not."""
        message = nixl_messages.decode(payload)
        if not self._usable:
            raise ProtocolError("a note about NIXL, which was not agreed on")
        if isinstance(message, PagesWritten):
            self._landings.on_landed(message)
        elif isinstance(message, WritesStopped):
            self._landings.on_stopped(message.want)
        elif isinstance(message, UnitLocations):
            self._launches.on_units(message)
        elif isinstance(message, Destinations):
            self._launches.on_places(message)
        elif isinstance(message, UseTcp):
            self._launches.on_plain(message.want)
        else:
            assert isinstance(message, StopWriting)
            self._launches.on_stop(message.want)

    def close(self, reason: str, done: Callable[[], None]) -> None:
        """End everything; ``done`` is called, on any thread, once no write of the other side can
        land here."""
        self._mover.leave(self._lost)
        self._launches.close()
        exposed = self._landings.close()
        if exposed:
            self._mover.call(self._end)
            why = f"{self._line.name} was lost while it wrote here: {reason}"
            self._mover.renew(self._offer, why, done)
        else:
            self._mover.call(self._end, done)

    def _end(self, agent: NixlAgent) -> None:
        self._launches.end(agent)
        agent.drop_marks(self._line.session)

    def _misfit(self, theirs: bytes) -> str:
        if self._offer is None:
            return "NIXL does not work here, see the log"
        if not theirs:
            return "the other side offers no NIXL"
        return nixl_messages.mismatch(self._offer, nixl_messages.decode_offer(theirs))

    def _lost(self, reason: str) -> None:
        if self._usable is not False:
            self._line.fail(reason)
