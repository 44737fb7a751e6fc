"""Sessions of hand-offs: whom they were made to, the negotiated format, the path of pages."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.bounded import remember
from kvconnect.cache.pages import LayerPages, unit_segments
from kvconnect.disaggregation.transfer_meter import TransferMeter, TransferTrace
from kvconnect.disaggregation.wire_blocks import GroupView
from kvconnect.errors import Refused
from kvconnect.peers.sessions import Session, Sessions
from kvconnect.protocol import messages
from kvconnect.protocol.identity import Identity
from kvconnect.protocol.messages import HandoffHello
from kvconnect.protocol.negotiation import Agreement, negotiate
from kvconnect.protocol.topology import head_range
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport import PAGE_PATHS
from kvconnect.transport.base import (
    PeerDown,
    PeerId,
    PeerUp,
    Transport,
    Unit,
)
from kvconnect.types import Endpoint, FailureCause, Origin, Rank

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 60.0  # from connecting; enough for a few MiB over a very slow network
_MOST_PROBE_FAILURES = 1024
_TCP_ONLY_AFTER = 2  # failures in a row; one may have another cause, such as the end of the peer
_MOST_REFUSALS = 64
_MOST_ENDED = 1024
_UNKNOWN_RANK = Rank(0, 1, 0, 1)  # before the peer's Hello

GroupPages = Sequence[LayerPages]
"""Where each layer of one KV-cache group is. A layer whose K and V are stored apart has two entries
with the same name and is transferred as one."""


@dataclass
class HandoffSession(Session):
    """``units`` and ``views`` are set once both sides have agreed. ``mixes_weights``: the peer has
    other weights, and both sides allow that."""

    reader: Rank = _UNKNOWN_RANK
    mixes_weights: bool = False
    units: list[Unit] = field(default_factory=list)
    unit_group: list[int] = field(default_factory=list)
    views: dict[int, GroupView] = field(default_factory=dict)
    meter: TransferMeter = field(default_factory=TransferMeter)


class PathPreference(NamedTuple):
    """Which path pages take: a name, or ``auto`` for the fastest that a peer offers. ``min_rate``:
    in bytes per second; slower peers are refused."""

    transport: str = "auto"
    min_rate: float = 0.0


class EndedSessions:
    """What is kept of sessions with workers that this one reads from, after their end.

    ``refusals``: by endpoint, why the last session was refused, oldest first. Threads: one adds,
    another takes.
    """

    def __init__(self) -> None:
        self.refusals: dict[Endpoint, str] = {}
        self._endpoints: deque[Endpoint] = deque(maxlen=_MOST_ENDED)

    def add(self, endpoint: Endpoint) -> None:
        """A session with this worker has ended, or could not be made."""
        self._endpoints.append(endpoint)

    def take(self) -> set[Endpoint]:
        """Return the workers that were added since the last call."""
        ended = set()
        while self._endpoints:
            ended.add(self._endpoints.popleft())
        return ended


class HandoffSessions(Sessions[HandoffSession]):
    """The sessions of one worker, by the origin they were made for too. The side that connects is
    the reader."""

    def __init__(
        self,
        hello: HandoffHello,
        pages: Sequence[GroupPages],
        transport: Transport,
        stats: OffloadingConnectorStats,
        preference: PathPreference,
    ) -> None:
        super().__init__(transport, messages.encode)
        self.hello = hello
        self.preference = preference
        self.speaks_for_engine = hello.rank.tp_rank == hello.rank.pp_rank == 0
        self.traced = False
        self._pages = pages
        self.stats = stats
        self.ended = EndedSessions()
        self._origins: dict[PeerId, Origin] = {}
        self._peers: dict[Origin, PeerId] = {}
        # How often in a row a connection was lost while a path beside TCP was measured.
        self._probe_failures: dict[Origin, int] = {}

    def set_identity(self, identity: Identity) -> None:
        """Greet peers with other weights from now on: end all sessions, so that they meet again."""
        self.hello.identity = identity
        logger.info("this worker has other weights now: %s", identity.weights)
        for session in self:
            self.disconnect(session.peer, "the weights have changed")

    def publish_counts(self) -> None:
        """Publish the numbers of peers as gauges."""
        if not self.speaks_for_engine:
            return
        up = sum(session.agreed for session in self._sessions.values())
        self.stats.gauge("handoff_peers", up, label="up")
        self.stats.gauge("handoff_peers", len(self._sessions) - up, label="connecting")
        mixed = sum(session.mixes_weights for session in self._sessions.values())
        self.stats.gauge("handoff_mixed_weights_peers", mixed)
        sessions = [
            session for session in self._sessions.values() if session.agreed and not session.inbound
        ]
        for path in PAGE_PATHS:
            count = sum(session.meter.path == path for session in sessions)
            self.stats.gauge("handoff_transport_peers", count, label=path)

    def origin(self, session: HandoffSession) -> Origin:
        """Return the worker that an outbound session was made to."""
        return self._origins[session.peer]

    def get_or_connect(self, origin: Origin) -> HandoffSession | None:
        """Return the session with a worker once its path is chosen. Otherwise return None, and
        connect unless that has begun."""
        peer = self._peers.get(origin)
        if peer is not None:
            session = self._sessions.get(peer)
            return session if session is not None and session.meter.path else None
        endpoint = origin.endpoint
        peer = self.transport.connect(endpoint.host, endpoint.port)
        self._peers[origin], self._origins[peer] = peer, origin
        self._begin(peer, inbound=False)
        self.publish_counts()
        return None

    def tick(self, now: float) -> None:
        """Disconnect peers whose rate cannot be measured in time, too."""
        super().tick(now)
        for session in self:
            measuring = session.agreed and not session.inbound and not session.meter.path
            if measuring and now - session.since > _PROBE_TIMEOUT_S:
                if _failed_in_probe(session):
                    self._count_probe_failure(self.origin(session), session.name)
                self.disconnect(
                    session.peer,
                    f"the bandwidth probe did not finish within {_PROBE_TIMEOUT_S:g} s",
                )

    def on_up(self, event: PeerUp) -> None:
        """A connection is authenticated: send the Hello."""
        if event.inbound:
            self._begin(event.peer, inbound=True)
        session = self._sessions.get(event.peer)
        if session is not None:
            session.connected()
            session.address = session.name = event.address
            wanted = self.preference.transport
            if wanted == "auto" and self._is_tcp_only(event.peer):
                wanted = "tcp"
            session.meter.paths = event.paths if wanted == "auto" else (wanted,)
            if session.meter.paths[0] not in event.paths:
                why = event.path_error or "the peer does not offer it"
                self.reject(event.peer, Refused("transport", f"no {wanted} path: {why}"))
                return
            self.send(event.peer, self.hello)

    def on_hello(self, session: HandoffSession, theirs: HandoffHello) -> Origin | None:
        """Negotiate with the peer; return the worker that the session was made to.

        Raises:
            Refused: naming the field that differs, with both values.
            ProtocolError: a second Hello.
        """
        session.greeted()
        session.name = f"{session.address.rpartition(':')[0]}/{theirs.engine_id[:8]}"
        reader, source = (theirs, self.hello) if session.inbound else (self.hello, theirs)
        origin = self._origins.get(session.peer)
        # SGLang's bootstrap server names no engine: then there is nothing to compare.
        if origin and origin.engine_id and (theirs.engine_id, theirs.epoch) != origin[1:]:
            raise Refused(
                "ticket",
                f"the ticket is for engine {origin.engine_id} (epoch {origin.epoch}), but engine "
                f"{theirs.engine_id} (epoch {theirs.epoch}) answers: the engine was restarted",
            )
        if origin and theirs.rank[::2] != origin.endpoint[:2]:
            asked, found = (
                f"tensor-parallel rank {tp_rank} of stage {pp_rank}"
                for tp_rank, pp_rank in (origin.endpoint[:2], theirs.rank[::2])
            )
            why = f"{asked} was asked at {origin.endpoint.host}:{origin.endpoint.port}"
            raise Refused("ticket", f"{why}, but {found} answers: the addresses are old")
        agreement = negotiate(reader, source)
        session.reader = reader.rank
        session.mixes_weights = bool(agreement.mixed_weights)
        if session.mixes_weights:
            text = "%s: KV of other weights is used, as mix_weights says: weights is %s"
            logger.warning(text, session.name, agreement.mixed_weights)
        self._resolve_units(session, agreement)
        session.agree()
        self.publish_counts()
        if not session.inbound:
            seconds = time.monotonic() - session.since
            self.stats.observe("handoff_handshake_seconds", seconds)
            logger.info("connected to %s in %.3f s", session.name, seconds)
        return origin

    def note_refused(self, field: str) -> None:
        self.stats.count("handoff_refused", label=field)

    def note_error(self) -> None:
        self.stats.count("handoff_peer_errors")

    def on_down(self, event: PeerDown) -> tuple[Origin | None, FailureCause]:
        """A connection is gone; return the worker it was made to, and the cause for its reads."""
        session, refusal = self.remove(event)
        origin = self._origins.pop(event.peer, None)
        if origin is not None:
            del self._peers[origin]
            self.ended.add(origin.endpoint)
            if session is not None and _failed_in_probe(session):
                self._count_probe_failure(origin, session.name)
        if session is not None:
            name = session.name or (str(origin.endpoint) if origin else "a peer")
            logger.warning("connection to %s ended: %s", name, refusal or event.reason)
            self.stats.count("handoff_peer_failures", label=name)
        self.publish_counts()
        if origin is not None and refusal:
            remember(self.ended.refusals, origin.endpoint, refusal, _MOST_REFUSALS)
        return origin, FailureCause.REFUSED if refusal else FailureCause.PEER

    def measured(self, session: HandoffSession) -> None:
        """All paths of an outbound session were measured."""
        if len(session.meter.paths) > 1:
            self._probe_failures.pop(self.origin(session), None)

    def _is_tcp_only(self, peer: PeerId) -> bool:
        origin = self._origins.get(peer)
        return origin is not None and self._probe_failures.get(origin, 0) >= _TCP_ONLY_AFTER

    def _count_probe_failure(self, origin: Origin, name: str) -> None:
        count = self._probe_failures.get(origin, 0) + 1
        remember(self._probe_failures, origin, count, _MOST_PROBE_FAILURES)
        following = "only tcp from now on" if count >= _TCP_ONLY_AFTER else "it is tried once more"
        logger.warning("%s: the other path failed in the probe: %s", name, following)

    def _begin(self, peer: PeerId, inbound: bool) -> None:
        rank = self.hello.rank
        trace = TransferTrace(rank.pp_rank * rank.tp + rank.tp_rank) if self.traced else None
        meter = TransferMeter(trace=trace)
        self.add(HandoffSession(peer, inbound, time.monotonic(), meter=meter))

    def _resolve_units(self, session: HandoffSession, agreement: Agreement) -> None:
        """Derive where the negotiated units are in this worker's cache."""
        rank = self.hello.rank
        for number, group in enumerate(agreement.groups):
            if not group.layers:
                continue
            place = {name: i for i, name in enumerate(group.layers)}
            session.views[number] = GroupView(
                ratio=group.source_ratio if session.inbound else group.reader_ratio,
                unit_all=agreement.unit(number),
                unit_of_layer=tuple(
                    agreement.unit(number, place[name]) if name in place else -1
                    for name in self.hello.groups[number].layers
                ),
                heads=group.heads[1] - group.heads[0],
            )
        for number, layer in agreement.units:
            group = agreement.groups[number]
            names = group.layers if layer is None else (group.layers[layer],)
            pages = [page for name in names for page in self._pages[number] if page.name == name]
            first = head_range(rank.tp_rank, rank.tp, self.hello.groups[number].kv_heads)[0]
            # A block that is moved whole is one row, whatever its tokens.
            rows = pages[0].tokens * group.wire_tokens // self.hello.groups[number].page_tokens
            segments, phases, size = unit_segments(
                pages,
                (group.heads[0] - first, group.heads[1] - first),
                rows,
                group.order,
            )
            session.units.append(Unit(segments, phases, size))
            session.unit_group.append(number)


def _failed_in_probe(session: HandoffSession) -> bool:
    """Whether a path that the peer offers did not work: a firewall blocks it, for instance."""
    return session.agreed and not session.meter.path and "tcp" in session.meter.rates
