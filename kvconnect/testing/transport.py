"""Conformance checks for transports: ``check_transport(make)`` runs them all."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from kvconnect.testing.buffers import require
from kvconnect.testing.page_memory import PageMemory, phased_unit, plain_unit, split_unit
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    Event,
    Fence,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Transport,
    Unit,
)

E = TypeVar("E", bound=Event)
Make = Callable[[], Transport]
_PATIENCE_S = 30.0
_POLL_S = 0.01
_MIB = 1 << 20


def check_transport(make: Make, path: str = "tcp") -> None:
    """Run every check on transports from ``make``, which returns a new one at each call.

    The transports must reach each other at 127.0.0.1. For a ``path`` other than tcp, set their
    ``stall_s`` to a few seconds. Takes a few seconds and 200 MiB.

    Raises:
        AssertionError: a check failed; the message begins with its name.
    """
    for check in CHECKS:
        try:
            check(make, path)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error


class Side:
    """One transport and all events that it has returned so far (``seen``)."""

    def __init__(self, transport: Transport, memory: PageMemory) -> None:
        self.transport = transport
        self.memory = memory
        self.seen: list[Event] = []
        transport.register(memory)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]

    def poll(self) -> None:
        """Append new events to ``seen``."""
        self.seen += self.transport.poll(_POLL_S)


class ConnectedPair:
    """A connected pair: ``of_reader`` is the peer id at the reader, ``of_source`` at the source."""

    def __init__(self, reader: Side, source: Side, path: str = "tcp") -> None:
        self.reader = reader
        self.source = source
        self.path = path
        self.address = source.transport.listen("127.0.0.1", 0)
        self.of_reader, self.of_source = self.connect()

    def connect(self) -> tuple[PeerId, PeerId]:
        """Connect again; return the new peer id on the reader and on the source."""
        number = self.reader.transport.connect(*self.address)
        before = len(self.source.of(PeerUp))
        self.until(lambda: PeerUp in kinds(self.reader, number), "the reader's PeerUp")
        self.until(lambda: len(self.source.of(PeerUp)) > before, "the source's PeerUp")
        return number, self.source.of(PeerUp)[-1].peer

    def until(self, done: Callable[[], object], what: str) -> None:
        """Poll both sides until ``done``. Who waits in vain is told why peers have ended."""
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() >= deadline:
                sides = (self.reader, self.source)
                ends = [down.reason for side in sides for down in side.of(PeerDown)]
                raise AssertionError(f"waited {_PATIENCE_S} s for {what}; ended peers: {ends}")
            self.reader.poll()
            self.source.poll()

    def until_down(self) -> None:
        """Poll until the connection is down on both sides."""
        self.until(lambda: self.reader.of(PeerDown), "the reader's PeerDown")
        self.until(lambda: self.source.of(PeerDown), "the source's PeerDown")

    def expect(
        self,
        read_id: int,
        units: Sequence[Unit],
        spans: Sequence[Sequence[int]],
        fence: Fence | None = None,
    ) -> None:
        """Have the reader expect wire blocks from 0 on in each unit."""
        places = [(0, array("q", ids)) for ids in spans]
        self.reader.transport.submit(
            IncomingPages(self.of_reader, read_id, units, places, fence, self.path)
        )

    def send(
        self,
        read_id: int,
        number: int,
        unit: Unit,
        ids: Sequence[int],
        first: int = 0,
        fence: Fence | None = None,
    ) -> None:
        """Have the source send wire blocks."""
        order = OutgoingPages(self.of_source, read_id, number, unit, first, array("q", ids), fence)
        self.source.transport.submit(order)

    def arrived(self, read_id: int) -> int:
        """Return how many wire blocks of a read were received."""
        return sum(e.count for e in self.reader.of(PagesReceived) if e.read_id == read_id)

    def check_works(self, read_id: int) -> None:
        """Move one page, to show that the connection works."""
        unit = plain_unit(64)
        self.expect(read_id, [unit], [[0]])
        self.send(read_id, 0, unit, [1])
        self.until(lambda: self.arrived(read_id), f"a page of read {read_id}")


@contextmanager
def pair(make: Make, path: str = "tcp", nbytes: int = _MIB) -> Iterator[ConnectedPair]:
    """Two connected transports: the source's memory is random, the reader's is zero."""
    reader, source = make(), make()
    try:
        yield ConnectedPair(
            Side(reader, PageMemory(nbytes)), Side(source, PageMemory(nbytes, seed=1)), path
        )
    finally:
        reader.close()
        source.close()


def kinds(side: Side, peer: PeerId) -> list[type[Event]]:
    """Return the types of one peer's events, in order."""
    return [type(event) for event in side.seen if event.peer == peer]


