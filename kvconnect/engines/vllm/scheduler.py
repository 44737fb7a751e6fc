"""The connector in vLLM's scheduler: turns vLLM's calls into events of the plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.device_blocks import DeviceBlocks
from kvconnect.engines.vllm.disaggregation import DisaggregationScheduler
from kvconnect.engines.vllm.events import EventLog
from kvconnect.engines.vllm.gauges import Gauges
from kvconnect.engines.vllm.hints import add_hints, drop_invalid_params
from kvconnect.engines.vllm.inside_loads import InsideLoads, foreign_failures, is_shared
from kvconnect.engines.vllm.live_requests import LiveRequests
from kvconnect.engines.vllm.messages import StepInstructions, StepReports, WorkerHello
from kvconnect.engines.vllm.observer import SchedulerObserver
from kvconnect.engines.vllm.plans import (
    inside_step,
    limits_of,
    make_plan,
    make_tiers,
    most_tokens,
    settings_for,
)
from kvconnect.engines.vllm.receipts import Receipts
from kvconnect.engines.vllm.states import kept_states
from kvconnect.engines.vllm.stats import KVConnectStats
from kvconnect.engines.vllm.tiers import TierScheduler
from kvconnect.engines.vllm.weights import EngineWeights
from kvconnect.errors import Incompatible
from kvconnect.offload.hints.plan import WrittenFirst, no_slots
from kvconnect.offload.planner import (
    KeptStates,
    LoadRequest,
    OffloadPlan,
    count_lookup,
    gauges,
    hits_by_tier,
)
from kvconnect.protocol.options import with_receipt
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Tier, TransferId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NOTHING = StepInstructions()


class _Match(NamedTuple):
    """Answer of :meth:`ConnectorScheduler.match` for a request that is not admitted yet."""

    local_tokens: int
    sync: bool = False  # load inside the step
    handoff: bool = False  # another engine sends the blocks


class ConnectorScheduler:
    """Owned by the scheduler's thread. Stores and loads nothing before :meth:`greet`."""

    device: DeviceBlocks  # set right after construction, when vLLM passes its block pool

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
    ) -> None:
        self.observer: SchedulerObserver | None = None
        translate.recompute_failed_loads(vllm_config)
        self._settings = settings = settings_for(vllm_config, settings)
        groups = translate.cache_groups(kv_cache_config)
        self._hash_tokens = translate.hash_block_tokens(vllm_config, kv_cache_config)
        self._limits = limits_of(vllm_config, kv_cache_config, settings)
        self._requests = LiveRequests(vllm_config)
        # Requests that were matched and not admitted yet; None: the request reads no cache.
        self._matched: dict[str, _Match | None] = {}
        self._slot_bytes = 0  # of the workers that store
        self._load_bytes = 0  # of a block, all workers together
        self._gauges = Gauges()
        self._inside = InsideLoads()
        self._weights = EngineWeights()
        self.events = EventLog(vllm_config, groups, kv_cache_config)
        stats, adapters = KVConnectStats(), self._requests.adapters
        self._numbers = count(1)  # of all jobs
        self.receipts = Receipts(stats)
        self.handoff = DisaggregationScheduler(
            vllm_config, settings, groups, stats, adapters, self._numbers
        )
        self.plan = self._make_plan(0, groups, stats)
        self.tiers: TierScheduler | None = None

    def greet(self, hellos: Mapping[tuple[int, int], WorkerHello], alone: bool = True) -> None:
        """Take the workers' host tiers and addresses; forget all blocks if they greeted before.

        The smallest tier sets the number of slots, since all workers use the same ones. ``alone``:
        there is no other connector. Raises :class:`Incompatible` if a worker's hello is missing.
        """
        workers = self._limits.workers
        if len(hellos) != workers:
            fix = "see the log for why others did not, and start again"
            raise Incompatible(f"{len(hellos)} of {workers} workers came up", fix)
        self._gauges.moved = True
        if self.handoff.greeted:
            self.reset()
        num_slots = min(hello.num_slots for hello in hellos.values())
        storing = [hello.slot_bytes for hello in hellos.values() if hello.stores]
        self._slot_bytes = sum(storing)
        self._load_bytes = sum(hello.slot_bytes for hello in hellos.values())
        if num_slots != len(self.plan.index.slots):
            self.plan = self._make_plan(num_slots, self.plan.groups, self.plan.stats)
            adapters, shares = self._requests.adapters, self.handoff.tickets.shares
            self.tiers = make_tiers(self._settings, self.plan, hellos, adapters, shares)
        self.handoff.greet(hellos, alone)
        self._weights.greet({place: hello.identity for place, hello in hellos.items()})
        gib = num_slots * self._slot_bytes / 2**30
        logger.info("host tier: %d blocks, %.2f GiB over %d workers", num_slots, gib, len(storing))

    def _make_plan(
        self, num_slots: int, groups: Sequence[CacheGroup], stats: OffloadingConnectorStats
    ) -> OffloadPlan:
        return make_plan(groups, num_slots, self._settings, stats, self._limits, self._numbers)

    def add_request(self, request: Request) -> TransferId | None:
        """Add a new request; return the transfer that other engines may ask for, if any."""
        self.device.wake()
        drop_invalid_params(request, self.plan.stats)
        self._requests[request.request_id] = request
        if self._requests.may_reuse(request):
            self.plan.add_request(request.request_id)
        now, asks = time.monotonic(), request.kv_transfer_params
        transfer = self.handoff.add_request(request, now) if asks else None
        add_hints(self.plan, request, self._hashes, now)
        if self.observer is not None:
            self.observer.request_added(request, transfer)
        return transfer

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens available after ``local_tokens``, whether they load asynchronously). They
        come from a hand-off, else from the host tier. None: ask again at the next step."""
        began = time.monotonic()
        self.receipts.looked_up(request, local_tokens, began)
        answer = self._match(request, local_tokens)
        if self.observer is not None:
            self.observer.looked_up(request.request_id, time.monotonic() - began, answer[0] is None)
        return answer

    def _match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        req_id = request.request_id
        if request.skip_reading_prefix_cache:
            self.handoff.decline(req_id)  # the prompt must be computed here
            self._matched[req_id] = None
            return 0, False
        arriving = self.handoff.match(request, local_tokens)
        if arriving:
            self._matched[req_id] = _Match(local_tokens, handoff=True)
            return arriving, True
        if not self._requests.may_reuse(request):
            self._matched[req_id] = None
            return 0, False
        limit, hashes = most_tokens(request, self.plan.groups), self._hashes(request)
        now = time.monotonic()
        if self.tiers and self.tiers.ask(request, hashes, (local_tokens, limit), now):
            return None, False
        if self.plan.awaits_load(req_id, hashes, local_tokens, request.num_tokens, now):
            return None, False  # the device will have the blocks
        found = self.plan.match(req_id, hashes, local_tokens, limit)
        if req_id in self.handoff.failed and req_id in self._matched:
            found = 0  # vLLM 0.32 did not admit this load and may never do so, see `failed`
        # Offered pages are sent while the step runs, before it is known that a load failed.
        most, others = self._settings.sync_load_bytes, len(self._requests) - 1
        sync = inside_step(self.plan, found, self._load_bytes, most, others)
        # If the whole prompt is found, a load inside the step leaves its last block to compute.
        whole_prompt = local_tokens + found >= request.num_tokens
        sync = sync and not self.handoff.leases and not whole_prompt
        first = (local_tokens + self.plan.groups[0].block_tokens) // self._hash_tokens - 1
        sync = sync and not is_shared(request, first, self._requests.values())
        self._matched[req_id] = _Match(local_tokens, sync)
        return found, found > 0 and not sync

    def after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external: int
    ) -> Mapping[Tier, int]:
        """Plan the load of a request whose blocks the engine has allocated. Return how many of its
        tokens come from each tier; empty for a hand-off."""
        if request.request_id not in self._matched:
            return {}  # called again for a request whose load is done
        match = self._matched.pop(request.request_id)
        if self._requests.may_reuse(request):
            self.plan.add_request(request.request_id)  # a preemption replaced its blocks
        tiers = self._admit(request, blocks, match, num_external) if match else {}
        self.receipts.admitted(request, tiers, num_external)
        if match and self.observer is not None:
            self.observer.admitted(request.request_id, num_external, tiers, match.handoff)
        return tiers

    def _admit(
        self, request: Request, blocks: KVCacheBlocks, match: _Match, num_external: int
    ) -> Mapping[Tier, int]:
        local_tokens, sync, handoff = match
        if handoff and num_external:
            self.handoff.after_alloc(request, blocks, local_tokens, num_external)
            return {}
        if handoff:  # the engine needs none of its tokens
            self.handoff.decline(request.request_id)
        total, hashes = local_tokens + num_external, self._hashes(request)
        if num_external:
            wanted = LoadRequest(local_tokens, total, hashes, blocks.get_block_ids(), sync)
            self.plan.plan_load(request.request_id, wanted, time.monotonic())
        promoted = self.tiers.admitted(request, hashes, (local_tokens, total)) if self.tiers else {}
        hits = hits_by_tier(num_external, promoted)
        count_lookup(self.plan.stats, request.num_tokens - local_tokens, hits)
        return hits

    def build_step(self, output: SchedulerOutput) -> StepInstructions:
        """Plan the stores of this step; return its instructions for the workers."""
        now = time.monotonic()
        self._requests.adapters.next_step()
        self.device.release_stored(self.plan.jobs.expire(now))
        kept = kept_states(output, self.plan.groups)
        due = {**dict.fromkeys(kept, 0), **dict(self.plan.due(translate.computed_tokens(output)))}
        for req_id, computed in due.items():
            self._store(req_id, computed, output, kept.get(req_id, ()))
        self.device.hold(self.handoff.offer(output, now))
        offload, computes = self.plan.take(now), bool(output.num_scheduled_tokens)
        self.plan.load_mode.began(now, computes and not any(load.sync for load in offload.loads))
        step = StepInstructions(offload, disaggregation=self.handoff.take(now))
        if self.tiers is not None:
            step.tiers = self.tiers.take(now)
            step.timed = self.tiers.time_step(output, now)
        self._inside.step(output, offload.loads)
        for store in offload.stores:
            for part in store.parts:
                self.device.hold_stored(part.block_ids)
        self.events.removed(self.plan.take_removed())
        self._gauges.moved |= computes or step != _NOTHING
        step.weights = self._weights.take()
        step.epoch, step.greet = self.handoff.epoch, not self.handoff.greeted
        step.computes, step.idle = computes, not computes and self.busy and not self.plan.busy
        step.handoffs = self.handoff.busy
        if self.observer is not None:
            self.observer.step_built(step, output.num_scheduled_tokens)
        return step

    def on_reports(self, reports: StepReports | None, failed: Collection[int] = ()) -> None:
        """Take a step's reports of the workers, and the device blocks that no load filled."""
        now = time.monotonic()
        self.plan.load_mode.ended(now)
        if reports is not None or failed:
            self._take_reports(reports or StepReports(), failed, now)
        else:  # as in most steps
            if released := self.handoff.leases.take_released():
                self.device.release(released)
            if self.tiers is not None:
                self.tiers.step_ended(0, now)
                self.tiers.on_answers((), now)

    def _take_reports(self, reports: StepReports, failed: Collection[int], now: float) -> None:
        self._gauges.moved = True
        if reports.hellos and not self.handoff.greeted:  # hellos may come twice: steps overlap
            self.greet(reports.hellos, alone=False)
        if failed and foreign_failures(reports, failed):
            # A step computed with blocks that another connector failed to load: copies in flight
            # may be wrong.
            self.device.release_stored(self.plan.jobs.void_stores())
            self.handoff.leases.withdraw_all(now)
        self._take_weights(reports, now)
        released, received = self.handoff.on_reports(reports.arrivals, reports.notices, now)
        self.device.release(released)
        self.receipts.received(received, now)
        # By number: a failed load voids its step's stores, which may have been reported before it.
        ordered = sorted(reports.reports, key=lambda report: report.job)
        for settled in filter(None, (self.plan.on_report(one, now) for one in ordered)):
            self.receipts.settled(settled.job, now, self.plan.groups)
            self.device.release_stored(settled.released)
            self.device.forget(self._inside.unfilled(settled.job))
            if self.tiers is not None:
                self.tiers.settled(settled)
            self.plan.hints.settled(settled.stored, settled.dropped, now, self._written_first)
            self.events.settled(settled.stored, settled.dropped)
        if self.tiers is not None:
            self.tiers.step_ended(reports.timed, now)
            for promoted in self.tiers.on_answers(reports.answers, now):
                if (request := self._requests.get(promoted.req_id)) is not None:
                    self.events.promoted(request, self._hashes(request), promoted.blocks)
        self.events.removed(self.plan.take_removed())
        if self.observer is not None:
            self.observer.reports_taken(reports)

    def _take_weights(self, reports: StepReports, now: float) -> None:
        """Take which weights the workers have. KV of former ones is neither offered nor shared.

        Steps may have computed with the new ones before this report, under former names. It comes
        before what the first of them found and stored, of which nothing is loaded or written."""
        changed, tiers = self._weights.on_reports(reports.identities), self.tiers
        if changed:
            self.handoff.leases.withdraw_all(now)
        if changed and tiers is not None:
            tiers.reset()
        if tiers is not None and (name := self._weights.settled()) is not None:
            tiers.name_by(name)

    @property
    def _written_first(self) -> WrittenFirst:
        return no_slots if self.tiers is None else self.tiers.written_first

    def finish_request(self, request: Request) -> dict[str, Any] | None:
        """End a request; return the ``kv_transfer_params`` of its response. Blocks that are being
        stored or handed off stay held until that ends."""
        self._gauges.moved = True
        hashes, asked, now = self._hashes(request), request.kv_transfer_params, time.monotonic()
        self._requests.pop(request.request_id, None)
        self._matched.pop(request.request_id, None)
        self.plan.finish_request(request.request_id, hashes)
        if not self._requests:
            self.device.rest()
        removing, not_loaded = self.tiers.finish(request, hashes) if self.tiers else (False, None)
        ticket = self.handoff.finish(request, now) if asked else None
        hints = self.plan.hints.finish(request.request_id, now, removing, self._written_first)
        if self.observer is not None:
            self.observer.request_finished(request.request_id)
        receipt = self.receipts.finish(request.request_id, not_loaded)
        return with_receipt(ticket, asked, receipt, hints)

    def reset(self) -> None:
        """Forget all blocks of the host tier: the engine resets its prefix cache."""
        self._gauges.moved = True
        self._requests.adapters.reset()
        self.device.release_stored(self.plan.reset())
        if self.tiers is not None:
            self.tiers.reset()
        self.handoff.leases.withdraw_all(time.monotonic())
        self.events.cleared()
        self._weights.look(reset=True)

    def weights_declared(self, version: str) -> None:
        """See :class:`NamesWeights`."""
        self._weights.look(version)

    def take_stats(self) -> KVConnectStats | None:
        """Return the counts since the last call, with the gauges if one changed."""
        now = time.monotonic()
        if self._gauges.due(now, at_rest=not self._requests and not self.busy):
            tiers = self.tiers.gauges() if self.tiers else ()
            read = chain(gauges(self.plan, now, self._slot_bytes), self.handoff.gauges(now), tiers)
            self._gauges.publish(read, self.plan.stats, now)
        return cast("KVConnectStats | None", self.plan.stats.take())

    @property
    def busy(self) -> bool:
        """Whether a job is open, so that the engine must keep stepping."""
        jobs = self.plan.busy or self.handoff.busy or bool(self.tiers and self.tiers.busy)
        return jobs or self._weights.pending

    def _hashes(self, request: Request) -> tuple[Sequence[bytes], ...]:
        return translate.group_hashes(request, self.plan.groups, self._hash_tokens)

    def _store(self, req_id: str, computed: int, output: SchedulerOutput, kept: KeptStates) -> None:
        """Plan to store a request's new blocks, and the states that the engine keeps."""
        request, state = self._requests.get(req_id), output.kv_connector_block_state
        if request is None or state is None or not self._requests.may_reuse(request):
            return  # it is gone, or its adapter was loaded again after it began
        hashes, table = self._hashes(request), state.resolve_block_ids(req_id)
        kept = self.device.present(kept, hashes)
        new = self.plan.plan_store(req_id, computed, hashes, table, kept)
        if self.tiers is not None:
            self.tiers.name(request, hashes, new)
        self.events.planned(request, hashes, new)
        if self.observer is not None and new:
            self.observer.store_planned(req_id, len(new))
