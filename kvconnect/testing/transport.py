"""What every transport must do, checked from outside through the seam.

``check_transport(make)`` raises :class:`AssertionError` naming the check and what went wrong.
"""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from kvconnect.testing.memory import PageMemory, phased_unit, plain_unit, require, split_unit
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
    """Run every check on transports from ``make``, which returns a fresh one at each call.

    All must be able to meet at 127.0.0.1, and with another ``path`` for pages than tcp have a
    ``stall_s`` of a few seconds. Takes a few seconds and 200 MiB.

    Raises:
        AssertionError: a check failed; the text begins with its name.
    """
    for check in CHECKS:
        try:
            check(make, path)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error


class Side:
    """One transport with what happened to it. ``seen`` holds all events so far."""

    def __init__(self, transport: Transport, memory: PageMemory) -> None:
        self.transport = transport
        self.memory = memory
        self.seen: list[Event] = []
        transport.register(memory)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]

    def poll(self) -> None:
        """Take in what happened since."""
        self.seen += self.transport.poll(_POLL_S)


class ConnectedPair:
    """A reader that is connected to a source. ``of_reader`` and ``of_source`` are the other's
    number on each side."""

    def __init__(self, reader: Side, source: Side, path: str = "tcp") -> None:
        self.reader = reader
        self.source = source
        self.path = path
        self.address = source.transport.listen("127.0.0.1", 0)
        self.of_reader, self.of_source = self.connect()

    def connect(self) -> tuple[PeerId, PeerId]:
        """Connect once more; return the new peer's number here and there."""
        number = self.reader.transport.connect(*self.address)
        before = len(self.source.of(PeerUp))
        self.until(lambda: PeerUp in kinds(self.reader, number), "the reader's PeerUp")
        self.until(lambda: len(self.source.of(PeerUp)) > before, "the source's PeerUp")
        return number, self.source.of(PeerUp)[-1].peer

    def until(self, done: Callable[[], object], what: str) -> None:
        """Poll both sides until ``done``."""
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            require(time.monotonic() < deadline, f"waited {_PATIENCE_S} s for {what}")
            self.reader.poll()
            self.source.poll()

    def until_down(self) -> None:
        """Poll until the link is down on both sides."""
        self.until(lambda: self.reader.of(PeerDown), "the reader's PeerDown")
        self.until(lambda: self.source.of(PeerDown), "the source's PeerDown")

    def want(
        self,
        want: int,
        units: Sequence[Unit],
        spans: Sequence[Sequence[int]],
        fence: Fence | None = None,
    ) -> None:
        """Have the reader expect wire blocks from 0 on in each unit."""
        places = [(0, array("q", ids)) for ids in spans]
        self.reader.transport.submit(
            IncomingPages(self.of_reader, want, units, places, fence, self.path)
        )

    def send(
        self,
        want: int,
        number: int,
        unit: Unit,
        ids: Sequence[int],
        first: int = 0,
        fence: Fence | None = None,
    ) -> None:
        """Have the source send wire blocks."""
        order = OutgoingPages(self.of_source, want, number, unit, first, array("q", ids), fence)
        self.source.transport.submit(order)

    def arrived(self, want: int) -> int:
        """Return how many wire blocks of a want were received."""
        return sum(e.count for e in self.reader.of(PagesReceived) if e.want == want)

    def check_works(self, want: int) -> None:
        """Move one page to see that the link is alive."""
        unit = plain_unit(64)
        self.want(want, [unit], [[0]])
        self.send(want, 0, unit, [1])
        self.until(lambda: self.arrived(want), f"a page of want {want}")


@contextmanager
def pair(make: Make, path: str = "tcp", nbytes: int = _MIB) -> Iterator[ConnectedPair]:
    """Two connected transports, the source's memory random and the reader's zero."""
    reader, source = make(), make()
    try:
        yield ConnectedPair(
            Side(reader, PageMemory(nbytes)), Side(source, PageMemory(nbytes, seed=1)), path
        )
    finally:
        reader.close()
        source.close()


def kinds(side: Side, peer: PeerId) -> list[type[Event]]:
    """Return the kinds of what happened to one peer, in order."""
    return [type(event) for event in side.seen if event.peer == peer]