def check_messages(make: Make, path: str) -> None:
    """Messages of all sizes arrive in order, in both directions."""
    with pair(make, path) as link:
        sizes = [1, 5, 1000, 10_000] * 25 + [_MIB] * 4
        messages = [bytes([i]) * size for i, size in enumerate(sizes)]
        for number, message in enumerate(messages):
            link.reader.transport.submit(PeerMessage(link.of_reader, message))
            link.source.transport.submit(PeerMessage(link.of_source, message))
            if number % 5 == 4:
                link.reader.poll()
                link.source.poll()
        sides = (link.reader, link.source)
        link.until(
            lambda: all(len(side.of(MessageReceived)) == len(messages) for side in sides),
            "all messages",
        )
        for side in sides:
            got = [event.payload for event in side.of(MessageReceived)]
            require(got == messages, "messages were changed or reordered")


def check_pages(make: Make, path: str) -> None:
    """Scattered pages of several units land byte for byte where the reader said, and only there."""
    pages = 64
    rng = random.Random(2)
    layouts = [  # how the source and the reader keep a unit: alike in bytes per wire block only
        (plain_unit(1000, 7), plain_unit(1000)),
        (split_unit(96, 3, pages, 100_000), plain_unit(288, 100_000)),
        (phased_unit(64, 2, 4, 200_000), split_unit(32, 4, pages, 200_000)),
        (plain_unit(256, 300_000), phased_unit(128, 2, 2, 300_000)),
    ]
    with pair(make, path) as link:
        model = PageMemory(len(link.reader.memory.data))
        spans = [rng.sample(range(pages), 40) for _ in layouts]
        link.expect(5, [there for _, there in layouts], spans)
        for number, (here, there) in enumerate(layouts):
            ids = rng.sample(range(pages), 40)
            model.write(there, spans[number], link.source.memory.read(here, ids))
            for first, last in ((25, 40), (0, 1), (1, 25)):
                link.send(5, number, here, ids[first:last], first)
        link.until(lambda: link.arrived(5) == 40 * len(layouts), "all pages")
        require(link.reader.memory.data == model.data, "pages differ from what was sent")
        events = link.reader.of(PagesReceived)
        require(not any(e.bad for e in events), "good pages were called bad")
        require(
            all(e.nbytes == e.count * layouts[e.number][0].block_bytes for e in events),
            "Received gives a wrong number of bytes",
        )
        link.until(
            lambda: len(link.source.of(PagesSent)) == 3 * len(layouts), "a Sent for each order"
        )


def check_fence(make: Make, path: str) -> None:
    """Pages are not read before their fence has passed."""
    unit = plain_unit(4096)
    with pair(make, path) as link:
        data = b"\x77" * 4096
        link.expect(1, [unit], [[3]])
        with _fence_after(lambda: link.source.memory.write(unit, [0], data)) as fence:
            link.send(1, 0, unit, [0], fence=fence)
            link.until(lambda: link.arrived(1), "the page behind a fence")
        require(link.reader.memory.read(unit, [3]) == data, "a page was read before its fence")


