"""Applies the hints of requests to their blocks in the host tier.

Owned by the scheduler's thread. Time is an argument, as in :mod:`kvconnect.offload.planner`. The
blocks of a prompt are kept as soon as they are readable, and counted when the request has ended:
then its times begin. ``demote`` and ``drop`` wait for the end of the request, which may read the
blocks. A block whose store is in flight then follows when the store ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvconnect.cache.groups import CacheGroup
from kvconnect.offload.hints.outcomes import MISSING, PENDING, RELEASED, HintOutcomes
from kvconnect.offload.index import HostIndex
from kvconnect.offload.retention import KeepOutcome, KeepTimes
from kvconnect.protocol.cache_hints import CacheHint, HintsRead, PromptHints
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Block

KEPT = (CacheHint.PIN, CacheHint.RETAIN)

WrittenFirst = Callable[[Collection[int]], Collection[int]]
"""Returns which of the slots to demote are to be written to a secondary tier first."""


def no_slots(_slots: Collection[int]) -> Collection[int]:
    """Return none: there is no secondary tier to write to."""
    return ()


@dataclass(eq=False)
class _HintedPrompt:
    """The hints of a request, and its prompt's blocks in prefix order."""

    hints: PromptHints
    tenant: bytes
    blocks: tuple[Block, ...]
    ended: float | None = None  # when the request ended

    def keep(self, now: float) -> KeepTimes:
        """Return how long to keep a block that is readable since ``now``."""
        start, hints = now if self.ended is None else self.ended, self.hints
        pinned_until = start + hints.pin_s if hints.pin_s else 0.0
        return KeepTimes(
            self.tenant, pinned_until, start + hints.retain_s if hints.retain_s else 0.0
        )


