"""The NIXL transport: a TCP transport whose peers may also have a NIXL path."""

from __future__ import annotations

import secrets
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
from kvconnect.transport.nixl.agent import NixlAgent
from kvconnect.transport.nixl.receive import InboundWrites
from kvconnect.transport.nixl.send import OutboundWrites
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.tcp import TcpTransport
from kvconnect.transport.tcp.page_path import ConnectionContext


class NixlTransport(Transport):
    """Adds the path ``nixl`` to the peers of a TCP transport, where both sides have NIXL.

    Connections, messages and pages on the path ``tcp`` are those of the TCP transport. On the path
    ``nixl`` the source writes into memory that the reader named; the reader may use a block again
    once the source reports the end of its writes, or once the reader's NIXL agent has ended.

    Each direction has an agent of its own, so that the end of the one that others write to ends
    nothing that is written from here. Who reads knows nothing of the one that writes.
    """

    def __init__(self, security: Security, options: ConnectionOptions) -> None:
        self._tcp = TcpTransport(security, options)
        self._options = options
        self._owner = secrets.token_hex(8)
        self._receiving: NixlWorker | None = None
        self._sending: NixlWorker | None = None

    def register(self, memory: Memory) -> None:
        """See the base class.

        Raises:
            ConfigError: NIXL, its backend or this memory cannot be used.
        """
        self._tcp.register(memory)
        options, regions = self._options, memory.regions()
        make = partial(NixlWorker, options.backend, regions, local=options.local, owner=self._owner)
        self._receiving = make() if options.reads else None
        self._sending = make() if options.serves else None
        self._tcp.add_page_path(self._path)

    def _path(self, context: ConnectionContext) -> NixlPath | None:
        """Return a new connection's path; None if its direction has no agent. The side that
        connects is the reader."""
        worker = self._sending if context.inbound else self._receiving
        return NixlPath(worker, context) if worker else None

    def listen(self, host: str, port: int) -> tuple[str, int]:
        return self._tcp.listen(host, port)

    def connect(self, host: str, port: int) -> PeerId:
        return self._tcp.connect(host, port)

    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        self._tcp.submit(order)

    def poll(self, timeout: float) -> list[Event]:
        return self._tcp.poll(timeout)

    def wake(self) -> None:
        self._tcp.wake()

    def cancel(self, peer: PeerId, read_id: int) -> None:
        self._tcp.cancel(peer, read_id)

    def close(self) -> None:
        workers = [worker for worker in (self._receiving, self._sending) if worker]
        for worker in workers:
            worker.retire()
        self._tcp.close()
        for worker in workers:
            worker.close()


Order = IncomingPages | OutgoingPages


class NixlPath:
    """One peer's NIXL path, see :class:`~kvconnect.transport.tcp.page_path.PagePath`.

    Orders wait until both sides have sent their greeting. If the two cannot use NIXL together, all
    orders go over TCP; otherwise the reader chooses the path of each read.
    """

    name = "nixl"

    def __init__(self, worker: NixlWorker, context: ConnectionContext) -> None:
        self._context = context
        self._worker = worker
        self._inbound = InboundWrites(context, worker)
        self._outbound = OutboundWrites(context, worker)
        self._lock = threading.Lock()
        self._waiting: list[Order] = []
        self._usable: bool | None = None
        self.path_error = ""
        self._offer = worker.join(self._lost)  # last: it may be lost at once

    def offer(self) -> bytes:
        """Return what goes with the greeting; nothing if there is no agent now. A reader is told
        nothing that lets it reach memory here: this side writes, it does not."""
        if self._offer is None:
            return b""
        told = replace(self._offer, metadata=b"") if self._context.inbound else self._offer
        return nixl_messages.encode(told)

    def settle(self, theirs: bytes, period: int) -> None:
        """Take the other side's offer and the agreed digest period.

        Raises:
            ProtocolError: what came is no offer.
        """
        self.path_error = self._mismatch(theirs)
        if not self.path_error:
            self._outbound.settle(nixl_messages.decode_offer(theirs), period)
            self._inbound.settle(period)
            self._worker.call(lambda agent: agent.expect_notifications(self._context.session))
        with self._lock:  # kept, so that a cancel comes before or after an order
            self._usable = not self.path_error
            waiting, self._waiting = self._waiting, []
            for order in waiting:
                self._route(order)

    def submit(self, order: Order) -> None:
        """Take an order."""
        with self._lock:
            if self._usable is None:
                self._waiting.append(order)
                return
        self._route(order)

    def _route(self, order: Order) -> None:
        path_error = self.path_error or (
            "it connected, so it reads" if self._context.inbound else ""
        )
        if path_error and isinstance(order, IncomingPages) and order.path != "tcp":
            self._context.fail(f"{order.path} is no path to this peer: {path_error}")
        elif not self._usable:
            self._context.tcp.submit(order)
        elif isinstance(order, IncomingPages):
            self._inbound.expect(order)
        else:
            self._outbound.send(order)

    def cancel(self, read_id: int) -> None:
        """See :meth:`Transport.cancel`."""
        with self._lock:
            self._waiting = [order for order in self._waiting if order.read_id != read_id]
            usable = self._usable
        if not usable:
            self._context.tcp.cancel(read_id)
        elif not self._inbound.cancel(read_id):
            self._outbound.cancel(read_id)

    def on_message(self, payload: bytes) -> None:
        """Take what the other side says; raises :class:`ProtocolError` if it may not."""
        message = nixl_messages.decode(payload)
        if not self._usable:
            raise ProtocolError("a note about NIXL, which was not agreed on")
        if isinstance(message, PagesWritten):
            self._inbound.on_written(message)
        elif isinstance(message, WritesStopped):
            self._inbound.on_stopped(message.read_id)
        elif isinstance(message, UnitLocations):
            self._outbound.on_units(message)
        elif isinstance(message, Destinations):
            self._outbound.on_places(message)
        elif isinstance(message, UseTcp):
            self._outbound.on_use_tcp(message.read_id)
        else:
            assert isinstance(message, StopWriting)
            self._outbound.on_stop(message.read_id)

    def close(self, reason: str, done: Callable[[], None]) -> None:
        """End everything; ``done`` is called, on any thread, once no write of the other side can
        land here."""
        self._worker.leave(self._lost)
        self._outbound.close()
        exposed = self._inbound.close()
        if exposed:
            self._worker.call(self._end)
            why = f"{self._context.name} was lost while it wrote here: {reason}"
            self._worker.renew(self._offer, why, done)
        else:
            self._worker.call(self._end, done)

    def _end(self, agent: NixlAgent) -> None:
        self._outbound.end(agent)
        agent.drop_notifications(self._context.session)

    def _mismatch(self, theirs: bytes) -> str:
        if self._offer is None:
            return "NIXL does not work here, see the log"
        if not theirs:
            return "the other side offers no NIXL"
        return nixl_messages.mismatch(self._offer, nixl_messages.decode_offer(theirs))

    def _lost(self, reason: str) -> None:
        if self._usable is False:
            return
        if self._context.inbound or not self._inbound.on_agent_lost(reason):
            self._context.fail(reason)
