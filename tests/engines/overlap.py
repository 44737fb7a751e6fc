"""vLLM's own scheduler and connector runner, with steps in flight, around a device made of lists.

What a device block holds is, per token, *which prefix it was computed from*. A forward looks at
what it reads, jobs run whenever the test lets them, and each looks at whether its blocks are still
somebody's. So an order of events in which a copy comes too late is seen where it does harm.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kvconnect.disaggregation.messages import (
    NoticeKind,
    PrefillSource,
    Receive,
    ReceiveReport,
    TransferEvent,
)
from kvconnect.engines.vllm import register
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.messages import StepInstructions, StepReports, WorkerHello
from kvconnect.engines.vllm.tickets import TicketIssuer
from kvconnect.offload.messages import FailedBlock, JobReport, LoadBlocks, StoreBlocks
from kvconnect.types import Endpoint, FailureCause, Rank, TransferId
from tests.engines.models import engine_args
from tests.engines.siblings import Sibling

BLOCK, BLOCKS, SLOTS, BUDGET, NEW = 4, 20, 24, 12, 6
WRONG = -1  # a token's KV that nobody meant to be there
READER = Rank(0, 1, 0, 1)
_SIBLING = {"kv_connector_module_path": "tests.engines.siblings"}
PEER = PrefillSource("peer", 1, (Endpoint(0, 0, "127.0.0.1", 1),), 1, 1)


class Mode(NamedTuple):
    """How steps overlap, how many tokens are drafted, what the engine is to others, and where
    KVConnect stands beside another connector."""

    in_flight: int = 2
    drafts: int = 0
    role: str = "kv_both"
    place: int | None = None  # among two connectors; None: it is the only one


class Clock:
    """Stands for the module ``time``; it goes on only when told."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.now


@cache
def _config() -> VllmConfig:
    register()
    init_none_hash(sha256)
    return EngineArgs(**engine_args("llama")).create_engine_config()


def make_config(mode: Mode) -> Any:
    """Return vLLM's configuration of such an engine. The CPU platform turns overlap off, so it is
    turned on behind its back."""
    base = _config()
    overlaps = mode.in_flight > 1
    ours: dict[str, Any] = {
        "kv_connector": "KVConnect",
        "kv_role": mode.role,
        "kv_connector_extra_config": {
            "listen": "127.0.0.1:0",
            "host_bytes": "1MiB",
            "sync_load_bytes": 0,  # its device has no loads inside a step
        },
    }
    transfer = KVTransferConfig(**ours)
    if mode.place is not None:
        children = [{"kv_connector": "Sibling", "kv_role": "kv_both", **_SIBLING}]
        children.insert(mode.place, ours)
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=mode.role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": children},
        )
    speculative = SimpleNamespace(
        num_speculative_tokens=mode.drafts,
        max_num_new_slots_for_drafting=0,
        num_speculative_tokens_per_batch_size=None,
        use_eagle=lambda: False,
        use_eagle_block_drop=lambda: False,
        use_dspark=lambda: False,
    )
    changes = {
        "kv_transfer_config": transfer,
        "speculative_config": speculative if mode.drafts else None,
        "num_speculative_tokens": mode.drafts,
        "num_lookahead_tokens": 0,
        "num_prefill_lookahead_tokens": 0,
        "max_concurrent_batches": mode.in_flight,
        "max_in_flight_tokens": mode.in_flight * BUDGET,
        "use_v2_model_runner": overlaps,
        "scheduler_config": _changed(
            base.scheduler_config,
            async_scheduling=overlaps,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=4,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=mode.place is not None,
        ),
        "cache_config": _changed(base.cache_config, block_size=BLOCK, num_gpu_blocks=BLOCKS),
        "parallel_config": _changed(
            base.parallel_config, pipeline_parallel_size=max(1, mode.in_flight - 1)
        ),
    }
    return _changed(base, **changes)


def _changed(config: Any, **changes: Any) -> Any:
    """Return a view of a configuration with other values, which are not checked."""

    class View:
        def __getattr__(self, name: str) -> Any:
            return getattr(config, name)

    view = View()
    view.__dict__.update(changes)
    return view


def token_after(prefix: tuple[int, ...]) -> int:
    return (sum(prefix) * 7 + len(prefix)) % 50


