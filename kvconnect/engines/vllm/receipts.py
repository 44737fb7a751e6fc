"""Says of each request where the tokens of its prompt came from.

Owned by the scheduler's thread. Time is an argument, as in :mod:`kvconnect.offload.planner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvconnect.cache.groups import CacheGroup, keeps_prefix
from kvconnect.disaggregation.receives import SettledReceive
from kvconnect.engines.vllm.events import KVConnectReceipt
from kvconnect.offload.copy_jobs import CopyJob
from kvconnect.offload.ledger import Owner
from kvconnect.offload.planner import lost_tokens
from kvconnect.protocol.options import nonce_of
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, PromptSource, Tier

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvconnect.engines.vllm.tiers import TierScheduler


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
        self._unpublished: dict[str, tuple[Request, str]] = {}  # no output so far; and its nonce
        self._events: list[KVConnectReceipt] = []

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
            nonce = nonce_of(request.kv_transfer_params)
            if nonce is not None:
                self._unpublished[request.request_id] = request, nonce

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
        prompt, unpublished = self._prompts.pop(req_id, None), self._unpublished.pop(req_id, None)
        if prompt is None or not prompt.tokens:
            return None
        for source, tokens in _sources(prompt).items():
            self._stats.count("prompt_tokens", tokens, label=source.value)
        receipt = _receipt(prompt, not_loaded)
        if unpublished is not None:
            self._events.append(KVConnectReceipt(unpublished[1], receipt))
        return receipt

    def sources(self, req_id: str) -> dict[PromptSource, int]:
        """Return the tokens of a live request's prompt by source; empty if it was not admitted."""
        prompt = self._prompts.get(req_id)
        return _sources(prompt) if prompt is not None and prompt.tokens else {}

    def take_events(self, tiers: TierScheduler | None) -> list[KVConnectReceipt]:
        """Return the receipts, since the last call, of requests with a nonce. They are published
        with a request's first output, so that they have come when a stream ends."""
        for req_id in [r for r, (each, _) in self._unpublished.items() if each.num_output_tokens]:
            prompt, (_, nonce) = self._prompts[req_id], self._unpublished.pop(req_id)
            prompt.final = True
            not_loaded = tiers.plan.not_loaded(req_id) if tiers else None
            self._events.append(KVConnectReceipt(nonce, _receipt(prompt, not_loaded)))
        events, self._events = self._events, []
        return events

    def _ended(self, req_id: str, now: float, lost: int, cause: FailureCause | None) -> None:
        prompt = self._prompts.get(req_id)
        if prompt is not None and not prompt.final:
            prompt.ready, prompt.lost, prompt.cause = now, lost, cause


def _receipt(prompt: _Prompt, not_loaded: str | None) -> dict[str, Any]:
    receipt: dict[str, Any] = {source.value: n for source, n in _sources(prompt).items()}
    receipt |= {"prompt": prompt.tokens, "waited_s": round(prompt.ready - prompt.asked, 6)}
    cause = prompt.cause.value if prompt.cause else not_loaded
    return receipt | ({"not_loaded": cause} if cause else {})


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
