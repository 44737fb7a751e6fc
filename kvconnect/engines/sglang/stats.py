"""Statistics of an SGLang process, under the same names as vLLM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconnect.engines.sglang.metrics_publisher import publisher
from kvconnect.offload.planner import count_lookup
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, Tier

if TYPE_CHECKING:
    from kvconnect.engines.sglang.linker_host_tier import PoolTier

_PUBLISH_S = 1.0
_KNOWN_REQUESTS = 4096  # limit: SGLang looks up waiting requests at every step; each counts once


class LinkerStats:
    """The linker's statistics. For the scheduler's thread. Pool tiers add theirs to ``stats``."""

    def __init__(
        self, stats: OffloadingConnectorStats, tiers: Sequence[PoolTier], page_tokens: int
    ) -> None:
        self.stats = stats
        self._tiers = tiers
        self._page_tokens = page_tokens
        self._known: dict[str, None] = {}  # requests that were counted, oldest first
        self._gauges: dict[tuple[str, str | None], float] = {}
        self._published = time.monotonic()

    def looked_up(self, rid: str, asked: int, found: int) -> None:
        """Count a request's lookup: pages that the device lacks, and how many of them are found."""
        if rid in self._known:
            return
        self._known[rid] = None
        if len(self._known) > _KNOWN_REQUESTS:
            del self._known[next(iter(self._known))]
        hits = {Tier.HOST: found * self._page_tokens}
        count_lookup(self.stats, asked * self._page_tokens, hits)

    def loaded(self, seconds: float) -> None:
        """Record that a request's pages were loaded, ``seconds`` after the load was queued."""
        self.stats.observe("load_latency_seconds", seconds, label=Tier.HOST.value)

    def waited(self, seconds: float) -> None:
        """Record how long a forward waited for the loads of all its layers."""
        self.stats.observe("load_exposed_seconds", seconds, label=Tier.HOST.value)

    def load_failed(self, cause: FailureCause) -> None:
        """Count a request that is aborted because its load failed."""
        self.stats.count("failed_requests", label=cause.value)

    def take(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call, and all gauges if one changed."""
        now = time.monotonic()
        found: dict[tuple[str, str | None], float] = {}
        for tier in self._tiers:
            for name, value, label in tier.gauges(now):
                known = found.get((name, label), 0)
                oldest = name == "ledger_oldest_hold_seconds"
                found[name, label] = max(known, value) if oldest else known + value
        if found != self._gauges:
            self._gauges = found
            for (name, label), value in found.items():
                self.stats.gauge(name, value, label)
        return self.stats.take()

    def publish(self) -> None:
        """Publish to SGLang's ``/metrics``, at most about once a second."""
        now = time.monotonic()
        if now - self._published >= _PUBLISH_S:
            self._published = now
            publisher().publish(self.take())