def check_reader_fence(make: Make, path: str) -> None:
    """Pages are not written before the fence of their read has passed."""
    unit = plain_unit(4096)
    with pair(make, path) as link:
        before: list[bytes] = []
        with _fence_after(lambda: before.append(link.reader.memory.read(unit, [3]))) as fence:
            link.expect(1, [unit], [[3]], fence)
            link.send(1, 0, unit, [0])
            link.until(lambda: link.arrived(1), "the page for a fenced place")
        require(before == [bytes(4096)], "a page was written before its read_id's fence")


@contextmanager
def _fence_after(action: Callable[[], object]) -> Iterator[Fence]:
    """A fence that passes a little later, right after ``action``."""
    passed = threading.Event()
    timer = threading.Timer(0.1, lambda: [step() for step in (action, passed.set)])
    timer.start()
    yield _EventFence(passed)
    timer.join()


class _EventFence(NamedTuple):
    event: threading.Event

    def wait(self) -> None:
        self.event.wait(_PATIENCE_S)


def check_concurrent_reads(make: Make, path: str) -> None:
    """Concurrent reads do not mix."""
    unit = plain_unit(512)
    with pair(make, path) as link:
        for read_id in range(200):
            link.expect(read_id, [unit], [[read_id, 200 + read_id]])
        for read_id in random.Random(3).sample(range(200), 200):
            link.send(read_id, 0, unit, [read_id + 400], 1)
            link.send(read_id, 0, unit, [read_id + 800], 0)
        link.until(lambda: all(link.arrived(read_id) == 2 for read_id in range(200)), "all reads")
        reader, source = link.reader.memory, link.source.memory
        for read_id in range(200):
            there = source.read(unit, [read_id + 400, read_id + 800])
            same = reader.read(unit, [200 + read_id, read_id]) == there
            require(same, f"read {read_id} got other pages")


def check_big(make: Make, path: str) -> None:
    """64 MiB in one order arrive whole."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 64 * _MIB) as link:
        ids = random.Random(4).sample(range(1024), 1024)
        link.expect(1, [unit], [ids])
        link.send(1, 0, unit, range(1024))
        link.until(lambda: link.arrived(1) == 1024, "64 MiB")
        found = link.reader.memory.read(unit, ids)
        require(found == link.source.memory.data, "64 MiB differ from what was sent")
        link.until(lambda: link.source.of(PagesSent), "the order's Sent")
        require(link.source.of(PagesSent)[0].nbytes == 64 * _MIB, "Sent gives wrong bytes")


def check_cancel_by_reader(make: Make, path: str) -> None:
    """After ``Drained`` no page of a cancelled read is touched, whatever still arrives."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 32 * _MIB) as link:
        link.expect(1, [unit], [range(512)])
        link.send(1, 0, unit, range(512))
        link.source.poll()
        link.reader.transport.cancel(link.of_reader, 1)
        link.until(lambda: Drained in kinds(link.reader, link.of_reader), "the reader's Drained")
        link.reader.memory.data[:] = bytes(32 * _MIB)  # as if the pages had a new owner
        link.send(1, 0, unit, range(100))  # the source does not know of the cancel yet
        link.until(lambda: len(link.source.of(PagesSent)) == 2, "the source to finish")
        link.check_works(2)
        expected = link.source.memory.data[64:128] + bytes(32 * _MIB - 64)
        require(link.reader.memory.data == expected, "pages of a cancelled read were written")


