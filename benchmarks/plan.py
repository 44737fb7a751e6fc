"""The scheduler's part: look up, insert, evict, plan a step, count.

    python -m benchmarks.plan

**Index.** KVConnect's index and vLLM's own CPU offload manager, with the same million blocks. Each
is filled with blocks of no further use, in pieces of 1 to 128, which are then all evicted by
prompts of 8,192 blocks: stored 128 at a time (one prefill step of 2k tokens), eight prompts
together. So slots and memory are as scattered as in a tier that has been in use. Lookups
alternate between the two, each of another prompt, so that neither finds its entries in the CPU's
nearest caches. A request's block hashes are new ``bytes`` objects, made when it arrives, equal to
the stored ones but not the same, and not hashed by Python yet; it is looked up once or twice. The
headline ``lookup_8192_ms`` is that first lookup, and the first of its prompt; ``_again`` is the
second. vLLM's manager is given its keys ready-made, which its scheduler makes of the hashes, and
is timed for its ``lookup`` calls alone. ``_scattered`` looks up blocks of many prompts in a row,
which no request does: a bound for a tier whose order was lost.

**Step.** The real connector plans decode steps of 256 requests with 2k tokens each, in blocks of
16; in every step one request in 16 fills a block, and the full tier evicts one for it.

**Stats.** One ``record_transfer``, and the largest payload an interval can have.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvconnect.engines.vllm
from benchmarks.common import emit, interleave, medians, progress, timed
from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.messages import StepInstructions, StepReports, WorkerHello
from kvconnect.engines.vllm.stats import KVConnectStats
from kvconnect.observability.metrics.catalog import CATALOG
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.messages import JobReport
from kvconnect.offload.planner import OffloadLimits, OffloadPlan
from kvconnect.stats import GAUGES, HISTOGRAMS
from kvconnect.types import TransferType
from tests.engines.models import model_dir

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 8192
PROMPTS = 123
SLOTS = PROMPTS * PROMPT_BLOCKS  # 1,007,616
PIECE = 128
TOGETHER = 8
RUNNING = 256
HASH_BYTES = 32
INTERVAL = 100_000  # operations between two reports


class Prompts:
    """Block hashes of many prompts; every call makes new objects."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._blobs = [self._random.randbytes(PROMPT_BLOCKS * HASH_BYTES) for _ in range(PROMPTS)]

    def piece(self, prompt: int, start: int, stop: int) -> list[bytes]:
        blob, size = self._blobs[prompt], HASH_BYTES
        return [blob[size * i : size * (i + 1)] for i in range(start, stop)]

    def whole(self, prompt: int) -> list[bytes]:
        return self.piece(prompt, 0, PROMPT_BLOCKS)

    def scattered(self) -> list[bytes]:
        """As many blocks as a prompt has, from anywhere: the worst case for the caches."""
        picks = ((self._random.randrange(PROMPTS), b) for b in range(PROMPT_BLOCKS))
        return [self.piece(prompt, block, block + 1)[0] for prompt, block in picks]

    def unknown(self, count: int) -> list[bytes]:
        return [self._random.randbytes(HASH_BYTES) for _ in range(count)]

    def filler(self) -> Iterator[list[bytes]]:
        """As many other blocks as there are slots, in pieces as decoding and prefill store them."""
        left = SLOTS
        while left:
            count = min(left, self._random.choice((1, PIECE, self._random.randint(1, PIECE))))
            left -= count
            yield self.unknown(count)

    def pieces(self) -> Iterator[list[bytes]]:
        """Every block once, in the order in which an engine would store them."""
        for first in range(0, PROMPTS, TOGETHER):
            for start in range(0, PROMPT_BLOCKS, PIECE):
                for prompt in range(first, min(first + TOGETHER, PROMPTS)):
                    yield self.piece(prompt, start, start + PIECE)


