"""Sessions with workers of other engines: from a connection to an agreement on bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.cache.pages import LayerPages, unit_segments
from kvconnect.disaggregation.receiver import Origin
from kvconnect.disaggregation.sender import GroupView
from kvconnect.disaggregation.states import SESSION, Event, SessionState
from kvconnect.disaggregation.transfer_trace import TransferTrace
from kvconnect.errors import ProtocolError, Refused
from kvconnect.offload.messages import PeerTransfer
from kvconnect.protocol import messages
from kvconnect.protocol.messages import Hello, Message, Reject
from kvconnect.protocol.negotiation import Agreement, negotiate
from kvconnect.protocol.topology import head_range
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.base import (
    Disconnect,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
    Unit,
)
from kvconnect.types import Endpoint, FailureCause, Rank, TransferType

logger = logging.getLogger(__name__)

_GREETING_S = 20.0  # a busy engine may take its time
_PROBES_S = 60.0  # from connecting; a few mebibytes over the slowest link worth using
_MOST_TCP_ONLY = 1024
_MOST_REFUSALS = 64
_NOBODY = Rank(0, 1, 0, 1)  # before it said who it is

GroupPages = Sequence[LayerPages]
"""Where each layer of one KV-cache group is. One that keeps K apart from V is there twice, by one
name, and moves as one."""


@dataclass
class TransferMeter:
    """What is measured on one connection, by want; times in seconds of the monotonic clock. A
    want that is not open (any more) is not measured: messages cross."""

    wire: dict[int, float] = field(default_factory=dict)  # open wants: how long pages moved
    moved: dict[int, int] = field(default_factory=dict)  # and how many bytes of them
    asked: dict[int, float] = field(default_factory=dict)  # since when, until the first page
    ready: dict[int, float] = field(default_factory=dict)  # when its last page was computed
    probes: int = 0  # that are over
    probed_bytes: int = 0  # of the one under way
    probed_seconds: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)  # bytes per second, by path
    paths: tuple[str, ...] = ("tcp",)  # that pages may take
    path: str = ""  # that they do take, once that is measured
    journal: TransferTrace | None = None  # where the engine traces

    def open(self, want: int, asked: bool) -> None:
        """Begin to measure a want; ``asked``: it is ours."""
        self.wire[want], self.moved[want] = 0.0, 0
        if asked:
            self.asked[want] = time.monotonic()
        if self.journal is not None:
            self.journal.open(want)

    def record(
        self,
        stats: OffloadingConnectorStats,
        kind: TransferType,
        event: PagesSent | PagesReceived,
        peer: str,
    ) -> None:
        """Count pages that moved."""
        stats.record_transfer(kind.value, event.nbytes, event.seconds)
        stats.count("handoff_peer_bytes", event.nbytes, label=peer)
        stats.count("handoff_peer_seconds", event.seconds, label=peer)
        if event.want in self.wire:
            self.wire[event.want] += event.seconds
            self.moved[event.want] += event.nbytes
        if self.journal is not None:
            self.journal.moved(event.want, event.nbytes, event.seconds)
        asked = self.asked.pop(event.want, None)
        if asked is not None:
            waited = time.monotonic() - asked - event.seconds
            stats.observe("handoff_wait_seconds", max(0.0, waited))

    def all_ready(self, want: int) -> None:
        """The other side has computed all of a want."""
        if want in self.wire:
            self.ready[want] = time.monotonic()
        if self.journal is not None:
            self.journal.ready(want)

    def finish(
        self, stats: OffloadingConnectorStats, want: int, role: str
    ) -> tuple[int, float, PeerTransfer | None]:
        """A want has everything: note how long its pages moved and, on the side that asked, how
        much of that came after the other side's prefill. Return the bytes and these seconds, and
        the same for a trace."""
        if want not in self.wire:
            return 0, 0.0, None
        moved = self.moved[want], self.wire[want]
        stats.observe("handoff_wire_seconds", self.wire[want], label=role)
        if role == "recv":  # no word of its being ready: the pages overtook it
            now = time.monotonic()
            stats.observe("handoff_exposed_seconds", now - self.ready.get(want, now))
        trace = None if self.journal is None else self.journal.close(want, self.path, *moved)
        self.forget(want)
        return *moved, trace

    def forget(self, want: int) -> None:
        """A want ended."""
        if self.journal is not None:
            self.journal.forget(want)
        for book in (self.wire, self.moved, self.asked, self.ready):
            book.pop(want, None)


@dataclass
class Session:
    """One connection. ``inbound``: the other side reads from this one; otherwise we read.

    ``units`` and ``views`` are there once both sides have ``agreed``.
    """

    peer: PeerId
    inbound: bool
    since: float
    address: str = ""
    name: str = ""  # of the other engine, for logs and metrics
    state: SessionState = SESSION.start
    refusal: str = ""  # why one side turned the other away
    reader: Rank = _NOBODY
    units: list[Unit] = field(default_factory=list)
    unit_group: list[int] = field(default_factory=list)
    views: dict[int, GroupView] = field(default_factory=dict)
    meter: TransferMeter = field(default_factory=TransferMeter)

    @property
    def agreed(self) -> bool:
        """Whether pages may move."""
        return self.state is SessionState.UP

    def advance(self, event: Event) -> None:
        """Take an event of the session's table."""
        self.state = SESSION.after(self.state, event)


