"""A scheduler process up to the point where SGLang makes its own collector, and KVConnect's.

Run as a module with SGLang's flags.
"""

from __future__ import annotations

import sys

from sglang.srt import runtime_context
from sglang.srt.server_args import prepare_server_args

PUBLISHED = "published\n"


def main(flags: list[str]) -> None:
    """Publish something, and say so."""
    args = prepare_server_args(flags)
    ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    from kvconnect.engines.sglang.metrics_publisher import publisher
    from kvconnect.stats import OffloadingConnectorStats

    assert "prometheus_client" not in sys.modules, "imported before it is needed"

    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

    made = SchedulerMetricsCollector.init_new(
        server_args=args,
        enable_priority_scheduling=False,
        enable_lora=False,
        enable_hierarchical_cache=False,
    )
    if made.collector:
        made.collector.observe_kv_transfer_metrics(latency_ms=1.0, total_mb=2.0, speed_gb_s=3.0)
    stats = OffloadingConnectorStats()
    stats.observe("handoff_wire_seconds", 0.25, "send")
    publisher().publish(stats.take())
    sys.stdout.write(PUBLISHED)


if __name__ == "__main__":
    main(sys.argv[1:])
