"""Connections of one worker with workers of other engines that share blocks of host memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from kvconnect import threads
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.errors import KVConnectError, ProtocolError, Refused, TransferFailed, contained
from kvconnect.offload.host_arena import HostArena
from kvconnect.peers.connections import connection_options
from kvconnect.protocol.addresses import Addresses
from kvconnect.protocol.cache_messages import (
    NONCE_BYTES,
    CacheHello,
    CacheMessage,
    Found,
    HostTierAddresses,
    Sent,
    decode,
    encode,
)
from kvconnect.protocol.codec import PROTOCOL, common_protocol
from kvconnect.protocol.hello import Reject
from kvconnect.protocol.identity import Identity, Weights, other_weights
from kvconnect.settings import Settings
from kvconnect.settings.addresses import listen_address
from kvconnect.settings.sharing import PeerSettings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends.base import StoreMeter
from kvconnect.tiers.peers.arena_memory import ArenaMemory, transport_units
from kvconnect.tiers.peers.asking import Holders, Questions
from kvconnect.tiers.peers.connection_owner import check_other_end
from kvconnect.tiers.peers.dialling import Dialler
from kvconnect.tiers.peers.fetching import Reads
from kvconnect.tiers.peers.same_machine import MemoryAccess, SourceMemory, is_this_machine
from kvconnect.tiers.peers.served import ServedBlocks
from kvconnect.tiers.peers.serving import SendLimit, Serving
from kvconnect.tiers.peers.sources import CacheSources
from kvconnect.transport import make_transport
from kvconnect.transport.base import (
    Disconnect,
    Ends,
    Event,
    MessageReceived,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
)
from kvconnect.transport.security import security_of
from kvconnect.transport.tcp.shared_port import SharedPort

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_JOIN_TIMEOUT_S = 10.0


@dataclass
class _Connection:
    """A connection that is up. ``agreed``: both sides keep the same blocks. ``nonce``: of this
    side's hello, if it may read the memory of the other. ``ends``: for checking whose it is."""

    inbound: bool
    host: str
    path: str
    nonce: bytes
    ends: Ends | None
    agreed: bool = False


class SharedBlocks(NamedTuple):
    """What a worker shares: the host tier, per KV-cache group the units of each page of a block in
    a slot, the fingerprint of the units' format, that of a slot's layout, and the weights that it
    has."""

    host: HostArena
    layouts: Sequence[Sequence[Sequence[HeadUnit]]]
    fingerprint: bytes
    layout: bytes
    identity: Identity = Identity()


class Reader(NamedTuple):
    """The workers that can be asked, and what asks them and reads from them, on any thread."""

    sources: CacheSources
    questions: Questions
    reads: Reads


