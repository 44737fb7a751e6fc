"""Transport within one process, for tests and as the shortest example.

It has no threads: ``poll`` carries out the orders of its side and puts the events into the queues
of both sides. Pages have no digests and peers do not authenticate.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvconnect.errors import ConfigError, Misuse, ProtocolError
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    Event,
    Fence,
    IncomingPages,
    Memory,
    MessageReceived,
    OutgoingPages,
    PageChunk,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
    Unit,
)
from kvconnect.transport.event_queue import EventQueue

_FIRST_PORT = 49152  # first ephemeral port of a real machine


class Network:
    """Addresses of the transports that listen in this process. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # also guards every connection between two transports
        self._listening: dict[tuple[str, int], InprocTransport] = {}
        self._ports = itertools.count(_FIRST_PORT)

    def listen(self, host: str, port: int, transport: InprocTransport) -> tuple[str, int]:
        """Reserve an address (port 0: any); raises :class:`ConfigError` if it is in use."""
        with self.lock:
            address = (host, port or next(self._ports))
            if address in self._listening:
                raise ConfigError("listen", f"{host}:{port}", "it is in use: name another port")
            self._listening[address] = transport
            return address

    def find(self, address: tuple[str, int]) -> InprocTransport | None:
        """Return the transport that listens at an address, None if there is none."""
        with self.lock:
            return self._listening.get(address)

    def leave(self, transport: InprocTransport) -> None:
        """Free the addresses of a transport."""
        with self.lock:
            for address in [a for a, t in self._listening.items() if t is transport]:
                del self._listening[address]


NETWORK = Network()
"""Default network of all transports."""


@dataclass
class _End:
    """One side of a connection."""

    owner: InprocTransport
    number: PeerId
    address: str
    other: _End = field(init=False)
    orders: deque[PeerMessage | OutgoingPages | Disconnect] = field(default_factory=deque)
    expected: dict[int, IncomingPages] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


