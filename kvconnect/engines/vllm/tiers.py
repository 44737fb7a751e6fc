"""The tiers below host memory in vLLM's scheduler: its calls turned into events of their plan."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.keys import scope_of, seed_of, tenant_of
from kvconnect.cache.model_identity import model_name
from kvconnect.cache.record_format import page_names
from kvconnect.config import Config
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.translate import is_of_tokens
from kvconnect.errors import Incompatible
from kvconnect.offload.index import HostIndex
from kvconnect.offload.jobs import SettledJob
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import (
    LookupRequest,
    LookupResult,
    PrefetchDecision,
    Promoted,
    TierLimits,
    TierPlan,
)
from kvconnect.tiers.cost_model import CostModel, LoadReason, TierSegment
from kvconnect.tiers.messages import TierAnswer, TierInstructions
from kvconnect.types import Tier

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_SHARE = 0.25  # of the host tier may be pinned by write-backs, and as much by prefetches
_STEPS = 8  # under way at a time, by far


class _Step(NamedTuple):
    """When a step began, the prompt tokens it computes, and the mean of those before each."""

    began: float
    tokens: int
    context: float


class TierScheduler:
    """Owned by the scheduler's thread. ``slot_bytes`` are those of a block over all workers."""

    def __init__(
        self,
        config: Config,
        groups: Sequence[CacheGroup],
        index: HostIndex,
        stats: OffloadingConnectorStats,
        sizes: tuple[int, int],
    ) -> None:
        workers, self._slot_bytes = sizes
        limits = TierLimits(
            workers=workers,
            deadline_s=config.deadline_s,
            wait_s=config.tiers.wait_s,
            slots=max(1, int(len(index.slots) * _SHARE)),
            reused=config.tiers.spill == "reused",
        )
        self._stats = stats
        self._index = index
        self._groups = tuple(groups)
        decides = config.tiers.load_when == "faster"
        self._cost = CostModel(groups[0].block_tokens) if decides else None
        self._names = BlockNames(groups)
        self._keys: dict[tuple[int, bytes], bytes] = {}  # of blocks that are being stored
        self._steps: deque[_Step] = deque(maxlen=_STEPS)
        self._ended = 0.0  # when the last step did
        self.plan = TierPlan(index, groups, stats, limits, self._choose, self._fetched)

    def ask(
        self,
        request: Request,
        hashes: Sequence[Sequence[bytes]],
        tokens: tuple[int, int],
        now: float,
    ) -> bool:
        """Whether a request that could use tokens [start, end) should ask again later."""
        wanted = self._names.wanted(request, hashes, tokens)
        return self.plan.lookup(request.request_id, wanted, now)

    def admitted(
        self, request: Request, hashes: Sequence[Sequence[bytes]], tokens: tuple[int, int]
    ) -> dict[Tier, int]:
        """A request was given device blocks, and its load of tokens [start, end) is planned; return
        how many of them came from below, by tier."""
        if self.plan.write_backs.reused:
            wanted = self._names.wanted(request, hashes, tokens)
            for number, row in wanted.rows(self._groups):
                for slot in self._index.ready_slots(number, row):
                    key = wanted.key(number, self._index.hash_of(slot))
                    self.plan.write_backs.loaded(number, slot, key)
        return self.plan.on_load_planned(request.request_id)

    def name(
        self, request: Request, hashes: Sequence[Sequence[bytes]], new: Sequence[tuple[int, int]]
    ) -> None:
        """Blocks (group, number) of a request are being stored in the host tier."""
        if new:
            wanted = self._names.wanted(request, hashes, (0, 0))
            blocks = [(group, hashes[group][block]) for group, block in new]
            self._keys.update((block, wanted.key(*block)) for block in blocks)

    def settled(self, settled: SettledJob) -> None:
        """A job of the host tier ended."""
        for block in settled.stored:
            key = self._keys.pop(block, None)
            if key is not None:
                self.plan.write_backs.stored(*block, key)
        for block in settled.dropped:
            self._keys.pop(block, None)

    def forget(self, req_id: str) -> None:
        """The request is over."""
        self._names.forget(req_id)
        self.plan.forget(req_id)

    def take(self, output: SchedulerOutput, now: float) -> TierInstructions:
        """Return this step's instructions for the workers."""
        if self._cost is not None:
            self._steps.append(_Step(now, *_prompt_tokens(output)))
        return self.plan.take(now)

    def on_answers(self, answers: Iterable[TierAnswer], now: float) -> list[Promoted]:
        """Take the workers' answers at the end of a step, and learn what it took. Return which
        blocks the host tier has now."""
        if self._cost is not None and self._steps:
            began, tokens, context = self._steps.popleft()
            self._cost.prefilled(tokens, now - max(began, self._ended), context)
        self._ended = now
        found = (self.plan.on_answer(answer, now) for answer in answers)
        return [came for came in found if came is not None]

    def reset(self) -> None:
        """Weights may be others from now on: what is stored goes by names nobody else knows."""
        self._names.reset(os.urandom(16))
        self._keys.clear()
        self.plan.reset()

    def gauges(self) -> Iterator[tuple[str, float, str | None]]:
        """Yield (name, value, label) of what is going on."""
        return self.plan.gauges()

    def _choose(self, offer: LookupResult) -> PrefetchDecision:
        """Weigh bringing blocks up against computing them."""
        if self._cost is None:
            self._stats.count("tier_decisions", label=LoadReason.LOAD.value)
            return PrefetchDecision(len(offer.tiers))
        segments = [
            TierSegment(tier, count * offer.block_tokens, count * self._slot_bytes)
            for tier, same in groupby(offer.tiers)
            if (count := len(list(same)))
        ]
        choice = self._cost.choose(offer.tokens, offer.context, segments)
        self._stats.count("tier_decisions", label=choice.reason.value)
        return PrefetchDecision(choice.tokens // offer.block_tokens, choice.give_up_s)

    def _fetched(self, tier: Tier, blocks: int, seconds: float) -> None:
        if self._cost is not None:
            self._cost.loaded(tier, blocks * self._slot_bytes, seconds)


def _prompt_tokens(output: SchedulerOutput) -> tuple[int, float]:
    """Return the prompt tokens of a step, and how many tokens are before each on average."""
    tokens, context = 0, 0.0
    for req_id, end in translate.computed_tokens(output):
        count = output.num_scheduled_tokens[req_id]
        if count > 1:  # others decode
            tokens += count
            context += count * (end - count / 2)
    return tokens, context / tokens if tokens else 0.0


# What vLLM's blocks are called below the host tier: by their tokens, so that others find them.


MOST_ADAPTERS = 4096  # remembered; far more than an engine has loaded
_NONE: Mapping[bytes, bytes] = MappingProxyType({})


def named_by_tokens(groups: Sequence[CacheGroup]) -> bool:
    """Whether blocks go by their tokens: where there is one size of them. Others, and prompts with
    images or embeddings, go by vLLM's hashes."""
    return len(groups) == 1 and groups[0].is_full


class BlockNames:
    """Names of live requests' blocks. Owned by the scheduler's thread."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._tokens = groups[0].block_tokens if named_by_tokens(groups) else 0
        self._prefixes: dict[str, bytes] = {}
        self._names: dict[str, dict[bytes, bytes]] = {}
        # What tells them apart, by name, number and path: vLLM numbers what it loads anew.
        # Only those used last. The files of one that was forgotten may be others by now than those
        # that were loaded, so from then on its blocks are for this engine alone.
        self._forgotten = 0  # the highest number of one
        self._adapters: OrderedDict[tuple[str, int, str], bytes] = OrderedDict()
        self._generation = b""

    def wanted(
        self, request: Request, hashes: Sequence[Sequence[bytes]], tokens: tuple[int, int]
    ) -> LookupRequest:
        """Return what a request could use of its tokens [start, end)."""
        return LookupRequest(
            hashes, *tokens, self._prefix(request), self._chain(request, hashes[0])
        )

    def forget(self, req_id: str) -> None:
        """The request is over."""
        self._prefixes.pop(req_id, None)
        self._names.pop(req_id, None)

    def reset(self, generation: bytes) -> None:
        """Blocks have names of another ``generation`` from now on."""
        self._generation = generation
        self._prefixes.clear()

    def _prefix(self, request: Request) -> bytes:
        """Return tenant and scope of a request, which its keys begin with."""
        known = self._prefixes.get(request.request_id)
        if known is None:
            lora = request.lora_request
            adapter = self._adapter(lora) if lora else b""
            known = tenant_of(request.cache_salt or "") + scope_of(adapter, self._generation)
            self._prefixes[request.request_id] = known
        return known

    def _adapter(self, lora: LoRARequest) -> bytes:
        """Return what tells an adapter from others: its files. Without any that can be read, it is
        told from all that other engines have."""
        loaded = lora.lora_name, lora.lora_int_id, lora.lora_path
        known = self._adapters.get(loaded)
        if known is None:
            try:
                if lora.lora_int_id <= self._forgotten:
                    raise Incompatible("it was not used for long")
                known = model_name(lora.lora_path, None, {}, "adapter_config.json").encode()
            except (Incompatible, OSError) as error:
                logger.warning("blocks of adapter %s are for this engine alone: %s", loaded, error)
                known = os.urandom(16)
            self._adapters[loaded] = known
            if len(self._adapters) > MOST_ADAPTERS:
                (_, number, _), _ = self._adapters.popitem(last=False)
                self._forgotten = max(self._forgotten, number)
        self._adapters.move_to_end(loaded)
        return known

    def _chain(self, request: Request, hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the names of a request's full blocks, by vLLM's hash."""
        if not self._tokens or request.mm_features or not is_of_tokens(request):
            return _NONE
        known = self._names.setdefault(request.request_id, {})
        done = len(known)
        if done < len(hashes):
            if done and hashes[done - 1] not in known:  # it has other tokens now
                known.clear()
                done = 0
            parent = known[hashes[done - 1]] if done else seed_of(request.cache_salt or "")
            tokens = request.all_token_ids[done * self._tokens : len(hashes) * self._tokens]
            known.update(zip(hashes[done:], page_names(tokens, self._tokens, parent), strict=True))
        return known
