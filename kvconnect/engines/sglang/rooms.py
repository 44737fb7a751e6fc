"""What becomes of the requests of one SGLang rank, by *bootstrap room*: SGLang's number for one
hand-off, which the router gives to both sides.

``PrefillRooms`` is the prefill side, ``Inbox`` (``inbox.py``) the decode side. Both turn calls of
SGLang's scheduler into instructions for the agent, and the agent's answers into outcomes. Neither
knows SGLang.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    NoticeKind,
    OfferBlocks,
    TransferEvent,
    Withdraw,
)
from kvconnect.errors import Refused, contained
from kvconnect.protocol.topology import readers_for
from kvconnect.stats import OTHER
from kvconnect.transport.base import Fence
from kvconnect.types import FailureCause, Rank, Span, TransferId

logger = logging.getLogger(__name__)

_PREFIX = b"sgl-room"
_MOST_GIVEN_UP = 1024


def is_room(value: object) -> bool:
    """Whether a client's value is a room: an unsigned number of 64 bits."""
    return type(value) is int and 0 <= value < 1 << 64


def transfer_of(room: int) -> TransferId:
    """Return the transfer that a room stands for. Both sides work it out for themselves."""
    return TransferId(_PREFIX + room.to_bytes(8, "big"))


def room_of(transfer: TransferId) -> int:
    """Return the room of a transfer."""
    return int.from_bytes(transfer[len(_PREFIX) :], "big")


def _announced(room: int) -> DisaggregationInstructions:
    return DisaggregationInstructions(offers=[OfferBlocks(transfer_of(room))])


def contain_room_errors(
    agent: HandoffAgent, room: int, failed: Callable[[int, str], None]
) -> AbstractContextManager[None]:
    """End one room, and nothing else, with whatever is raised inside; counted and logged.

    SGLang ends its server when its scheduler's thread raises, and it is in that thread that we
    work on what peers said. So all that is done for a room is done in here.
    """

    def ended(error: Exception) -> None:
        logger.error("kvconnect: the hand-off of room %s is given up", room, exc_info=error)
        with agent.stats() as stats:
            stats.count("handoff_refused", label=OTHER)
        failed(room, f"{type(error).__name__}: {error}")

    return contained(ended)


class RoomTransfer(NamedTuple):
    """What readers were sent of one room, and how long these bytes were on their way."""

    nbytes: int = 0
    seconds: float = 0.0


_readers = functools.lru_cache(maxsize=64)(readers_for)  # some milliseconds for many workers


@dataclass(eq=False)
class SendRoom:
    """A room of the prefill side. Blocks are counted from the start of the prompt."""

    prefix: int = 0  # blocks that decode has already; fixed when the first reader joins
    most: int | None = None  # blocks of the prompt, where that is known
    offered: int | None = None  # up to which block, once something was
    ahead: dict[int, int] = field(default_factory=dict)  # block -> page, until SGLang sends it
    kept: set[int] = field(default_factory=set)  # pages that are freed when the room is closed
    frees: list[Callable[[], object]] = field(default_factory=list)  # which does that
    lost: bool = False  # given up by this side
    waiting: frozenset[Rank] | None = None  # readers still to finish; None: none is known
    joined: set[Rank] = field(default_factory=set)
    complete: bool = False  # the last chunk was offered
    moved: RoomTransfer = field(default_factory=RoomTransfer)

    @property
    def served(self) -> bool:
        """Whether everyone who needs something has everything."""
        return self.complete and self.waiting is not None and not self.waiting

    @property
    def next(self) -> int:
        """The first block that was not offered."""
        return self.prefix if self.offered is None else self.offered

    def ahead_to(self, end: int) -> range:
        """Return the blocks up to ``end`` that were not offered yet, to be offered in a step."""
        return range(0) if self.waiting is None else range(self.next, end)

    def note_ahead(self, first: int, ids: array[int]) -> None:
        """The blocks ``first ...`` are offered in the step that now begins, from pages ``ids``."""
        self.offered = first + len(ids)
        self.ahead.update(enumerate(ids, first))

    def keep(self, pages: set[int], frees: Sequence[Callable[[], object]]) -> None:
        """These pages are not the request's any more, but may be on their way: ``frees``, which
        give them back, are called when the room is closed, at the same point on every rank."""
        self.kept |= pages
        self.frees += frees

    def check(self, first: int, ids: array[int]) -> str:
        """Return why the blocks ``first ...`` cannot be sent from pages ``ids``, "" if they can."""
        if ids and first > self.next:
            return f"blocks from {first} on were to be sent when {self.next} was the next one"
        if self.ahead:
            for block, page in enumerate(ids, first):
                before = self.ahead.pop(block, page)
                if before != page and before not in self.kept:
                    return f"block {block} was moved to another page while it was being sent"
        return ""