@dataclass(eq=False)
class Running:
    """A request as the model runner knows it."""

    tokens: list[int]
    table: list[int]
    computed: int


class Device:
    """A worker's half of lists; loads, stores and receives run when the test says so."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kv: list[list[int]] = [[WRONG] * BLOCK for _ in range(BLOCKS)]
        self.slots: list[list[int]] = [[WRONG] * BLOCK for _ in range(SLOTS)]
        self.jobs: list[LoadBlocks | StoreBlocks | Receive] = []
        self.offered: dict[TransferId, list[int]] = {}  # what readers may read
        self.withdrawn: list[TransferId] = []  # not answered yet
        self.step = StepInstructions()
        self.reports = StepReports()
        self.finished: set[str] = set()
        self.errors: set[int] = set()

    # -- what vLLM's runner calls -------------------------------------------------------------

    def register(self, caches: object) -> None:
        pass

    def hello(self) -> WorkerHello:
        return WorkerHello(SLOTS, 64, ("127.0.0.1", 5), receives=True)

    def begin_step(self, step: StepInstructions) -> None:
        self.step = step
        if step.greet:
            self.reports.hellos[0, 0] = self.hello()
        for load in step.offload.loads:
            assert not load.sync, "no load is to be part of a step"
        self.jobs += [*step.offload.loads, *step.disaggregation.receives]
        for offer in step.disaggregation.offers:
            self.offered.setdefault(offer.transfer, [])
        self.withdrawn += [order.transfer for order in step.disaggregation.withdrawals]

    def start_forward(self, hooks: bool) -> None:
        pass

    def end_step(self) -> None:
        self.jobs += self.step.offload.stores
        for offer in self.step.disaggregation.offers:
            for span in offer.spans:
                known = self.offered[offer.transfer]
                assert len(known) == span.first
                known += span.block_ids

    def collect(self) -> tuple[set[str], set[str]]:
        finished, self.finished = self.finished, set()
        return finished, set()

    def take_errors(self) -> set[int]:
        errors, self.errors = self.errors, set()
        return errors

    def take_reports(self) -> StepReports | None:
        reports, self.reports = self.reports, StepReports()
        return reports if any(vars(reports).values()) else None

    def take_stats(self) -> None:
        return None

    # -- what happens meanwhile ---------------------------------------------------------------

    def run(self, number: int, fails: bool) -> None:
        """End a job; one that fails has done damage."""
        job = self.jobs.pop(number)
        self.engine.seen[f"{type(job).__name__} {'failed' if fails else 'done'}"] += 1
        end = self._receive if isinstance(job, Receive) else self._copy
        failures = end(job, fails)  # type: ignore[operator]
        if isinstance(job, Receive):
            self.reports.arrivals.append(ReceiveReport(job.job, failures))
        else:
            self.reports.reports.append(JobReport(job.job, failures))
        if isinstance(job, StoreBlocks):
            return
        self.finished.add(job.req_id)
        self.errors |= {failure.block_id for failure in failures}

    def read(self, transfer: TransferId) -> None:
        """Another engine reads what is offered of a transfer."""
        prompt = self.engine.transfers[transfer]
        for number, block in enumerate(self.offered[transfer]):
            self.engine.expect_held(block)
            for offset in range(BLOCK):
                place = number * BLOCK + offset
                if place < len(prompt) - 1:
                    found = self.kv[block][offset]
                    assert found == self.engine.print(prompt[: place + 1]), "wrong KV handed off"

    def serve(self, transfer: TransferId) -> None:
        """A reader comes and takes what there is; it has everything once all is offered."""
        self.read(transfer)
        self.reports.notices.append(TransferEvent(transfer, NoticeKind.JOINED, READER))
        whole = -(-(len(self.engine.transfers[transfer]) - 1) // BLOCK)
        if len(self.offered[transfer]) == whole:
            self.engine.seen["handed off"] += 1
            self.reports.notices.append(TransferEvent(transfer, NoticeKind.DONE, READER))

    def answer(self, number: int) -> None:
        """The last read of a withdrawn transfer ends."""
        transfer = self.withdrawn.pop(number)
        self.read(transfer)
        del self.offered[transfer]
        self.reports.notices.append(TransferEvent(transfer, NoticeKind.WITHDRAWN))

    def _copy(self, job: LoadBlocks | StoreBlocks, fails: bool) -> tuple[FailedBlock, ...]:
        failures = []
        for part in job.parts:
            for block, slot in zip(part.block_ids, part.slots, strict=True):
                # What comes of a store that was given up is not used, and while no request lives,
                # nobody is given a block that one reads.
                half = self.engine.half
                held = job.job in half.plan.jobs.ledger._holds and not half.device._rests
                if held or isinstance(job, LoadBlocks):
                    self.engine.expect_held(block)
                cause = FailureCause.MISSING if slot < 0 else FailureCause.COPY
                if fails or slot < 0:
                    failures.append(FailedBlock(part.group, block, slot, cause))
                if isinstance(job, LoadBlocks):
                    self.kv[block] = [WRONG] * BLOCK if fails else list(self.slots[slot])
                else:
                    self.slots[slot] = [WRONG] * BLOCK if fails else list(self.kv[block])
        return tuple(failures)

    def _receive(self, job: Receive, fails: bool) -> tuple[FailedBlock, ...]:
        prompt = self.engine.prompts[job.req_id]
        failures = []
        for span, (first, end) in zip(job.spans, job.tokens, strict=True):
            for number, block in enumerate(span.block_ids, span.first):
                self.engine.expect_held(block)
                for offset in range(BLOCK):
                    place = number * BLOCK + offset
                    if first <= place < end:
                        right = self.engine.print(prompt[: place + 1])
                        self.kv[block][offset] = WRONG if fails else right
                if fails or job.source is None:
                    failures.append(FailedBlock(span.group, block, -1, FailureCause.PEER))
        return tuple(failures)


@dataclass
class Step:
    """One that was scheduled; its output comes once the device has run it."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput | None = None