class InprocTransport(Transport):
    """A transport whose ``poll`` carries out its orders. Contract: see :class:`Transport`."""

    def __init__(self, network: Network = NETWORK) -> None:
        self._network = network
        self._events = EventQueue()
        self._memory: Memory | None = None
        self._ends: dict[PeerId, _End] = {}
        self._numbers = itertools.count(1)

    def register(self, memory: Memory) -> None:
        if self._memory is not None:
            raise Misuse("the memory is registered already")
        self._memory = memory

    def listen(self, host: str, port: int) -> tuple[str, int]:
        return self._network.listen(host, port, self)

    def connect(self, host: str, port: int) -> PeerId:
        with self._network.lock:
            number = PeerId(next(self._numbers))
            other = self._network.find((host, port))
            if other is None:
                self._events.put(PeerDown(number, f"cannot connect: nobody is at {host}:{port}"))
                return number
            here = _End(self, number, f"{host}:{port}")
            there = _End(other, PeerId(next(other._numbers)), "inproc")
            here.other, there.other = there, here
            for end in (here, there):
                end.owner._ends[end.number] = end
                end.owner._events.put(PeerUp(end.number, end is there, end.address))
            return number

    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        with self._network.lock:
            end = self._ends.get(order.peer)
            if end is None:
                return
            if isinstance(order, IncomingPages):
                end.expected[order.read_id] = order
            else:
                end.orders.append(order)

    def poll(self, timeout: float) -> list[Event]:
        for end in list(self._ends.values()):
            self._carry_out(end)
        return self._events.drain(timeout)

    def wake(self) -> None:
        self._events.wake()

    def cancel(self, peer: PeerId, read_id: int) -> None:
        with self._network.lock:
            end = self._ends.get(peer)
            if end is None:
                return
            end.orders = deque(
                order
                for order in end.orders
                if not (isinstance(order, OutgoingPages) and order.read_id == read_id)
            )
            if end.expected.pop(read_id, None):
                end.ended.add(read_id)
            self._events.put(Drained(peer, read_id))

    def close(self) -> None:
        self._network.leave(self)
        for end in list(self._ends.values()):
            self._part(end, "closed", "closed by the other side")

    def _carry_out(self, end: _End) -> None:
        """Carry out the orders that are queued for one peer."""
        for _ in range(len(end.orders)):
            with self._network.lock:
                order = end.orders.popleft() if end.orders else None
            if isinstance(order, OutgoingPages):
                for fence in (order.fence, _fence_there(order, end.other)):
                    if fence:
                        fence.wait()
            with self._network.lock:  # so that no cancel from another thread comes during a copy
                if order is None or end.number not in self._ends:
                    return
                try:
                    self._carry_out_one(end, order)
                except ProtocolError as error:
                    self._part(end, "closed by the other side", f"broke the protocol: {error}")

    def _carry_out_one(self, end: _End, order: PeerMessage | OutgoingPages | Disconnect) -> None:
        other = end.other
        if isinstance(order, PeerMessage):
            other.owner._events.put(MessageReceived(other.number, order.payload))
        elif isinstance(order, Disconnect):
            self._part(end, order.reason, "closed by the other side")
        else:
            nbytes = len(order.ids) * order.unit.block_bytes
            if order.read_id not in other.ended:
                self._copy(order, other)
                other.owner._events.put(
                    PagesReceived(
                        other.number,
                        order.read_id,
                        order.number,
                        order.first,
                        len(order.ids),
                        (),
                        nbytes,
                        0.0,
                    )
                )
            self._events.put(PagesSent(end.number, order.read_id, nbytes, 0.0))

    def _copy(self, order: OutgoingPages, other: _End) -> None:
        unit, ids = _destination(order, other)
        source, target = self._memory, other.owner._memory
        if source is None or target is None:
            raise Misuse("register the memory before pages move")
        data = bytearray()
        for piece in source.outgoing(order.unit, order.ids):
            for address, length in _runs(piece):
                data += ctypes.string_at(address, length)
        start = 0
        for piece in target.incoming(unit, ids):
            for address, length in _runs(piece):
                ctypes.memmove(address, bytes(data[start : start + length]), length)
                start += length

    def _part(self, end: _End, here: str, there: str) -> None:
        with self._network.lock:
            for side, reason in ((end, here), (end.other, there)):
                if side.owner._ends.pop(side.number, None):
                    side.owner._events.put(PeerDown(side.number, reason))


def _fence_there(order: OutgoingPages, other: _End) -> Fence | None:
    expected = other.expected.get(order.read_id)
    return expected.fence if expected else None


def _destination(order: OutgoingPages, other: _End) -> tuple[Unit, array[int]]:
    """Return the unit and ids that pages are written to, from the receiver's own table.

    Raises:
        ProtocolError: the receiver does not expect these pages.
    """
    expected = other.expected.get(order.read_id)
    if expected is None or order.number >= len(expected.units):
        raise ProtocolError(f"unit {order.number} of read {order.read_id} is not known here")
    unit = expected.units[order.number]
    first, ids = expected.spans[order.number]
    start = order.first - first
    if start < 0 or start + len(order.ids) > len(ids) or unit.block_bytes != order.unit.block_bytes:
        raise ProtocolError(f"pages of read {order.read_id} that are not expected")
    return unit, ids[start : start + len(order.ids)]


def _runs(piece: PageChunk) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of each run of a chunk; raises :class:`Misuse` if one is outside."""
    segments, phases = piece.unit.segments, piece.unit.phases
    triples = len(segments) // phases
    for number in piece.ids:
        page, phase = divmod(number, phases)
        for i in range(phase * triples, (phase + 1) * triples, 3):
            offset, stride, length = segments[i : i + 3]
            start = offset + page * stride
            if start < 0 or start + length > piece.nbytes:
                raise Misuse(f"wire block {number} reaches outside its memory")
            yield piece.address + start, length
