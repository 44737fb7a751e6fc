"""What becomes of the requests of one SGLang rank, by *bootstrap room*: SGLang's number for one
hand-off, which the router gives to both sides.

``Outbox`` is the prefill side, ``Inbox`` the decode side. Both turn calls of SGLang's scheduler
into instructions for the agent, and the agent's answers into outcomes. Neither knows SGLang.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.plan.instructions import (
    Drop,
    Instructions,
    Keep,
    Notice,
    NoticeKind,
    Offer,
    Receive,
    Report,
    Source,
    Withdraw,
)
from kvconnect.transport.base import Fence
from kvconnect.types import Endpoint, FailureCause, JobId, Rank, Span, TransferId
from kvconnect.wire.topology import readers_for, sources_for
from kvconnect.worker.handoff import HandoffAgent

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


class Moved(NamedTuple):
    """What readers were sent of one room, and how long these bytes were on their way."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Outgoing:
    """A room of the prefill side. Blocks are counted from the start of the prompt."""

    prefix: int = 0  # blocks that decode has already
    offered: int | None = None  # up to which block, once something was
    waiting: frozenset[Rank] | None = None  # readers still to finish; None: none is known
    joined: set[Rank] = field(default_factory=set)
    complete: bool = False  # the last chunk was offered
    moved: Moved = field(default_factory=Moved)

    @property
    def served(self) -> bool:
        """Whether everyone who needs something has everything."""
        return self.complete and self.waiting is not None and not self.waiting


class Outbox:
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
        self._rooms: dict[int, _Outgoing] = {}
        self._given_up: dict[int, None] = {}  # before anybody asked; oldest first

    def open(self, room: int) -> None:
        """A request was given to this rank: readers may ask for its blocks."""
        if self._given_up.pop(room, None) is not None:
            self._withdraw(room)
        if room not in self._rooms:
            self._rooms[room] = _Outgoing()
            self._agent.run(Instructions(offers=[Offer(transfer_of(room))]))

    def prefix(self, room: int) -> int:
        """Return how many blocks decode has already."""
        found = self._rooms.get(room)
        return found.prefix if found else 0

    def ahead(self, room: int, end: int) -> range:
        """Return the blocks up to ``end`` that were not offered yet, to be offered in a step."""
        found = self._rooms.get(room)
        if found is None or found.waiting is None:
            return range(0)
        return range(found.prefix if found.offered is None else found.offered, end)

    def note_ahead(self, room: int, blocks: range) -> None:
        """These blocks are offered in the step that now begins."""
        self._rooms[room].offered = blocks.stop

    def send(
        self, room: int, first: int, ids: array[int], rest: Sequence[Span], fence: Fence | None
    ) -> None:
        """Offer the KV blocks ``first ...``, those left out that a step has offered, and, with
        the last of them, one span per other group. They are there once ``fence`` passed."""
        found = self._rooms.get(room)
        if found is None:
            return
        skip = max(0, (found.offered or first) - first)
        spans = [Span(0, first + skip, ids[skip:])] if len(ids) > skip else []
        found.offered = max(found.offered or 0, first + len(ids))
        if spans or rest:
            offer = Offer(transfer_of(room), (*spans, *rest))
            self._agent.run(Instructions(offers=[offer]), fence)

    def complete(self, room: int) -> None:
        """The last chunk was offered."""
        found = self._rooms.get(room)
        if found is not None:
            found.complete = True
            self._settle(room, found)

    def close(self, room: int) -> None:
        """The request is over, however it ended."""
        found = self._rooms.pop(room, None)
        if found is None:
            return
        if found.joined or found.served:
            self._withdraw(room)
        else:  # whoever asks later is told at once, instead of waiting for a request that is over
            self._given_up[room] = None
            if len(self._given_up) > _MOST_GIVEN_UP:
                oldest = next(iter(self._given_up))
                del self._given_up[oldest]
                self._withdraw(oldest)
        with self._agent.stats() as stats:
            stats.count("handoff_sent_requests", label="done" if found.served else "aborted")

    def moved(self, room: int) -> Moved | None:
        """Return what readers were sent; None of a room that is closed."""
        found = self._rooms.get(room)
        return found.moved if found else None

    def take(self, notices: Sequence[Notice]) -> None:
        """Take what the agent saw of readers."""
        for notice in notices:
            room = room_of(notice.transfer)
            if room in self._given_up and notice.kind is NoticeKind.JOINED:
                del self._given_up[room]
                self._withdraw(room)
            found = self._rooms.get(room)
            if found is None or notice.kind in (NoticeKind.RENEWED, NoticeKind.WITHDRAWN):
                continue
            if notice.kind is NoticeKind.LEFT:
                self._failed(room, "the decode engine gave up, or was lost")
            elif notice.kind is NoticeKind.DECLINED:
                found.waiting = frozenset()  # decode takes this rank's share from another one
                self._ready(room)
            elif notice.reader is not None and notice.kind is NoticeKind.JOINED:
                self._join(room, found, notice)
            elif notice.reader is not None and found.waiting is not None:
                found.waiting -= {notice.reader}
                nbytes, seconds = found.moved
                found.moved = Moved(nbytes + notice.nbytes, seconds + notice.seconds)
            self._settle(room, found)

    def _withdraw(self, room: int) -> None:
        order = Withdraw(transfer_of(room), FailureCause.GONE)
        self._agent.run(Instructions(withdrawals=[order]))

    def _join(self, room: int, found: _Outgoing, notice: Notice) -> None:
        reader = notice.reader
        assert reader is not None
        found.joined.add(reader)
        found.prefix = notice.first
        needed = readers_for(self._rank, reader.tp, reader.pp, self._kv_heads)
        if found.waiting is None and found.joined >= needed:
            found.waiting = needed | found.joined
            self._ready(room)

    def _settle(self, room: int, found: _Outgoing) -> None:
        if found.served:
            self._served(room)


