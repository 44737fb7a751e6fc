"""An engine's metrics, read before and after what a trial asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from kvconnect.observability.metrics.rates import added
from kvconnect.router.fleet import reports
from kvconnect.trial.engine_api import EngineName
from kvconnect.trial.http_client import HttpClient, TrialFailed

Series = Mapping[tuple[tuple[str, str], ...], float]
_PAUSE_S = 0.1
_SETTLE_S = 15.0
_KVCONNECT = (
    *("lookups_total", "query_tokens_total", "hit_tokens_total", "failed_blocks_total"),
    *("tier_decisions_total", "skipped_store_blocks_total", "evicted_blocks_total"),
    *("transfer_bytes_total", "transfer_seconds_total", "host_bytes_capacity"),
    *("host_blocks_capacity", "tier_available", "jobs_in_flight", "tier_jobs_in_flight"),
    *("handoff_received_requests_total", "handoff_refused_total", "handoff_failures_total"),
)
_DEVICE_HITS = "vllm:prefix_cache_hits_total"
_VLLM_CACHE = "vllm:cache_config_info"
_SGLANG_CACHE = "sglang:max_total_num_tokens"


@dataclass(frozen=True)
class Counters:
    """One reading of ``/metrics``.

    Attributes:
        engine: whose names the metrics have.
        series: metric -> its labels -> value.
        missing: why there is no reading, for people; "" if there is one.
    """

    engine: EngineName = EngineName.VLLM
    series: Mapping[str, Series] = field(default_factory=dict)
    missing: str = ""

    @property
    def of_kvconnect(self) -> bool:
        """Whether KVConnect has counted here."""
        return any("kvconnect_" in name for name in self.series)

    @property
    def device_tokens(self) -> int:
        """Tokens that the device's cache holds; 0 if the engine does not say."""
        if self.engine is EngineName.SGLANG:
            return int(max(self.series.get(_SGLANG_CACHE, {}).values(), default=0))
        caches = [dict(labels) for labels in self.series.get(_VLLM_CACHE, {})]
        return sum(map(_tokens_of, caches))

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 if the engine does not say."""
        caches = [dict(labels) for labels in self.series.get(_VLLM_CACHE, {})]
        return max((_number(labels.get("block_size", "")) for labels in caches), default=0)

    @property
    def device_hits(self) -> float:
        """Tokens found in the device's cache so far, as vLLM counts them."""
        return sum(self.series.get(_DEVICE_HITS, {}).values())

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of KVConnect's series ``name`` with these labels; see :func:`added`."""
        wanted = labels.items()
        return added(name, (found for found in self._kvconnect(name) if wanted <= found[0].items()))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return KVConnect's series ``name`` added up by a label's values; see :func:`added`."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for labels, value in self._kvconnect(name):
            found.setdefault(labels.get(label, ""), []).append((labels, value))
        return {kind: added(name, series) for kind, series in found.items()}

    def _kvconnect(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of each of KVConnect's series ``name``."""
        for key, value in self.series.get(f"{self.engine.value}:kvconnect_{name}", {}).items():
            yield dict(key), value


@dataclass(frozen=True)
class Change:
    """What two readings differ in."""

    before: Counters
    after: Counters

    def total(self, name: str, **labels: str) -> float:
        """Return by how much :meth:`Counters.total` rose."""
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return what rose, by a label's values."""
        before = self.before.by(name, label)
        rose = {key: n - before.get(key, 0.0) for key, n in self.after.by(name, label).items()}
        return {key: value for key, value in rose.items() if value > 0}


def read(http: HttpClient, engine: EngineName) -> Counters:
    """Read an engine's metrics; if that fails, the result says why."""
    try:
        text = http.get("/metrics").decode("utf-8", "replace")
    except TrialFailed as error:
        return Counters(engine, missing=str(error))
    names = tuple(f"{engine.value}:kvconnect_{name}" for name in _KVCONNECT)
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, labels, value in reports.samples(
        text, (*names, _DEVICE_HITS, _VLLM_CACHE, _SGLANG_CACHE)
    ):
        series = found.setdefault(name, {})
        series[tuple(sorted(labels.items()))] = value
    if not found:
        return Counters(engine, missing=f"{http.url}/metrics has no metric of {engine.value}")
    return Counters(engine, found)


def settled(
    http: HttpClient, engine: EngineName, done: Callable[[Counters], bool] | None = None
) -> Counters:
    """Read metrics until no job is in flight and they are ``done``, for some seconds at most."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        now = read(http, engine)
        busy = now.total("jobs_in_flight") or now.total("tier_jobs_in_flight")
        if not now.of_kvconnect or (not busy and (done is None or done(now))):
            return now
        if time.monotonic() > deadline:
            return now
        time.sleep(_PAUSE_S)


def _tokens_of(cache: Mapping[str, str]) -> int:
    tokens = _number(cache.get("kv_cache_size_tokens", ""))
    return tokens or _number(cache.get("num_gpu_blocks", "")) * _number(cache.get("block_size", ""))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def named(counts: Mapping[str, float], without: Collection[str] = ()) -> str:
    """Return counts in one line, such as ``digest 3, copy 1``."""
    return ", ".join(f"{name} {n:.0f}" for name, n in counts.items() if name not in without)
