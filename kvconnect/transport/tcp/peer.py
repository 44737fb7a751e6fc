"""One peer: its connections from the first to the last, and when it counts as up or down."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvconnect.errors import ProtocolError
from kvconnect.protocol import nixl_messages
from kvconnect.protocol.auth import Opening
from kvconnect.protocol.codec import (
    MAX_MESSAGE,
    NixlPayload,
    pack_greeting,
    stricter,
    unpack_greeting,
)
from kvconnect.transport.base import (
    ConnectionOptions,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PeerDown,
    PeerId,
    PeerUp,
)
from kvconnect.transport.tcp.context import DIGEST_PERIOD, ConnectionContext, TransportContext
from kvconnect.transport.tcp.control_connection import CLOSED_BY_PEER, ControlConnection
from kvconnect.transport.tcp.data_connection import DataConnection
from kvconnect.transport.tcp.send_queue import SendQueue, StallWatchdog

logger = logging.getLogger(__name__)

_GRACE_S = 1.0
"""For last notes: ours to be written before a hang-up, theirs to arrive after a data connection
was lost, since they say why."""


CLOSED = "closed"
"""Reason of a peer that goes down because the transport does."""


@dataclass
class _PeerPhase:
    """How far a peer has come."""

    inbound: bool
    deadline: float  # to be up; later, to be down
    digest_period: int  # asked for here; once greeted, the stricter one of both sides
    greeted: bool = False
    complete: bool = False  # has all its connections
    up: bool = False
    sending: bool = False
    threads: int = 0  # that may still touch pages; the rail's counts as one
    early: list[bytes] = field(default_factory=list)  # notes to send once up
    ending: str = ""  # reason of a hang-up or loss whose last notes are waited for
    reason: str = ""  # why it is down
    refused: str = ""  # the bounded cause of that, where there is one


class Peer:
    """All methods but ``move_plain`` are for the loop's thread; ``traffic`` is for any. If there is
    a ``rail``, it takes the orders instead.

    A peer is joined by its connections, greets (with its first note) when it has them all, is up
    when it was greeted too: then both sides know that both have authenticated everything, and no
    page can arrive on a connection that is still being set up. It is down when its threads have
    left its sockets; only then is ``PeerDown`` emitted and ``on_gone`` called.
    """

    def __init__(
        self,
        number: PeerId,
        opening: Opening,
        address: str,
        shared: TransportContext,
        *,
        inbound: bool,
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.number = number
        self.session = opening.session
        self.address = address
        options, now = shared.options, shared.loop.now
        watch = StallWatchdog(options.stall_s, now)
        self.traffic = SendQueue(number, shared.events, opening.connections, watch)
        self._connections = opening.connections
        self._shared = shared
        self._on_gone = on_gone
        self._control: ControlConnection | None = None
        self._lanes: dict[int, DataConnection] = {}
        deadline = now() + _patience_s(options, inbound)
        self._life = _PeerPhase(inbound, deadline, DIGEST_PERIOD[options.digest])
        self.rail = shared.make_rail(_line(self, shared, inbound)) if shared.make_rail else None
        self._life.threads += self.rail is not None

    def __repr__(self) -> str:
        life = self._life
        state = life.reason or ("up" if life.up else "being set up")
        return f"<Peer {self.number} at {self.address}, {state}, {life.threads} threads>"

    def join(self, opening: Opening, sock: socket.socket, rest: bytes) -> None:
        """Take an authenticated connection over, and what came on it already.

        Raises:
            ProtocolError: this peer has it already, or it does not fit the others. The socket
                stays the caller's.
        """
        life = self._life
        taken = self._control if opening.channel == "control" else opening.number in self._lanes
        if life.up or life.reason or taken or opening.connections != self._connections:
            raise ProtocolError(f"a connection that does not fit its session: {opening}")
        if opening.channel == "control":
            self._control = ControlConnection(sock, self._shared.loop, self._on_note, self.fail)
            self._control.feed(rest)
        elif rest:
            raise ProtocolError("pages before the greeting")
        else:
            lane = DataConnection(self.number, sock, self.traffic, self._shared, self._on_left)
            self._lanes[opening.number] = lane
        if self._control and len(self._lanes) == self._connections:
            life.complete = True
            offer = self.rail.offer() if self.rail else b""
            period = DIGEST_PERIOD[self._shared.options.digest]
            self._control.send(pack_greeting(period, offer))
            self._come_up()

    def note(self, payload: bytes) -> None:
        """Send a note, once up."""
        if self._control and self._life.up:
            self._control.send(payload)
        else:
            self._life.early.append(payload)

    def hang_up(self, reason: str) -> None:
        """Go down when the notes before this are written, or soon if they cannot be."""
        if self._control and self._life.up:
            self._end_soon(reason)
            self._control.finish(reason)
        else:
            self.fail(reason)

    def move_plain(self, order: IncomingPages | OutgoingPages) -> None:
        """Take an order for the data connections. For any thread."""
        if isinstance(order, IncomingPages):
            self.traffic.expect(order)
            return
        self.traffic.send(order)
        if not self._life.sending:
            self._shared.loop.call(self.start_sending)

    def start_sending(self) -> None:
        """Start the threads that send, if they do not run."""
        life = self._life
        if life.up and not life.reason and not life.sending:
            life.sending = True
            for lane in self._lanes.values():
                self._start(lane.start_sending)

    def tick(self, now: float) -> None:
        """Send a heartbeat if it is time; go down if it is high time."""
        life, options = self._life, self._shared.options
        control = self._control
        if life.reason:
            return
        if now > life.deadline:
            self.fail(f"not connected within {_patience_s(options, life.inbound):g} s")
        elif self.traffic.watch.overdue(now):
            self.fail("stalled: a frame, or the end of a cancelled one, takes too long")
        elif life.complete and control:
            if now - control.heard_at > options.silent_s:
                self.fail(f"no sign of life for {options.silent_s:g} s")
            elif now - control.sent_at >= options.heartbeat_s:
                control.send(b"")

    def fail(self, reason: str, refused: str = "") -> None:
        """Go down, for the first reason given; for good."""
        life = self._life
        if life.reason:
            return
        life.reason = life.ending or reason
        level = logging.INFO if life.reason in (CLOSED, CLOSED_BY_PEER) else logging.WARNING
        logger.log(level, "peer %s at %s is down: %s", self.number, self.address, life.reason)
        self.traffic.close()
        if self._control:
            self._control.close()
        for lane in self._lanes.values():
            lane.shut()
        life.refused = refused
        if self.rail:
            closed = partial(self._on_left, "closed", False)
            self.rail.close(life.reason, partial(self._shared.loop.call, closed))
        self._settle()

    def _settle(self) -> None:
        """Be gone, if down and no thread is left."""
        life = self._life
        if not life.reason or life.threads:
            return
        for lane in self._lanes.values():
            lane.close()
        if life.up or not life.inbound:
            self._shared.events.put(PeerDown(self.number, life.reason, life.refused))
        self._on_gone(self)

    def _come_up(self) -> None:
        life = self._life
        if not (life.complete and life.greeted) or life.up or life.reason:
            return
        life.up = True
        life.deadline = math.inf
        lacking = self.rail.lacking if self.rail else ""
        paths = ("tcp", "nixl") if self.rail and not lacking else ("tcp",)
        up = PeerUp(self.number, life.inbound, self.address, paths, lacking)
        self._shared.events.put(up)
        for lane in self._lanes.values():
            self._start(lane.start_receiving)
        for payload in life.early:
            self.note(payload)
        if self.traffic.has_queued():
            self.start_sending()

    def _start(self, start: Callable[[int], None]) -> None:
        """Have a lane start a thread, unless the peer went down over the one before."""
        life = self._life
        if life.reason:
            return
        try:
            start(life.digest_period)
            life.threads += 1
        except RuntimeError as error:  # the system has no more
            self.fail(str(error))

    def _end_soon(self, reason: str) -> None:
        life = self._life
        life.ending = life.ending or reason
        life.deadline = min(life.deadline, self._shared.loop.now() + _GRACE_S)

    def _on_note(self, payload: bytes) -> None:
        life = self._life
        if isinstance(payload, NixlPayload):
            if not (self.rail and life.greeted):
                raise ProtocolError("a note for a path that was not agreed on")
            self.rail.on_note(payload)
        elif life.up:
            if payload and not self._shared.events.put(MessageReceived(self.number, payload)):
                self.fail("sends notes faster than they are read here")
        elif not life.greeted:
            period, offer = unpack_greeting(payload)
            life.digest_period = stricter(life.digest_period, period)
            if self.rail:
                self.rail.settle(offer, life.digest_period)
            life.greeted = True
            self._come_up()
        elif payload:
            raise ProtocolError("a note before it was greeted")

    def _on_left(self, reason: str, lost: bool) -> None:
        """One thread of a lane has ended."""
        self._life.threads -= 1
        if self._life.reason:
            self._settle()
        elif lost:
            self._end_soon(reason)
        else:
            self.fail(reason)


def _line(peer: Peer, shared: TransportContext, inbound: bool) -> ConnectionContext:
    """Return what a rail gets of a peer."""

    def say(message: nixl_messages.NixlMessage) -> None:
        note = NixlPayload(nixl_messages.encode(message))
        if len(note) > MAX_MESSAGE:
            kind = type(message).__name__
            shared.loop.call(partial(peer.fail, f"{kind} of {len(note)} bytes is too long to send"))
        else:
            shared.loop.call(partial(peer.note, note))

    return ConnectionContext(
        peer=peer.number,
        name=peer.address,
        session=peer.session,
        inbound=inbound,
        events=shared.events,
        pages=shared.pages,
        watch=peer.traffic.watch,
        say=say,
        fail=lambda reason: shared.loop.call(partial(peer.fail, reason)),
        plain=peer.move_plain,
        cancel_plain=peer.traffic.cancel,
    )


def _patience_s(options: ConnectionOptions, inbound: bool) -> float:
    """How long a peer may take to be set up: one that called may be busy, one that is called is
    to be there."""
    return options.silent_s if inbound else options.dead_after_s
