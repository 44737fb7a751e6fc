"""The half of ``doctor transport`` that listens and answers."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable

from kvconnect.doctor.link import LinkServer
from kvconnect.doctor.messages import (
    VERSION,
    Cpu,
    DoctorHello,
    GetCpu,
    GetLink,
    LinkPort,
    Message,
    No,
    TransferRequest,
    decode,
    encode,
)
from kvconnect.doctor.test_buffer import PageArea, page_unit, pattern
from kvconnect.errors import ProtocolError
from kvconnect.transport.base import (
    Disconnect,
    Event,
    MessageReceived,
    OutgoingPages,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
)

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""How long a peer may say nothing before the next one gets its turn."""

_POLL_S = 0.2
_MAX_REASON = 1000


class DoctorSource:
    """Answers one peer after the other, as long as ``step`` is called. For one thread.

    ``transport`` has ``area`` already and stays its owner's.

    A peer that comes while another is served is turned away: both would measure the other.
    """

    def __init__(self, transport: Transport, area: PageArea, host: str) -> None:
        self._transport = transport
        self._area = area
        self._host = host
        self._peer: PeerId | None = None
        self._link: LinkServer | None = None
        self._heard = 0.0
        area.fill(pattern(area.nbytes))

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answer until ``ended`` says so; it is asked several times a second."""
        while not ended():
            self.step(_POLL_S)

    def step(self, timeout: float) -> None:
        """Answer what came, waiting up to ``timeout`` seconds for it."""
        for event in self._transport.poll(timeout):
            self._take(event)
        if self._peer is not None and time.monotonic() - self._heard > IDLE_S:
            self._hang_up(self._peer, f"nothing was asked for {IDLE_S:g} s")

    def close(self) -> None:
        """Close what was opened here."""
        if self._link:
            self._link.close()
            self._link = None

    def _take(self, event: Event) -> None:
        if isinstance(event, PeerUp):
            if self._peer is not None:
                self._hang_up(event.peer, "busy with another reader; try again later")
                return
            logger.info("%s is measuring", event.address)
            self._peer, self._heard = event.peer, time.monotonic()
        elif isinstance(event, PeerDown) and event.peer == self._peer:
            logger.info("the reader is gone: %s", event.reason)
            self._peer = None
            self.close()
        elif isinstance(event, MessageReceived) and event.peer == self._peer:
            self._heard = time.monotonic()
            try:
                self._answer(event.peer, decode(event.payload))
            except (ProtocolError, OSError) as error:
                self._hang_up(event.peer, str(error))

    def _answer(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, TransferRequest):
            self._send(peer, message)
        elif isinstance(message, GetCpu):
            self._tell(peer, Cpu(time.process_time()))
        elif isinstance(message, GetLink):
            self.close()
            self._link = LinkServer(self._host, message.connections, message.nbytes)
            self._tell(peer, LinkPort(self._link.port, self._link.word))
        elif isinstance(message, DoctorHello):
            if message.version != VERSION:
                text = f"version {message.version} of the exchange there, {VERSION} here"
                raise ProtocolError(f"{text}: use the same kvconnect on both sides")
            self._tell(peer, DoctorHello(self._area.nbytes, self._area.device))
        else:
            raise ProtocolError(f"a {type(message).__name__} that nobody asked for")

    def _send(self, peer: PeerId, ask: TransferRequest) -> None:
        pages = self._area.nbytes // ask.page_bytes
        if max(ask.ids) >= pages:
            raise ProtocolError(f"page {max(ask.ids)} does not exist, there are {pages}")
        unit = page_unit(ask.page_bytes)
        self._transport.submit(OutgoingPages(peer, ask.want, 0, unit, 0, array("q", ask.ids)))

    def _tell(self, peer: PeerId, message: Message) -> None:
        self._transport.submit(PeerMessage(peer, encode(message)))

    def _hang_up(self, peer: PeerId, reason: str) -> None:
        # The peer is given up at its PeerDown, which always follows.
        logger.info("hanging up: %s", reason)
        self._tell(peer, No(reason[:_MAX_REASON]))
        self._transport.submit(Disconnect(peer, reason))
