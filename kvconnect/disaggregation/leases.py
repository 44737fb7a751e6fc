"""Leases of the prefill scheduler: which blocks are held for readers, and until when.

A request that another engine will decode gets a *lease*: its blocks are held from their offer until
every worker has confirmed that nothing reads them any more. Several leases may hold one block,
since requests share prefixes; the engine counts references.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvconnect.cache.groups import CacheGroup
from kvconnect.disaggregation.limits import HandoffLimits
from kvconnect.disaggregation.messages import NoticeKind, OfferBlocks, TransferEvent, Withdraw
from kvconnect.disaggregation.states import LEASE, Lease
from kvconnect.errors import Misuse
from kvconnect.jobs import WorkerJob, WorkerJobs
from kvconnect.life_cycles import Event
from kvconnect.offload.ledger import Owner
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import NULL_BLOCK, FailureCause, Rank, Span, TransferId, TransferType

logger = logging.getLogger(__name__)

_MOST_READERS = 1024  # workers of one decode engine
_OVER = (NoticeKind.DONE, NoticeKind.LEFT)

LONGEST_LIFE_S = 600.0
"""Limit on the life of a lease after its prefill in seconds, even if peers renew it. A longer
``lease_s`` counts instead. Readers have the same limit."""


@dataclass
class _LeaseLife:
    since: float
    end: float = math.inf  # limit on every deadline


@dataclass
class _Lease:
    transfer: TransferId
    tokens: int
    life: _LeaseLife
    next_block: list[int]  # per group: the first block not offered yet
    end_block: list[int]  # per group: the first block beyond ``tokens``
    state: Lease = LEASE.start
    blocks: list[int] = field(default_factory=list)  # held by the caller until released
    readers: dict[Rank, NoticeKind] = field(default_factory=dict)  # the last notice of each
    deadline: float = math.inf  # infinite while the request is alive
    overdue: bool = False  # past the deadline at the last tick
    gap: bool = False  # a block that readers need is missing
    withdrawal: WorkerJob[_Lease] | None = None

    @property
    def ended(self) -> bool:
        """Whether the lease offers nothing more; its request may live on."""
        return self.gap or self.state in (Lease.WITHDRAWN, Lease.RELEASED)

    @property
    def computed(self) -> bool:
        """Whether every block was offered."""
        return self.next_block == self.end_block

    @property
    def served(self) -> bool:
        """Whether every worker of the reading engine has every page, or left."""
        kinds = self.readers.values()
        return all(kind in _OVER for kind in kinds) and any(
            len(self.readers) == rank.tp * rank.pp for rank in self.readers
        )

    def complete(
        self, number: int, group: CacheGroup, computed_tokens: int, table: Sequence[int]
    ) -> Span | None:
        """Take the blocks of a group that are complete and were not offered yet."""
        first, end = self.next_block[number], self.end_block[number]
        if group.states is not None:
            return self._complete_state(number, computed_tokens, table)
        if computed_tokens < self.tokens:  # else a partly filled last block counts too
            end = computed_tokens // group.block_tokens
        if first >= end:
            return None
        block_ids = array("q", table[first:end])
        if not group.is_full and first == group.first_block(self.tokens):
            # The engine may free blocks at the far end of a window.
            while block_ids and block_ids[0] == NULL_BLOCK:
                del block_ids[0]
                first += 1
        self.gap = self.gap or NULL_BLOCK in block_ids or len(block_ids) != end - first
        if self.gap or first == end:
            return None
        self.next_block[number] = end
        return Span(number, first, block_ids)

    def _complete_state(
        self, number: int, computed_tokens: int, table: Sequence[int]
    ) -> Span | None:
        """Take the state after ``tokens`` tokens, as block 0 of its group: block sizes may differ.
        A step that goes further overwrites it."""
        first = self.next_block[number]
        if computed_tokens < self.tokens or first == self.end_block[number]:
            return None
        self.gap = self.gap or computed_tokens > self.tokens or table[first] == NULL_BLOCK
        if self.gap:
            return None
        self.next_block[number] = self.end_block[number]
        return Span(number, 0, array("q", table[first : first + 1]))

    def record_reader(self, reader: Rank, kind: NoticeKind) -> None:
        """Record a reader's notice."""
        self.state = LEASE.after(self.state, Event.JOINED)
        # Notices of different workers may overtake each other, but a reader confirms to one worker
        # only when it has every page from all of them.
        if self.readers.get(reader) is NoticeKind.DONE:
            return
        if reader in self.readers or len(self.readers) < _MOST_READERS:
            self.readers[reader] = kind

    def start_deadline(self, limits: HandoffLimits, now: float) -> None:
        """Every block was offered: readers have a deadline from now on."""
        if self.state in (Lease.GROWING, Lease.STREAMING):  # else it was preempted
            self.state = LEASE.after(self.state, Event.COMPUTED)
        self.life.end = min(self.life.end, now + max(LONGEST_LIFE_S, limits.lease_s))
        self.extend(limits, now)

    def extend(self, limits: HandoffLimits, now: float) -> None:
        """A reader gave a sign of life."""
        if now >= self.life.end:
            return
        self.overdue = False
        if self.state is Lease.WAITING:
            self.deadline = min(self.life.end, now + limits.lease_s)
        elif self.state is Lease.READING:
            self.deadline = min(self.life.end, now + limits.deadline_s)


