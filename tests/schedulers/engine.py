"""An engine of vLLM without a model: its real scheduler, both halves of KVConnect with their
threads, and what stands for the model runner and the core's loop between them."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvconnect.engines.vllm import tier_stores
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.offload.shared_memory import SharedMemory
from tests.schedulers.checks import Stuck, WrongTokens, watch_cost_model
from tests.schedulers.contents import VOCABULARY, KnownText, continuation
from tests.schedulers.faults import Faults, FaultyCopier, FaultyStore
from tests.schedulers.model import Batch, Model, Wrong
from tests.schedulers.shapes import LAYERS, EngineShape, cache_config, vllm_config

DRAIN_S = 60.0  # for which an engine may take to finish what it has; far more than it needs
_QUEUE = 2  # steps under way with asynchronous scheduling


@dataclass
class Prompt:
    """A request as a client sends it. ``rows``: a number for each embedding, in place of tokens."""

    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    new: int = 8
    salt: str | None = None
    adapter: LoRARequest | None = None
    priority: int = 0
    params: Any = None
    skips_cache: bool = False

    @property
    def scope(self) -> object:
        return self.salt, self.adapter and self.adapter.lora_path

    def embeddings(self) -> torch.Tensor | None:
        return torch.tensor(self.rows, dtype=torch.float32).reshape(-1, 1) if self.rows else None


@dataclass
class Answer:
    """What the engine said to a request so far. ``weights``: those it began with."""

    prompt: Prompt
    weights: object
    tokens: list[int] = field(default_factory=list)
    reason: Any = None
    params: Mapping[str, Any] | None = None
    spoiled: bool = False  # the weights changed while it ran


class Engine:
    """One engine, moved step by step by the thread that made it."""

    def __init__(self, shape: EngineShape, random: Random, faults: Faults | None = None) -> None:
        self.shape = shape
        self.random = Random(random.random())
        self.faults = faults or Faults(Random(random.random()))
        config, cache = vllm_config(shape), cache_config(shape)
        self.answers: dict[str, Answer] = {}
        self.to_abort: list[str] = []  # while a step runs
        self.model = Model(shape, cache, Random(random.random()))
        blocks, hashed = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hashed
        kind = AsyncScheduler if shape.overlap else Scheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=blocks,
            hash_block_size=hashed,
            log_stats=True,
        )
        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        self._hasher = get_request_block_hasher(hashed, function)
        self._memories: list[SharedMemory] = []
        self.workers = [self._start_worker(rank, config, cache) for rank in range(shape.tp)]
        for memory in self._memories:
            memory.close()
        self.connector.scheduler.greet(
            {(0, rank): worker.worker.hello() for rank, worker in enumerate(self.workers)}
        )
        self._step_tokens: list[int] = []  # prompt tokens of the step that is reported
        watch_cost_model(self.connector.scheduler, self._step_tokens)
        self._aggregator = KVOutputAggregator(shape.tp)
        self._queue: deque[tuple[SchedulerOutput, Any]] = deque()
        self.counts: dict[tuple[str, str | None], float] = {}
        self._count()

    @property
    def connector(self) -> KVConnect:
        """The scheduler's connector."""
        found = self.scheduler.connector
        assert isinstance(found, KVConnect)
        return found

    def _start_worker(self, rank: int, config: Any, cache: Any) -> KVConnect:
        own = copy.copy(config)
        own.parallel_config = copy.copy(config.parallel_config)
        own.parallel_config.rank = rank
        connector = KVConnect(own, KVConnectorRole.WORKER, cache)
        make = connector.worker.make_copier
        connector.worker.share_memory = partial(self._share_memory, rank)  # type: ignore[method-assign]
        connector.worker.make_copier = lambda *args: FaultyCopier(make(*args), self.faults)  # type: ignore[method-assign,assignment,return-value]
        make_disk = tier_stores.make_disk
        with patch.object(
            tier_stores, "make_disk", lambda *args: FaultyStore(make_disk(*args), self.faults)
        ):
            connector.register_kv_caches(self.model.views(rank))
        return connector

    def _share_memory(
        self, rank: int, replicas: int, sizes: Callable[[int], tuple[int, int]], node: int
    ) -> SharedMemory:
        """Share a host tier as ranks do that are processes, one after the other."""
        assert (replicas, node) == (self.shape.replicas, -1)
        nbytes, _ = sizes(replicas)
        if not rank % replicas:
            self._memories.append(SharedMemory.make(nbytes, replicas))
            return self._memories[-1]
        return SharedMemory.open(self._memories[-1].offer(), nbytes, rank % replicas, replicas)

    def _count(self) -> None:
        """Keep what the scheduler's half counts, which the engine would publish."""
        stats = self.connector.scheduler.plan.stats
        count = stats.count

        def counted(name: str, number: Any = 1, label: str | None = None) -> None:
            self.counts[name, label] = self.counts.get((name, label), 0) + number
            count(name, number, label=label)

        stats.count = counted  # type: ignore[method-assign]

    # Requests -------------------------------------------------------------------------------

    def add(self, req_id: str, prompt: Prompt) -> None:
        """Add a request, as the core does with those of its input queue."""
        known = prompt.rows or prompt.tokens
        self.model.texts[req_id] = KnownText(prompt.scope, known)
        self.answers[req_id] = Answer(prompt, self.model.weights)
        extra = {"kv_transfer_params": prompt.params} if prompt.params else None
        sampling = SamplingParams(
            max_tokens=prompt.new,
            ignore_eos=True,
            skip_reading_prefix_cache=prompt.skips_cache,
            extra_args=extra,
        )
        request = Request(
            req_id,
            None if prompt.rows else list(prompt.tokens),
            sampling,
            None,
            arrival_time=time.time(),
            prompt_embeds=prompt.embeddings(),
            lora_request=prompt.adapter,
            cache_salt=prompt.salt,
            priority=prompt.priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def live(self) -> list[str]:
        """Return the requests that are not over."""
        found = self.scheduler.requests.items()
        return [req_id for req_id, request in found if not request.is_finished()]

    def abort(self, *req_ids: str) -> None:
        """Abort requests, of which the engine says nothing more."""
        self.scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ABORTED)
        for req_id in req_ids:
            answer = self.answers[req_id]
            answer.reason = answer.reason or "abort"

    def add_last(self, req_id: str) -> None:
        """Add a request of no interest, which has the engine stepped."""
        self.add(req_id, Prompt([1, 2], new=1))

    def run(self, req_id: str, prompt: Prompt) -> Answer:
        """Add a request and step until it is answered."""
        self.add(req_id, prompt)
        self.step_until(lambda: self.answers[req_id].reason is not None)
        return self.answers[req_id]

    # Steps ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Make one step of the core's loop. Return whether there was anything to do."""
        self.faults.pace.step()
        if self.shape.overlap:
            return self._step_with_queue()
        if not self.scheduler.has_requests():
            return False
        output, batch = self._schedule()
        self._update(output, self._execute(output, batch))
        return True

    def _step_with_queue(self) -> bool:
        if self.scheduler.has_requests():
            output, batch = self._schedule()
            self._queue.appendleft((output, self._execute(output, batch)))
            more = output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            if len(self._queue) < _QUEUE and more:
                return True
        elif not self._queue:
            return False
        self._update(*self._queue.pop())
        return True

    def step_until(self, reached: Callable[[], bool]) -> None:
        """Step until something is true. Raises :class:`Stuck` if it does not become so."""
        until = time.monotonic() + DRAIN_S
        while not reached():
            self.step()
            if time.monotonic() > until:
                raise Stuck(self)

    def drain(self) -> None:
        """Step until there is nothing to do. Raises :class:`Stuck` if there always is."""
        self.step_until(lambda: not self.busy)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._queue)

    def _schedule(self) -> tuple[SchedulerOutput, Batch]:
        output = self.scheduler.schedule()
        manager, requests = self.scheduler.kv_cache_manager, self.scheduler.requests
        scheduled = output.num_scheduled_tokens
        tables = {req_id: manager.get_block_ids(req_id) for req_id in scheduled}
        exact = () if self.shape.overlap else scheduled
        tokens = {req_id: list(requests[req_id].all_token_ids) for req_id in exact}
        return output, self.model.prepare(output, tables, tokens)

    def _execute(self, output: SchedulerOutput, batch: Batch) -> Any:
        """Run a step on all ranks, as vLLM's model runner does."""
        wrong: list[Wrong] = []
        news = [self._execute_rank(rank, output, batch, wrong) for rank in range(self.shape.tp)]
        self._judge(wrong, output, batch, set().union(*(kv.invalid_block_ids for kv in news)))
        sampled = self.model.sample(batch)
        results = []
        for kv in news:
            if not output.num_scheduled_tokens:
                results.append(ModelRunnerOutput.with_kv_conn_output_only(kv))
                continue
            req_ids = list(output.num_scheduled_tokens)
            places = {req_id: place for place, req_id in enumerate(req_ids)}
            tokens = [sampled.get(req_id, []) for req_id in req_ids]
            result = ModelRunnerOutput(req_ids, places, tokens, None, {})
            result.kv_connector_output = kv
            results.append(result)
        if self.shape.tp == 1:
            return results[0]
        return self._aggregator.aggregate([copy.copy(result) for result in results], 0)

    def _execute_rank(
        self, rank: int, output: SchedulerOutput, batch: Batch, wrong: list[Wrong]
    ) -> KVConnectorOutput:
        connector, computes = self.workers[rank], bool(output.num_scheduled_tokens)
        self.model.clean(rank, output)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        context = SimpleNamespace(
            cudagraph_runtime_mode=CUDAGraphMode.NONE, attn_metadata=computes or None
        )
        if output.has_sync_kv_loads:
            connector.start_load_kv(context)
        for layer, name in enumerate(LAYERS) if computes else ():
            hooked = layer == 0 or self.shape.kind != "states"
            if hooked and output.has_sync_kv_loads:
                connector.wait_for_layer_load(name)
            wrong += self.model.run_layer(rank, layer, batch)
            if hooked:
                connector.save_kv_layer(name, torch.empty(0), None)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(context)
        connector.wait_for_save()
        found = connector.get_transfer_results(output.finished_req_ids)
        news = KVConnectorOutput(
            finished_recving=found.finished_recving, failed_recving=found.failed_recving
        )
        news.invalid_block_ids = connector.get_block_ids_with_load_errors()
        news.kv_connector_stats = connector.get_kv_connector_stats()
        news.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return news

    def _judge(
        self, wrong: Iterable[Wrong], output: SchedulerOutput, batch: Batch, failed: set[int]
    ) -> None:
        """Raise for wrong KV that a request read, unless the step reports the load that failed to
        bring it: then the scheduler discards what the step computed of it."""
        spoiled = {
            work.req_id
            for work in batch.work
            if output.has_sync_kv_loads and failed.intersection(*work.tables[:1])
        }
        for each in wrong:
            if each.req_id not in spoiled | self.model.exempt:
                raise WrongTokens(str(each))

    def _update(self, output: SchedulerOutput, result: Any) -> None:
        if self.to_abort:
            self.abort(*self.to_abort)
            self.to_abort.clear()
        self._step_tokens[:] = [n for n in output.num_scheduled_tokens.values() if n > 1]
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                answer = self.answers[each.request_id]
                answer.tokens += each.new_token_ids
                if each.finish_reason is not None:
                    answer.reason, answer.params = each.finish_reason, each.kv_transfer_params
                    self._compare(each.request_id, answer)
        if self.shape.drafts and not self.shape.overlap:
            self._draft(output)

    def _draft(self, output: SchedulerOutput) -> None:
        random = self.random
        live = [r for r in output.num_scheduled_tokens if r in self.scheduler.requests]
        drafted = [req_id for req_id in live if random.random() < 0.8]
        most = self.shape.drafts + 1
        drafts = [
            [random.randrange(VOCABULARY) for _ in range(random.randrange(most))] for _ in drafted
        ]
        self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, drafts))

    def _compare(self, req_id: str, answer: Answer) -> None:
        """Compare a finished answer with that of an engine that has no caches."""
        self.model.texts.pop(req_id, None)
        prompt = answer.prompt
        if answer.spoiled or str(answer.reason) != "length":
            return
        offered = isinstance(prompt.params, dict) and prompt.params.get("do_remote_decode")
        if offered and self.shape.kind == "states":
            return  # its prompt was shortened by a token
        known = prompt.rows or prompt.tokens
        wanted = continuation(prompt.scope, answer.weights, known, prompt.new)
        if answer.tokens != wanted:
            raise WrongTokens(f"{req_id} got tokens {answer.tokens}, not {wanted}")

    # What operators do ----------------------------------------------------------------------

    def reset(self, weights: object = None, running: bool = False) -> bool:
        """Reset all caches for new weights, which are used from then on if the engine has done it;
        none: they stay. Return whether it has; it may refuse while blocks are in use."""
        try:
            done = self.scheduler.reset_prefix_cache(running, True)
        except RuntimeError:  # loads or stores are under way
            return False
        computed = any(request.num_computed_tokens for request in self.scheduler.requests.values())
        if not done or self._queue or computed:
            return False
        if weights is not None:
            self.change_weights(weights)
        return True

    def change_weights(self, weights: object) -> None:
        """Use other weights from now on, and tell the workers as vLLM's update of weights does:
        KVConnect takes weights of which it is told nothing for those that the files have."""
        self.model.weights = weights
        for worker in self.workers:
            worker.worker.weights_updating(draft=False)
            worker.worker.weights_updated(draft=False, from_files=False)
        for req_id in self.live():
            self.answers[req_id].spoiled = True

    def forget_device(self) -> bool:
        """Empty the device's prefix cache alone, so that prompts come from other tiers."""
        return bool(self.scheduler.reset_prefix_cache(False, False))

    def pause(self) -> None:
        """Schedule nothing more."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def resume(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def close(self) -> None:
        """Stop all threads. Idempotent."""
        for gate in (self.faults.copy_gate, self.faults.store_gate, self.faults.read_gate):
            gate.open()
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