class HintPlan:
    """Hints of one engine.

    Blocks to demote that are written to a secondary tier first are demoted in :meth:`written`.

    Attributes:
        outcomes: counts what became of blocks, also of those that secondary tiers remove.
    """

    def __init__(
        self, index: HostIndex, groups: Sequence[CacheGroup], stats: OffloadingConnectorStats
    ) -> None:
        self.outcomes = HintOutcomes(stats)
        self._index = index
        self._groups = groups
        self._stats = stats
        self._prompts: dict[str, _HintedPrompt] = {}
        self._prefetches: dict[str, int] = {}  # tokens to prefetch, by request
        self._waiting: dict[Block, _HintedPrompt] = {}  # blocks that are not readable yet
        self._demoting: dict[int, Block] = {}  # blocks to demote, by slot

    def add(
        self,
        req_id: str,
        read: HintsRead,
        tenant: bytes,
        hashes: Sequence[Sequence[bytes]],
        prompt_tokens: int,
        now: float,
    ) -> None:
        """Take the hints of a new request. ``hashes`` are those of its blocks, by group."""
        for ignored in read.ignored:
            self._stats.count("ignored_cache_hints", label=ignored.value)
        hints = read.hints
        if hints is None:
            return
        for hint in hints.hints:
            self._stats.count("cache_hints", label=hint.value)
        tokens = min(prompt_tokens, hints.tokens or prompt_tokens)
        if hints.prefetch:
            self._prefetches[req_id] = tokens
        if hints.hints == (CacheHint.PREFETCH,):
            return
        prompt = _HintedPrompt(hints, tenant, _blocks_within(self._groups, hashes, tokens))
        self._prompts[req_id] = prompt
        if hints.release is None:
            found = self._apply(prompt, prompt.blocks, now)
            missing = (block for block in prompt.blocks if block not in found)
            self._waiting.update(dict.fromkeys(missing, prompt))

    def prefetch_tokens(self, req_id: str) -> int:
        """Return how many tokens of its prompt a request wants loaded at any cost."""
        return self._prefetches.get(req_id, 0)

    def released(self, req_id: str) -> tuple[CacheHint | None, Sequence[Block]]:
        """Return whether a request demotes or drops blocks when it ends, and which."""
        prompt = self._prompts.get(req_id)
        return (None, ()) if prompt is None else (prompt.hints.release, prompt.blocks)

    def absent(self, block: Block) -> str | None:
        """Return the outcome of a block that is about to be dropped if no secondary tier has it;
        None for a block that is being stored: the end of its store counts it."""
        if self._slot_of(block) is not None:
            return RELEASED[CacheHint.DROP]
        return None if self._index.has(block.group, block.block_hash) else MISSING

    def finish(
        self,
        req_id: str,
        now: float,
        removing: bool = False,
        written_first: WrittenFirst = no_slots,
    ) -> dict[str, int] | None:
        """End a request. Return how many blocks had which outcome; None if it had no hints but
        ``prefetch``.

        ``pending`` blocks are being stored; ``missing`` ones are not in host memory. ``removing``:
        secondary tiers remove the blocks too. Then those that are not in host memory are pending,
        and who removes them counts all that are not being stored.
        """
        self._prefetches.pop(req_id, None)
        prompt = self._prompts.pop(req_id, None)
        if prompt is None:
            return None
        prompt.ended = now
        self.expire(now)
        found = self._apply(prompt, prompt.blocks, now, written_first)
        outcomes = Counter(found.values())
        for block in prompt.blocks:
            if block in found:
                self._forget(prompt, block)
            elif self._index.has(block.group, block.block_hash):
                self._waiting[block] = prompt
                outcomes[PENDING] += 1
            else:
                self._forget(prompt, block)
                outcomes[MISSING] += 1
        if removing:
            outcomes[PENDING] += outcomes.pop(MISSING, 0)
        else:
            self.outcomes.count(outcomes)
        return dict(+outcomes)

    def written(self, slots: Iterable[int]) -> None:
        """Demote the blocks that were to be written to a secondary tier first: that has ended."""
        found = ((slot, self._demoting.pop(slot, None)) for slot in slots)
        self._index.policy.demote(
            [slot for slot, block in found if block and self._slot_of(block) == slot]
        )

    def settled(
        self,
        stored: Iterable[Block],
        dropped: Iterable[Block],
        now: float,
        written_first: WrittenFirst = no_slots,
    ) -> None:
        """Take the blocks that a finished store made readable, or did not. Secondary tiers have
        been told of them before."""
        if not self._waiting:
            return
        by_prompt: dict[_HintedPrompt, list[Block]] = {}
        for block in stored:
            prompt = self._waiting.pop(block, None)
            if prompt is not None:
                by_prompt.setdefault(prompt, []).append(block)
        for prompt, blocks in by_prompt.items():
            outcomes = self._apply(prompt, blocks, now, written_first)
            if prompt.ended is not None:
                self.outcomes.count(Counter(outcomes.values()))
        lost = [self._waiting.pop(block, None) for block in dropped]
        self.outcomes.count(
            {MISSING: sum(prompt is not None and prompt.ended is not None for prompt in lost)}
        )

    def expire(self, now: float) -> None:
        """End the pins and retentions whose time is over."""
        if (retention := self._index.retention) is not None:
            self.outcomes.count({KeepOutcome.EXPIRED.value: retention.expire(now)})

    def reset(self) -> None:
        """Note that all blocks are forgotten. Live requests' hints have nothing to apply to."""
        self._prompts.clear()
        self._prefetches.clear()
        self._waiting.clear()
        self._demoting.clear()

    def gauges(self) -> Iterator[tuple[str, float, str | None]]:
        """Yield (name, value, label) of each gauge."""
        retention = self._index.retention
        for kind in KEPT:
            kept = 0 if retention is None else retention.kept.used(kind)
            yield "host_blocks_kept", kept, kind.value

    def _apply(
        self,
        prompt: _HintedPrompt,
        blocks: Sequence[Block],
        now: float,
        written_first: WrittenFirst = no_slots,
    ) -> dict[Block, str]:
        """Apply a prompt's hints to those blocks that are readable; return the outcomes."""
        slots = {block: slot for block in blocks if (slot := self._slot_of(block)) is not None}
        for slot in slots.values():
            self._demoting.pop(slot, None)
        release = prompt.hints.release
        if release is None:
            keep = prompt.keep(now)
            return {block: self._index.keep(slot, keep, now).value for block, slot in slots.items()}
        if release is CacheHint.DROP:
            self._index.remove(slots.values())
        else:
            later = written_first(slots.values())
            self._demoting.update((slot, block) for block, slot in slots.items() if slot in later)
            self._index.policy.demote([slot for slot in slots.values() if slot not in later])
        return dict.fromkeys(slots, RELEASED[release])

    def _slot_of(self, block: Block) -> int | None:
        return self._index.slot_of(block.group, block.block_hash)

    def _forget(self, prompt: _HintedPrompt, block: Block) -> None:
        """Wait for a block no longer, unless another request's hint does."""
        if self._waiting.get(block) is prompt:
            del self._waiting[block]


def _blocks_within(
    groups: Sequence[CacheGroup], hashes: Sequence[Sequence[bytes]], tokens: int
) -> tuple[Block, ...]:
    """Return the blocks of the first ``tokens`` tokens, by the end of their tokens."""
    ends = [
        (end * group.block_tokens, number, row[end - 1])
        for number, (group, row) in enumerate(zip(groups, hashes, strict=True))
        for end in range(1, min(tokens // group.block_tokens, len(row)) + 1)
    ]
    return tuple(Block(number, block_hash) for _, number, block_hash in sorted(ends))
