"""Connections of one worker with workers of other engines that share blocks of host memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from kvconnect import threads
from kvconnect.bounded import remember
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.errors import ProtocolError
from kvconnect.offload.host_arena import HostArena
from kvconnect.peers.connections import open_transport, page_path
from kvconnect.peers.dialling import Dialler
from kvconnect.peers.loop import PeerLoop
from kvconnect.peers.sessions import Session, Sessions
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
from kvconnect.tiers.peers.fetching import Reads
from kvconnect.tiers.peers.same_machine import MemoryAccess, SourceMemory, is_this_machine
from kvconnect.tiers.peers.served import ServedBlocks
from kvconnect.tiers.peers.serving import SendLimit, Serving
from kvconnect.tiers.peers.sources import CacheSources
from kvconnect.transport.base import (
    Drained,
    Ends,
    Event,
    MessageReceived,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerUp,
    Transport,
)
from kvconnect.transport.tcp.shared_port import SharedPort

logger = logging.getLogger(__name__)

_MOST_REFUSALS = 64


@dataclass
class SharingSession(Session):
    """``same_blocks``: both sides keep the same blocks. The session of two that do not stays, and
    is not used: it would only be made again. ``nonce``: of this side's hello, if it may read the
    memory of the other. ``ends``: for checking whose it is."""

    host: str = ""
    path: str = "tcp"
    nonce: bytes = b""
    ends: Ends | None = None
    same_blocks: bool = False


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
    """Owns the transport, whose memory is the host tier, and a thread that answers others and takes
    their answers.

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
        self._dialler = Dialler(transport, options.addresses(), clock)
        self._sessions = Sessions[SharingSession](transport, encode)
        self._refusals: dict[tuple[str, int], str] = {}  # the last of each worker that refused
        self._meets_again = threading.Event()  # with another hello
        self.address = _listen(transport, options.listen, number)
        kind = threads.ThreadKind.PEERS
        self._loop = PeerLoop(kind, transport, self._take, self._tick, again=True)
        self._loop.start()

    def __repr__(self) -> str:
        return f"<PeerAgent {len(self.reader.sources)} of {len(self._dialler)} sources>"

    @property
    def served(self) -> ServedBlocks:
        """What others may read; any thread may change it."""
        return self._serving.served

    @property
    def available(self) -> bool:
        """Whether a configured worker can be asked, or none is configured. For any thread."""
        return self.reader.sources.has(self._dialler.peers()) or not self._dialler.configured

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
        self._loop.stop()
        self._loop.join()
        self._serving.close()
        self._transport.close()
        self.reader.sources.close()
        self._dialler.close()

    def _tick(self, now: float) -> None:
        self._dialler.tick(now)
        self._serving.tick(now)
        self._sessions.tick(now)
        if self._meets_again.is_set():
            self._meets_again.clear()
            for session in self._sessions:
                self._dialler.end(session.peer)
                self._sessions.disconnect(session.peer, "the weights have changed")

    def _take(self, event: Event) -> None:
        with self._sessions.isolate(event.peer):
            if isinstance(event, PeerUp):
                self._on_up(event)
            elif isinstance(event, PeerDown):
                self._on_down(event)
            elif (session := self._sessions.get(event.peer)) is not None:
                self._on_session_event(session, event)

    def _on_up(self, event: PeerUp) -> None:
        host = event.address.rpartition(":")[0].strip("[]")
        copies = self._access.reads and not event.inbound and is_this_machine(host)
        session = SharingSession(
            event.peer,
            event.inbound,
            time.monotonic(),
            address=event.address,
            name=event.address,
            host=host,
            path="nixl" if self._nixl and "nixl" in event.paths else "tcp",
            nonce=os.urandom(NONCE_BYTES) if copies else b"",
            ends=event.ends,
        )
        session.connected()
        self._sessions.add(session)
        if event.inbound:
            self._serving.on_up(event.peer, host)
        self._sessions.send(event.peer, msgspec.structs.replace(self._hello, nonce=session.nonce))

    def _on_session_event(
        self,
        session: SharingSession,
        event: MessageReceived | PagesSent | PagesReceived | Drained,
    ) -> None:
        if isinstance(event, MessageReceived):
            self._on_message(session, decode(event.payload))
        elif isinstance(event, PagesReceived):
            self.reader.reads.on_received(event)
        elif isinstance(event, PagesSent):
            self._serving.on_sent(event)
        elif session.inbound:
            self._serving.on_drained(event)
        else:
            self.reader.reads.on_drained(event)

    def _on_message(self, session: SharingSession, message: CacheMessage) -> None:
        if isinstance(message, Reject):
            self._sessions.on_reject(session, message)
        elif isinstance(message, CacheHello):
            self._on_hello(session, message)
        elif not session.same_blocks:
            raise ProtocolError(f"{type(message).__name__} before an agreement")
        elif session.inbound:
            self._serving.on_message(session.peer, message)
        elif isinstance(message, Found):
            self.reader.questions.on_found(session.peer, message)
        elif isinstance(message, Sent):
            self.reader.reads.on_sent(session.peer, message)
        elif isinstance(message, HostTierAddresses) and session.nonce:
            self._on_memory(session, message)
        else:
            raise ProtocolError(f"{type(message).__name__} from a source")

    def _on_hello(self, session: SharingSession, hello: CacheHello) -> None:
        """Agree with a worker on what to share: all that both keep, or nothing."""
        session.greeted()
        common_protocol(PROTOCOL, hello.protocol)
        session.agree()
        if hello.engine == self._hello.engine:
            self._dialler.forget(session.peer)
            return
        same_part = hello.layout == self._hello.layout
        other = other_weights(self._hello.identity, hello.identity, same_part=same_part)
        if other is not None and _are_known(self._hello, hello):
            text = "the peer at %s has other weights, %r there and %r here: nothing is shared"
            logger.warning(text, session.name, other[1], other[0])
        elif hello.format != self._hello.format:
            logger.warning("the peer at %s keeps other blocks: nothing is shared", session.name)
        else:
            if not session.inbound:
                address, path = session.address, session.path
                self.reader.sources.add(session.peer, address, path, hello, same_part)
            elif self._access.gives and same_part and hello.nonce and is_this_machine(session.host):
                self._serving.tell_memory(session.peer, hello.nonce)
            session.same_blocks = True
        self._dialler.answered(session.peer)

    def _on_memory(self, session: SharingSession, told: HostTierAddresses) -> None:
        """Read a source's blocks from its memory from now on, if the system lets this process and
        the process that it names is the one that says so."""
        try:
            check_other_end(told.pid, session.ends)
            memory = SourceMemory(told, session.nonce, self._access.host)
        except OSError as error:
            text = "the memory of the engine at %s cannot be read, so the network is used: %s"
            logger.info(text, session.name, error)
        else:
            self.reader.sources.set_memory(session.peer, memory)

    def _on_down(self, event: PeerDown) -> None:
        _, refusal = self._sessions.remove(event)
        self._note_refusal(self._dialler.address(event.peer), refusal)
        self._dialler.lost(event.peer, time.monotonic())
        self._serving.on_down(event.peer)
        self.reader.sources.remove(event.peer)
        self.reader.questions.on_down(event.peer)
        self.reader.reads.on_down(event.peer)

    def _note_refusal(self, address: tuple[str, int] | None, refusal: str) -> None:
        """Log why there is no sharing with a worker, once: it is connected to again and again."""
        if address is not None and refusal and self._refusals.get(address) != refusal:
            remember(self._refusals, address, refusal, _MOST_REFUSALS)
            logger.warning("nothing is shared with the engine at %s:%d: %s", *address, refusal)


