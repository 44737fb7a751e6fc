"""What metrics and tracing cost a real engine per request and transfer; how long a scrape takes.

    python -m benchmarks.metrics

Half a percent of a request cannot be told from two engines beside each other on a shared machine.
So one vLLM engine runs in this process, with metrics and tracing on, and what is called for them is
timed where it is called: recording, collecting and publishing of statistics; making spans, and the
CPU time of the thread that sends them (vLLM's own spans included). The timer is counted with it.

``metrics_cost``, ``trace_cost``: that time over the time of the requests, the worse of new prompts,
which are stored, and of prompts that are loaded from the host tier. A request has 512 tokens and 16
more; every one of them is traced, which fleets seldom do.

``metrics_us_per_transfer``, ``trace_us_per_transfer``: to count one transfer of a hand-off, with
its peer; to keep its times and make its span. ``trace_us_per_request`` of the router: its five
spans; ``trace_off_us_per_request``: what is called in their place while tracing is off.

``scrape_ms``, ``series``: the text of ``/metrics``, for an engine of 8 data-parallel ranks that has
met 100 peers on each (of which 32 have series by name), and for a router in front of 100 engines of
8 ranks; the worse of the two. The client's own ``_created`` series are counted where they are.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.common import emit, interleave, medians, progress
from benchmarks.settings import chosen
from tests.engines.models import engine_args

TOKENS, ANSWER = 512, 16
PEERS, RANKS = 100, 8
REPEAT = 2000


class Timer:
    """Adds up the time that methods take, each second once: not again inside one another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = threading.local()
        self._lock = threading.Lock()

    def watch(self, owner: type, *names: str) -> None:
        """Time methods of a class from now on."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "now", False):
                return work(*args, **kwargs)
            self._inside.now, began = True, time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._inside.now = False
                with self._lock:
                    self.seconds += time.perf_counter() - began

        return timed


def watch_all() -> tuple[Timer, Timer]:
    """Return the timers of metrics and of tracing."""
    from kvconnect.disaggregation.transfer_meter import TransferTrace
    from kvconnect.engines.vllm import tracing as spans
    from kvconnect.engines.vllm.scheduler import ConnectorScheduler
    from kvconnect.engines.vllm.stats import KVConnectPromMetrics, KVConnectStats
    from kvconnect.engines.vllm.worker import ConnectorWorker
    from kvconnect.observability.tracing.otel import Tracer

    metrics, tracing = Timer(), Timer()
    recorded = ("record_transfer", "count", "gauge", "observe", "aggregate", "take", "reduce")
    metrics.watch(KVConnectStats, *recorded, "is_empty", "__init__")
    metrics.watch(ConnectorScheduler, "take_stats")
    metrics.watch(ConnectorWorker, "take_stats")
    metrics.watch(KVConnectPromMetrics, "observe")
    tracing.watch(Tracer, "parent", "start", "record")
    tracing.watch(
        spans._TracedRequest,
        *("looked_up", "admitted", "computes", "computed", "stores", "stored", "finish"),
    )
    tracing.watch(TransferTrace, "open", "queued", "moved", "ready", "close", "forget")
    return metrics, tracing


def sender_seconds() -> float:
    """Return the CPU time of the threads that send spans."""
    names = [t for t in threading.enumerate() if "BatchSpanProcessor" in t.name]
    paths = [Path(f"/proc/self/task/{t.native_id}/schedstat") for t in names]
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


@contextmanager
def collector() -> Iterator[str]:
    """Run what takes the spans in a process of its own; yield its address."""
    code = (
        "import sys; from tests.fakes.trace_collector import collecting\n"
        "with collecting() as c: print(c.endpoint, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        try:
            yield it.stdout.readline().strip()
        finally:
            it.communicate()


def measure_requests(rounds: int) -> dict[str, float]:
    """Return the shares of metrics and tracing in the time of requests."""
    import random

    from opentelemetry import trace
    from vllm import LLM, SamplingParams

    draw = random.Random(0)
    costs: dict[str, float] = {}
    with collector() as endpoint:
        metrics, tracing = watch_all()
        progress("starting an engine")
        transfer = {"kv_connector": "KVConnect", "kv_role": "kv_both"}
        llm = LLM(
            **engine_args("bench")
            | {
                "max_model_len": 1024,
                "num_gpu_blocks_override": 64,  # three prompts
                "kv_transfer_config": transfer
                | {"kv_connector_extra_config": chosen("metrics", host_bytes="512MiB")},
                "disable_log_stats": False,
                "otlp_traces_endpoint": endpoint,
            }
        )
        params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)

        def generate(number: int, prompt: list[int]) -> int:
            """Return how many tokens were cached."""
            parent = f"00-{draw.getrandbits(128):032x}-{draw.getrandbits(64):016x}-01"
            headers = {"traceparent": parent}
            engine = llm.llm_engine
            asked = {"prompt_token_ids": prompt}
            engine.add_request(str(number), asked, params, trace_headers=headers)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            return int(outputs[-1].num_cached_tokens or 0)

        stored = [[draw.randrange(10, 2000) for _ in range(TOKENS)] for _ in range(rounds)]
        numbers = iter(range(10**6))
        generate(next(numbers), [draw.randrange(10, 2000) for _ in range(TOKENS)])
        for kind, cached in (("new", 0), ("hit", TOKENS - 1)):
            before = metrics.seconds, tracing.seconds + sender_seconds()
            began = time.perf_counter()
            found = [generate(next(numbers), prompt) for prompt in stored]
            seconds = time.perf_counter() - began
            if [tokens >= cached // 32 * 32 for tokens in found].count(True) < rounds - 1:
                raise SystemExit(f"{kind} prompts had {found} cached tokens")
            spent = metrics.seconds - before[0], tracing.seconds + sender_seconds() - before[1]
            for name, value in zip(("metrics", "trace"), spent, strict=True):
                costs[f"{name}_cost_{kind}"] = value / seconds
                costs[f"{name}_us_per_request_{kind}"] = value / rounds * 1e6
            costs[f"request_ms_{kind}"] = seconds / rounds * 1e3
            progress(f"{kind}: " + ", ".join(f"{k} {v:.4g}" for k, v in costs.items()))
        if not tracing.seconds:
            raise SystemExit("nothing was traced")
        llm.llm_engine.engine_core.shutdown()
        trace.get_tracer_provider().shutdown()  # type: ignore[attr-defined]
    for name in ("metrics", "trace"):
        costs[f"{name}_cost"] = max(costs[f"{name}_cost_{kind}"] for kind in ("new", "hit"))
    return costs


def measure_transfers() -> dict[str, float]:
    """Return the microseconds that one transfer of a hand-off costs."""
    from kvconnect.disaggregation.transfer_meter import ChunkKey, TransferMeter, TransferTrace
    from kvconnect.stats import OffloadingConnectorStats
    from kvconnect.transport.base import PagesReceived, PeerId
    from kvconnect.types import TransferType

    def moves(trace: TransferTrace | None) -> Callable[[], None]:
        meter, stats = TransferMeter(trace=trace), OffloadingConnectorStats()
        event = PagesReceived(PeerId(0), 1, 0, 0, 8, (), 1 << 20, 0.001)

        def work() -> None:
            meter.open(1, asked=True)
            for _ in range(REPEAT):
                if trace is not None:
                    trace.queued(1, ChunkKey(0, 0, 8))
                meter.record(stats, TransferType.RECV, event, "10.0.0.1/abcdef")
            meter.finish(stats, 1, "recv")

        return work

    seconds = medians(interleave({"off": moves(None), "on": moves(TransferTrace(0))}, 15))
    per = {name: value / REPEAT * 1e6 for name, value in seconds.items()}
    return {
        "metrics_us_per_transfer": per["off"],
        "trace_us_per_transfer": max(0.0, per["on"] - per["off"]),
    }


def measure_router(endpoint: str) -> dict[str, float]:
    """Return the microseconds that a request's spans cost the router."""
    from kvconnect.router.http.http_request import HttpRequest, RequestContent
    from kvconnect.router.metrics import CallOutcome, RequestOutcome
    from kvconnect.router.policy.choice import Mode, RoutingChoice, RoutingReason
    from kvconnect.router.policy.fleet_view import Role, Target
    from kvconnect.router.policy.ranking import RankingReason
    from kvconnect.router.policy.target_choice import TargetChoice
    from kvconnect.router.tracing import RouterSpans

    place = TargetChoice(Target(0), RankingReason.LEAST)
    choice = RoutingChoice(Mode.PUSH, RoutingReason.DEFAULT, place, place)
    base = SimpleNamespace(host="10.0.0.1", port=8000)
    engines: list[Any] = [
        SimpleNamespace(role=role, base=base, url="http://10.0.0.1:8000") for role in Role
    ]
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    request = HttpRequest("POST", "/v1/completions", headers, RequestContent(lambda: None))

    def requests(spans: RouterSpans) -> None:
        for _ in range(REPEAT // 10):
            of = spans.of(request)
            of.chosen(choice)
            for span in [of.call(engine, place) for engine in engines]:
                span.headers()
                span.end(CallOutcome.OK)
            of.end(RequestOutcome.OK, 200, choice)

    off = RouterSpans()
    os.environ |= {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_MAX_QUEUE_SIZE": str(100 * REPEAT),  # they come faster than any router makes them
    }
    on = RouterSpans()
    works: dict[str, Callable[[], object]] = {
        "off": partial(requests, off),
        "on": partial(requests, on),
    }
    seconds = medians(interleave(works, 15))
    on.close()
    per = {name: value / (REPEAT // 10) * 1e6 for name, value in seconds.items()}
    del os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"], os.environ["OTEL_BSP_MAX_QUEUE_SIZE"]
    return {"router_trace_us_per_request": per["on"], "router_trace_off_us_per_request": per["off"]}


def measure_scrapes(rounds: int) -> dict[str, float | int]:
    """Return the time that ``/metrics`` takes, and how many series it has."""
    import prometheus_client as prometheus

    engine, router = engine_registry(), router_registry()
    texts: dict[str, bytes] = {}

    def scrape(name: str, registry: Any, before: Callable[[], None] = lambda: None) -> None:
        before()
        texts[name] = prometheus.generate_latest(registry)

    engines = {"engine": partial(scrape, "engine", engine)}
    samples = interleave(engines, rounds)
    prometheus.disable_created_metrics()  # as the router does
    samples |= interleave({"router": partial(scrape, "router", *router)}, rounds)
    series = {
        name: sum(not line.startswith(b"#") for line in text.splitlines())
        for name, text in texts.items()
    }
    times = medians(samples)
    return {
        "scrape_ms": max(times.values()) * 1e3,
        "series": max(series.values()),
        **{f"scrape_ms_{name}": seconds * 1e3 for name, seconds in times.items()},
        **{f"series_{name}": count for name, count in series.items()},
    }


def engine_registry() -> Any:
    """Return all series of an engine of 8 ranks, whose workers met 100 peers each."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvconnect.observability.metrics.prometheus import PromMetrics
    from kvconnect.stats import OffloadingConnectorStats

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    labels = {rank: ["model", str(rank)] for rank in range(RANKS)}
    metrics = PromMetrics(kinds, ["model_name", "engine"], labels)  # type: ignore[arg-type]
    for rank in range(RANKS):
        stats = OffloadingConnectorStats()
        for peer in range(PEERS):
            for name in ("handoff_peer_bytes", "handoff_peer_seconds", "handoff_peer_failures"):
                stats.count(name, 1.5, label=f"10.0.{rank}.{peer}/abcdef01")
        metrics.observe(stats.data, rank)
    return registry


def router_registry() -> tuple[Any, Callable[[], None]]:
    """Return all series of a router in front of 100 engines, and what it does before a scrape."""
    from kvconnect.router.metrics import EngineLoads, RouterMetrics
    from kvconnect.router.policy.fleet_view import Role, TargetLoad

    metrics, ranks = RouterMetrics(), [TargetLoad(own=100, foreign=200)] * RANKS
    roles = [Role.PREFILL, Role.DECODE] * (PEERS // 2)
    engines = [
        EngineLoads(role, f"http://10.0.0.{number}:8000", ranks)
        for number, role in enumerate(roles)
    ]
    for engine in engines:
        metrics.add_engine(engine.role, engine.url)
    return metrics.registry, lambda: metrics.tokens(engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or nothing of it would be in this process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    figures: dict[str, Any] = {}
    figures |= measure_scrapes(options.rounds)
    figures |= measure_transfers()
    with collector() as endpoint:
        figures |= measure_router(endpoint)
    figures |= measure_requests(options.rounds)
    emit("metrics", figures)


if __name__ == "__main__":
    main()