def check_cancel_by_source(make: Make, path: str) -> None:
    """A source's cancel ends with ``Drained``; the connection still works."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 16 * _MIB) as link:
        passed = threading.Event()
        link.expect(1, [unit], [range(256)])
        link.send(1, 0, unit, range(256), fence=_EventFence(passed))
        for _ in range(4):
            link.send(1, 0, unit, range(256))
        link.source.transport.cancel(link.of_source, 1)
        passed.set()
        link.until(lambda: Drained in kinds(link.source, link.of_source), "the source's Drained")
        link.check_works(2)
        sent = [event for event in link.source.of(PagesSent) if event.read_id == 1]
        require(len(sent) <= 1, "what was queued for a cancelled read was sent")


def check_unasked(make: Make, path: str) -> None:
    """Pages that nobody asked for end the connection and are not written."""
    unit = plain_unit(512)
    wrong: list[tuple[int, int, Unit, int]] = [
        (9, 0, unit, 0),  # unknown read
        (1, 1, unit, 0),  # unknown unit
        (1, 0, unit, 2),  # outside the span
        (1, 0, plain_unit(256), 0),  # other size of a wire block
    ]
    for read_id, number, sent, first in wrong:
        with pair(make, path) as link:
            link.expect(1, [unit], [[0, 1]])
            link.send(read_id, number, sent, [5], first)
            link.until_down()
            require(
                not any(link.reader.memory.data),
                f"pages that nobody asked for were written: {sent}",
            )


def check_disconnect(make: Make, path: str) -> None:
    """Messages before a disconnect arrive; both sides learn that the connection is gone."""
    with pair(make, path) as link:
        link.source.transport.submit(PeerMessage(link.of_source, b"because"))
        link.source.transport.submit(Disconnect(link.of_source, "enough"))
        link.until_down()
        require(MessageReceived in kinds(link.reader, link.of_reader), "the last message was lost")
        require(link.source.of(PeerDown)[0].reason == "enough", "PeerDown gives another reason")


def check_end(make: Make, path: str) -> None:
    """``PeerDown`` is a peer's last event; later orders are dropped; a reconnect has a new id."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 32 * _MIB) as link:
        link.expect(1, [unit], [range(512)])
        link.send(1, 0, unit, range(512))
        link.source.poll()
        link.reader.transport.submit(Disconnect(link.of_reader, "enough"))
        link.until(lambda: link.reader.of(PeerDown), "the reader's PeerDown")
        link.reader.memory.data[:] = bytes(32 * _MIB)
        link.until(lambda: link.source.of(PeerDown), "the source's PeerDown")
        for order in (PeerMessage(link.of_reader, b"x"), Disconnect(link.of_reader, "again")):
            link.reader.transport.submit(order)
        link.expect(2, [unit], [[0]])
        link.reader.transport.cancel(link.of_reader, 1)
        link.send(1, 0, unit, [0])
        old = link.of_reader, link.of_source
        link.of_reader, link.of_source = link.connect()
        require(old[0] != link.of_reader and old[1] != link.of_source, "a peer id was used twice")
        require(not any(link.reader.memory.data), "a page was written after PeerDown")
        link.check_works(1)
        for side, peer in zip((link.reader, link.source), old, strict=True):
            require(kinds(side, peer)[-1] is PeerDown, "something happened after PeerDown")


def check_wake(make: Make, path: str) -> None:
    """``wake`` ends the poll that waits, or else the next one; a poll without one waits."""
    with pair(make, path) as link:
        transport, started = link.reader.transport, time.monotonic()
        transport.wake()
        transport.poll(_PATIENCE_S)
        timer = threading.Timer(_POLL_S, transport.wake)
        timer.start()
        transport.poll(_PATIENCE_S)
        timer.join()
        require(time.monotonic() - started < _PATIENCE_S, "a poll was not woken")
        started = time.monotonic()
        transport.poll(_POLL_S)
        require(time.monotonic() - started >= _POLL_S / 2, "a poll did not wait")


def check_close(make: Make, path: str) -> None:
    """``close`` informs the other side, may be called twice, and frees the address."""
    with pair(make, path) as link:
        link.source.transport.close()
        link.source.transport.close()
        link.until(lambda: link.reader.of(PeerDown), "the PeerDown after a close")
        nobody = link.reader.transport.connect(*link.address)
        link.until(lambda: PeerDown in kinds(link.reader, nobody), "the PeerDown of nobody")
        require(PeerUp not in kinds(link.reader, nobody), "nobody was up")


CHECKS: tuple[Callable[[Make, str], None], ...] = (
    check_messages,
    check_pages,
    check_fence,
    check_reader_fence,
    check_concurrent_reads,
    check_big,
    check_cancel_by_reader,
    check_cancel_by_source,
    check_unasked,
    check_disconnect,
    check_wake,
    check_end,
    check_close,
)
