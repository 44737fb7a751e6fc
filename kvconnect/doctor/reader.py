"""The half of ``doctor transport`` that connects, asks for pages and measures."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from kvconnect.doctor.link import measure_link
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
from kvconnect.doctor.test_buffer import GRAIN_BYTES, PageArea, differing, page_unit, pattern
from kvconnect.errors import ProtocolError, Refused, TransferFailed
from kvconnect.transport.base import (
    Event,
    IncomingPages,
    MessageReceived,
    PagesReceived,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
)

M = TypeVar("M", bound=Message)

_POLL_S = 0.1
_MIB = 1 << 20


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is moved.

    Attributes:
        area_bytes: memory on each side; pages are picked anywhere in it, so caches hold few.
        page_bytes, round_bytes: of one page, and of all pages asked for together.
        rounds: that count; one before them does not.
        budget_s: on a slow link, no further round begins after this.
        trips: single pages of 4 KiB for the latency.
        patience_s: how long nothing may arrive before that is a failure.
    """

    area_bytes: int = 128 * _MIB
    page_bytes: int = 64 << 10
    round_bytes: int = 64 * _MIB
    rounds: int = 5
    budget_s: float = 10.0
    trips: int = 200
    patience_s: float = 15.0


class Measured(msgspec.Struct):
    """One path.

    Attributes:
        bytes_per_s: median of the rounds.
        page_s: median from asking for a page of 4 KiB until it can be used.
        cpu_s_per_gb: of both processes together, per 1e9 bytes.
        verified: pages that were compared byte for byte with what they should be.
        wrong: those among them that differ.
        bad: those among them that the transport's own digests called wrong.
        failed: why it ended early; empty if it did not.
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
    """Measures one peer, through a transport that has ``area`` already. For one thread; every wait
    ends within ``patience_s``.

    All methods raise :class:`TransferFailed` if the peer is gone or says nothing in time,
    :class:`Refused` if it was turned away, and :class:`ProtocolError` if it is not a source.
    """

    def __init__(self, transport: Transport, area: PageArea, sizes: Sizes) -> None:
        self._transport = transport
        self._area = area
        self._sizes = sizes
        self._random = random.Random(1)
        self._expected = pattern(area.nbytes)
        self._zeros = bytes(area.nbytes)
        self._theirs = area.nbytes
        self._wants = 0
        self._peer = PeerId(0)
        self._pending: deque[Event] = deque()

    def meet(self, host: str, port: int) -> tuple[PeerUp, DoctorHello]:
        """Connect; return how, and who the other side is."""
        self._peer = self._transport.connect(host, port)
        up = next(event for event in self._events() if isinstance(event, PeerUp))
        hello = self._ask(DoctorHello(self._area.nbytes, self._area.device), DoctorHello)
        if hello.version != VERSION:
            text = f"version {hello.version} of the exchange there, {VERSION} here"
            raise ProtocolError(f"{text}: use the same kvconnect on both sides")
        self._theirs = min(hello.area_bytes, self._area.nbytes)
        return up, hello

    def link(self, host: str, connections: int) -> float:
        """Return what plain sockets carry on the same way, in bytes per second.

        Raises:
            OSError: they cannot be connected, or break.
        """
        nbytes = self._sizes.round_bytes // connections
        link = self._ask(GetLink(connections, nbytes), LinkPort)
        return measure_link((host, link.port), link.word, [nbytes] * connections, 3)

    def measure(self, path: str) -> Measured:
        """Move pages on a path; what failed after it began is in the result."""
        result = Measured(path)
        try:
            self._rounds(result)
            if not (result.wrong or result.bad):
                self._trips(result)
        except (TransferFailed, ProtocolError, Refused) as error:
            result.failed = str(error)
        return result

    def _rounds(self, result: Measured) -> None:
        sizes = self._sizes
        count = sizes.round_bytes // sizes.page_bytes
        rates, cpu_s = [], 0.0
        ends = time.monotonic() + sizes.budget_s
        for number in range(sizes.rounds + 1):
            pages = self._pick(sizes.page_bytes, count)
            self._area.fill(self._zeros)
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

    def _trips(self, result: Measured) -> None:
        count = min(self._sizes.trips, self._theirs // GRAIN_BYTES)
        pages = self._pick(GRAIN_BYTES, count)
        self._area.fill(self._zeros)
        ends = time.monotonic() + self._sizes.budget_s
        seconds = []
        for page in pages:
            seconds.append(self._move(result, GRAIN_BYTES, [page]))
            if time.monotonic() > ends:
                break
        self._verify(result, GRAIN_BYTES, pages[: len(seconds)])
        result.page_s = statistics.median(seconds)

    def _pick(self, page_bytes: int, count: int) -> list[tuple[int, int]]:
        """Return pairs of pages, (here, there), each page at most once."""
        here = self._random.sample(range(self._area.nbytes // page_bytes), count)
        there = self._random.sample(range(self._theirs // page_bytes), count)
        return list(zip(here, there, strict=True))

    def _move(self, result: Measured, page_bytes: int, pages: list[tuple[int, int]]) -> float:
        """Have pages sent; return the seconds from asking until all of them can be used."""
        self._wants += 1
        here = array("q", (page for page, _ in pages))
        there = [page for _, page in pages]
        peer, want, unit = self._peer, self._wants, page_unit(page_bytes)
        started = time.perf_counter()
        self._transport.submit(IncomingPages(peer, want, [unit], [(0, here)], path=result.path))
        self._tell(TransferRequest(want, page_bytes, there))
        left = len(pages)
        for event in self._events():
            if isinstance(event, PagesReceived) and event.read_id == want:
                left -= event.count
                result.bad += len(event.bad)
                if left == 0:
                    break
        seconds = time.perf_counter() - started
        self._transport.cancel(peer, want)
        return seconds

    def _verify(self, result: Measured, page_bytes: int, pages: list[tuple[int, int]]) -> None:
        found = self._area.snapshot()
        result.wrong += differing(found, self._expected, page_bytes, pages)
        result.verified += len(pages)

    def _cpu_s(self) -> float:
        """CPU seconds of both processes so far."""
        theirs = self._ask(GetCpu(), Cpu).seconds
        return theirs + time.process_time()

    def _ask(self, message: Message, kind: type[M]) -> M:
        self._tell(message)
        for event in self._events():
            if isinstance(event, MessageReceived):
                answer = decode(event.payload)
                if isinstance(answer, kind):
                    return answer
                raise ProtocolError(f"a {type(answer).__name__} instead of a {kind.__name__}")
        raise TransferFailed("no answer")

    def _tell(self, message: Message) -> None:
        self._transport.submit(PeerMessage(self._peer, encode(message)))

    def _events(self) -> Iterator[Event]:
        """Yield what happens to the peer; raises when it is gone or nothing happens for long."""
        patience_s = self._sizes.patience_s
        deadline = time.monotonic() + patience_s
        while self._pending or time.monotonic() < deadline:
            if not self._pending:
                events = self._transport.poll(_POLL_S)
                self._pending.extend(event for event in events if event.peer == self._peer)
                continue
            event = self._pending.popleft()
            if isinstance(event, PeerDown):
                _raise_down(event)
            _raise_no(event)
            if isinstance(event, MessageReceived | PagesReceived | PeerUp):
                deadline = time.monotonic() + patience_s
            yield event
        raise TransferFailed(f"nothing came from the other half for {patience_s:g} s")


def _raise_down(event: PeerDown) -> None:
    if event.refused:
        raise Refused(event.refused, event.reason)
    raise TransferFailed(f"the connection is gone: {event.reason}")


def _raise_no(event: Event) -> None:
    if isinstance(event, MessageReceived) and isinstance(answer := decode(event.payload), No):
        raise TransferFailed(f"the other half hung up: {answer.reason}")