class Ours:
    """KVConnect's plan over one full-attention group."""

    def __init__(self) -> None:
        self.index = HostIndex(SLOTS, 1, make_policy("lru", SLOTS))
        limits = OffloadLimits(workers=1, deadline_s=30.0, held_blocks=SLOTS)
        self.plan = OffloadPlan([CacheGroup(BLOCK_TOKENS)], self.index, KVConnectStats(), limits)
        self.plan.add_request("request")

    def store(self, hashes: Sequence[bytes]) -> None:
        slots = (self.index.reserve(0, block_hash) for block_hash in hashes)
        self.index.commit(array("q", (slot for slot in slots if slot is not None)))  # as in a job
        self.plan.take_removed()

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return the leading blocks found."""
        tokens = self.plan.match("request", (hashes,), 0, len(hashes) * BLOCK_TOKENS)
        return tokens // BLOCK_TOKENS


class Theirs:
    """vLLM's manager, called as its scheduler calls it."""

    def __init__(self) -> None:
        self.manager = CPUOffloadingManager(SLOTS)

    def store(self, hashes: Sequence[bytes]) -> None:
        context = self._context()
        output = self.manager.prepare_store(offload_keys(hashes), context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)

    def match(self, keys: Sequence[OffloadKey]) -> int:
        """Return the leading blocks found, given their keys."""
        context, hits = self._context(), 0
        for key in keys:
            if self.manager.lookup(key, context) is not LookupResult.HIT:
                break
            hits += 1
        return hits

    def _context(self) -> ReqContext:
        context = ReqContext(req_id="request")
        self.manager.on_new_request(context)
        return context


def offload_keys(hashes: Sequence[bytes]) -> list[OffloadKey]:
    """Return vLLM's keys, which its scheduler makes of a request's hashes."""
    return [make_offload_key(block_hash, 0) for block_hash in hashes]


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def populate(side: Ours | Theirs, prompts: Prompts) -> dict[str, float]:
    """Fill a tier, then replace all of it by the prompts; return seconds per block of either."""
    seconds = sum(timed(partial(side.store, piece)) for piece in prompts.filler())
    pieces = [timed(partial(side.store, piece)) for piece in prompts.pieces()]
    return {"insert": seconds / SLOTS, "insert_evict": sum(pieces) / SLOTS}


def check_lookups(ours: Ours, theirs: Theirs, prompts: Prompts) -> None:
    """Both find whole prompts, and stop at the same block when one is missing."""
    hashes = prompts.whole(7)
    if (ours.match(hashes), theirs.match(offload_keys(hashes))) != (PROMPT_BLOCKS, PROMPT_BLOCKS):
        raise SystemExit("a stored prompt was not found")
    missing = PROMPT_BLOCKS // 2
    hashes[missing] = prompts.unknown(1)[0]
    if (ours.match(hashes), theirs.match(offload_keys(hashes))) != (missing, missing):
        raise SystemExit("a block that was never stored was found")


def race(
    ours: Ours, theirs: Theirs, draw: Callable[[int], list[bytes]], rounds: int
) -> dict[str, list[float]]:
    """Look up new hashes in turn, each twice, and return the seconds."""
    samples: dict[str, list[float]] = {k: [] for k in ("ours", "ours2", "theirs", "theirs2")}
    for number in range(rounds):
        hashes = draw(2 * number)
        for name in ("ours", "ours2"):
            samples[name].append(timed(lambda: ours.match(hashes)))  # noqa: B023
        keys = offload_keys(draw(2 * number + 1))
        for name in ("theirs", "theirs2"):
            samples[name].append(timed(lambda: theirs.match(keys)))  # noqa: B023
    return samples


