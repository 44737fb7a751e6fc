"""Reads blocks from the host memory of other engines into this worker's slots."""

from __future__ import annotations

import logging
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import NamedTuple

from kvconnect.errors import ProtocolError
from kvconnect.protocol.cache_messages import (
    MAX_FETCHED,
    WHOLE,
    Fetch,
    FetchOutcome,
    Place,
    Sent,
)
from kvconnect.protocol.reads import Cancel
from kvconnect.tiers.backends.base import BlockOutcome
from kvconnect.tiers.peers.asking import Holders
from kvconnect.tiers.peers.same_machine import SourceMemory
from kvconnect.tiers.peers.sources import CacheSource, CacheSources
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    IncomingPages,
    PagesReceived,
    PeerId,
    Unit,
)

logger = logging.getLogger(__name__)

STOP_S = 0.5
"""Seconds that a late read has to stop. It does not while pages are on their way, so its source is
disconnected then: nothing else of the tier must wait for it."""

_WITH_PAGES = (FetchOutcome.SENT, FetchOutcome.OVERWRITTEN)


class Wanted(NamedTuple):
    """A page to read, the slot for its block, who has it, and its number in the block."""

    key: bytes
    slot: int
    holders: Holders
    page: int = 0


@dataclass(eq=False)
class _OpenRead:
    """Units of some blocks from one source. It has ended when no page can arrive any more.
    ``page``: the part of their slots."""

    source: CacheSource
    number: int
    page: int
    units: Sequence[int]
    places: Sequence[int]  # of the blocks in the caller's list
    arrived: int = 0  # wire blocks
    bad: set[int] = field(default_factory=set)
    outcomes: bytes | None = None
    stopped: bool = False
    ended: bool = False

    def settle(self) -> None:
        """End the read if all pages that were sent have arrived."""
        if self.outcomes is not None and not self.stopped:
            sent = sum(outcome in _WITH_PAGES for outcome in self.outcomes)
            self.ended = self.arrived >= sent * len(self.units)

    def outcome(self, number: int) -> BlockOutcome:
        """Return what became of the block with this number in the read."""
        if self.stopped or self.outcomes is None:
            return BlockOutcome.FAILED
        if self.outcomes[number] == FetchOutcome.SENT:
            return BlockOutcome.CORRUPT if number in self.bad else BlockOutcome.OK
        busy = self.outcomes[number] == FetchOutcome.BUSY
        return BlockOutcome.UNAVAILABLE if busy else BlockOutcome.ABSENT


