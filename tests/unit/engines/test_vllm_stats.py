"""Statistics and metrics beside those of vLLM's own connectors, under MultiConnector."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvconnect.engines.vllm import register
from kvconnect.engines.vllm.stats import KVConnectStats
from kvconnect.observability.metrics.prometheus import PromMetrics

LABELS, ENGINES = ["model_name", "engine"], {0: ["m", "0"]}
CHILDREN: dict[str, Any] = {
    "KVConnect": {"kv_connector": "KVConnect", "kv_role": "kv_both"},
    "OffloadingConnector": {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    },
    "NixlConnector": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
}
BOTH_ORDERS = [
    ["KVConnect", "OffloadingConnector"],
    ["OffloadingConnector", "KVConnect"],
    ["KVConnect", "NixlConnector"],
    ["NixlConnector", "KVConnect"],
    ["KVConnect"],
]


def config(children: list[str]) -> Any:
    extra = {"connectors": [CHILDREN[name] for name in children]}
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    )


def types_for(registry: CollectorRegistry) -> dict[type[Any], Any]:
    return {cls: functools.partial(cls, registry=registry) for cls in (Counter, Gauge, Histogram)}


def names(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


@pytest.mark.parametrize("children", BOTH_ORDERS, ids="-".join)
@pytest.mark.parametrize("in_server", [True, False])
def test_metrics_beside_another_connector_s(children: list[str], in_server: bool) -> None:
    register()
    registry = CollectorRegistry()

    def build() -> Any:
        made: Any = (types_for(registry), LABELS, ENGINES)
        return MultiConnector.build_prom_metrics(config(children), *made)

    async def start() -> Any:
        metrics = build()
        await asyncio.sleep(0)  # the server is up
        assert "vllm:kv_offload_load_bytes" in names(registry)
        return metrics

    metrics = asyncio.run(start()) if in_server else build()
    assert "vllm:kvconnect_lookups" in names(registry)
    stats = KVConnectStats()
    stats.record_transfer("CPU_to_GPU", 100, 0.5)
    metrics.observe({"KVConnect": stats.to_dict()})
    labels = {"model_name": "m", "engine": "0"}
    ours = {**labels, "transfer_type": "CPU_to_GPU"}
    assert registry.get_sample_value("vllm:kvconnect_transfer_bytes_total", ours) == 100
    shown = registry.get_sample_value("vllm:kv_offload_load_bytes_total", labels)
    assert (shown == 100) == ("OffloadingConnector" not in children)  # which has loaded nothing


def test_aliases_that_come_at_once_take_the_names_of_others() -> None:
    """Control: why they are left for later."""
    registry = CollectorRegistry()
    PromMetrics(types_for(registry), LABELS, ENGINES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        MultiConnector.build_prom_metrics(
            config(["OffloadingConnector"]),
            types_for(registry),
            LABELS,
            ENGINES,  # type: ignore[arg-type]
        )


def test_statistics_are_rebuilt_by_the_name_of_the_class() -> None:
    register()
    stats = KVConnectStats()
    stats.count("lookups", 3)
    (rebuilt,) = MultiConnector.build_kv_connector_stats(
        {"KVConnect": stats.to_dict()}
    ).data.values()  # type: ignore[union-attr]
    assert isinstance(rebuilt, KVConnectStats) and rebuilt.reduce() == {"lookups": 3}
