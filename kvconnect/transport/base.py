"""The contract of a transport, which moves pages between the KV caches of two processes.

A transport knows peers, connections and byte runs, not requests: ``kvconnect.disaggregation``
decides what is sent and when. The receiver alone decides where pages go, from its own tables. Its
addresses are told to the sender only where the sender's hardware writes (``nixl``).

Terms: a *read id* is the receiver's number for the pages that it expects from one peer. A *unit* is
a set of byte runs that every wire block of a group has (all layers of the group, or one of them);
both sides derive the same unit numbers from their agreement. A *wire block* is the smallest piece
of a block table that both sides can address.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol

from kvconnect.protocol.auth import Service

if TYPE_CHECKING:
    from kvconnect.transport.tcp.shared_port import SharedPort

PeerId = NewType("PeerId", int)
"""Id of one connection to another worker; never reused by a transport."""

UNAUTHENTICATED = PeerId(0)
"""Peer id in events about connections rejected before authentication."""


@dataclass(frozen=True)
class Unit:
    """Where this side keeps one wire block of a unit, as byte runs in wire order.

    ``segments`` holds ``phases * n`` triples (offset, stride, length) in bytes. Wire block ``w``
    has the runs ``[offset + (w // phases) * stride, + length)`` of the n triples that start at
    ``(w % phases) * n``. ``block_bytes`` is the sum of their lengths, equal for every phase.
    """

    segments: array[int]
    phases: int
    block_bytes: int


class PageChunk(NamedTuple):
    """Pages in CPU memory: the wire blocks ``ids`` of ``unit`` within [address, + nbytes)."""

    address: int
    nbytes: int
    unit: Unit
    ids: array[int]


class MemoryRegion(NamedTuple):
    """A range of memory registered with a transport. ``device``: a CUDA device, -1 for the CPU."""

    address: int
    nbytes: int
    device: int = -1


class PageUser(NamedTuple):
    """Who waits for a chunk: the peer that its pages go to or come from. ``gone`` returns whether
    nobody waits any more."""

    peer: PeerId
    gone: Callable[[], bool]


class Memory(Protocol):
    """The KV cache as a transport reads and writes it: directly, or through a staging ring.

    Any thread may call it, several at a time. Chunks come in the order of ``ids`` and together
    cover them. A chunk is used before the next is requested; closing the generator early frees its
    memory and copies nothing more. Requesting a chunk may wait until others have freed memory; if
    ``user`` is gone meanwhile, no more chunks come.
    """

    def regions(self) -> tuple[MemoryRegion, ...]:
        """Return all memory that holds pages; constant for the lifetime of the object."""

    def region_of(self, unit: Unit) -> MemoryRegion:
        """Return the region from whose start a unit's offsets count."""

    def outgoing(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        """Yield chunks that hold the pages' bytes."""

    def incoming(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        """Yield chunks to fill; each is copied into its pages when the next is requested."""


class Fence(Protocol):
    """A point in the device's work queue."""

    def wait(self) -> None:
        """Block the calling thread until the device has passed this point."""


class PeerMessage(NamedTuple):
    """Send a message of at most ``MAX_MESSAGE_BYTES``; messages stay in order."""

    peer: PeerId
    payload: bytes


class IncomingPages(NamedTuple):
    """Expect pages for read ``read_id``.

    ``units[u]`` says where unit u lies here; ``spans[u]`` is (first wire block, ids) of its wire
    blocks. None is written before ``fence`` has passed. ``path`` is one of those in the peer's
    ``PeerUp``; a peer that connected to this side sends over ``tcp`` alone.
    """

    peer: PeerId
    read_id: int
    units: Sequence[Unit]
    spans: Sequence[tuple[int, array[int]]]
    fence: Fence | None = None
    path: str = "tcp"


class OutgoingPages(NamedTuple):
    """Send wire blocks ``first ... first + len(ids) - 1`` of a unit, once ``fence`` has passed."""

    peer: PeerId
    read_id: int
    number: int  # of the unit
    unit: Unit
    first: int
    ids: array[int]
    fence: Fence | None = None


class Disconnect(NamedTuple):
    """Close a peer's connection; queued messages are sent first. ``PeerDown`` with this reason
    follows."""

    peer: PeerId
    reason: str


Ends = tuple[tuple[str, int], tuple[str, int]]
"""IP address and port of this side of a TCP connection, and of the other side."""


class PeerUp(NamedTuple):
    """A connection is authenticated.

    ``inbound``: the other side connected. ``paths``: the page paths that both sides have;
    ``path_error`` says why there are no more. ``ends``: those of the connection for messages, if it
    is TCP.
    """

    peer: PeerId
    inbound: bool
    address: str
    paths: tuple[str, ...] = ("tcp",)
    path_error: str = ""
    ends: Ends | None = None


class PeerDown(NamedTuple):
    """A connection is closed, or could not be made; all its orders have ended. The peer is
    ``UNAUTHENTICATED`` if the connection was rejected before it had a peer id."""

    peer: PeerId
    reason: str
    refused: str = ""  # bounded cause if authentication failed: "auth", "address" ...


class MessageReceived(NamedTuple):
    """A message arrived."""

    peer: PeerId
    payload: bytes


class PagesSent(NamedTuple):
    """All of one ``OutgoingPages`` was handed to the network; its source may be overwritten."""

    peer: PeerId
    read_id: int
    nbytes: int
    seconds: float


class PagesReceived(NamedTuple):
    """Pages arrived. ``bad``: wire blocks whose digest does not match."""

    peer: PeerId
    read_id: int
    number: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    bad: tuple[int, ...]
    nbytes: int
    seconds: float


class Drained(NamedTuple):
    """A cancelled read has ended: none of its pages is read or written any more."""

    peer: PeerId
    read_id: int


Event = PeerUp | PeerDown | MessageReceived | PagesSent | PagesReceived | Drained

MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Security:
    """Who may connect, and how a peer authenticates.

    Without a key and without TLS, only loopback addresses and ``allowed`` networks (CIDR) are
    accepted and connected to. The key of ``key_file`` and the certificates are read again when
    their files change.
    """

    key: bytes = field(default=b"", repr=False)
    allowed: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    key_file: str = ""


@dataclass(frozen=True)
class ConnectionOptions:
    """Options of a transport. Times are in seconds.

    Both sides of a connection use the stricter ``digest`` of the two.
    """

    connections: int = 2  # data connections per peer
    max_peers: int = 256  # that connect to this worker
    backend: str = "UCX"  # NIXL's backend
    local: bool = False  # NIXL, which has no authentication, uses loopback only
    reads: bool = True  # NIXL: has an agent that others write to
    serves: bool = True  # NIXL: has an agent that writes to readers; it is never replaced
    digest: str = "sampled"
    heartbeat_s: float = 1.0
    dead_after_s: float = 5.0  # no answer from the other machine, or connecting
    silent_s: float = 20.0  # no message from the other process, which may be busy
    stall_s: float = 30.0  # no progress inside one frame, or end of a cancelled one
    service: Service = "handoff"  # what peers are connected to and accepted for
    port: SharedPort | None = None  # where other services of this process listen too


class Transport(ABC):
    """Connections of one worker. All methods are for one thread, except ``connect``, ``submit`` and
    ``cancel``, which any thread may call. Only ``poll``, ``listen`` and ``close`` block.
    """

    @abstractmethod
    def register(self, memory: Memory) -> None:
        """Set the memory that holds pages; once, before anything is submitted."""

    @abstractmethod
    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept peers at an address; port 0 picks one. Return the address in use.

        Raises:
            ConfigError: the address cannot be used, or is not loopback and nothing protects it.
        """

    @abstractmethod
    def connect(self, host: str, port: int) -> PeerId:
        """Start connecting; ``PeerUp`` or ``PeerDown`` follows within ``dead_after_s``."""

    @abstractmethod
    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        """Queue an order. An order for a peer that is down is dropped."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Return new events, waiting up to ``timeout`` seconds for the first."""

    @abstractmethod
    def wake(self) -> None:
        """Let the poll that waits return, or else the next one. For any thread."""

    @abstractmethod
    def cancel(self, peer: PeerId, read_id: int) -> None:
        """End a read: drop what is queued for it and discard what still arrives.

        ``Drained`` follows, unless ``PeerDown`` does. Where hardware writes pages, they may still
        be written until ``Drained``.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every connection and end every thread. Idempotent."""