def measure_index(seed: int, rounds: int) -> dict[str, float]:
    prompts = Prompts(seed)
    progress(f"filling KVConnect's index, then vLLM's manager, twice with {SLOTS} blocks")
    empty = resident_bytes()
    ours = Ours()
    mine, size = populate(ours, prompts), resident_bytes() - empty
    theirs = Theirs()
    other, their_size = populate(theirs, prompts), resident_bytes() - empty - size
    if ours.index.evictions != SLOTS:
        raise SystemExit(f"{ours.index.evictions} evictions, expected {SLOTS}")
    ours.plan.check()
    progress(f"{rounds} rounds of lookups")
    first = medians(race(ours, theirs, prompts.whole, rounds))
    scattered = medians(race(ours, theirs, lambda _: prompts.scattered(), rounds))
    check_lookups(ours, theirs, prompts)
    return {
        "lookup_8192_ms": first["ours"] * 1e3,
        "lookup_vs_vllm": first["theirs"] / first["ours"],
        "lookup_8192_again_ms": first["ours2"] * 1e3,
        "lookup_vs_vllm_again": first["theirs2"] / first["ours2"],
        "lookup_8192_scattered_ms": scattered["ours"] * 1e3,
        "lookup_vs_vllm_scattered": scattered["theirs"] / scattered["ours"],
        "bytes_per_block": size / SLOTS,
        "bytes_per_block_vllm": their_size / SLOTS,
        "insert_us": mine["insert"] * 1e6,
        "insert_vs_vllm": other["insert"] / mine["insert"],
        "insert_evict_us": mine["insert_evict"] * 1e6,
        "insert_evict_vs_vllm": other["insert_evict"] / mine["insert_evict"],
    }


class Decoding:
    """The connector's scheduler role, and what vLLM's scheduler does around it."""

    def __init__(self, seed: int) -> None:
        kvconnect.engines.vllm.register()
        init_none_hash(sha256)
        self._random = random.Random(seed)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        blocks = RUNNING * 2 * PIECE
        spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            hash_block_size=BLOCK_TOKENS,
        )
        config = VllmConfig(
            model_config=ModelConfig(str(model_dir("llama"))),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS),
            kv_transfer_config=KVTransferConfig(kv_connector="KVConnect", kv_role="kv_both"),
        )
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.connector = KVConnect(config, KVConnectorRole.SCHEDULER, cache)
        self.connector.bind_gpu_block_pool(self.pool)
        # As many slots as the prompts take: the tier is full when decoding starts.
        hello = WorkerHello(num_slots=RUNNING * (PIECE - 1), slot_bytes=1 << 20)
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): hello})
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.requests = [self._admit(number) for number in range(RUNNING)]

    def decode(self) -> SchedulerOutput:
        """Return the next step: one more token for each request."""
        before = [request.num_tokens for request in self.requests]
        for request in self.requests:
            if request.num_tokens % BLOCK_TOKENS == 0:
                self.tables[request.request_id] += self.pool.get_new_blocks(1)
            request.append_output_token_ids(self._random.randrange(1000))
        cached = CachedRequestData.make_empty()
        cached.req_ids = [request.request_id for request in self.requests]
        cached.num_computed_tokens = before
        cached.new_block_ids = [None] * RUNNING
        return self._output([], cached, dict.fromkeys(cached.req_ids, 1))

    def plan(self, output: SchedulerOutput) -> StepInstructions:
        meta = self.connector.build_connector_meta(output)
        assert isinstance(meta, StepInstructions)
        return meta

    def answer(self, meta: StepInstructions) -> None:
        """Report all of a step's stores done, as its worker would."""
        reports = StepReports([JobReport(store.job) for store in meta.offload.stores])
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports))

    def _admit(self, number: int) -> Request:
        """Run one request's prefill; of 16 requests in a row, one fills a block per step."""
        length = PIECE * BLOCK_TOKENS - number % BLOCK_TOKENS
        prompt = [self._random.randrange(1000) for _ in range(length)]
        request = Request(
            f"request-{number}", prompt, SamplingParams(), None, block_hasher=self._hasher
        )
        self.connector.on_new_request(request)
        self.tables[request.request_id] = self.pool.get_new_blocks(PIECE)
        new = NewRequestData.from_request(request, self._block_ids(request.request_id))
        output = self._output([new], CachedRequestData.make_empty(), {request.request_id: length})
        self.answer(self.plan(output))
        return request

    def _output(
        self, new: list[NewRequestData], cached: CachedRequestData, scheduled: dict[str, int]
    ) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, cached
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.kv_connector_block_state = KVConnectorBlockState(
            set(scheduled), self._block_ids, boundary_state_offloads={}
        )
        return output

    def _block_ids(self, req_id: str) -> tuple[list[int], ...]:
        return ([block.block_id for block in self.tables[req_id]],)