def _are_known(*hellos: CacheHello) -> bool:
    """Whether something is known of all workers' weights. Else their formats say what they are: a
    model's name, where its files are not there."""
    return all(hello.identity.weights != Weights() for hello in hellos)


def start_agent(
    settings: Settings, blocks: SharedBlocks, number: int, port: SharedPort | None = None
) -> PeerAgent:
    """Start a worker's agent with the settings of its engine; see :class:`PeerAgent`. ``number``
    counts the workers of all data-parallel engines. ``port``: where the process hands off blocks.

    Raises:
        ConfigError: an address, key, certificate or transport that cannot be used.
    """
    options = settings.cache_peers
    assert options is not None  # else there is no such tier
    if options.same_machine == "auto":
        way: Literal["memory", "network"] = "network" if settings.key_file else "memory"
        options = msgspec.structs.replace(options, same_machine=way)
    if options.serve:
        options = msgspec.structs.replace(options, listen=settings.listen)
    elif options.serves:
        text = "cache_peers.listen opens a second port, and goes with the next version: %s"
        logger.warning(text, "remove it, set serve in cache_peers, and set listen to IP:PORT")
        port = None
    path = page_path(settings, measures=False)
    memory = ArenaMemory(blocks.host)
    transport = open_transport(settings, "share", port, path, memory, serves=options.serves)
    with ExitStack() as undo:
        undo.callback(transport.close)
        agent = PeerAgent(options, transport, blocks, settings.wait_s, number, path == "nixl")
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