# The checks -------------------------------------------------------------------------------------


def check_notes(make: Make, path: str) -> None:
    """Notes of all sizes arrive in order, both ways."""
    with pair(make, path) as link:
        sizes = [1, 5, 1000, 10_000] * 25 + [_MIB] * 4
        notes = [bytes([i]) * size for i, size in enumerate(sizes)]
        for number, note in enumerate(notes):
            link.reader.transport.submit(PeerMessage(link.of_reader, note))
            link.source.transport.submit(PeerMessage(link.of_source, note))
            if number % 5 == 4:
                link.reader.poll()
                link.source.poll()
        sides = (link.reader, link.source)
        link.until(
            lambda: all(len(side.of(MessageReceived)) == len(notes) for side in sides), "all notes"
        )
        for side in sides:
            got = [event.payload for event in side.of(MessageReceived)]
            require(got == notes, "notes were changed or reordered")


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
        link.want(5, [there for _, there in layouts], spans)
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
        link.want(1, [unit], [[3]])
        with _fence_after(lambda: link.source.memory.write(unit, [0], data)) as fence:
            link.send(1, 0, unit, [0], fence=fence)
            link.until(lambda: link.arrived(1), "the page behind a fence")
        require(link.reader.memory.read(unit, [3]) == data, "a page was read before its fence")


def check_reader_fence(make: Make, path: str) -> None:
    """Pages are not written before the fence of their want has passed."""
    unit = plain_unit(4096)
    with pair(make, path) as link:
        before: list[bytes] = []
        with _fence_after(lambda: before.append(link.reader.memory.read(unit, [3]))) as fence:
            link.want(1, [unit], [[3]], fence)
            link.send(1, 0, unit, [0])
            link.until(lambda: link.arrived(1), "the page for a fenced place")
        require(before == [bytes(4096)], "a page was written before its want's fence")


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


def check_many_wants(make: Make, path: str) -> None:
    """Wants that are under way together do not mix."""
    unit = plain_unit(512)
    with pair(make, path) as link:
        for want in range(200):
            link.want(want, [unit], [[want, 200 + want]])
        for want in random.Random(3).sample(range(200), 200):
            link.send(want, 0, unit, [want + 400], 1)
            link.send(want, 0, unit, [want + 800], 0)
        link.until(lambda: all(link.arrived(want) == 2 for want in range(200)), "all wants")
        reader, source = link.reader.memory, link.source.memory
        for want in range(200):
            there = source.read(unit, [want + 400, want + 800])
            same = reader.read(unit, [200 + want, want]) == there
            require(same, f"want {want} got other pages")


def check_big(make: Make, path: str) -> None:
    """64 MiB in one order arrive whole."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 64 * _MIB) as link:
        ids = random.Random(4).sample(range(1024), 1024)
        link.want(1, [unit], [ids])
        link.send(1, 0, unit, range(1024))
        link.until(lambda: link.arrived(1) == 1024, "64 MiB")
        found = link.reader.memory.read(unit, ids)
        require(found == link.source.memory.data, "64 MiB differ from what was sent")
        link.until(lambda: link.source.of(PagesSent), "the order's Sent")
        require(link.source.of(PagesSent)[0].nbytes == 64 * _MIB, "Sent gives wrong bytes")


def check_cancel_by_reader(make: Make, path: str) -> None:
    """After ``Drained`` no page of a cancelled want is touched, whatever still arrives."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 32 * _MIB) as link:
        link.want(1, [unit], [range(512)])
        link.send(1, 0, unit, range(512))
        link.source.poll()
        link.reader.transport.cancel(link.of_reader, 1)
        link.until(lambda: Drained in kinds(link.reader, link.of_reader), "the reader's Quiet")
        link.reader.memory.data[:] = bytes(32 * _MIB)  # as if the pages were somebody else's now
        link.send(1, 0, unit, range(100))  # the source has not heard of it yet
        link.until(lambda: len(link.source.of(PagesSent)) == 2, "the source to finish")
        link.check_works(2)
        expected = link.source.memory.data[64:128] + bytes(32 * _MIB - 64)
        require(link.reader.memory.data == expected, "a cancelled want still landed")