class PathPreference(NamedTuple):
    """Which path pages take: a name, or ``auto`` for the faster one of what a peer has.
    ``min_rate`` is in bytes per second; a peer that is slower is refused."""

    transport: str = "auto"
    min_rate: float = 0.0


class Sessions:
    """The connections of one worker, by peer and by the origin they were made for.

    Not synchronised: its owner holds a lock. Whoever connects is the reader of the session.
    """

    def __init__(
        self,
        hello: Hello,
        pages: Sequence[GroupPages],
        transport: Transport,
        stats: OffloadingConnectorStats,
        choice: PathPreference,
    ) -> None:
        self.hello = hello
        self.choice = choice
        self.is_first = hello.rank.tp_rank == hello.rank.pp_rank == 0  # speaks for its engine
        self.traced = False
        self._pages = pages
        self.transport = transport
        self.stats = stats
        self.refusals: dict[Endpoint, str] = {}  # why there is no agreement with whom; oldest first
        self._links: dict[PeerId, Session] = {}
        self._origins: dict[PeerId, Origin] = {}
        self._peers: dict[Origin, PeerId] = {}
        self._tcp_only: dict[
            Origin, None
        ] = {}  # whose other paths broke while measured; oldest first

    def __len__(self) -> int:
        return len(self._links)

    def count(self) -> None:
        """Publish how many peers there are."""
        if not self.is_first:
            return
        up = sum(link.agreed for link in self._links.values())
        self.stats.gauge("handoff_peers", up, label="up")
        self.stats.gauge("handoff_peers", len(self._links) - up, label="connecting")
        links = [link for link in self._links.values() if link.agreed and not link.inbound]
        for path in ("tcp", "nixl"):
            count = sum(link.meter.path == path for link in links)
            self.stats.gauge("handoff_transport_peers", count, label=path)

    def origin(self, link: Session) -> Origin:
        """Return what a connection from here was made for."""
        return self._origins[link.peer]

    def get(self, peer: PeerId) -> Session | None:
        """Return a connection that is up."""
        return self._links.get(peer)

    def need(self, origin: Origin) -> Session | None:
        """Return the link to a worker once its path is chosen; None if it is being made or was
        just asked for."""
        peer = self._peers.get(origin)
        if peer is not None:
            link = self._links.get(peer)
            return link if link is not None and link.meter.path else None
        endpoint = origin.endpoint
        peer = self.transport.connect(endpoint.host, endpoint.port)
        self._peers[origin], self._origins[peer] = peer, origin
        self._links[peer] = _link(self, peer, inbound=False)
        self.count()
        return None

    def tell(self, peer: PeerId, message: Message) -> None:
        """Send a message."""
        self.transport.submit(PeerMessage(peer, messages.encode(message)))

    def hang_up(self, peer: PeerId, reason: str) -> None:
        """Close a connection that cannot go on; its end says why."""
        link = self._links.get(peer)
        if link is not None and link.state is not SessionState.CLOSING:
            link.advance(Event.ABORT)
            self.transport.submit(Disconnect(peer, reason))

    def tick(self, now: float) -> None:
        """Give up on peers that are connected but do not say who they are."""
        for link in self._links.values():
            if link.state is SessionState.GREETING and now - link.since > _GREETING_S:
                self.hang_up(link.peer, f"no greeting within {_GREETING_S:g} s")
            measuring = link.agreed and not link.inbound and not link.meter.path
            if measuring and now - link.since > _PROBES_S:
                self.hang_up(link.peer, f"its speed could not be measured in {_PROBES_S:g} s")

    def on_up(self, event: PeerUp) -> None:
        """A connection is authenticated: say who we are."""
        if event.inbound:
            self._links[event.peer] = _link(self, event.peer, inbound=True)
        link = self._links.get(event.peer)
        if link is not None:
            link.advance(Event.CONNECTED)
            link.address = link.name = event.address
            wanted = self.choice.transport
            if wanted == "auto" and self._origins.get(event.peer) in self._tcp_only:
                wanted = "tcp"
            link.meter.paths = event.paths if wanted == "auto" else (wanted,)
            if link.meter.paths[0] not in event.paths:
                why = event.lacking or "it does not offer it"
                self.refuse(event.peer, Refused("transport", f"no {wanted} path: {why}"))
                return
            self.tell(event.peer, self.hello)

    def on_hello(self, link: Session, theirs: Hello) -> Origin | None:
        """The other side said who it is: agree. Return what the connection was made for.

        Raises:
            Refused: naming the field that differs, with both values.
            ProtocolError: it had said so before.
        """
        if link.state is not SessionState.GREETING:
            raise ProtocolError("a second Hello")
        link.name = f"{link.address.rpartition(':')[0]}/{theirs.engine_id[:8]}"
        reader, source = (theirs, self.hello) if link.inbound else (self.hello, theirs)
        origin = self._origins.get(link.peer)
        # Not all ways to meet tell whom: then there is no name to compare.
        if origin and origin.engine_id and (theirs.engine_id, theirs.epoch) != origin[1:]:
            raise Refused(
                "ticket",
                f"the ticket is for engine {origin.engine_id} (epoch {origin.epoch}), at its "
                f"address is {theirs.engine_id} (epoch {theirs.epoch}): it was restarted",
            )
        agreement = negotiate(reader, source)
        link.reader = reader.rank
        self._settle(link, agreement)
        link.advance(Event.AGREED)
        self.count()
        if not link.inbound:
            seconds = time.monotonic() - link.since
            self.stats.observe("handoff_handshake_seconds", seconds)
            logger.info("connected to %s in %.3f s", link.name, seconds)
        return origin

    def on_turned(self, link: Session, message: Reject) -> None:
        """The other side does not agree."""
        if link.refusal:
            return  # it was mutual
        link.refusal = message.message or message.field
        self.stats.count("handoff_refused", label=message.field)
        self.hang_up(link.peer, f"refused by the other side: {message.message}")

    def refuse(self, peer: PeerId, error: Refused) -> None:
        """Tell the other side why there is no agreement, and end the connection."""
        link = self._links.get(peer)
        if link is not None:
            link.refusal = str(error) or error.field
        self.stats.count("handoff_refused", label=error.field)
        self.tell(peer, Reject(field=error.field, message=str(error)))
        self.hang_up(peer, str(error))

    def on_down(self, event: PeerDown) -> tuple[Origin | None, FailureCause]:
        """A connection is gone; return the origin it was made for, and what its end means."""
        link = self._links.pop(event.peer, None)
        origin = self._origins.pop(event.peer, None)
        if origin is not None:
            del self._peers[origin]
            if link is not None and _broke_while_measured(link):
                logger.warning("%s: only tcp from now on, the other path broke", link.name)
                self._tcp_only[origin] = None
                if len(self._tcp_only) > _MOST_TCP_ONLY:
                    del self._tcp_only[next(iter(self._tcp_only))]
        if event.refused:
            self.stats.count("handoff_refused", label=event.refused)
        if link is not None:
            name = link.name or (str(origin.endpoint) if origin else "a peer")
            logger.warning("connection to %s ended: %s", name, event.reason)
            self.stats.count("handoff_peer_failures", label=name)
        self.count()
        refusal = (link.refusal if link else "") or (event.refused and event.reason)
        if origin is not None and refusal:
            self.refusals[origin.endpoint] = refusal
            if len(self.refusals) > _MOST_REFUSALS:
                del self.refusals[next(iter(self.refusals))]
        return origin, FailureCause.REFUSED if refusal else FailureCause.PEER

    def _settle(self, link: Session, agreement: Agreement) -> None:
        """Work out where the agreed units lie here."""
        rank = self.hello.rank
        for number, group in enumerate(agreement.groups):
            if not group.layers:
                continue
            place = {name: i for i, name in enumerate(group.layers)}
            link.views[number] = GroupView(
                ratio=group.source_ratio if link.inbound else group.reader_ratio,
                unit_all=agreement.unit(number),
                unit_of_layer=tuple(
                    agreement.unit(number, place[name]) if name in place else -1
                    for name in self.hello.groups[number].layers
                ),
            )
        for number, layer in agreement.units:
            group = agreement.groups[number]
            names = group.layers if layer is None else (group.layers[layer],)
            pages = [page for name in names for page in self._pages[number] if page.name == name]
            first = head_range(rank.tp_rank, rank.tp, self.hello.groups[number].kv_heads)[0]
            segments, phases, size = unit_segments(
                pages,
                (group.heads[0] - first, group.heads[1] - first),
                group.wire_tokens,
                group.order,
            )
            link.units.append(Unit(segments, phases, size))
            link.unit_group.append(number)


def _link(links: Sessions, peer: PeerId, inbound: bool) -> Session:
    rank = links.hello.rank
    journal = TransferTrace(rank.pp_rank * rank.tp + rank.tp_rank) if links.traced else None
    return Session(peer, inbound, time.monotonic(), meter=TransferMeter(journal=journal))


def _broke_while_measured(link: Session) -> bool:
    """Whether a path that is there does not work: it is behind a firewall, for instance."""
    return link.agreed and not link.meter.path and "tcp" in link.meter.rates