class PrefillRooms:
    """The prefill side. For the scheduler's thread.

    ``ready(room)``, ``served(room)`` and ``failed(room, why)`` are called from :meth:`take`: all
    readers have asked; all have everything; one gave up. ``kv_heads``: over all ranks, by group.
    """

    def __init__(
        self,
        agent: HandoffAgent,
        rank: Rank,
        kv_heads: Sequence[int],
        ready: Callable[[int], None],
        served: Callable[[int], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._agent = agent
        self._rank = rank
        self._kv_heads = tuple(kv_heads)
        self._ready, self._served, self._failed = ready, served, failed
        self._rooms: dict[int, SendRoom] = {}
        self._given_up: dict[int, None] = {}  # before anybody asked; oldest first
        self._leaving: set[int] = set()  # withdrawn, and not known to be over

    def open(self, room: int) -> None:
        """A request was given to this rank: readers may ask for its blocks, from when nothing of
        an earlier request with this room is on its way any more."""
        with contain_room_errors(self._agent, room, self.give_up):
            self._given_up.pop(room, None)
            if room not in self._rooms:
                self._rooms[room] = SendRoom()
                if room not in self._leaving:
                    self._agent.run(_announced(room))

    def find(self, room: int) -> SendRoom | None:
        """Return a room that is open."""
        return self._rooms.get(room)

    def prefix(self, room: int) -> int:
        """Return how many blocks decode has already."""
        found = self._rooms.get(room)
        return found.prefix if found else 0

    def send(
        self, room: int, first: int, ids: array[int], rest: Sequence[Span], fence: Fence | None
    ) -> None:
        """Offer the KV blocks ``first ...``, those left out that a step has offered, and, with
        the last of them, one span per other group. They are there once ``fence`` passed.

        A block that a step has offered from another page, which is not kept, ends the room: what
        was sent may be of that page's next owner. Decode has not got the last span yet, so it has
        not used any of it.
        """
        found = self._rooms.get(room)
        if found is None or found.lost:
            return
        with contain_room_errors(self._agent, room, self.give_up):
            why = found.check(first, ids)
            if why:
                logger.error("kvconnect: the hand-off of room %s is given up: %s", room, why)
                self.give_up(room, why)
                return
            new = ids[found.next - first :]
            spans = [Span(0, found.next, new)] if new else []
            found.offered = found.next + len(new)
            if spans or rest:
                offer = OfferBlocks(transfer_of(room), (*spans, *rest))
                self._agent.run(DisaggregationInstructions(offers=[offer]), fence)

    def give_up(self, room: int, why: str) -> None:
        """Tell a room's readers, and SGLang, that this side cannot go on with it."""
        found = self._rooms.get(room)
        if found is not None and not found.lost:
            found.lost = True
            self._failed(room, why)
            self._withdraw(room)

    def complete(self, room: int) -> None:
        """The last chunk was offered."""
        found = self._rooms.get(room)
        if found is not None and not found.lost:
            found.complete = True
            with contain_room_errors(self._agent, room, self.give_up):
                self._settle(room, found)

    def close(self, room: int) -> None:
        """The request is over, however it ended."""
        found = self._rooms.pop(room, None)
        if found is None:
            return
        with contain_room_errors(self._agent, room, self._failed):
            # What was offered is not kept: the next request of this room must not begin with it.
            if found.joined or found.served or found.lost or found.offered is not None:
                self._withdraw(room)
            elif room not in self._leaving:  # whoever asks later is told at once, and need not wait
                self._given_up[room] = None
                if len(self._given_up) > _MOST_GIVEN_UP:
                    oldest = next(iter(self._given_up))
                    del self._given_up[oldest]
                    self._withdraw(oldest)
            with self._agent.stats() as stats:
                stats.count("handoff_sent_requests", label="done" if found.served else "aborted")
        for free in found.frees:
            free()

    def moved(self, room: int) -> RoomTransfer | None:
        """Return what readers were sent; None of a room that is closed."""
        found = self._rooms.get(room)
        return found.moved if found else None

    def take(self, notices: Sequence[TransferEvent]) -> None:
        """Take what the agent saw of readers."""
        for notice in notices:
            room = room_of(notice.transfer)
            with contain_room_errors(self._agent, room, self.give_up):
                if room not in self._leaving:
                    self._take(room, notice)
                elif notice.kind is NoticeKind.WITHDRAWN:  # the last one of what was withdrawn
                    self._leaving.remove(room)
                    found = self._rooms.get(room)
                    if found is not None and not found.lost:
                        self._agent.run(_announced(room))

    def _take(self, room: int, notice: TransferEvent) -> None:
        if room in self._given_up and notice.kind is NoticeKind.JOINED:
            del self._given_up[room]
            self._withdraw(room)
        found = self._rooms.get(room)
        if found is None or notice.kind in (NoticeKind.RENEWED, NoticeKind.WITHDRAWN):
            return
        if notice.kind is NoticeKind.DECLINED:
            if found.joined:
                return  # somebody else does want it
            found.waiting = frozenset()  # decode takes this rank's share from another one
            self._ready(room)
        elif notice.reader is not None and notice.kind is NoticeKind.JOINED:
            self._join(room, found, notice)
        elif notice.reader not in found.joined:
            return  # it was never let in
        elif notice.kind is NoticeKind.LEFT:
            self._failed(room, "the decode engine gave up, or was lost")
        elif notice.reader is not None and found.waiting is not None:
            found.waiting -= {notice.reader}
            nbytes, seconds = found.moved
            found.moved = RoomTransfer(nbytes + notice.nbytes, seconds + notice.seconds)
        self._settle(room, found)

    def _withdraw(self, room: int) -> None:
        if room not in self._leaving:
            order = Withdraw(transfer_of(room), FailureCause.GONE)
            self._agent.run(DisaggregationInstructions(withdrawals=[order]))
            self._leaving.add(room)

    def _join(self, room: int, found: SendRoom, notice: TransferEvent) -> None:
        reader = notice.reader
        assert reader is not None
        needed = self._needed(found, reader, notice.first)
        if needed is None:
            with self._agent.stats() as stats:
                stats.count("handoff_refused", label="params")
            return  # it waits in vain, until its own deadline
        if found.most is not None and notice.first > found.most:
            why = f"decode has {notice.first} blocks of a prompt of {found.most}"
            self.give_up(room, f"the decode engine asks for what there is not: {why}")
            return
        if not found.joined:
            found.prefix = notice.first
            found.waiting = None  # also where another one has declined
        found.joined.add(reader)
        if found.waiting is None and found.joined >= needed:
            found.waiting = needed | found.joined
            self._ready(room)

    def _needed(self, found: SendRoom, reader: Rank, first: int) -> frozenset[Rank] | None:
        """Return all readers that a room waits for if this one is let in; None if it is not."""
        known = found.joined or found.waiting is not None
        if known and first != found.prefix:
            return None  # what was sent, and SGLang's own count of it, go by the first word
        try:
            return _readers(self._rank, reader.tp, reader.pp, self._kv_heads)
        except Refused:
            return None

    def _settle(self, room: int, found: SendRoom) -> None:
        if found.served and not found.lost:
            self._served(room)
