"""A model that computes nothing: it writes each token's fingerprint where its KV belongs, and
checks the fingerprints that attention and states would read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, SlidingWindowSpec

from tests.schedulers.contents import GARBAGE, KnownText, next_token, tag
from tests.schedulers.shapes import HEADS, LAYERS, ROW, EngineShape

Tables = Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Wrong:
    """KV that a request reads and that is not its own."""

    req_id: str
    rank: int
    layer: int
    block: int
    block_id: int
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        where = f"rank {self.rank}, layer {self.layer}, block {self.block} (id {self.block_id})"
        return f"{self.req_id} reads KV that is not its own: {where}, tokens {list(self.tokens)}"


@dataclass(frozen=True)
class Work:
    """A request in a step: it computes tokens [start, start + count), of which the ones from
    ``known`` on are drafts that will be rejected."""

    req_id: str
    start: int
    count: int
    known: int
    prints: Sequence[int]
    tables: Sequence[Sequence[int]]


@dataclass
class Batch:
    """A step's work, and the drafts that the model accepts, by request."""

    work: list[Work]
    accepted: dict[str, list[int]]


class Model:
    """The model of an engine, on all of its ranks. ``weights`` is part of every fingerprint."""

    def __init__(self, shape: EngineShape, cache: KVCacheConfig, random: Random) -> None:
        self.weights: object = "first"
        self.texts: dict[str, KnownText] = {}
        self.exempt: set[str] = set()  # requests whose KV may be of two kinds of weights
        self._shape, self._random = shape, random
        groups = cache.kv_cache_groups
        self._groups = {layer: n for n, group in enumerate(groups) for layer in group.layer_names}
        self._specs = [group.kv_cache_spec for group in groups]
        self._state_blocks: dict[tuple[str, int], int] = {}
        layers = len(LAYERS) if shape.kind == "full" else 1
        size = (layers, shape.blocks, shape.heads, shape.block_tokens, ROW)
        self.memory = [torch.zeros(size, dtype=torch.float32) for _ in range(shape.tp)]
        self._ints = [memory.view(torch.int32).numpy() for memory in self.memory]

    def views(self, rank: int) -> dict[str, torch.Tensor]:
        """Return a rank's KV cache by layer. States have one row for each block."""
        memory = self.memory[rank]
        found = {layer: memory[n % len(memory)] for n, layer in enumerate(LAYERS)}
        for layer, group in self._groups.items():
            if isinstance(self._specs[group], MambaSpec):
                found[layer] = found[layer].reshape(self._shape.blocks, 1, -1)
        return found

    def prepare(self, output: SchedulerOutput, tables: Tables, tokens: Mapping[str, Any]) -> Batch:
        """Take a step's news of requests. ``tokens``: all tokens of requests that the scheduler
        knows exactly; the model remembers those of the others itself."""
        for new in output.scheduled_new_reqs:
            self.texts[new.req_id].tokens = self._prompt(new)
            self._forget_state(new.req_id)
        cached = output.scheduled_cached_reqs
        for req_id in cached.resumed_req_ids:
            self._align(req_id, cached.all_token_ids[req_id])
            self._forget_state(req_id)
        for req_id in (*(output.preempted_req_ids or ()), *output.finished_req_ids):
            self._forget_state(req_id)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        batch = Batch([], {})
        for req_id, count in output.num_scheduled_tokens.items():
            if req_id in tokens:
                self._align(req_id, tokens[req_id])
            drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            known = self.texts[req_id].tokens
            # Overlapping steps count drafts that the step before rejects.
            start = min(starts[req_id], len(known) - 1)
            batch.accepted[req_id] = self._accept(req_id, start + count - drafts, drafts)
            prints = self.texts[req_id].fingerprints(self.weights)
            batch.work.append(Work(req_id, start, count, len(known), prints, tables[req_id]))
        return batch

    def _prompt(self, new: NewRequestData) -> list[int]:
        known = self.texts[new.req_id].tokens
        if new.prompt_token_ids is None:  # embeddings
            return known
        return list(new.prompt_token_ids)

    def _align(self, req_id: str, tokens: Sequence[int]) -> None:
        """Take a request's tokens from the scheduler, whose embeddings are zeros."""
        known = self.texts[req_id]
        known.tokens = [own or given for own, given in _pairs(known.tokens, tokens)]

    def _accept(self, req_id: str, end: int, drafts: int) -> list[int]:
        """Accept some of the drafts of a request whose last token is reached."""
        known, accepted = self.texts[req_id], list[int]()
        if drafts and end >= len(known.tokens):
            for _ in range(self._random.randrange(drafts + 1)):
                accepted.append(next_token(known.fingerprints(self.weights)[-1]))
                known.tokens.append(accepted[-1])
        return accepted

    def sample(self, batch: Batch) -> dict[str, list[int]]:
        """Return the tokens that a step yields, by request."""
        sampled = {}
        for work in batch.work:
            if work.start + work.count >= work.known:
                token = next_token(work.prints[work.known])
                self.texts[work.req_id].tokens.append(token)
                sampled[work.req_id] = [*batch.accepted[work.req_id], token]
        return sampled

    def clean(self, rank: int, output: SchedulerOutput) -> None:
        """Do what a step does with blocks before anything is loaded or computed."""
        memory = self._ints[rank]
        for block_id in output.new_block_ids_to_zero or ():
            memory[:, block_id] = 0
        for copy in output.kv_cache_block_copies or ():
            memory[:, copy.dst_block_id] = memory[:, copy.src_block_id]

    def run_layer(self, rank: int, layer: int, batch: Batch) -> Iterator[Wrong]:
        """Write a layer's KV of a step, then read what its attention reads."""
        group = self._groups[LAYERS[layer]]
        spec = self._specs[group]
        memory = self._ints[rank][layer % len(self._ints[rank])]
        if isinstance(spec, MambaSpec):
            for work in batch.work:
                yield from self._run_state(work, rank, layer, memory)
            return
        for work in batch.work:
            self._write(work, rank, layer, memory)
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        for work in batch.work:
            first = max(0, work.start - window + 1) if window else 0
            yield from self._read(work, (first, rank), layer, memory)

    def _tags(self, rank: int, layer: int) -> Any:
        first, heads = rank * HEADS // self._shape.tp, self._shape.heads
        return np.array([tag(layer, first + head) for head in range(heads)], dtype=np.int32)

    def _write(self, work: Work, rank: int, layer: int, memory: Any) -> None:
        table = work.tables[self._groups[LAYERS[layer]]]
        size, tags = self._shape.block_tokens, self._tags(rank, layer)
        for token in range(work.start, work.start + work.count):
            if token // size >= len(table):
                continue
            own = token < work.known
            written = work.prints[token + 1] ^ tags if own else GARBAGE + token
            memory[table[token // size], :, token % size] = np.reshape(written, (-1, 1))

    def _read(self, work: Work, where: tuple[int, int], layer: int, memory: Any) -> Iterator[Wrong]:
        first, rank = where
        table = work.tables[self._groups[LAYERS[layer]]]
        size, tags = self._shape.block_tokens, self._tags(rank, layer)
        for block in range(first // size, -(-work.start // size)):
            begin, end = max(first, block * size), min(work.start, (block + 1) * size)
            if begin >= end:
                continue
            own = np.array(work.prints[begin + 1 : end + 1], dtype=np.int32)
            there = memory[table[block], :, begin - block * size : end - block * size]
            same = (there == (own[None, :] ^ tags[:, None])[:, :, None]).all(axis=(0, 2))
            if table[block] == 0 or not same.all():
                tokens = tuple(int(n) + begin for n in np.flatnonzero(~same))
                yield Wrong(work.req_id, rank, layer, block, table[block], tokens)

    def _run_state(self, work: Work, rank: int, layer: int, memory: Any) -> Iterator[Wrong]:
        """Read the state before a step's tokens, and write the one after them: in the block of the
        last token, as vLLM's mode ``align`` does."""
        table, size = work.tables[self._groups[LAYERS[layer]]], self._shape.block_tokens
        before = self._state_blocks.get((work.req_id, rank), (work.start - 1) // size)
        after = -(-(work.start + work.count) // size) - 1
        own = tag(layer, rank)
        if work.start and (
            table[before] == 0 or not (memory[table[before]] == work.prints[work.start] ^ own).all()
        ):
            yield Wrong(work.req_id, rank, layer, before, table[before], (work.start,))
        end = min(work.start + work.count, work.known)
        memory[table[after]] = work.prints[end] ^ own
        self._state_blocks[work.req_id, rank] = after

    def _forget_state(self, req_id: str) -> None:
        for rank in range(self._shape.tp):
            self._state_blocks.pop((req_id, rank), None)


def _pairs(known: Sequence[int], tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each of ``tokens`` with what takes its place: the number of an embedding, or 0."""
    for n, token in enumerate(tokens):
        yield (known[n] if not token and n < len(known) else 0), token