class Wanted(NamedTuple):
    """What a decode rank asks for: the KV blocks ``first ...`` into ``ids``, and other groups'
    spans. ``workers`` are the prefill ranks that SGLang pairs it with, ``tp`` and ``pp`` how many
    that engine has."""

    first: int
    ids: array[int]
    rest: tuple[Span, ...]
    workers: tuple[Endpoint, ...]
    tp: int
    pp: int


class Inbox:
    """The decode side. For the scheduler's thread.

    ``arrived(room)`` and ``failed(room, why)`` are called from :meth:`take`. A room is ``over``
    when no page of it can land any more.
    """

    def __init__(
        self,
        agent: HandoffAgent,
        rank: Rank,
        groups: Sequence[tuple[int, int]],
        deadline_s: float,
        arrived: Callable[[int], None],
        failed: Callable[[int, str], None],
    ) -> None:
        """``groups``: tokens per block and KV heads over all ranks, by group."""
        self._agent = agent
        self._rank = rank
        self._groups = tuple(groups)
        self._deadline_s = deadline_s
        self._arrived, self._failed = arrived, failed
        self._asked: dict[JobId, float] = {}  # when, in monotonic seconds; of jobs not over
        self._jobs: dict[int, set[JobId]] = {}  # by room, which clients may give to two requests
        self._last = 0

    def ask(self, room: int, wanted: Wanted) -> None:
        """Ask for a room's blocks.

        Raises:
            Refused: this rank and that engine cannot share the heads evenly.
        """
        source = Source("", 0, wanted.workers, wanted.tp, wanted.pp)
        refusals = self._refusals(room, source)
        self._last += 1
        job = JobId(self._last)
        self._asked[job] = time.monotonic()
        self._jobs.setdefault(room, set()).add(job)
        spans = (Span(0, wanted.first, wanted.ids), *wanted.rest)
        spans = tuple(span for span in spans if span.block_ids)
        receive = Receive(
            job=job,
            req_id=str(room),
            transfer=transfer_of(room),
            source=source,
            spans=spans,
            tokens=tuple(self._tokens(span) for span in spans),
            early=True,
            deadline_s=self._deadline_s,
        )
        self._agent.run(Instructions(receives=[receive], keeps=refusals))

    def drop(self, room: int) -> None:
        """The room is not wanted any more; it is over some time later."""
        drops = [Drop(job) for job in self._jobs.get(room, ())]
        if drops:
            self._agent.run(Instructions(drops=drops))

    def is_over(self, room: int) -> bool:
        """Whether no page of a room can land any more."""
        return room not in self._jobs

    def take(self, finished: Sequence[tuple[Report, Receive]]) -> None:
        """Take receives that ended."""
        for report, job in finished:
            room = int(job.req_id)
            self._jobs[room].discard(job.job)
            if not self._jobs[room]:
                del self._jobs[room]
            self._count(time.monotonic() - self._asked.pop(job.job), report)
            if report.failures:
                self._failed(room, self._why(report, job))
            else:
                self._arrived(room)

    def _count(self, seconds: float, report: Report) -> None:
        with self._agent.stats() as stats:
            if not report.failures:
                stats.observe("handoff_latency_seconds", seconds)
                stats.count("handoff_received_requests", label="done")
            elif report.failures[0].cause is FailureCause.SKIPPED:  # nobody wanted it any more
                stats.count("handoff_received_requests", label="aborted")
            else:
                stats.count("handoff_received_requests", label="failed")
                stats.count("handoff_failures", label=report.failures[0].cause.value)

    def _why(self, report: Report, job: Receive) -> str:
        """Return in words what a report says."""
        causes = Counter(failure.cause for failure in report.failures)
        found = ", ".join(f"{count} x {cause.value}" for cause, count in causes.items())
        for endpoint in job.source.endpoints if job.source else ():
            if FailureCause.REFUSED in causes and endpoint in self._agent.refusals:
                return f"blocks did not arrive ({found}): {self._agent.refusals[endpoint]}"
        return f"blocks did not arrive ({found})"

    def _tokens(self, span: Span) -> tuple[int, int]:
        size, _ = self._groups[span.group]
        return span.first * size, (span.first + len(span.block_ids)) * size

    def _refusals(self, room: int, source: Source) -> list[Keep]:
        """Return word to workers that SGLang pairs this one with but that it needs nothing of, so
        that they do not wait for it."""
        heads = [kv_heads for _, kv_heads in self._groups]
        needed = set(sources_for(self._rank, source.tp, source.pp, heads))
        idle = [e for e in source.endpoints if (e.pp_rank, e.tp_rank) not in needed]
        transfer = transfer_of(room)
        return [
            Keep(transfer, Source("", 0, (endpoint,), source.tp, source.pp)) for endpoint in idle
        ]
