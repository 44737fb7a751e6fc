"""The two peers of ``doctor transport``: a source that answers, and a reader that measures."""

from __future__ import annotations

import logging
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from kvconnect.doctor.buffers import GRAIN_BYTES, PatternBuffer, differing, page_unit, pattern
from kvconnect.doctor.exchange import (
    CpuRequest,
    CpuSeconds,
    DoctorHello,
    DoctorMessage,
    SocketTestPort,
    SocketTestRequest,
    TransferRequest,
    decode,
    encode,
)
from kvconnect.doctor.plain_sockets import SocketTestServer, measure_sockets
from kvconnect.errors import ProtocolError, Refused, TransferFailed
from kvconnect.peers.sessions import Session, Sessions, SessionState
from kvconnect.protocol.codec import PROTOCOL, common_protocol
from kvconnect.protocol.hello import Reject
from kvconnect.transport.base import (
    Event,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PagesReceived,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
)

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=DoctorMessage)

IDLE_S = 60.0
"""Time without a request after which the source closes a reader's connection."""

_SOURCE_POLL_S = 0.2
_READER_POLL_S = 0.1
_MIB = 1 << 20


def _hello(buffer: PatternBuffer) -> DoctorHello:
    return DoctorHello(area_bytes=buffer.nbytes, device=buffer.device)


class DoctorSource:
    """Answers one reader at a time, whenever ``step`` is called. For one thread.

    ``buffer`` must be registered with ``transport``, which the caller closes. A second reader is
    rejected, because two measurements at a time disturb each other.
    """

    def __init__(self, transport: Transport, buffer: PatternBuffer, host: str) -> None:
        self._sessions = Sessions[Session](transport, encode)
        self._buffer = buffer
        self._host = host
        self._reader: PeerId | None = None
        self._socket_test: SocketTestServer | None = None
        self._last_message = 0.0
        buffer.fill(pattern(buffer.nbytes))

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answer until ``ended`` returns true; it is called several times a second."""
        while not ended():
            self.step(_SOURCE_POLL_S)

    def step(self, timeout: float) -> None:
        """Answer pending events, waiting up to ``timeout`` seconds for one."""
        for event in self._sessions.transport.poll(timeout):
            with self._sessions.isolate(event.peer):
                self._handle(event)
        now = time.monotonic()
        self._sessions.tick(now)
        if self._reader is not None and now - self._last_message > IDLE_S:
            self._sessions.end(self._reader, Refused("other", f"no request for {IDLE_S:g} s"))

    def close(self) -> None:
        """Close the socket test; the transport stays open."""
        if self._socket_test:
            self._socket_test.close()
            self._socket_test = None

    def _handle(self, event: Event) -> None:
        if isinstance(event, PeerUp):
            self._on_up(event)
        elif isinstance(event, PeerDown):
            self._sessions.remove(event)
            if event.peer == self._reader:
                logger.info("reader disconnected: %s", event.reason)
                self._reader = None
                self.close()
        elif isinstance(event, MessageReceived) and (session := self._sessions.get(event.peer)):
            if event.peer == self._reader:
                self._last_message = time.monotonic()
            try:
                self._answer(session, decode(event.payload))
            except (ProtocolError, OSError) as error:  # the reader is told
                raise Refused("other", str(error)) from error

    def _on_up(self, event: PeerUp) -> None:
        session = Session(event.peer, event.inbound, time.monotonic(), name=event.address)
        session.connected()
        self._sessions.add(session)
        served = self._reader and self._sessions.get(self._reader)
        if served and served.state is not SessionState.CLOSING:
            raise Refused("other", "busy with another reader; try again later")
        self.close()
        logger.info("reader %s connected", event.address)
        self._reader, self._last_message = event.peer, time.monotonic()

    def _answer(self, session: Session, message: DoctorMessage) -> None:
        if isinstance(message, DoctorHello):
            session.greeted()
            common_protocol(PROTOCOL, message.protocol)
            session.agree()
            self._sessions.send(session.peer, _hello(self._buffer))
        elif not session.agreed:
            raise ProtocolError(f"{type(message).__name__} before an agreement")
        elif isinstance(message, TransferRequest):
            self._send(session.peer, message)
        elif isinstance(message, CpuRequest):
            self._sessions.send(session.peer, CpuSeconds(time.process_time()))
        elif isinstance(message, SocketTestRequest):
            self.close()
            test = SocketTestServer(self._host, message.connections, message.nbytes)
            self._socket_test = test
            self._sessions.send(session.peer, SocketTestPort(test.port, test.word))
        else:
            raise ProtocolError(f"unexpected message {type(message).__name__}")

    def _send(self, peer: PeerId, request: TransferRequest) -> None:
        pages = self._buffer.nbytes // request.page_bytes
        if max(request.ids) >= pages:
            raise ProtocolError(
                f"page {max(request.ids)} does not exist; the test buffer has {pages}"
            )
        unit = page_unit(request.page_bytes)
        self._sessions.transport.submit(
            OutgoingPages(peer, request.read_id, 0, unit, 0, array("q", request.ids))
        )


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and limits of a measurement.

    Attributes:
        buffer_bytes: test buffer on each side; its random pages are moved, so caches hold few.
        page_bytes, round_bytes: of one page, and of all pages of one request.
        rounds: rounds that count, after one warm-up round.
        budget_s: no round begins after this time, for slow links.
        trips: single pages of 4 KiB, moved to measure latency.
        patience_s: longest time without an event before the measurement fails.
    """

    buffer_bytes: int = 128 * _MIB
    page_bytes: int = 64 << 10
    round_bytes: int = 64 * _MIB
    rounds: int = 5
    budget_s: float = 10.0
    trips: int = 200
    patience_s: float = 15.0