def measure_steps(seed: int, steps: int) -> dict[str, float]:
    progress(f"prefill of {RUNNING} requests, then {steps} decode steps")
    decoding = Decoding(seed)
    gc.collect()
    gc.freeze()  # as vLLM's engine core does once it is up
    samples: dict[str, list[float]] = {"plan": [], "answer": [], "stats": []}
    stored = 0
    for _ in range(steps):
        output, metas = decoding.decode(), []
        samples["plan"].append(timed(lambda: metas.append(decoding.plan(output))))  # noqa: B023
        stored += sum(len(p.slots) for store in metas[0].offload.stores for p in store.parts)
        samples["answer"].append(timed(lambda: decoding.answer(metas[0])))  # noqa: B023
        samples["stats"].append(timed(decoding.connector.get_kv_connector_stats))
    gc.unfreeze()
    if stored != steps * RUNNING // BLOCK_TOKENS:
        raise SystemExit(f"{stored} blocks stored in {steps} steps")
    seconds = medians(samples)
    return {
        "build_meta_256_us": seconds["plan"] * 1e6,
        "take_reports_256_us": seconds["answer"] * 1e6,
        "take_stats_us": seconds["stats"] * 1e6,
    }


def full_interval(operations: int, seed: int) -> KVConnectStats:
    """Return an interval in which everything happened that the catalogue knows, often."""
    draw, stats = random.Random(seed), KVConnectStats()
    for _ in range(operations):
        kind = draw.choice(list(TransferType)).value
        stats.record_transfer(kind, int(10 ** draw.uniform(3, 12)), 10 ** draw.uniform(-6, 3))
    for metric in CATALOG:
        for label in metric.label.values if metric.label else (None,):
            if metric.section == GAUGES:
                stats.gauge(metric.recorded_as, draw.randrange(10**12), label)
            elif metric.section != HISTOGRAMS:
                stats.count(metric.recorded_as, draw.randrange(1, 10**12), label)
            elif metric.name.startswith(("load_", "handoff_")):  # others come with transfers
                for _ in range(operations // 100):
                    stats.observe(metric.recorded_as, 10 ** draw.uniform(-6, 3), label)
    return stats


def measure_stats(seed: int, rounds: int) -> dict[str, float]:
    progress("recording operations")
    draw, stats, calls = random.Random(seed), KVConnectStats(), 10_000
    operations = [(draw.randrange(1, 10**9), draw.random()) for _ in range(calls)]

    def record() -> None:
        for nbytes, seconds in operations:
            stats.record_transfer("GPU_to_CPU", nbytes, seconds)

    seconds = medians(interleave({"record": record}, rounds))["record"]
    interval = full_interval(INTERVAL, seed)
    sizes = (len(pickle.dumps(interval)), len(msgspec.msgpack.encode(interval.data)))
    return {
        "stats_record_us": seconds / calls * 1e6,
        "stats_payload_bytes": max(sizes),
        "stats_payload_msgpack_bytes": sizes[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = measure_index(options.seed, options.rounds)
    figures |= measure_steps(options.seed, steps=6 * BLOCK_TOKENS)
    figures |= measure_stats(options.seed, options.rounds)
    emit("plan", figures)


if __name__ == "__main__":
    main()
