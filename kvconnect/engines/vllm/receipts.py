"""Says of each request where the tokens of its prompt came from.

Owned by the scheduler's thread. Time is an argument, as in :mod:`kvconnect.offload.planner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvconnect.cache.groups import CacheGroup, keeps_prefix
from kvconnect.disaggregation.receives import SettledReceive
from kvconnect.offload.jobs import CopyJob, Owner
from kvconnect.offload.planner import lost_tokens
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, PromptSource, Tier

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class _Prompt:
    """The prompt of a request that was looked up."""

    asked: float
    ready: float
    device: int
    tokens: int = 0
    loaded: dict[PromptSource, int] = field(default_factory=dict)
    lost: int = 0  # of the loaded ones
    cause: FailureCause | None = None
    final: bool = False


class Receipts:
    """Receipts of live requests; counts the same tokens in the metric ``prompt_tokens``."""

    def __init__(self, stats: OffloadingConnectorStats) -> None:
        self._stats = stats
        self._prompts: dict[str, _Prompt] = {}

    def looked_up(self, request: Request, device_tokens: int, now: float) -> None:
        """Note a lookup; the device has ``device_tokens`` of the prompt. It may be repeated, also
        after a load failed. Once a request has output, its receipt does not change."""
        known = self._prompts.get(request.request_id)
        if known is not None and request.num_output_tokens:
            known.final = True
            return
        asked = now if known is None else known.asked
        self._prompts[request.request_id] = _Prompt(asked, now, device_tokens)

    def admitted(self, request: Request, tiers: Mapping[Tier, int], external: int) -> None:
        """Note that a request has device blocks. ``external`` of its tokens are loaded: from
        ``tiers``, and the others from another engine."""
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and not prompt.final:
            prompt.tokens = request.num_prompt_tokens
            prompt.loaded = {PromptSource(tier.value): count for tier, count in tiers.items()}
            prompt.loaded[PromptSource.HANDOFF] = external - sum(tiers.values())

    def settled(self, job: CopyJob, now: float, groups: Sequence[CacheGroup]) -> None:
        """Note a finished job of the host tier, which may be a load."""
        if job.owner is Owner.LOAD:
            self._ended(job.req_id, now, lost_tokens(job, keeps_prefix(groups)), job.cause)

    def received(self, receives: Iterable[SettledReceive], now: float) -> None:
        """Note the hand-offs that ended."""
        for one in receives:
            self._ended(one.req_id, now, one.lost, one.cause)

    def finish(self, req_id: str, not_loaded: str | None = None) -> dict[str, Any] | None:
        """End a request and count its tokens. ``not_loaded``: why the secondary tiers' blocks were
        not all prefetched. Return its receipt; None if it was not admitted."""
        prompt = self._prompts.pop(req_id, None)
        if prompt is None or not prompt.tokens:
            return None
        sources = _sources(prompt)
        for source, tokens in sources.items():
            self._stats.count("prompt_tokens", tokens, label=source.value)
        receipt: dict[str, Any] = {source.value: tokens for source, tokens in sources.items()}
        receipt |= {"prompt": prompt.tokens, "waited_s": round(prompt.ready - prompt.asked, 6)}
        cause = prompt.cause.value if prompt.cause else not_loaded
        return receipt | ({"not_loaded": cause} if cause else {})

    def _ended(self, req_id: str, now: float, lost: int, cause: FailureCause | None) -> None:
        prompt = self._prompts.get(req_id)
        if prompt is not None and not prompt.final:
            prompt.ready, prompt.lost, prompt.cause = now, lost, cause


def _sources(prompt: _Prompt) -> dict[PromptSource, int]:
    """Return the tokens by source. They add up to the prompt."""
    sources = dict.fromkeys(PromptSource, 0)
    sources |= {**prompt.loaded, PromptSource.DEVICE: min(prompt.device, prompt.tokens)}
    lost = prompt.lost
    for source in (
        *(PromptSource.HANDOFF, PromptSource.REMOTE, PromptSource.PEER, PromptSource.DISK),
        PromptSource.HOST,
    ):
        taken = min(lost, sources[source])
        sources[source] -= taken
        lost -= taken
    sources[PromptSource.COMPUTED] = prompt.tokens - sum(sources.values())
    return sources