class PathMeasurement(msgspec.Struct):
    """The figures of one path.

    Attributes:
        bytes_per_s: median of the rounds.
        page_s: median time from the request for a page of 4 KiB until it is usable.
        cpu_s_per_gb: of both processes together, per 1e9 bytes.
        verified: pages compared byte for byte with the expected contents.
        wrong: verified pages that differ.
        bad: pages with a wrong digest, as the transport reports.
        failed: why the measurement ended early; empty if it is complete.
    """

    path: str
    bytes_per_s: float = 0.0
    page_s: float = 0.0
    cpu_s_per_gb: float = 0.0
    verified: int = 0
    wrong: int = 0
    bad: int = 0
    failed: str = ""


class DoctorReader:
    """Measures one source. For one thread; every wait ends within ``patience_s``.

    ``buffer`` must be registered with ``transport``, which the caller closes.

    All methods raise :class:`TransferFailed` if the source is gone or sends nothing in time,
    :class:`Refused` if the handshake rejects it, and :class:`ProtocolError` if it is no source.
    """

    def __init__(self, transport: Transport, buffer: PatternBuffer, sizes: Sizes) -> None:
        self._transport = transport
        self._buffer = buffer
        self._sizes = sizes
        self._random = random.Random(1)
        self._expected = pattern(buffer.nbytes)
        self._zeros = bytes(buffer.nbytes)
        self._shared_bytes = buffer.nbytes
        self._reads = 0
        self._peer = PeerId(0)
        self._pending: deque[Event] = deque()

    def connect(self, host: str, port: int) -> tuple[PeerUp, DoctorHello]:
        """Connect to a source; return the connection's event and the source's hello."""
        self._peer = self._transport.connect(host, port)
        up = next(event for event in self._events() if isinstance(event, PeerUp))
        hello = self._ask(_hello(self._buffer), DoctorHello)
        common_protocol(PROTOCOL, hello.protocol)
        self._shared_bytes = min(hello.area_bytes, self._buffer.nbytes)
        return up, hello

    def measure_sockets(self, host: str, connections: int) -> float:
        """Return the bytes per second of plain sockets between the same hosts.

        Raises:
            OSError: a socket cannot connect, or breaks.
        """
        nbytes = self._sizes.round_bytes // connections
        test = self._ask(SocketTestRequest(connections, nbytes), SocketTestPort)
        return measure_sockets((host, test.port), test.word, [nbytes] * connections, 3)

    def measure(self, path: str) -> PathMeasurement:
        """Move pages on a path. A failure ends the measurement and is in the result."""
        result = PathMeasurement(path)
        try:
            self._rounds(result)
            if not (result.wrong or result.bad):
                self._trips(result)
        except (TransferFailed, ProtocolError, Refused) as error:
            result.failed = str(error)
        return result

    def _rounds(self, result: PathMeasurement) -> None:
        sizes = self._sizes
        count = sizes.round_bytes // sizes.page_bytes
        rates, cpu_s = [], 0.0
        ends = time.monotonic() + sizes.budget_s
        for number in range(sizes.rounds + 1):
            pages = self._pick(sizes.page_bytes, count)
            self._buffer.fill(self._zeros)
            before = self._cpu_s()
            seconds = self._move(result, sizes.page_bytes, pages)
            if number:
                cpu_s += self._cpu_s() - before
                rates.append(sizes.round_bytes / seconds)
            self._verify(result, sizes.page_bytes, pages)
            if rates and time.monotonic() > ends:
                break
        result.bytes_per_s = statistics.median(rates)
        result.cpu_s_per_gb = cpu_s / (len(rates) * sizes.round_bytes) * 1e9

    def _trips(self, result: PathMeasurement) -> None:
        count = min(self._sizes.trips, self._shared_bytes // GRAIN_BYTES)
        pages = self._pick(GRAIN_BYTES, count)
        self._buffer.fill(self._zeros)
        ends = time.monotonic() + self._sizes.budget_s
        seconds = []
        for page in pages:
            seconds.append(self._move(result, GRAIN_BYTES, [page]))
            if time.monotonic() > ends:
                break
        self._verify(result, GRAIN_BYTES, pages[: len(seconds)])
        result.page_s = statistics.median(seconds)

    def _pick(self, page_bytes: int, count: int) -> list[tuple[int, int]]:
        """Return pairs of page numbers (here, there), each page at most once."""
        here = self._random.sample(range(self._buffer.nbytes // page_bytes), count)
        there = self._random.sample(range(self._shared_bytes // page_bytes), count)
        return list(zip(here, there, strict=True))

    def _move(
        self, result: PathMeasurement, page_bytes: int, pages: list[tuple[int, int]]
    ) -> float:
        """Read pages; return the seconds from the request until all are usable."""
        self._reads += 1
        here = array("q", (page for page, _ in pages))
        there = [page for _, page in pages]
        peer, read_id, unit = self._peer, self._reads, page_unit(page_bytes)
        started = time.perf_counter()
        self._transport.submit(IncomingPages(peer, read_id, [unit], [(0, here)], path=result.path))
        self._send(TransferRequest(read_id, page_bytes, there))
        left = len(pages)
        for event in self._events():
            if isinstance(event, PagesReceived) and event.read_id == read_id:
                left -= event.count
                result.bad += len(event.bad)
                if left == 0:
                    break
        seconds = time.perf_counter() - started
        self._transport.cancel(peer, read_id)
        return seconds

    def _verify(
        self, result: PathMeasurement, page_bytes: int, pages: list[tuple[int, int]]
    ) -> None:
        found = self._buffer.snapshot()
        result.wrong += differing(found, self._expected, page_bytes, pages)
        result.verified += len(pages)

    def _cpu_s(self) -> float:
        """CPU seconds of both processes so far."""
        return self._ask(CpuRequest(), CpuSeconds).seconds + time.process_time()

    def _ask(self, message: DoctorMessage, kind: type[M]) -> M:
        self._send(message)
        for event in self._events():
            if isinstance(event, MessageReceived):
                answer = decode(event.payload)
                if isinstance(answer, kind):
                    return answer
                raise ProtocolError(f"message {type(answer).__name__} instead of {kind.__name__}")
        raise TransferFailed("the source did not answer")

    def _send(self, message: DoctorMessage) -> None:
        self._transport.submit(PeerMessage(self._peer, encode(message)))

    def _events(self) -> Iterator[Event]:
        """Yield the source's events; raise if it is gone or sends nothing for ``patience_s``."""
        patience_s = self._sizes.patience_s
        deadline = time.monotonic() + patience_s
        while self._pending or time.monotonic() < deadline:
            if not self._pending:
                events = self._transport.poll(_READER_POLL_S)
                self._pending.extend(event for event in events if event.peer == self._peer)
                continue
            event = self._pending.popleft()
            if isinstance(event, PeerDown):
                _raise_down(event)
            _raise_closed(event)
            if isinstance(event, MessageReceived | PagesReceived | PeerUp):
                deadline = time.monotonic() + patience_s
            yield event
        raise TransferFailed(f"the source sent nothing for {patience_s:g} s")


def _raise_down(event: PeerDown) -> None:
    if event.refused:
        raise Refused(event.refused, event.reason)
    raise TransferFailed(f"the connection is gone: {event.reason}")


def _raise_closed(event: Event) -> None:
    if isinstance(event, MessageReceived) and isinstance(answer := decode(event.payload), Reject):
        if answer.field != "other":
            raise Refused(answer.field, answer.message)
        raise TransferFailed(f"the source closed the connection: {answer.message}")
