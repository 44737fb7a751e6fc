"""The seam between workers: moves pages between the KV caches of two processes.

A transport knows peers, connections and byte runs. It knows nothing of requests: what may be sent,
and when, is decided and carried out by ``kvconnect.disaggregation``. Whoever receives
pages says where they go, from tables it made itself; a sender has no say in it. Addresses are told
to the other side only where its hardware writes (``nixl``), and only the receiver's own.

Terms: a *read* is one receiver's number for what it expects from one peer. A *unit* is a set of
byte runs that every wire block of a group has (all layers of the group, or one of them); both
sides number units alike because both derive them from the same agreement. A *wire block* is the
smallest piece of a block table that both sides can address.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Protocol

PeerId = NewType("PeerId", int)
"""Number of one authenticated connection to another worker; never reused by a transport."""

UNAUTHENTICATED = PeerId(0)
"""Nobody's number: whoever was turned away before it had one."""


@dataclass(frozen=True)
class Unit:
    """Where this side keeps one wire block of a unit, as byte runs in wire order.

    ``segments`` holds ``phases * n`` triples (offset, stride, length) in bytes. Wire block ``w``
    has the runs ``[offset + (w // phases) * stride, + length)`` of the n triples that start at
    ``(w % phases) * n``. ``block_bytes`` is the sum of their lengths, the same for every phase.
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
    """One piece of backing storage, for transports whose hardware writes into it. ``device`` is
    the number of a CUDA device, -1 for CPU memory."""

    address: int
    nbytes: int
    device: int = -1


class Memory(Protocol):
    """The KV cache as a transport reads and writes it: directly, or through a staging ring.

    Threads: any, several at a time. Pieces come in the order of ``ids`` and together cover it.
    Each is used before the next is asked for; a generator that is closed early gives its room
    back and copies nothing more. Asking for a piece may block, for a bounded time, and raises
    ``TransferFailed`` if there is no room for it by then.
    """

    def regions(self) -> tuple[MemoryRegion, ...]:
        """Return all storage that pages lie in; the same for as long as the memory lives."""

    def region_of(self, unit: Unit) -> MemoryRegion:
        """Return the area from whose start a unit's offsets count."""

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        """Yield pieces that hold the pages' bytes."""

    def incoming(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        """Yield pieces to fill; each is moved into its pages when the next is asked for."""


class Fence(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Block the calling thread, and nothing else, until the device has passed it."""


# What a transport is told to do -------------------------------------------------------------


class PeerMessage(NamedTuple):
    """Deliver a small message, at most ``MAX_MESSAGE_BYTES``, in order with other notes."""

    peer: PeerId
    payload: bytes


class IncomingPages(NamedTuple):
    """Expect pages for read ``read_id``. ``units[u]`` says where unit number u lies here and
    ``spans[u]`` the (first wire block, ids) its wire blocks are taken from. None of them is
    written before ``fence`` passed. ``path`` is one of those in the peer's ``PeerUp``;
    to a side that was connected to, pages go over ``tcp`` alone."""

    peer: PeerId
    read_id: int
    units: Sequence[Unit]
    spans: Sequence[tuple[int, array[int]]]
    fence: Fence | None = None
    path: str = "tcp"


class OutgoingPages(NamedTuple):
    """Send the wire blocks ``first ... first + len(ids) - 1`` of a unit, once ``fence`` passed."""

    peer: PeerId
    read_id: int
    number: int  # of the unit
    unit: Unit
    first: int
    ids: array[int]
    fence: Fence | None = None


class Disconnect(NamedTuple):
    """Close a peer's connection, for instance because it broke the protocol; notes queued before
    it still go out. ``PeerDown`` with this reason follows."""

    peer: PeerId
    reason: str


# What it answers ----------------------------------------------------------------------------


class PeerUp(NamedTuple):
    """A connection is authenticated. ``inbound``: the other side asked for it. ``paths``: ways
    for pages that both sides have; ``lacking`` says why there are not more."""

    peer: PeerId
    inbound: bool
    address: str
    paths: tuple[str, ...] = ("tcp",)
    lacking: str = ""


class PeerDown(NamedTuple):
    """A connection is gone, or could not be made; all that was submitted for it has ended. Those
    that were refused before they were peers are the ``UNAUTHENTICATED``."""

    peer: PeerId
    reason: str
    refused: str = ""  # a bounded cause where the other side was refused: "auth", "address" ...


class MessageReceived(NamedTuple):
    """A note arrived."""

    peer: PeerId
    payload: bytes


class PagesSent(NamedTuple):
    """One ``OutgoingPages`` was handed to the network whole; its source may be overwritten."""

    peer: PeerId
    read_id: int
    nbytes: int
    seconds: float


class PagesReceived(NamedTuple):
    """Pages arrived. ``bad``: wire blocks among them whose digest does not match."""

    peer: PeerId
    read_id: int
    number: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    bad: tuple[int, ...]
    nbytes: int
    seconds: float


class Drained(NamedTuple):
    """A cancelled read: no page of it is read or written any more."""

    peer: PeerId
    read_id: int


Event = PeerUp | PeerDown | MessageReceived | PagesSent | PagesReceived | Drained

MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Security:
    """Who may connect, and how that is proven.

    Without a key and without TLS only loopback addresses and ``allowed`` networks (CIDR) are
    accepted and connected to. Keys and certificates come from files, never from settings; with
    ``key_file`` the key is the one in it, and read again when that changes, as certificates are.
    """

    key: bytes = field(default=b"", repr=False)
    allowed: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    key_file: str = ""


@dataclass(frozen=True)
class ConnectionOptions:
    """How a transport talks. Times in seconds.

    Both sides of a connection use the stricter ``digest`` of the two.
    """

    connections: int = 2  # data connections per peer
    backend: str = "UCX"  # of NIXL, where that is a path
    local: bool = False  # NIXL, which authenticates nobody itself, keeps to loopback
    digest: str = "sampled"
    heartbeat_s: float = 1.0
    dead_after_s: float = 5.0  # without an answer of the other machine, or to connect
    silent_s: float = 20.0  # without a word of the other process, which may be busy
    stall_s: float = 30.0  # without progress inside one frame, or until a cancelled one ends


class Transport(ABC):
    """Connections of one worker. All methods are for one thread, except ``submit`` and
    ``cancel``, which any thread may call; nothing blocks but ``poll``, ``listen`` and ``close``.
    """

    @abstractmethod
    def register(self, memory: Memory) -> None:
        """Say where pages are; once, before anything is submitted."""

    @abstractmethod
    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept peers at an address; port 0 picks one. Return the address in use.

        Raises:
            ConfigError: the address cannot be used, or is not loopback and nothing protects it.
        """

    @abstractmethod
    def connect(self, host: str, port: int) -> PeerId:
        """Start to connect; ``PeerUp`` or ``PeerDown`` follows within ``dead_after_s``."""

    @abstractmethod
    def submit(self, order: PeerMessage | IncomingPages | OutgoingPages | Disconnect) -> None:
        """Queue an order. One for a peer that is down is dropped: its ``PeerDown`` says so."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Return what happened, waiting up to ``timeout`` seconds for the first event."""

    @abstractmethod
    def cancel(self, peer: PeerId, read_id: int) -> None:
        """Drop what is queued for a read and let what is under way land nowhere; ``Drained``
        follows, unless ``PeerDown`` does. Pages that still arrive are thrown away, or land before
        ``Drained`` does where hardware writes them."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection and end every thread. Idempotent."""


# Events on their way from a transport's threads to the one that polls.


MAX_UNREAD_BYTES = 16 << 20
"""Notes of one peer that wait to be read; more, and it should be given up."""

_EVENT_BYTES = 256  # what even an empty note takes


class EventQueue:
    """A queue that is emptied at once. ``put`` is for any thread, ``drain`` for one."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._filled = threading.Condition()
        self._unread_bytes: Counter[PeerId] = Counter()

    def put(self, event: Event) -> bool:
        """Add an event; say False if so many notes of its peer are unread that no more should be
        taken."""
        with self._filled:
            self._events.append(event)
            if isinstance(event, MessageReceived):
                self._unread_bytes[event.peer] += max(len(event.payload), _EVENT_BYTES)
            self._filled.notify()
            return self._unread_bytes[event.peer] <= MAX_UNREAD_BYTES

    def drain(self, timeout: float) -> list[Event]:
        """Return all events in order, waiting up to ``timeout`` seconds for the first."""
        with self._filled:
            self._filled.wait_for(lambda: self._events, timeout)
            events = list(self._events)
            self._events.clear()
            self._unread_bytes.clear()
            return events
