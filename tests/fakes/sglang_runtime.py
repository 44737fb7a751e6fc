"""What an SGLang scheduler process tells KVConnect's metrics, played by plain objects."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from kvconnect.stats import OffloadingConnectorStats


class Context(ModuleType):
    """What ``sglang.srt.runtime_context`` answers."""

    def __init__(self) -> None:
        super().__init__("sglang.srt.runtime_context")
        self.observability = SimpleNamespace(
            enable_metrics=True, enable_metrics_for_all_schedulers=False, extra_metric_labels=None
        )
        self.parallel = SimpleNamespace(
            attn_tp_rank=0, attn_cp_rank=0, tp_rank=0, pp_rank=0, moe_ep_rank=0, dp_rank=None
        )
        self.disagg = SimpleNamespace(enable_pd_role_switch=False, disaggregation_mode="prefill")
        for name in ("observability", "parallel", "disagg"):
            setattr(self, f"get_{name}", lambda name=name: getattr(self, name))
        self.get_serving = lambda: SimpleNamespace(served_model_name="m")


def measured(nbytes: int = 4096, seconds: float = 0.5) -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    stats.record_transfer("SEND", nbytes, seconds)
    stats.observe("handoff_wire_seconds", seconds, "send")
    stats.gauge("handoff_peers", 3, "up")
    return stats