class PeerAgent:
    """Owns the transport, and a thread that answers others and takes their answers.

    ``read_s``: seconds after which a read has failed. ``number`` is added to the port to listen at.
    ``nixl``: read over NIXL where a peer has it.

    Attributes:
        reader: finds and reads blocks.
        address: where it listens; None if it does not.

    Raises:
        ConfigError: it cannot listen there, or the transport does not work here.
    """

    def __init__(
        self,
        options: PeerSettings,
        transport: Transport,
        blocks: SharedBlocks,
        read_s: float,
        number: int = 0,
        nixl: bool = False,
    ) -> None:
        host = blocks.host
        groups = [
            [transport_units(page, host.slot_bytes) for page in pages] for pages in blocks.layouts
        ]
        sizes = [{n: unit.block_bytes for n, unit in pages[0].parts.items()} for pages in groups]
        clock = time.monotonic
        self._transport = transport
        self._nixl = nixl
        whole = all(len(pages) == 1 for pages in groups)  # whose digests are those of slots
        copies = whole and options.same_machine == "memory"
        self._access = MemoryAccess(host, copies, copies and not options.serve_rate)
        self._hello = CacheHello(
            engine=os.urandom(16),
            format=blocks.fingerprint,
            layout=blocks.layout,
            groups=sizes,
            identity=blocks.identity,
            pages=[len(pages) for pages in groups],
        )
        self._meter = StoreMeter()
        sources = CacheSources(transport, groups)
        self.reader = Reader(
            sources, Questions(sources, options.ask_s, clock), Reads(sources, read_s, clock)
        )
        served, limit = ServedBlocks(host.num_slots), SendLimit(options.serve_rate, clock)
        self._serving = Serving(transport, served, host, groups, limit, self._meter)
        self._dialler = Dialler(sources, options.addresses(), clock)
        self._peers: dict[PeerId, _Connection] = {}
        self._closed = threading.Event()
        self._meets_again = threading.Event()  # with another hello
        transport.register(ArenaMemory(host))
        self.address = _listen(transport, options.listen, number)
        kind, stopped = threads.ThreadKind.PEERS, self._closed.is_set
        name = "kvconnect-peers"
        self._thread = threads.make(kind, name, self._loop, again=True, stopped=stopped)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PeerAgent {len(self.reader.sources)} of {len(self._dialler)} sources>"

    @property
    def served(self) -> ServedBlocks:
        """What others may read; any thread may change it."""
        return self._serving.served

    @property
    def available(self) -> bool:
        """Whether a configured worker can be asked, or none is configured. For any thread."""
        return self._dialler.available

    def find(
        self, keys: Sequence[bytes], groups: Sequence[int], source: Addresses = ()
    ) -> list[Holders]:
        """Ask the workers at ``source``, or else the configured ones; see :meth:`Questions.find`.
        For any thread."""
        return self.reader.questions.find(keys, groups, self._dialler.peers(source))

    def set_identity(self, identity: Identity) -> None:
        """The worker has these weights from now on: meet all peers again if they are others. For
        any thread."""
        if identity != self._hello.identity:
            self._hello = msgspec.structs.replace(self._hello, identity=identity)
            self._meets_again.set()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call. Any thread may call this."""
        return self._meter.take()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._serving.close()
        self._transport.close()
        self.reader.sources.close()

    def _loop(self) -> None:
        ticked = -_TICK_S
        while not self._closed.is_set():
            now = time.monotonic()
            if now - ticked >= _TICK_S:
                ticked = now
                self._dialler.tick(now)
                self._serving.tick(now)
                self._end_all()
            for event in self._transport.poll(_TICK_S):
                with contained(partial(self._end, event.peer)):
                    self._on_event(event)

    def _end_all(self) -> None:
        """End all connections if the weights have changed; the dialler makes them again."""
        if self._meets_again.is_set():
            self._meets_again.clear()
            for peer in self._peers:
                self._dialler.end(peer, "the weights have changed")

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerUp):
            path = "nixl" if self._nixl and "nixl" in event.paths else "tcp"
            host = event.address.rpartition(":")[0].strip("[]")
            copies = self._access.reads and not event.inbound and is_this_machine(host)
            nonce = os.urandom(NONCE_BYTES) if copies else b""
            self._peers[event.peer] = _Connection(event.inbound, host, path, nonce, event.ends)
            if event.inbound:
                self._serving.on_up(event.peer, host)
            hello = msgspec.structs.replace(self._hello, nonce=nonce)
            self._transport.submit(PeerMessage(event.peer, encode(hello)))
        elif isinstance(event, PeerDown):
            self._on_down(event)
        elif (connection := self._peers.get(event.peer)) is None:
            return
        elif isinstance(event, MessageReceived):
            self._on_message(event.peer, connection, decode(event.payload))
        elif isinstance(event, PagesReceived):
            self.reader.reads.on_received(event)
        elif isinstance(event, PagesSent):
            self._serving.on_sent(event)
        elif connection.inbound:
            self._serving.on_drained(event)
        else:
            self.reader.reads.on_drained(event)

    def _on_message(self, peer: PeerId, connection: _Connection, message: CacheMessage) -> None:
        if isinstance(message, CacheHello):
            self._on_hello(peer, connection, message)
        elif isinstance(message, Reject):
            raise TransferFailed(f"refused by the peer: {message.message}")
        elif not connection.agreed:
            raise ProtocolError(f"{type(message).__name__} before an agreement")
        elif connection.inbound:
            self._serving.on_message(peer, message)
        elif isinstance(message, Found):
            self.reader.questions.on_found(peer, message)
        elif isinstance(message, Sent):
            self.reader.reads.on_sent(peer, message)
        elif isinstance(message, HostTierAddresses) and connection.nonce:
            self._on_memory(peer, connection, message)
        else:
            raise ProtocolError(f"{type(message).__name__} from a source")

    def _on_hello(self, peer: PeerId, connection: _Connection, hello: CacheHello) -> None:
        """Agree with a worker that keeps the same blocks. The connection to another one stays, and
        is not used: it would only be made again."""
        if connection.agreed:
            raise ProtocolError("a second hello")
        common_protocol(PROTOCOL, hello.protocol)
        if hello.engine == self._hello.engine:
            self._dialler.forget(peer)
            return
        address = self._dialler.address(peer)
        same_part = hello.layout == self._hello.layout
        other = other_weights(self._hello.identity, hello.identity, same_part=same_part)
        if other is not None and _are_known(self._hello, hello):
            text = "the peer at %s has other weights, %r there and %r here: nothing is shared"
            logger.warning(text, address or peer, other[1], other[0])
        elif hello.format != self._hello.format:
            logger.warning("the peer at %s keeps other blocks: nothing is shared", address or peer)
        else:
            if address is not None:
                self.reader.sources.add(peer, connection.path, hello, same_part)
            elif (
                self._access.gives
                and same_part
                and hello.nonce
                and is_this_machine(connection.host)
            ):
                self._serving.tell_memory(peer, hello.nonce)
            connection.agreed = True
        self._dialler.answered(peer)

    def _on_memory(self, peer: PeerId, connection: _Connection, told: HostTierAddresses) -> None:
        """Read a source's blocks from its memory from now on, if the system lets this process and
        the process that it names is the one that says so."""
        try:
            check_other_end(told.pid, connection.ends)
            memory = SourceMemory(told, connection.nonce, self._access.host)
        except OSError as error:
            text = "the memory of the engine at %s cannot be read, so the network is used: %s"
            logger.info(text, self._dialler.address(peer), error)
        else:
            self.reader.sources.set_memory(peer, memory)

    def _on_down(self, event: PeerDown) -> None:
        self._peers.pop(event.peer, None)
        self._dialler.lost(event.peer, time.monotonic())
        self._serving.on_down(event.peer)
        self.reader.sources.remove(event.peer)
        self.reader.questions.on_down(event.peer)
        self.reader.reads.on_down(event.peer)

    def _end(self, peer: PeerId, error: Exception) -> None:
        """End the connection that an error came from."""
        if not isinstance(error, KVConnectError):  # a bug here
            logger.error("unexpected error; this connection ends", exc_info=error)
        if isinstance(error, Refused):
            self._transport.submit(PeerMessage(peer, encode(Reject(error.field, str(error)))))
        self._transport.submit(Disconnect(peer, f"{type(error).__name__}: {error}"))


def _are_known(*hellos: CacheHello) -> bool:
    """Whether something is known of all workers' weights. Else their formats say what they are: a
    model's name, where its files are not there."""
    return all(hello.identity.weights != Weights() for hello in hellos)