class Leases:
    """Leases of one prefill engine. Owned by the scheduler's thread; ``now`` is in seconds of one
    monotonic clock. Each step: ``on_notice`` for workers' notices, ``offer`` for scheduled
    requests, ``tick``, ``take``."""

    def __init__(
        self, groups: Sequence[CacheGroup], stats: OffloadingConnectorStats, limits: HandoffLimits
    ) -> None:
        self.granted = 0  # device blocks, each as often as a lease held it
        self.returned = 0
        self._groups = tuple(groups)
        self._stats = stats
        self._limits = limits
        self._withdrawing: WorkerJobs[_Lease] = WorkerJobs(limits.workers, limits.deadline_s)
        self._leases: dict[TransferId, _Lease] = {}
        self._requests: dict[str, _Lease] = {}  # of live requests
        self._offers: list[OfferBlocks] = []
        self._withdrawals: list[Withdraw] = []
        self._released: list[int] = []
        self._starved = False  # the engine computes nothing, though requests wait

    def __len__(self) -> int:
        """How many leases are live."""
        return len(self._leases)

    @property
    def busy(self) -> bool:
        """Whether blocks are held or an answer is awaited, so that the engine must keep stepping.
        Requests that wait to be scheduled do not count: a paused engine schedules none."""
        leases = self._leases.values()
        return any(lease.blocks or lease.state is Lease.WITHDRAWN for lease in leases)

    def open(
        self,
        req_id: str,
        transfer: TransferId,
        tokens: int,
        now: float,
        prompt: PromptIdentity = NO_PROMPT,
    ) -> bool:
        """Start a lease of the prompt's first ``tokens`` and announce it to the workers, which
        refuse readers of another ``prompt``.

        Return False if the transfer already has a lease; the request is then an ordinary one.
        """
        if transfer in self._leases:
            return False
        first = [group.first_block(tokens) for group in self._groups]
        end = [-(-tokens // group.block_tokens) for group in self._groups]
        lease = _Lease(transfer, tokens, _LeaseLife(now), first, end)
        self._leases[transfer] = self._requests[req_id] = lease
        self._offers.append(OfferBlocks(transfer, prompt=prompt))
        return True

    def offer(
        self,
        req_id: str,
        computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        cached_tokens: int = 0,
    ) -> list[int]:
        """Offer what this step completes; return device blocks that the caller must hold now.

        Without a live lease nothing happens. A table with a null block where readers need a real
        one ends the lease at the next ``tick``.

        Args:
            computed_tokens: of the request, this step's included.
            block_ids: per group, the request's block table.
            cached_tokens: of the prompt, those that the engine had and did not compute.
        """
        lease = self._requests.get(req_id)
        if lease is None or lease.ended or lease.computed:
            return []
        spans = []
        for number, (group, table) in enumerate(zip(self._groups, block_ids, strict=True)):
            span = lease.complete(number, group, computed_tokens, table)
            if span is not None:
                spans.append(span)
        if lease.gap:
            logger.warning(
                "request %s: some of its blocks are missing, so it is not handed off", req_id
            )
            return []
        held = [block for span in spans for block in span.block_ids]
        if spans:
            self._offers.append(OfferBlocks(lease.transfer, tuple(spans), cached=cached_tokens))
            lease.blocks += held
            self.granted += len(held)
        return held

    def stepped(self, computes: bool) -> None:
        """The engine has planned a step. If it ``computes`` nothing though prompts wait, it lacks
        the blocks that leases hold. Leases that nobody reads are not renewed then: their readers
        may wait for blocks of another hand-off, whose prompt waits here."""
        waiting = self._requests.values()
        self._starved = not computes and any(
            not (lease.ended or lease.computed) for lease in waiting
        )

    def preempted(self, req_id: str | None, now: float) -> None:
        """The engine preempted a request, since it is short of blocks. A complete lease stays, with
        the deadline of a finished request. An incomplete one ends; the request is an ordinary one.

        ``req_id`` None: the paused engine waits for all blocks, to reset its prefix cache.
        """
        for name in list(self._requests) if req_id is None else [req_id]:
            lease = self._requests.get(name)
            if lease is None or lease.ended or lease.deadline < math.inf:
                continue
            if lease.computed:
                lease.start_deadline(self._limits, now)
            elif lease.blocks or req_id is not None:
                del self._requests[name]
                self._withdraw(lease, Event.ABORT, now)

    def withdraw_all(self, now: float) -> None:
        """The engine resets its prefix cache, perhaps for new weights: end every lease with blocks,
        also those of live requests."""
        for lease in self._leases.values():
            if lease.blocks:
                self._withdraw(lease, Event.ABORT, now)

    def finish(self, req_id: str, completed: bool, now: float) -> TransferId | None:
        """The request is over; return the transfer if its blocks stay available.

        They do if the request was ``completed``, every block was offered and the lease is live.
        """
        lease = self._requests.pop(req_id, None)
        if lease is None or lease.ended:
            return None
        if not (completed and lease.computed):
            self._withdraw(lease, Event.ABORT, now)
            return None
        lease.start_deadline(self._limits, now)
        return lease.transfer

    def on_notice(self, notice: TransferEvent, now: float) -> None:
        """Take a worker's notice about a reader, or its answer to a withdrawal."""
        lease = self._leases.get(notice.transfer)
        if lease is None:  # a late answer
            return
        if notice.kind is NoticeKind.WITHDRAWN:
            if lease.withdrawal is not None and self._withdrawing.answered(lease.withdrawal):
                lease.state = LEASE.after(lease.state, Event.ANSWERED)
                del self._leases[lease.transfer]
                self._released += lease.blocks
                self.returned += len(lease.blocks)
        elif notice.kind is NoticeKind.DECLINED:
            self._withdraw(lease, Event.ABORT, now)
        elif notice.kind is NoticeKind.MISMATCHED:
            if not lease.readers:  # else its own reader has come, and this is another
                self._withdraw(lease, Event.ABORT, now)
        elif not lease.ended:
            if notice.reader is not None:
                lease.record_reader(notice.reader, notice.kind)
            if lease.served:
                self._withdraw(lease, Event.SERVED, now)
            else:
                self._renew(lease, now)

    def tick(self, now: float) -> None:
        """Withdraw leases at the second tick past their deadline, so that notices which arrived
        during a long step are read first. If a worker does not answer a withdrawal, its blocks
        stay held, since a read may be in flight."""
        for lease in self._leases.values():
            if lease.gap:
                self._withdraw(lease, Event.ABORT, now)
            if lease.withdrawal is not None or lease.deadline > now:
                continue
            if lease.overdue:
                self._withdraw(lease, Event.EXPIRE, now)
            lease.overdue = True
        for job in self._withdrawing.take_late(now):
            logger.warning("%d workers have not answered the withdrawal of a hand-off", job.waiting)

    def take(self) -> tuple[list[OfferBlocks], list[Withdraw]]:
        """Return the instructions since the last call; offers are to be run first."""
        taken = self._offers, self._withdrawals
        self._offers, self._withdrawals = [], []
        return taken

    def take_released(self) -> list[int]:
        """Return device blocks to give back, each as often as it was held."""
        released, self._released = self._released, []
        return released

    def gauges(self, now: float) -> Iterator[tuple[str, float, str | None]]:
        """Yield gauges as (name, value, label)."""
        yield "ledger_held_blocks", self.granted - self.returned, Owner.SEND.value
        yield "handoff_leases", len(self._leases), None
        yield "jobs_in_flight", len(self._leases), TransferType.SEND.value
        oldest = max((now - lease.life.since for lease in self._leases.values()), default=0.0)
        yield "ledger_oldest_hold_seconds", oldest, None

    def check(self) -> None:
        """Prove that granted = returned + held, and that every lease has an end.

        Raises:
            Misuse: the numbers differ, or a lease has no end.
        """
        held = sum(len(lease.blocks) for lease in self._leases.values())
        if self.granted != self.returned + held:
            raise Misuse(f"granted {self.granted} != returned {self.returned} + held {held}")
        self._withdrawing.check()
        alive = {lease.transfer for lease in self._requests.values()}
        for transfer, lease in self._leases.items():
            ends = lease.deadline < math.inf or lease.withdrawal is not None
            if not ends and transfer not in alive:
                raise Misuse(f"lease {transfer.hex()} has neither a deadline nor a live request")

    def _renew(self, lease: _Lease, now: float) -> None:
        if not (self._starved and lease.state is Lease.WAITING):
            lease.extend(self._limits, now)

    def _withdraw(self, lease: _Lease, event: Event, now: float) -> None:
        """End a lease once; ``event`` is the reason."""
        before, lease.state = lease.state, LEASE.after(lease.state, event)
        if before is Lease.WITHDRAWN:
            return
        lease.withdrawal = self._withdrawing.open(lease, now)
        cause = FailureCause.DEADLINE if event is Event.EXPIRE else FailureCause.GONE
        self._withdrawals.append(Withdraw(lease.transfer, cause))
        outcome = "aborted"
        if event is Event.EXPIRE:
            self._stats.count("handoff_expired_leases")
            outcome = "expired"
        elif event is Event.SERVED and NoticeKind.LEFT not in lease.readers.values():
            outcome = "done"
        self._stats.count("handoff_sent_requests", label=outcome)