class Reads:
    """Reads from all sources. :meth:`read` is for any thread, the rest for the one that polls the
    transport. ``wait_s``: after how long a read over the network has failed."""

    def __init__(self, sources: CacheSources, wait_s: float, clock: Callable[[], float]) -> None:
        self._sources = sources
        self._wait_s = wait_s
        self._clock = clock
        self._open: dict[int, _OpenRead] = {}
        self._units: dict[tuple[int, int, tuple[int, ...]], list[Unit]] = {}

    def read(self, group: int, wanted: Sequence[Wanted]) -> list[BlockOutcome]:
        """Read blocks of one group. Block until nothing writes into the slots any more: a little
        longer than ``wait_s`` at most."""
        outcomes = [BlockOutcome.OK] * len(wanted)
        copied = self._copy(group, wanted)
        rest = [place for place in range(len(wanted)) if place not in copied]
        with self._sources.changed:
            began = self._clock()
            reads = list(self._plan(group, wanted, rest, outcomes))
            self._open.update((read.number, read) for read in reads)
        for read in reads:
            self._start(group, read, [wanted[place] for place in read.places])
        self._wait(reads, began)
        for read in reads:
            for number, place in enumerate(read.places):
                outcome = read.outcome(number)
                if outcome is not BlockOutcome.OK:
                    outcomes[place] = outcome
        return outcomes

    def on_sent(self, peer: PeerId, message: Sent) -> None:
        """A source sends no more; raises :class:`ProtocolError` for an unknown read of it."""
        with self._sources.changed:
            read = self._open.get(message.read_id)
            if read is None:
                return
            if read.source.peer != peer or len(message.outcomes) != len(read.places):
                raise ProtocolError(f"outcome of fetch {message.read_id}, which was not asked for")
            read.outcomes = message.outcomes
            read.settle()
            self._sources.changed.notify_all()

    def on_received(self, event: PagesReceived) -> None:
        """Pages of a read have arrived."""
        with self._sources.changed:
            read = self._open.get(event.read_id)
            if read is not None and read.source.peer == event.peer:
                read.arrived += event.count
                read.bad.update(event.bad)
                read.settle()
                self._sources.changed.notify_all()

    def on_drained(self, event: Drained) -> None:
        """A read that was stopped has ended."""
        with self._sources.changed:
            read = self._open.get(event.read_id)
            if read is not None and read.source.peer == event.peer:
                read.ended = True
                self._sources.changed.notify_all()

    def on_down(self, peer: PeerId) -> None:
        """A source is gone: nothing of it arrives any more."""
        with self._sources.changed:
            for read in self._open.values():
                if read.source.peer == peer and not read.ended:
                    read.stopped = read.ended = True
            self._sources.changed.notify_all()

    def _copy(self, group: int, wanted: Sequence[Wanted]) -> set[int]:
        """Copy blocks from the memory of sources on this machine. Return which are here."""
        found: dict[tuple[PeerId, SourceMemory], dict[int, tuple[Place, int]]] = defaultdict(dict)
        with self._sources.changed:
            for number, block in enumerate(wanted):
                for source in self._sources.of(block.holders):
                    place = source.memory.take(block.key) if source.memory else None
                    if source.memory and place:
                        found[source.peer, source.memory][number] = place, block.slot
                        break
        here: set[int] = set()
        nbytes = self._sources.groups[group][0].whole.block_bytes
        for (peer, memory), blocks in found.items():
            try:
                right = memory.read(list(blocks.values()), nbytes)
            except OSError as error:
                logger.info("the network is used again for an engine on this machine: %s", error)
                self._sources.set_memory(peer, None)
            else:
                here.update(compress(blocks, right))
        return here

    def _plan(
        self,
        group: int,
        wanted: Sequence[Wanted],
        places: Sequence[int],
        outcomes: list[BlockOutcome],
    ) -> Iterator[_OpenRead]:
        """Yield the reads of blocks at ``places``. Note those that nobody has as ABSENT, and those
        of sources that are left alone as UNAVAILABLE."""
        resting = self._sources.resting(self._clock())
        by_holders: dict[tuple[Holders, int, int], list[int]] = defaultdict(list)
        times = Counter[bytes]()  # a fetch must not name a block twice
        for place in places:
            block = wanted[place]
            by_holders[block.holders - resting, block.page, times[block.key]].append(place)
            times[block.key] += 1
        step = len(self._sources.groups[group])
        for (holders, page, _), places in by_holders.items():
            givers = self._givers(group, holders)
            if not givers:
                for place in places:
                    rests = wanted[place].holders & resting
                    outcomes[place] = BlockOutcome.UNAVAILABLE if rests else BlockOutcome.ABSENT
            for source, units in givers.items():
                ordered = _in_its_order(places, step, source.pages[group])
                for start in range(0, len(places), MAX_FETCHED):
                    some = ordered[start : start + MAX_FETCHED]
                    source.reading += len(some)
                    yield _OpenRead(source, next(self._sources.numbers), page, tuple(units), some)

    def _givers(self, group: int, holders: Holders) -> dict[CacheSource, list[int]]:
        """Return the units that each source gives, the least busy one first; empty if nobody has
        one of them."""
        sources = sorted(self._sources.of(holders), key=lambda source: source.reading)
        for source in sources:
            if WHOLE in source.units[group]:
                return {source: [WHOLE]}
        givers: dict[CacheSource, list[int]] = defaultdict(list)
        for unit in self._sources.groups[group][0].parts:
            giver = next((source for source in sources if unit in source.units[group]), None)
            if giver is None:
                return {}
            givers[giver].append(unit)
        return givers

    def _start(self, group: int, read: _OpenRead, blocks: Sequence[Wanted]) -> None:
        units = self._units_of(group, read.page, tuple(read.units))
        slots = array("q", [block.slot for block in blocks])
        peer, path = read.source.peer, read.source.path
        spans = [(0, slots)] * len(units)
        self._sources.transport.submit(IncomingPages(peer, read.number, units, spans, path=path))
        keys = [block.key for block in blocks]
        self._sources.say(peer, Fetch(read.number, group, list(read.units), keys))

    def _units_of(self, group: int, page: int, numbers: tuple[int, ...]) -> list[Unit]:
        """Return the units of a read; the same list each time, which NIXL tells a source once."""
        found = self._units.get((group, page, numbers))
        if found is None:
            units = self._sources.groups[group][page]
            found = [unit for number in numbers if (unit := units.get(number)) is not None]
            self._units[group, page, numbers] = found
        return found

    def _wait(self, reads: Sequence[_OpenRead], began: float) -> None:
        """Wait for reads; stop those that take too long, and wait until they have stopped."""
        changed, ended = self._sources.changed, partial(self._have_ended, reads)
        with changed:
            changed.wait_for(ended, self._wait_s)
            late = [read for read in reads if not read.ended]
            if not self._sources.closed:
                self._judge(reads, began)
            for read in late:
                read.stopped = True
        for read in late:
            self._sources.say(read.source.peer, Cancel(read.number))
        for read in reads:  # also those that have ended: the transport keeps a read until then
            self._sources.transport.cancel(read.source.peer, read.number)
        with changed:
            stopped = changed.wait_for(ended, STOP_S)
            stuck = {read.source.peer for read in late if not (stopped or read.ended)}
        for peer in stuck:
            reason = f"a read took longer than {self._wait_s:g} s, and does not stop"
            self._sources.transport.submit(Disconnect(peer, reason))
        with changed:
            changed.wait_for(ended)
            for read in reads:
                read.source.reading -= len(read.places)
                del self._open[read.number]

    def _judge(self, reads: Sequence[_OpenRead], began: float) -> None:
        """Note, once for all reads of a source, whether they were late or have brought pages."""
        now = self._clock()
        late = {read.source for read in reads if not read.ended}
        for source in late:
            source.read_breaker.failed(now, began)
            text = "a read from the engine at %s takes more than %g s; it is not used for a while"
            logger.warning(text, source.address, self._wait_s)
        for source in {read.source for read in reads if read.arrived and not read.stopped} - late:
            source.read_breaker.succeeded()

    def _have_ended(self, reads: Sequence[_OpenRead]) -> bool:
        return self._sources.closed or all(read.ended for read in reads)


def _in_its_order(places: Sequence[int], step: int, pages: int) -> Sequence[int]:
    """Return places with those first that are the same page of the source's blocks, which has
    ``pages`` in each: it sends them in one go. They are ``step`` pages from one another here."""
    if step % pages == 0:
        return places
    order = sorted(range(len(places)), key=lambda number: number * step % pages)
    return [places[number] for number in order]