def start_agent(
    config: Settings, blocks: SharedBlocks, number: int, port: SharedPort | None = None
) -> PeerAgent:
    """Start a worker's agent with the settings of its engine; see :class:`PeerAgent`. ``number``
    counts the workers of all data-parallel engines. ``port``: where the process hands off blocks.

    Raises:
        ConfigError: an address, key, certificate or transport that cannot be used.
    """
    options = config.cache_peers
    assert options is not None  # else there is no such tier
    if options.same_machine == "auto":
        way: Literal["memory", "network"] = "network" if config.key_file else "memory"
        options = msgspec.structs.replace(options, same_machine=way)
    if options.serve:
        options = msgspec.structs.replace(options, listen=config.listen)
    elif options.serves:
        text = "cache_peers.listen opens a second port, and goes with the next version: %s"
        logger.warning(text, "remove it, set serve in cache_peers, and set listen to IP:PORT")
        port = None
    nixl = config.transport == "nixl"
    connection = connection_options(config, "share", port)
    transport = make_transport("nixl" if nixl else "tcp", security_of(config), connection)
    with ExitStack() as undo:
        undo.callback(transport.close)
        agent = PeerAgent(options, transport, blocks, config.wait_s, number, nixl)
        undo.pop_all()
    return agent


def _listen(transport: Transport, setting: str, number: int) -> tuple[str, int] | None:
    where = listen_address(setting)
    if where is None:
        return None
    host, port = where
    found = transport.listen(host, port + number if port else 0)
    logger.info("serving blocks of host memory at %s:%d", *found)
    return found
