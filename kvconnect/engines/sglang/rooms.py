"""Hand-offs of one SGLang rank, by *bootstrap room*: the router's number for one hand-off.

:class:`PrefillRooms` is the prefill side, ``decode_rooms.py`` the decode side. Both turn calls of
SGLang's scheduler into instructions for the agent, and the agent's answers into outcomes. Neither
imports SGLang.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.bounded import remember
from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    NoticeKind,
    OfferBlocks,
    TransferEvent,
    Withdraw,
)
from kvconnect.errors import Refused, contained
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.protocol.topology import readers_for
from kvconnect.stats import OTHER
from kvconnect.transport.base import Fence
from kvconnect.types import FailureCause, Rank, Span, TransferId

logger = logging.getLogger(__name__)

_PREFIX = b"sgl-room"
_MOST_GIVEN_UP = 1024


def is_room(value: object) -> bool:
    """Whether a client's value is a valid room: an integer from 1 to 2**63 - 1. SGLang's rows hold
    no larger one, and 0 means in them that the row was not written."""
    return type(value) is int and 1 <= value < 1 << 63


def transfer_of(room: int) -> TransferId:
    """Return the transfer id of a room; both sides derive the same."""
    return TransferId(_PREFIX + room.to_bytes(8, "big"))


def room_of(transfer: TransferId) -> int:
    """Return the room of a transfer."""
    return int.from_bytes(transfer[len(_PREFIX) :], "big")


def _announced(room: int, prompt: PromptIdentity) -> DisaggregationInstructions:
    offer = OfferBlocks(transfer_of(room), prompt=prompt, reusable=True)
    return DisaggregationInstructions(offers=[offer])


def contain_room_errors(
    agent: HandoffAgent, room: int, failed: Callable[[int, str], None]
) -> AbstractContextManager[None]:
    """Contain errors of work for one room: an error ends only this room, is counted and logged.

    SGLang ends its server when its scheduler's thread raises, and that thread handles peers'
    messages. So all work for a room runs inside this context.
    """

    def ended(error: Exception) -> None:
        logger.error("kvconnect: the hand-off of room %s is given up", room, exc_info=error)
        with agent.stats() as stats:
            stats.count("handoff_refused", label=OTHER)
        failed(room, f"{type(error).__name__}: {error}")

    return contained(ended)


class RoomTransfer(NamedTuple):
    """Bytes sent to the readers of one room, and the seconds that took."""

    nbytes: int = 0
    seconds: float = 0.0


_readers = functools.lru_cache(maxsize=64)(readers_for)  # some milliseconds for many workers


@dataclass(eq=False)
class SendRoom:
    """A room of the prefill side. Blocks are counted from the start of the prompt."""

    prompt: PromptIdentity = NO_PROMPT
    # Blocks that decode already has; fixed when the first reader joins, or when SGLang is told.
    prefix: int = 0
    told: bool = False  # SGLang counts the blocks that it sends from the prefix on
    prompt_blocks: int | None = None  # blocks of the prompt, if known
    offered: int | None = None  # first block not offered; None: nothing was offered
    offered_ahead: dict[int, int] = field(
        default_factory=dict
    )  # block -> page, until SGLang sends it
    # A rank may have offered or sent the blocks before this one before SGLang's tree has them; the
    # same on all ranks.
    ahead_until: int = 0
    state_ahead: Span | None = None  # a state that a step offers before SGLang sends it
    # Each returns pages to free when the room is closed.
    deferred_pages: list[Callable[[], set[int]]] = field(default_factory=list)
    deferred_frees: list[Callable[[], object]] = field(default_factory=list)  # these free them
    given_up: bool = False  # by this side
    left: bool = False  # its request goes on without it, and calls the frees
    waiting: frozenset[Rank] | None = None  # unfinished readers; None: not known yet
    joined: set[Rank] = field(default_factory=set)
    complete: bool = False  # the last chunk was offered
    moved: RoomTransfer = field(default_factory=RoomTransfer)

    @property
    def served(self) -> bool:
        """Whether every reader has every page."""
        return self.complete and self.waiting is not None and not self.waiting

    @property
    def next_block(self) -> int:
        """The first block that was not offered."""
        return self.prefix if self.offered is None else self.offered

    @property
    def asked(self) -> bool:
        """Whether the readers are known, and with them what they need. A room that was left has
        none."""
        return self.waiting is not None and not self.left

    def unoffered_until(self, end: int) -> range:
        """Return the blocks up to ``end`` that were not offered yet."""
        return range(self.next_block, end) if self.asked else range(0)

    def record_ahead(self, first: int, ids: array[int]) -> None:
        """Record that the starting step offers the blocks ``first ...`` from pages ``ids``."""
        self.offered = first + len(ids)
        self.offered_ahead.update(enumerate(ids, first))

    def record_state_ahead(self, state: Span) -> None:
        """Record that the starting step offers the state of the request, after its blocks."""
        self.offered, self.state_ahead = self.next_block, state

    def keep(
        self, pages: Sequence[Callable[[], set[int]]], frees: Sequence[Callable[[], object]]
    ) -> None:
        """Keep pages that the request no longer owns but that may still be read: those that
        ``pages`` return. ``frees`` are called when the room is closed, which is at the same point
        on every rank."""
        self.deferred_pages += pages
        self.deferred_frees += frees

    def check(self, first: int, ids: array[int], rest: Sequence[Span]) -> str:
        """Return why the blocks ``first ...`` cannot be sent from pages ``ids``, or ``rest``; ""
        if they can."""
        if rest and self.state_ahead is not None and self.state_ahead not in rest:
            return "the state was moved to another slot while it was being sent"
        if ids and first > self.next_block:
            return f"blocks from {first} on were to be sent when {self.next_block} was the next one"
        if self.offered_ahead:
            for block, page in enumerate(ids, first):
                before = self.offered_ahead.pop(block, page)
                if before != page and not self._is_deferred(before):
                    return f"block {block} was moved to another page while it was being sent"
        return ""

    def _is_deferred(self, page: int) -> bool:
        return any(page in pages() for pages in self.deferred_pages)


def _nothing_to_settle(wait: bool) -> None: ...


class PrefillRooms:
    """The prefill side. For the scheduler's thread.

    :meth:`take` calls ``ready(room)`` when all readers have asked, ``served(room)`` when all have
    every page, and ``failed(room, why)`` when one gave up. ``kv_heads``: over all ranks, by group.
    ``settle`` makes the offers that a batch has still to make, if its page numbers have arrived or
    with ``wait``; whoever offers ahead of SGLang sets it.
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
        self.settle: Callable[[bool], None] = _nothing_to_settle
        self._agent = agent
        self._rank = rank
        self._kv_heads = tuple(kv_heads)
        self._ready, self._served, self._failed = ready, served, failed
        self._rooms: dict[int, SendRoom] = {}
        self._unasked: dict[int, None] = {}  # closed before a reader asked; oldest first
        self._withdrawing: set[int] = set()  # withdrawals that were not answered

    def open(self, room: int, prompt: PromptIdentity = NO_PROMPT) -> None:
        """Open the room of a request of this rank, for readers with the same prompt. They may ask
        for its blocks once nothing of an earlier request with the same room is in flight."""
        with contain_room_errors(self._agent, room, self.give_up):
            self._unasked.pop(room, None)
            if room not in self._rooms:
                self._rooms[room] = SendRoom(prompt)
                if room not in self._withdrawing:
                    self._agent.run(_announced(room, prompt))

    def find(self, room: int) -> SendRoom | None:
        """Return a room if it is open."""
        return self._rooms.get(room)

    def prefix(self, room: int) -> int:
        """Return how many blocks the decode engine already has."""
        found = self._rooms.get(room)
        return found.prefix if found else 0

    def tell_prefix(self, room: int) -> int:
        """Return the prefix for SGLang. It stays as it is from then on."""
        found = self._rooms.get(room)
        if found is None:
            return 0
        found.told = True
        return found.prefix

    def send(
        self, room: int, first: int, ids: array[int], rest: Sequence[Span], fence: Fence | None
    ) -> None:
        """Offer those KV blocks ``first ...`` that no step has offered, and with the last of them
        one span per other group. They can be read after ``fence``.

        The room fails if a step offered a block from another page whose free was not deferred: the
        page's next owner may have overwritten what was sent. Decode has not received the last span
        yet, so it has used none of the pages.
        """
        self.settle(True)
        found = self._rooms.get(room)
        if found is None or found.given_up:
            return
        with contain_room_errors(self._agent, room, self.give_up):
            why = found.check(first, ids, rest)
            if why:
                logger.error("kvconnect: the hand-off of room %s is given up: %s", room, why)
                self.give_up(room, why)
                return
            new = ids[found.next_block - first :]
            spans = [Span(0, found.next_block, new)] if new else []
            spans += [span for span in rest if span != found.state_ahead]
            found.offered = found.next_block + len(new)
            if spans:
                offer = OfferBlocks(transfer_of(room), tuple(spans))
                self._agent.run(DisaggregationInstructions(offers=[offer]), fence)

    def give_up(self, room: int, why: str) -> None:
        """Fail a room: tell its readers and SGLang."""
        found = self._rooms.get(room)
        if found is not None and not found.given_up:
            found.given_up = True
            self._failed(room, why)
            self._withdraw(room)

    def complete(self, room: int) -> None:
        """Record that the last chunk was offered."""
        found = self._rooms.get(room)
        if found is not None and not found.given_up:
            found.complete = True
            with contain_room_errors(self._agent, room, self.give_up):
                self._settle(room, found)

    def close(self, room: int) -> None:
        """Close the room of a request that ended in any way."""
        self.settle(True)
        found = self._rooms.pop(room, None)
        if found is None:
            return
        with contain_room_errors(self._agent, room, self._failed):
            # Withdraw what was offered: the next request of this room must not begin with it.
            if found.joined or found.served or found.given_up or found.offered is not None:
                self._withdraw(room)
                # SGLang frees the pages next, and their next owner may write to them.
                self._agent.await_stopped(transfer_of(room))
            # Later readers are refused at once.
            elif room not in self._withdrawing and (
                oldest := remember(self._unasked, room, None, _MOST_GIVEN_UP)
            ):
                self._withdraw(oldest[0])
            with self._agent.stats() as stats:
                stats.count("handoff_sent_requests", label="done" if found.served else "aborted")
        for free in () if found.left else found.deferred_frees:
            free()

    def leave(self, room: int) -> SendRoom | None:
        """Return a room if it is open; :meth:`close` will not call its deferred frees then."""
        found = self._rooms.get(room)
        if found is not None:
            found.left = True
        return found

    def moved(self, room: int) -> RoomTransfer | None:
        """Return what was sent to readers; None if the room is closed."""
        found = self._rooms.get(room)
        return found.moved if found else None

    def take(self, notices: Sequence[TransferEvent]) -> None:
        """Process the agent's notices about readers."""
        for notice in notices:
            room = room_of(notice.transfer)
            with contain_room_errors(self._agent, room, self.give_up):
                if room not in self._withdrawing:
                    self._take(room, notice)
                elif notice.kind is NoticeKind.WITHDRAWN:  # the answer to the withdrawal
                    self._withdrawing.remove(room)
                    found = self._rooms.get(room)
                    if found is not None and not found.given_up:
                        self._agent.run(_announced(room, found.prompt))

    def _take(self, room: int, notice: TransferEvent) -> None:
        if notice.kind is NoticeKind.JOINED:
            self._refuse_late(room)
        found = self._rooms.get(room)
        if found is None or notice.kind in (NoticeKind.RENEWED, NoticeKind.WITHDRAWN):
            return
        if notice.kind in (NoticeKind.DECLINED, NoticeKind.MISMATCHED):
            if found.joined:
                return  # another reader needs it
            if notice.kind is NoticeKind.MISMATCHED:
                self.give_up(room, notice.detail)
                return
            found.waiting = frozenset()  # decode reads these heads from another rank
            self._ready(room)
        elif notice.reader is not None and notice.kind is NoticeKind.JOINED:
            self._join(room, found, notice)
        elif notice.reader not in found.joined:
            return  # this reader was not accepted
        elif notice.kind is NoticeKind.LEFT:
            self._failed(room, "the decode engine cancelled the transfer, or was lost")
        elif notice.reader is not None and found.waiting is not None:
            found.waiting -= {notice.reader}
            nbytes, seconds = found.moved
            found.moved = RoomTransfer(nbytes + notice.nbytes, seconds + notice.seconds)
        self._settle(room, found)

    def _refuse_late(self, room: int) -> None:
        """Refuse the readers of a room that was closed before they came."""
        if room in self._unasked:
            del self._unasked[room]
            self._withdraw(room)

    def _withdraw(self, room: int) -> None:
        self.settle(True)  # nothing of the room may be offered after its withdrawal
        if room not in self._withdrawing:
            order = Withdraw(transfer_of(room), FailureCause.GONE)
            self._agent.run(DisaggregationInstructions(withdrawals=[order]))
            self._withdrawing.add(room)

    def _join(self, room: int, found: SendRoom, notice: TransferEvent) -> None:
        reader = notice.reader
        assert reader is not None
        needed = self._needed(found, reader, notice.first)
        if needed is None:
            with self._agent.stats() as stats:
                stats.count("handoff_refused", label="params")
            return  # this reader waits until its own deadline
        if found.prompt_blocks is not None and notice.first > found.prompt_blocks:
            why = f"decode has {notice.first} blocks of a prompt of {found.prompt_blocks}"
            self.give_up(room, f"the decode engine asks for blocks that do not exist: {why}")
            return
        if found.told and notice.first != found.prefix:
            # A pipeline stage took the state of the room's former request for this one's.
            self.give_up(room, "the decode engine has asked after this stage had begun")
            return
        if not found.joined:
            found.prefix = notice.first
            found.waiting = None  # also if another reader has declined
        found.joined.add(reader)
        if found.waiting is None and found.joined >= needed:
            found.waiting = needed | found.joined
            self._ready(room)

    def _needed(self, found: SendRoom, reader: Rank, first: int) -> frozenset[Rank] | None:
        """Return all readers that a room waits for if this one is accepted; None if it is not."""
        known = found.joined or found.waiting is not None
        if known and first != found.prefix:
            return None  # the first reader's prefix counts, also for SGLang
        try:
            return _readers(self._rank, reader.tp, reader.pp, self._kv_heads)
        except Refused:
            return None

    def _settle(self, room: int, found: SendRoom) -> None:
        if found.served and not found.given_up:
            self._served(room)
