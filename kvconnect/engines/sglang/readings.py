"""What the linker counts, in the shape and under the names of vLLM's halves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvconnect.engines.sglang.metrics import publisher
from kvconnect.engines.sglang.pool_tier import PoolTier, gauges
from kvconnect.plan.offload import count_lookup
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, Tier

_PUBLISH_S = 1.0
_KNOWN_REQUESTS = 4096  # waiting requests are looked up at every step, and counted once


class Readings:
    """For the scheduler's thread. ``stats`` is shared with the tiers, which count copies."""

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
        """A request was looked up: pages that the device lacks, and how many of them are here."""
        if rid in self._known:
            return
        self._known[rid] = None
        if len(self._known) > _KNOWN_REQUESTS:
            del self._known[next(iter(self._known))]
        hits = {Tier.HOST: found * self._page_tokens}
        count_lookup(self.stats, asked * self._page_tokens, hits)

    def loaded(self, seconds: float) -> None:
        """A request's load is there, so long after it was asked for."""
        self.stats.observe("load_latency_seconds", seconds, label=Tier.HOST.value)

    def waited(self, seconds: float) -> None:
        """A forward with loads waited so long for its layers, over all of them."""
        self.stats.observe("load_exposed_seconds", seconds, label=Tier.HOST.value)

    def load_failed(self, cause: FailureCause) -> None:
        """A request is aborted because its load failed."""
        self.stats.count("failed_requests", label=cause.value)

    def take(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call, with the gauges if one moved."""
        now = time.monotonic()
        found: dict[tuple[str, str | None], float] = {
            ("ledger_oldest_hold_seconds", None): max(
                tier.ledger.oldest_age(now) for tier in self._tiers
            )
        }
        for tier in self._tiers:
            for name, value, label in gauges(tier):
                found[name, label] = found.get((name, label), 0) + value
        if found != self._gauges:
            self._gauges = found
            for (name, label), value in found.items():
                self.stats.gauge(name, value, label)
        return self.stats.take()

    def publish(self) -> None:
        """Show it on SGLang's ``/metrics``, about once a second however often this is called."""
        now = time.monotonic()
        if now - self._published >= _PUBLISH_S:
            self._published = now
            publisher().publish(self.take())
