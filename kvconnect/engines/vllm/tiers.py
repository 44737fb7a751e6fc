"""Lower tiers in vLLM's scheduler: turns its calls into events of :class:`TierPlan`."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.block_names import BlockNames, shared_pages
from kvconnect.engines.vllm.shares import ShareTickets
from kvconnect.offload.copy_jobs import SettledJob
from kvconnect.offload.planner import OffloadPlan
from kvconnect.protocol.cache_hints import CacheHint
from kvconnect.settings import Settings
from kvconnect.settings.stores import ONE_BY_ONE
from kvconnect.tiers import (
    LookupResult,
    PrefetchDecision,
    Promoted,
    TierLimits,
    TierPlan,
)
from kvconnect.tiers.cost_model import CostModel, LoadReason, TierSegment
from kvconnect.tiers.messages import RemovalAnswer, TierAnswer, TierInstructions
from kvconnect.tiers.offers import Offers
from kvconnect.tiers.removals import DroppedBlock, Removals
from kvconnect.tiers.search import FEW_KEYS, MAX_KEYS
from kvconnect.types import Block, Tier

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_SHARE = 0.25  # of host slots that write-backs may pin; prefetches may pin as many
_STEPS = 8  # measured at once; as many as engines have in flight


class _Step(NamedTuple):
    """A step that computes prompt tokens: its number, its start, how many it computes, and the mean
    number of tokens before each."""

    number: int
    began: float
    tokens: int
    context: float


class TierScheduler:
    """Owned by the scheduler's thread. ``host``: the engine's plan of its host tier. ``sizes``:
    (workers that store, bytes of a block over all of these)."""

    def __init__(
        self,
        settings: Settings,
        host: OffloadPlan,
        sizes: tuple[int, int],
        adapters: Adapters,
        shares: ShareTickets,
    ) -> None:
        self._shares = shares
        workers, self._slot_bytes = sizes
        peers = settings.cache_peers
        self._writes = bool(settings.disk or settings.remote)
        limits = TierLimits(
            workers=workers,
            deadline_s=settings.deadline_s,
            wait_s=settings.wait_s,
            slots=max(1, int(len(host.index.slots) * _SHARE)),
            reused=self._writes and settings.spill == "reused",
            searches=self._writes or bool(peers and peers.ask),
            first_keys=FEW_KEYS if isinstance(settings.remote, ONE_BY_ONE) else MAX_KEYS,
        )
        self._host = host
        groups = host.groups
        decides = settings.load_when == "faster"
        self._cost = CostModel(groups[0].block_tokens) if decides else None
        self._names = BlockNames(groups, adapters, shared_pages(settings, groups))
        self._keys: dict[Block, bytes] = {}  # of blocks being stored
        self._steps: deque[_Step] = deque(maxlen=_STEPS)
        self._timed = 0  # number of the last step in it
        self._ended = 0.0  # when the last step ended
        self._offers = Offers(host.index, serves=peers is not None and peers.serves)
        self.plan = TierPlan(host.index, groups, host.stats, limits, self._choose, self._fetched)
        write_backs = self.plan.write_backs
        self._removals = Removals(write_backs, host.hints.outcomes, workers, settings.deadline_s)

    def ask(
        self,
        request: Request,
        hashes: Sequence[Sequence[bytes]],
        tokens: tuple[int, int],
        now: float,
    ) -> bool:
        """Look up a request's tokens [start, end); return whether it should ask again later."""
        hinted = self._host.hints.prefetch_tokens(request.request_id)
        wanted = self._names.wanted(request, hashes, tokens[0], tokens[1])
        source = self._shares.source(request.request_id)
        wanted = wanted._replace(prefetch_tokens=hinted, source=source)
        return self.plan.lookup(request.request_id, wanted, now)

    def admitted(
        self, request: Request, hashes: Sequence[Sequence[bytes]], tokens: tuple[int, int]
    ) -> dict[Tier, int]:
        """A request has device blocks, and its load of tokens [start, end) is planned. Return how
        many of the tokens came from each secondary tier."""
        if self.plan.write_backs.reused:
            wanted = self._names.wanted(request, hashes, tokens[0], tokens[1])
            for number, row in wanted.rows(self._host.groups):
                for slot in self._host.index.ready_slots(number, row):
                    key = wanted.key(number, self._host.index.hash_of(slot))
                    self.plan.write_backs.loaded(number, slot, key)
        return self.plan.on_load_planned(request.request_id)

    def name(
        self, request: Request, hashes: Sequence[Sequence[bytes]], new: Sequence[tuple[int, int]]
    ) -> None:
        """Keep the keys of a request's blocks (group, number) that are being stored on the host."""
        if new:
            wanted = self._names.wanted(request, hashes, 0, 0)
            blocks = [Block(group, hashes[group][block]) for group, block in new]
            self._keys.update(
                (block, wanted.key(block.group, block.block_hash)) for block in blocks
            )
            self._offers.name(wanted.page_keys(blocks))

    def settled(self, settled: SettledJob) -> None:
        """Tell the plan which blocks a finished job stored in the host tier."""
        for block in settled.stored:
            key = self._keys.pop(block, None)
            if key is None:
                continue
            self._offers.stored(block.group, block.block_hash, key)
            if self._writes:
                self.plan.write_backs.stored(block.group, block.block_hash, key)
        for block in settled.dropped:
            self._keys.pop(block, None)

    def finish(
        self, request: Request, hashes: Sequence[Sequence[bytes]]
    ) -> tuple[bool, str | None]:
        """End a request; call this before :meth:`HintPlan.finish`. Return whether secondary tiers
        remove the blocks that it drops, and count them, and what :meth:`TierPlan.forget` does."""
        removing = self._release(request, hashes)
        self._names.forget(request.request_id)
        return removing, self.plan.forget(request.request_id)

    def _release(self, request: Request, hashes: Sequence[Sequence[bytes]]) -> bool:
        """Prepare that a request demotes or drops blocks; return whether blocks are removed."""
        hint, blocks = self._host.hints.released(request.request_id)
        if hint is None:
            return False
        wanted = self._names.wanted(request, hashes, 0, 0)
        keys = {block: wanted.key(block.group, block.block_hash) for block in blocks}
        if hint is CacheHint.DEMOTE:
            for block, key in keys.items() if self._writes else ():
                self.plan.write_backs.demoted(block.group, block.block_hash, key)
            return False
        self._offers.name(wanted.page_keys(blocks))
        self._offers.drop(set(keys.values()))
        if self._writes:
            absent = self._host.hints.absent
            self._removals.add(DroppedBlock(key, absent(block)) for block, key in keys.items())
        return self._writes

    def time_step(self, output: SchedulerOutput, now: float) -> int:
        """Begin to measure a step that computes prompt tokens. Return the number that its report
        shall have; 0 if it is not measured."""
        if self._cost is None:
            return 0
        tokens, context = _prompt_tokens(output)
        if not tokens:
            return 0
        self._timed += 1
        self._steps.append(_Step(self._timed, now, tokens, context))
        return self._timed

    def step_ended(self, number: int, now: float) -> None:
        """Note the end of a step, which :meth:`time_step` has given a ``number``, or 0."""
        while self._steps and self._steps[0].number <= number:
            step = self._steps.popleft()
            if self._cost is not None and step.number == number:
                self._cost.prefilled(step.tokens, now - max(step.began, self._ended), step.context)
        self._ended = now

    def take(self, now: float) -> TierInstructions:
        """Return this step's instructions for the workers."""
        work = self.plan.take(now)
        work.removals = self._removals.take(now)
        self._offers.take(work)
        return work

    def on_answers(self, answers: Iterable[TierAnswer], now: float) -> list[Promoted]:
        """Take the workers' answers. Return the blocks that were prefetched into the host tier."""
        promoted = []
        for answer in answers:
            if isinstance(answer, RemovalAnswer):
                self._removals.on_answer(answer)
            elif (came := self.plan.on_answer(answer, now)) is not None:
                promoted.append(came)
        self._host.hints.written(self.plan.take_ended())
        for came in promoted:
            self._host.hints.settled(came.blocks, came.lost, now, self.written_first)
            self._offers.promoted(came)
        return promoted

    def reset(self) -> None:
        """Start a new random scope of keys, shared with no other engine: the weights may change, or
        have changed. Nothing that was named before is loaded or written any more. :meth:`name_by`
        ends the scope."""
        self._names.reset(os.urandom(16))
        self._keys.clear()
        self.plan.reset()
        self._offers.withdraw()

    def name_by(self, weights: bytes) -> None:
        """Name blocks by ``weights`` from now on, so that engines with the same find them."""
        self._names.reset(weights)

    def written_first(self, slots: Collection[int]) -> Collection[int]:
        """Return which slots of blocks to demote are to be written to a secondary tier first."""
        return self.plan.write_backs.waiting(slots)

    @property
    def busy(self) -> bool:
        """Whether work is planned or an answer is awaited: the engine must keep stepping."""
        return self.plan.busy or self._removals.busy or self._offers.ready

    def gauges(self) -> Iterator[tuple[str, float, str | None]]:
        """Yield gauges as (name, value, label)."""
        return self.plan.gauges(self._removals.jobs)

    def _choose(self, offer: LookupResult) -> PrefetchDecision:
        """Decide how many of the found blocks to prefetch rather than compute."""
        if self._cost is None:
            self._host.stats.count("tier_decisions", label=LoadReason.LOAD.value)
            return PrefetchDecision(len(offer.tiers))
        segments = [
            TierSegment(tier, count * offer.block_tokens, count * self._slot_bytes)
            for tier, same in groupby(offer.tiers)
            if (count := len(list(same)))
        ]
        choice = self._cost.choose(offer.tokens, offer.context, segments)
        self._host.stats.count("tier_decisions", label=choice.reason.value)
        return PrefetchDecision(choice.tokens // offer.block_tokens, choice.give_up_s)

    def _fetched(self, tier: Tier, blocks: int, seconds: float) -> None:
        if self._cost is not None:
            self._cost.loaded(tier, blocks * self._slot_bytes, seconds)


def _prompt_tokens(output: SchedulerOutput) -> tuple[int, float]:
    """Return a step's number of prompt tokens, and the mean number of tokens before each."""
    tokens, context = 0, 0.0
    for req_id, end in translate.computed_tokens(output):
        count = output.num_scheduled_tokens[req_id]
        if count > 1:  # a request with one token decodes
            tokens += count
            context += count * (end - count / 2)
    return tokens, context / tokens if tokens else 0.0