@dataclass
class Engine:
    """The engine core's loop in pieces: :meth:`schedule`, :meth:`execute` and :meth:`update` for
    each step, in this order, with others between them."""

    mode: Mode
    clock: Clock
    steps: deque[Step] = field(default_factory=deque)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)  # also those that are over
    transfers: dict[TransferId, tuple[int, ...]] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)  # their kv_transfer_params
    running: dict[str, Running] = field(default_factory=dict)
    epoch: int = 0  # of the weights
    accepted: int = 0  # tokens of each draft that are right
    seen: Counter[str] = field(default_factory=Counter)  # what happened
    spoiled: set[int] = field(default_factory=set)  # blocks that a load inside the step spoiled

    def __post_init__(self) -> None:
        config = make_config(self.mode)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=_dtype())
        tensor = KVCacheTensor(0, ["layer"], 0, 0)
        cache_config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(["layer"], spec)])
        kind = AsyncScheduler if self.mode.in_flight > 1 else Scheduler
        self.scheduler: Any = kind(
            config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        connector = self.scheduler.connector
        worker = type(connector)(config, KVConnectorRole.WORKER, cache_config)
        self.half = _ours(connector).scheduler
        self.device = Device(self)
        _ours(worker).__dict__["worker"] = self.device
        Sibling.engine, Sibling.has, Sibling.fails = self, 0, False
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        self.runner = ActiveKVConnector(config, {})
        if metadata := worker.get_handshake_metadata():
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        own = self.half.handoff.tickets
        self.tickets = TicketIssuer(own._keys, -1, 1e6, PEER, own.shares)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.pool = self.scheduler.kv_cache_manager.block_pool

    def print(self, prefix: tuple[int, ...]) -> int:
        """Return what the last token's KV is, computed with today's weights."""
        return hash((self.epoch, prefix)) & 0xFFFFFFFF

    def expect_held(self, block: int) -> None:
        assert block, "the null block was used"
        assert self.pool.blocks[block].ref_cnt > 0, f"block {block} is nobody's any more"

    # -- what another connector does ----------------------------------------------------------

    def load_inside(self, prompt: tuple[int, ...], first: int, blocks: list[int]) -> None:
        """Fill blocks with the KV of a prompt's tokens from ``first`` on."""
        self.seen["loaded inside"] += len(blocks)
        for number, block in enumerate(blocks):
            self.expect_held(block)
            start = first + number * BLOCK
            places = range(start, start + BLOCK)
            self.device.kv[block] = [self.print(prompt[: place + 1]) for place in places]

    def spoil(self, block: int) -> None:
        """Such a block is not what it should be, which the engine hears of after the step."""
        self.device.kv[block] = [WRONG] * BLOCK
        self.spoiled.add(block)
        self.seen["spoiled"] += 1

    # -- requests -----------------------------------------------------------------------------

    def add(self, prompt: tuple[int, ...], params: dict[str, Any] | None = None) -> str:
        """A request comes."""
        name = f"r{len(self.prompts)}"
        self.prompts[name] = prompt
        new = 1 if params and params.get("do_remote_decode") else NEW
        sampling = SamplingParams(max_tokens=new, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.requests[name] = request
        lease = self.half.handoff.leases._requests.get(name)
        if lease is not None:
            self.transfers[lease.transfer] = prompt
        return name

    def expect_right(self, name: str) -> None:
        """A request that is over has the tokens that follow its prompt."""
        tokens = list(self.prompts[name])
        for token in self.requests[name].output_token_ids:
            assert token == token_after(tuple(tokens)), f"{name} has a wrong token"
            tokens.append(token)
        assert len(tokens) == len(self.prompts[name]) + self.requests[name].max_tokens

    def ticket(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        """Return what a prefill engine gives out for a prompt."""
        transfer = TransferId(secrets.token_bytes(16))
        answer = self.tickets.answer("plain", transfer, len(prompt) - 1)
        assert answer is not None
        return answer

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names or None, RequestStatus.FINISHED_ABORTED)

    @property
    def alive(self) -> list[str]:
        return [name for name, req in self.scheduler.requests.items() if not req.is_finished()]

    # -- steps --------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Schedule a step if there is room for one and something to do."""
        if len(self.steps) < self.mode.in_flight and self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.steps.append(Step(scheduled))
            self.seen["preemptions"] += len(scheduled.preempted_req_ids or ())
            if self.mode.in_flight == 1:  # nothing comes between
                self.execute()

    def execute(self) -> None:
        """Run the next step on the device."""
        step = next((step for step in self.steps if step.output is None), None)
        if step is None:
            return
        out = step.scheduled
        if not out.total_num_scheduled_tokens:
            step.output = self.runner.no_forward(out)
            return
        self._learn(out)
        self.runner.pre_forward(out)
        sampled = [self._forward(name, out) for name in out.num_scheduled_tokens]
        self.runner.finish_forward()
        connector = self.runner.post_forward(out.finished_req_ids)
        names = list(out.num_scheduled_tokens)
        index = {name: number for number, name in enumerate(names)}
        step.output = ModelRunnerOutput(names, index, sampled, kv_connector_output=connector)

    def update(self) -> None:
        """Take the output of the oldest step, if it has run."""
        if not self.steps or self.steps[0].output is None:
            return
        step = self.steps.popleft()
        told = self.scheduler.update_from_output(step.scheduled, step.output)
        for answer in (each for client in told.values() for each in client.outputs):
            if answer.kv_transfer_params:
                self.answers[answer.request_id] = answer.kv_transfer_params
        if self.mode.drafts and self.mode.in_flight == 1:
            names = [name for name in step.scheduled.num_scheduled_tokens if name in self.alive]
            drafts = [[0] * self.mode.drafts for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _learn(self, out: SchedulerOutput) -> None:
        for new in out.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids or ())
            table = list(new.block_ids[0])
            self.running[new.req_id] = Running(tokens, table, new.num_computed_tokens)
        cached = out.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[place]
            if name in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids[name])
                table = list(fresh[0]) if fresh else []
                self.running[name] = Running(tokens, table, cached.num_computed_tokens[place])
            elif fresh:
                self.running[name].table += fresh[0]

    def _forward(self, name: str, out: SchedulerOutput) -> list[int]:
        """Compute a request's part of a step; return the tokens that it samples."""
        req = self.running[name]
        drafts = len(out.scheduled_spec_decode_tokens.get(name, ()))
        end = req.computed + out.num_scheduled_tokens[name] - drafts
        if self.spoiled:
            assert self.mode.in_flight == 1 and len(out.num_scheduled_tokens) == 1
            return self._forward_in_vain(req, end)
        for place in range(req.computed):
            found = self.device.kv[req.table[place // BLOCK]][place % BLOCK]
            assert found == self.print(tuple(req.tokens[: place + 1])), f"{name} reads wrong KV"
        assert end <= len(req.tokens)
        sampled: list[int] = []
        if end == len(req.tokens):
            sampled = [token_after(tuple(req.tokens))]
            while len(sampled) <= min(self.accepted, drafts):
                sampled.append(token_after((*req.tokens, *sampled)))
        known = req.tokens + sampled[:-1]
        for place in range(req.computed, end + drafts):
            right = self.print(tuple(known[: place + 1])) if place < len(known) else WRONG
            self.device.kv[req.table[place // BLOCK]][place % BLOCK] = right
        self.seen["accepted"] += max(0, len(sampled) - 1)
        req.tokens += sampled
        req.computed = end + max(0, len(sampled) - 1)
        return sampled

    def _forward_in_vain(self, req: Running, end: int) -> list[int]:
        """Compute from a spoiled block. vLLM takes none of it, and goes back to that block."""
        table = req.table
        for place in range(req.computed, end):
            self.device.kv[table[place // BLOCK]][place % BLOCK] = WRONG
        req.computed = min(map(table.index, self.spoiled)) * BLOCK
        self.spoiled.clear()
        return [0] if end == len(req.tokens) else []

    # -- the whole ----------------------------------------------------------------------------

    def check(self) -> None:
        """The books balance, and what they hold is held in the pool as well."""
        half = self.half
        half.plan.check()
        half.handoff.leases.check()
        half.handoff.receives.check()
        free = sum(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert free == self.pool.get_num_free_blocks()

    def settle(self, what: str, reads: bool = True) -> None:
        """Let the engine work, and all that is under way end, until nothing is left to do.

        Raises:
            AssertionError: it does not come to rest.
        """
        for _ in range(400):
            if not (self.steps or self.scheduler.has_requests()):
                return
            self.schedule()
            self.execute()
            self.update()
            while self.device.jobs:
                self.device.run(0, fails=False)
            while self.device.withdrawn:
                self.device.answer(0)
            for transfer in list(self.device.offered) if reads else ():
                self.device.serve(transfer)
            self.clock.now += 1.0
            self.check()
        raise AssertionError(f"{what} never ends: {self.half.handoff.leases._leases}")

    def pause(self, mode: str, forget: bool, reads: bool) -> None:
        """As ``pause_generation`` does it."""
        if mode == "abort":
            self.abort()
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        self.scheduler.set_pause_state(state)
        self.settle(f"pause {mode}", reads)
        if not forget:
            return
        if self.parked:  # vLLM does not support it
            with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
                self.scheduler.reset_prefix_cache(True, True)
        else:
            assert self.scheduler.reset_prefix_cache(True, True)
            self.epoch += 1
            self.seen["new weights"] += 1

    @property
    def parked(self) -> bool:
        """Whether requests that do not run have blocks: theirs have been loaded."""
        names = set(self.alive) - {request.request_id for request in self.scheduler.running}
        return any(self.scheduler.kv_cache_manager.get_block_ids(name)[0] for name in names)

    def resume(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def end(self) -> None:
        """All requests come to their end; nothing may be left."""
        self.resume()
        self.settle("the work")
        while self.device.jobs:  # stores that were given up, which nobody waits for
            self.device.run(0, fails=False)
        if self.device.reports.reports:  # the next step takes the answers along
            self.add((1,))
            self.settle("one more request")
        assert not self.scheduler.requests and not self.half.busy
        half = self.half
        assert not (half._requests or half._matched or half.plan._requests), "not forgotten"
        assert not (half.handoff.receives._requests or half.handoff.leases._requests)
        assert not (self.device.jobs or self.device.offered or self.device.withdrawn)
        assert self.pool.get_num_free_blocks() == BLOCKS - 1
        assert self.half.plan.jobs.ledger.held == 0 and len(self.half.handoff.leases) == 0
        assert self.half.plan.index.slots.busy == 0
        assert self.scheduler.reset_prefix_cache(reset_connector=True)


def _ours(connector: Any) -> Any:
    """Return KVConnect, alone or among others."""
    children = getattr(connector, "sub_connectors", [connector])
    return next(child for child in children if isinstance(child, KVConnect))


def _dtype() -> Any:
    import torch

    return torch.float32