def check_cancel_by_source(make: Make, path: str) -> None:
    """What a source cancels ends with ``Drained``; the link works on."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 16 * _MIB) as link:
        passed = threading.Event()
        link.want(1, [unit], [range(256)])
        link.send(1, 0, unit, range(256), fence=_EventFence(passed))
        for _ in range(4):
            link.send(1, 0, unit, range(256))
        link.source.transport.cancel(link.of_source, 1)
        passed.set()
        link.until(lambda: Drained in kinds(link.source, link.of_source), "the source's Quiet")
        link.check_works(2)
        sent = [event for event in link.source.of(PagesSent) if event.want == 1]
        require(len(sent) <= 1, "what was queued for a cancelled want was sent")


def check_unasked(make: Make, path: str) -> None:
    """Pages that nobody asked for end the connection and land nowhere."""
    unit = plain_unit(512)
    wrong: list[tuple[int, int, Unit, int]] = [
        (9, 0, unit, 0),  # unknown want
        (1, 1, unit, 0),  # unknown unit
        (1, 0, unit, 2),  # outside the span
        (1, 0, plain_unit(256), 0),  # other size of a wire block
    ]
    for want, number, sent, first in wrong:
        with pair(make, path) as link:
            link.want(1, [unit], [[0, 1]])
            link.send(want, number, sent, [5], first)
            link.until_down()
            require(not any(link.reader.memory.data), f"pages nobody asked for landed: {sent}")


def check_hangup(make: Make, path: str) -> None:
    """Notes before a hang-up arrive; both sides learn that the link is gone."""
    with pair(make, path) as link:
        link.source.transport.submit(PeerMessage(link.of_source, b"because"))
        link.source.transport.submit(Disconnect(link.of_source, "enough"))
        link.until_down()
        require(MessageReceived in kinds(link.reader, link.of_reader), "the last note was lost")
        require(link.source.of(PeerDown)[0].reason == "enough", "PeerDown gives another reason")


def check_end(make: Make, path: str) -> None:
    """``PeerDown`` is a peer's last event, orders for it are dropped, and who comes back is new."""
    unit = plain_unit(64 << 10)
    with pair(make, path, 32 * _MIB) as link:
        link.want(1, [unit], [range(512)])
        link.send(1, 0, unit, range(512))
        link.source.poll()
        link.reader.transport.submit(Disconnect(link.of_reader, "enough"))
        link.until(lambda: link.reader.of(PeerDown), "the reader's PeerDown")
        link.reader.memory.data[:] = bytes(32 * _MIB)
        link.until(lambda: link.source.of(PeerDown), "the source's PeerDown")
        for order in (PeerMessage(link.of_reader, b"x"), Disconnect(link.of_reader, "again")):
            link.reader.transport.submit(order)
        link.want(2, [unit], [[0]])
        link.reader.transport.cancel(link.of_reader, 1)
        link.send(1, 0, unit, [0])
        old = link.of_reader, link.of_source
        link.of_reader, link.of_source = link.connect()
        require(old[0] != link.of_reader and old[1] != link.of_source, "a peer's number came back")
        require(not any(link.reader.memory.data), "a page landed after PeerDown")
        link.check_works(1)
        for side, peer in zip((link.reader, link.source), old, strict=True):
            require(kinds(side, peer)[-1] is PeerDown, "something happened after PeerDown")


def check_close(make: Make, path: str) -> None:
    """Closing tells the other side, can be done twice, and leaves nobody at the address."""
    with pair(make, path) as link:
        link.source.transport.close()
        link.source.transport.close()
        link.until(lambda: link.reader.of(PeerDown), "the PeerDown after a close")
        nobody = link.reader.transport.connect(*link.address)
        link.until(lambda: PeerDown in kinds(link.reader, nobody), "the PeerDown of nobody")
        require(PeerUp not in kinds(link.reader, nobody), "nobody was up")


CHECKS: tuple[Callable[[Make, str], None], ...] = (
    check_notes,
    check_pages,
    check_fence,
    check_reader_fence,
    check_many_wants,
    check_big,
    check_cancel_by_reader,
    check_cancel_by_source,
    check_unasked,
    check_hangup,
    check_end,
    check_close,
)
