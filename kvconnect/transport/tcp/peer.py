"""One peer: its connections, from setup to the end."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvconnect.errors import ProtocolError, Refused, contained
from kvconnect.protocol import nixl_messages
from kvconnect.protocol.auth import Opening
from kvconnect.protocol.codec import MAX_MESSAGE, NixlPayload, pack_greeting, unpack_greeting
from kvconnect.protocol.frames import stricter
from kvconnect.transport.base import ConnectionOptions, MessageReceived, PeerDown, PeerId, PeerUp
from kvconnect.transport.tcp.context import DIGEST_PERIOD, TransportContext
from kvconnect.transport.tcp.control_connection import CLOSED_BY_PEER, ControlConnection
from kvconnect.transport.tcp.data_connection import DataConnection
from kvconnect.transport.tcp.page_path import ConnectionContext, PagePath
from kvconnect.transport.tcp.send_queue import SendQueue
from kvconnect.transport.tcp.stall_watchdog import StallWatchdog

logger = logging.getLogger(__name__)

_GRACE_S = 1.0
"""How long last messages may take: ours before a disconnect, theirs after a data connection
was lost, since they give the reason."""


CLOSED = "closed"
"""Reason of ``PeerDown`` when the transport itself closes."""


@dataclass
class _PeerPhase:
    """State of a peer. Booleans only ever become true."""

    inbound: bool
    deadline: float  # to be up; once ending, to be down
    digest_period: int  # asked for here; once greeted, the stricter one of both sides
    greeted: bool = False
    complete: bool = False  # has all its connections
    up: bool = False
    sending: bool = False  # was given pages to send
    threads: int = 0  # that may still touch pages; the page path counts as one
    queued_messages: list[bytes] = field(default_factory=list)  # to send once up
    ending: str = ""  # reason, while last messages are waited for
    reason: str = ""  # why it is down
    refused: str = ""  # the bounded cause of that, where there is one


class Peer:
    """One peer. ``send_queue`` and ``pages`` are for any thread, the rest is for the loop's.

    Once all connections of a peer have joined, it sends its greeting. With the other side's
    greeting the peer is up: both sides have authenticated every connection, so no page can arrive
    on one that is still being set up. ``PeerDown`` is emitted and ``on_gone`` called after all its
    threads have left the sockets. ``pages`` takes the orders about pages: the ``page_path`` where
    there is one, else the ``send_queue``.
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
        start_sending = partial(self.call, self._start_sending)
        self.send_queue = SendQueue(
            number,
            shared.events,
            opening.connections,
            watch,
            start_sending,
            priority=options.port.priority if options.port else None,
            first=options.service == "handoff",
            most_bytes=lambda: shared.most_frame_bytes,
        )
        self._connections = opening.connections
        self._shared = shared
        self._on_gone = on_gone
        self._control: ControlConnection | None = None
        self._data: dict[int, DataConnection] = {}
        deadline = now() + _setup_limit_s(options, inbound)
        self._phase = _PeerPhase(inbound, deadline, DIGEST_PERIOD[options.digest])
        self.page_path = (
            shared.make_page_path(self._make_context(inbound=inbound))
            if shared.make_page_path
            else None
        )
        self._phase.threads += self.page_path is not None
        self.pages: PagePath | SendQueue = self.page_path or self.send_queue

    def __repr__(self) -> str:
        phase = self._phase
        state = phase.reason or ("up" if phase.up else "being set up")
        return f"<Peer {self.number} at {self.address}, {state}, {phase.threads} threads>"

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop's thread. For any thread. An error ends this peer only."""
        self._shared.loop.call(partial(self.run, function))

    def run(self, function: Callable[[], None]) -> None:
        """Run ``function`` now. An error ends this peer only."""
        with contained(self._on_error):
            function()

    def _on_error(self, error: Exception) -> None:
        logger.error("internal error of KVConnect; %r ends", self, exc_info=error)
        self.fail(f"{type(error).__name__}: {error}")

    def join(self, opening: Opening, sock: socket.socket, rest: bytes) -> None:
        """Take over an authenticated connection and the bytes already received on it.

        Raises:
            ProtocolError: it is a duplicate or does not fit the peer's others. The caller keeps the
                socket.
        """
        phase = self._phase
        taken = self._control if opening.channel == "control" else opening.number in self._data
        if phase.up or phase.reason or taken or opening.connections != self._connections:
            raise ProtocolError(f"a connection that does not fit its session: {opening}")
        if opening.channel == "control":
            self._control = ControlConnection(sock, self._shared.loop, self._on_message, self.fail)
            self._control.feed(rest)
        elif rest:
            raise ProtocolError("pages before the greeting")
        else:
            connection = DataConnection(
                self.number,
                sock,
                self.send_queue,
                self._shared,
                lambda reason, lost: self.call(partial(self._on_thread_end, reason, lost)),
            )
            self._data[opening.number] = connection
        if self._control and len(self._data) == self._connections:
            phase.complete = True
            offer = self.page_path.offer() if self.page_path else b""
            period = DIGEST_PERIOD[self._shared.options.digest]
            self._control.send(pack_greeting(period, offer))
            self._go_up()

    def send_message(self, payload: bytes) -> None:
        """Send a message, once up."""
        if self._control and self._phase.up:
            self._control.send(payload)
        else:
            self._phase.queued_messages.append(payload)

    def disconnect(self, reason: str) -> None:
        """Go down after the messages before this are written, or after a grace period."""
        if self._control and self._phase.up:
            self._end_after_grace(reason)
            self._control.finish(reason)
        else:
            self.fail(reason)

    def tick(self, now: float) -> None:
        """Send a heartbeat when it is due; go down after a timeout."""
        phase, options = self._phase, self._shared.options
        control = self._control
        if phase.reason:
            return
        if now > phase.deadline:
            self.fail(f"not connected within {_setup_limit_s(options, phase.inbound):g} s")
        elif self.send_queue.watch.overdue(now):
            self.fail("stalled: a frame, or the end of a cancelled one, takes too long")
        elif phase.complete and control:
            if now - control.heard_at > options.silent_s:
                self.fail(f"no sign of life for {options.silent_s:g} s")
            elif now - control.sent_at >= options.heartbeat_s:
                control.send(b"")

    def fail(self, reason: str, refused: str = "") -> None:
        """Go down for good; the first reason given counts."""
        phase = self._phase
        if phase.reason:
            return
        phase.reason = phase.ending or reason
        level = logging.INFO if phase.reason in (CLOSED, CLOSED_BY_PEER) else logging.WARNING
        logger.log(level, "peer %s at %s is down: %s", self.number, self.address, phase.reason)
        self.send_queue.close()
        if self._control:
            self._control.close()
        for connection in self._data.values():
            connection.shut()
        phase.refused = refused
        if self.page_path:
            closed = partial(self._on_thread_end, "closed", False)
            self.page_path.close(phase.reason, partial(self.call, closed))
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        """Emit ``PeerDown`` if down and without threads."""
        phase = self._phase
        if not phase.reason or phase.threads:
            return
        for connection in self._data.values():
            connection.close()
        if phase.up or not phase.inbound:
            self._shared.events.put(PeerDown(self.number, phase.reason, phase.refused))
        self._on_gone(self)

    def _go_up(self) -> None:
        phase = self._phase
        control = self._control
        if control is None or not (phase.complete and phase.greeted) or phase.up or phase.reason:
            return
        phase.up = True
        phase.deadline = math.inf
        path_error = self.page_path.path_error if self.page_path else ""
        paths = ("tcp", self.page_path.name) if self.page_path and not path_error else ("tcp",)
        up = PeerUp(
            self.number, phase.inbound, self.address, paths, path_error, ends=control.ends()
        )
        self._shared.events.put(up)
        for connection in self._data.values():
            self._start(connection.start_receiving)
        for payload in phase.queued_messages:
            self.send_message(payload)
        if phase.sending:
            self._start_sending()

    def _start_sending(self) -> None:
        """Start the sending threads now, or once up."""
        phase = self._phase
        phase.sending = True
        if phase.up:
            for connection in self._data.values():
                self._start(connection.start_sending)

    def _start(self, start: Callable[[int], None]) -> None:
        """Start a thread of a data connection, unless starting the previous one failed."""
        phase = self._phase
        if phase.reason:
            return
        try:
            start(phase.digest_period)
            phase.threads += 1
        except RuntimeError as error:  # the system has no more
            self.fail(str(error))

    def _end_after_grace(self, reason: str) -> None:
        phase = self._phase
        phase.ending = phase.ending or reason
        phase.deadline = min(phase.deadline, self._shared.loop.now() + _GRACE_S)

    def _on_message(self, payload: bytes) -> None:
        phase = self._phase
        if isinstance(payload, NixlPayload):
            if not (self.page_path and phase.greeted):
                raise ProtocolError("a message for a path that was not agreed on")
            self.page_path.on_message(payload)
        elif phase.up:
            if payload and not self._shared.events.put(MessageReceived(self.number, payload)):
                self.fail("sends messages faster than they are read here")
        elif not phase.greeted:
            try:
                period, offer = unpack_greeting(payload)
            except Refused as error:
                self.fail(str(error), error.field)
                return
            phase.digest_period = stricter(phase.digest_period, period)
            if self.page_path:
                self.page_path.settle(offer, phase.digest_period)
            phase.greeted = True
            self._go_up()
        elif payload:
            raise ProtocolError("a message before the greeting")

    def _make_context(self, *, inbound: bool) -> ConnectionContext:
        """Return the context of the page path."""

        def say(message: nixl_messages.NixlMessage) -> None:
            payload = NixlPayload(nixl_messages.encode(message))
            if len(payload) > MAX_MESSAGE:
                kind = type(message).__name__
                self.call(partial(self.fail, f"{kind} of {len(payload)} bytes is too long to send"))
            else:
                self.call(partial(self.send_message, payload))

        return ConnectionContext(
            peer=self.number,
            name=self.address,
            session=self.session,
            inbound=inbound,
            events=self._shared.events,
            pages=self._shared.pages,
            watch=self.send_queue.watch,
            say=say,
            fail=lambda reason: self.call(partial(self.fail, reason)),
            tcp=self.send_queue,
        )

    def _on_thread_end(self, reason: str, lost: bool) -> None:
        """A thread of a data connection has ended."""
        self._phase.threads -= 1
        if self._phase.reason:
            self._finish_if_idle()
        elif lost:
            self._end_after_grace(reason)
        else:
            self.fail(reason)


def _setup_limit_s(options: ConnectionOptions, inbound: bool) -> float:
    """Return the time limit for setup; an inbound peer may be busy."""
    return options.silent_s if inbound else options.dead_after_s
