"""One conversation trace, two engines each, default settings: what to choose.

    python -m benchmarks.choosing [--rounds N] [--requests N] [--only NAME]...

Needs ``scripts/setup peers`` and ``scripts/setup sglang``. The Mooncake conversation trace
(``benchmarks/serve``) is asked of fleets of two engines with the same tiny model, each engine on a
core of its own (``benchmarks/machines.py``), behind the router that belongs to it; as texts, since
smg takes no token ids. Every fleet is started for each of its turns, so that all begin with empty
caches; the fleets take turns, round after round. All get the requests at the same times: at 70 % of
the rate that two vLLM engines without a connector bear.

Fleets: ``plain``, vLLM without a connector behind vllm-router; ``lmcache``, vLLM with LMCache's
server behind vllm-router; ``kvconnect``, vLLM with KVConnect behind its router; ``nixl``, prefill
and decode with vLLM's ``NixlConnector`` behind vllm-router; ``kvconnect_pd``, the same with
KVConnect behind its router; ``hicache``, SGLang with HiCache and its ``file`` backend behind smg;
``sglang_kvconnect``, SGLang with KVConnect's linker behind KVConnect's router; ``sglang_nixl``,
prefill and decode with SGLang's ``nixl`` behind smg; ``sglang_kvconnect_pd``, the same with
KVConnect behind its router.

All have the same device memory, and where there is a cache in host memory, 1 GiB for each engine.
All else is the default of each project, with what a CPU needs: NIXL's agents sleep between polls
(``benchmarks/nixl.py``), LMCache's chunks are as long as a block.

``ttft_ms_F``, ``ttft_p99_ms_F``, ``itl_ms_F``, ``tokens_per_s_F``: mean and 99th percentile of the
time to first token, mean time between tokens, output tokens per second of fleet F, the median over
rounds; ``..._low`` and ``..._high`` are the least and the most of any round. ``ttft_over_F``,
``itl_over_F``: KVConnect's over that of F, with the same engine and as many roles, the median over
rounds of ratios within one round. ``failed_F``: requests without an answer.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import emit, end_when_terminated, progress
from benchmarks.serve import parts
from benchmarks.serve.fleet import (
    INTRODUCTIONS,
    LMCACHE_PACKAGES,
    MODEL,
    VLLM_ROUTER,
    LmcacheServer,
    Variant,
    VllmRouter,
    engine,
    nixl_engine,
)
from benchmarks.serve.load import PEERS, SGLANG, LoadFailed
from benchmarks.serve.parts import Replay
from benchmarks.serve.sglang_servers import DEVICE_TOKENS, HOST_RATIO, CpuServer
from benchmarks.serve.trace import Request, read, sample, scaled
from benchmarks.serve.workloads import failed
from benchmarks.settings import chosen
from tests.engines import pd
from tests.engines.models import model_dir
from tests.engines.server import Process, Router, kv_transfer
from tests.servers import free_port
from tests.sglang import pd as sglang_pd
from tests.sglang.server import Role, SglangServer, plugin_path

HOST_BYTES = "1GiB"
SMG = PEERS / "smg" / "bin" / "smg"
TRACE = Path(__file__).parent / "serve" / "conversations.jsonl.gz"
PLUGIN = Path(__file__).with_name("sglang_plugin")
HICACHE = Path(__file__).parents[1] / "tests" / "sglang" / "hicache"
BASELINE = "plain"
FIGURES = {
    "ttft_ms": "mean_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_ms": "mean_itl_ms",
    "tokens_per_s": "output_throughput",
}
"""Figures, and their names in what vLLM's load generator saves."""
COMPARED = ("ttft_ms", "itl_ms")


class Fleet(NamedTuple):
    """What is compared. ``ours``: the fleet with KVConnect that it is compared with, "" for one of
    those."""

    start: Callable[[ExitStack], Variant]
    ours: str


# Routers ------------------------------------------------------------------------------------------


@dataclass
class Balancer(Process):
    """vllm-router in front of engines that do both, with its default policy."""

    engines: Sequence[Process]

    def command(self) -> list[str]:
        return [
            *(str(VLLM_ROUTER), "--worker-urls", *(one.url for one in self.engines)),
            *("--host", self.host, "--port", str(self.port), "--log-level", "warning"),
            *("--prometheus-port", str(free_port())),
        ]


@dataclass
class Smg(Process):
    """smg, with its default policies, in front of SGLang servers that do both, or of one for
    prefill and one for decode."""

    servers: Sequence[SglangServer]

    def command(self) -> list[str]:
        first, second = self.servers
        where = ["--worker-urls", first.url, second.url]
        if first.role == "prefill":
            prefill = ["--prefill", first.url, str(first.bootstrap_port)]
            where = ["--pd-disaggregation", *prefill, "--decode", second.url]
        return [
            *(str(SMG), "launch", "--backend", "sglang", *where),
            *("--model-path", str(model_dir(MODEL)), "--host", self.host),
            *("--port", str(self.port), "--prometheus-port", str(free_port())),
            *("--log-level", "warn"),
        ]


class OurRouter(Router):
    """``kvconnect router`` as it comes, with probes."""

    def command(self) -> list[str]:
        command = super().command()
        at = command.index("--probe-interval")
        return command[:at] + command[at + 2 :]


# Fleets -------------------------------------------------------------------------------------------


def behind(stack: ExitStack, name: str, engines: Sequence[Any], router: Process) -> Variant:
    """Start engines and their router, each engine on its own cores."""
    side_by_side: Any = pd.side_by_side
    if isinstance(engines[0], SglangServer):
        side_by_side = sglang_pd.side_by_side
    stack.enter_context(side_by_side(*engines))
    fleet = Variant(name, engines, stack.enter_context(router))
    fleet.signal(signal.SIGSTOP)
    fleet.place(apart=True)
    fleet.signal(signal.SIGCONT)
    return fleet


def plain(stack: ExitStack) -> Variant:
    engines = [engine(None, 1) for _ in range(2)]
    return behind(stack, "plain", engines, Balancer(engines))


def lmcache(stack: ExitStack) -> Variant:
    store = stack.enter_context(LmcacheServer(gib=2))
    engines = [engine(store.connector(), 1, **store.settings()) for _ in range(2)]
    return behind(stack, "lmcache", engines, Balancer(engines))


def nixl(stack: ExitStack) -> Variant:
    engines = [nixl_engine("kv_producer"), nixl_engine("kv_consumer")]
    return behind(stack, "nixl", engines, VllmRouter(*engines))


def kvconnect(stack: ExitStack) -> Variant:
    connector = kv_transfer(**chosen("choosing", host_bytes=HOST_BYTES))
    engines = [engine(connector, 1) for _ in range(2)]
    return behind(stack, "kvconnect", engines, OurRouter([], engines, ("--unified",)))


def kvconnect_pd(stack: ExitStack) -> Variant:
    sized = chosen("choosing", host_bytes=HOST_BYTES)
    p, d = (engine(kv_transfer(role=role, **sized), 1) for role in ("kv_producer", "kv_consumer"))
    return behind(stack, "kvconnect_pd", [p, d], OurRouter([p], [d]))


def sglang(
    args: Sequence[str] = (), role: Role = "null", backend: str = "kvconnect", **env: str
) -> CpuServer:
    """Return an SGLang server that is not started yet."""
    ucx = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"} if backend == "nixl" else {}
    plugin = plugin_path(PLUGIN if role != "null" else HICACHE)
    return CpuServer(
        model=MODEL,
        role=role,
        backend=backend,
        tokens=DEVICE_TOKENS,
        chunk=512,
        texts=True,
        args=("--page-size", "64", *args),
        env={**plugin, "OMP_NUM_THREADS": "1", **ucx, **env},
    )


def hicache(stack: ExitStack) -> Variant:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    args = (
        *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        *("--hicache-storage-backend", "file"),
    )
    servers = [sglang(args, SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=folder) for _ in range(2)]
    return behind(stack, "hicache", servers, Smg(servers))


def sglang_nixl(stack: ExitStack) -> Variant:
    servers = [sglang(role="prefill", backend="nixl"), sglang(role="decode", backend="nixl")]
    return behind(stack, "sglang_nixl", servers, Smg(servers))


def sglang_kvconnect(stack: ExitStack) -> Variant:
    config = {
        "linker": "KVConnectLinker",
        "linker_module_path": "kvconnect.engines.sglang.linker",
        "linker_extra_config": chosen("choosing", host_bytes=HOST_BYTES),
    }
    args = (
        "--enable-unified-cache-external-linker",
        *("--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(config)),
    )
    servers = [sglang(args) for _ in range(2)]
    return behind(stack, "sglang_kvconnect", servers, OurRouter([], servers, ("--unified",)))


def sglang_kvconnect_pd(stack: ExitStack) -> Variant:
    p, d = sglang(role="prefill"), sglang(role="decode")
    return behind(stack, "sglang_kvconnect_pd", [p, d], OurRouter([p], [d]))


FLEETS = {
    "plain": Fleet(plain, "kvconnect"),
    "lmcache": Fleet(lmcache, "kvconnect"),
    "kvconnect": Fleet(kvconnect, ""),
    "nixl": Fleet(nixl, "kvconnect_pd"),
    "kvconnect_pd": Fleet(kvconnect_pd, ""),
    "hicache": Fleet(hicache, "sglang_kvconnect"),
    "sglang_kvconnect": Fleet(sglang_kvconnect, ""),
    "sglang_nixl": Fleet(sglang_nixl, "sglang_kvconnect_pd"),
    "sglang_kvconnect_pd": Fleet(sglang_kvconnect_pd, ""),
}


# What is measured ---------------------------------------------------------------------------------


@contextmanager
def started(name: str) -> Iterator[Variant]:
    """Start a fleet, and let its engines meet."""
    progress(f"starting {name}")
    with ExitStack() as stack:
        fleet = FLEETS[name].start(stack)
        introduce(fleet)
        yield fleet


def introduce(fleet: Variant) -> None:
    """Ask until there is an answer: some engines connect at the first request, which fails, and
    some routers look for their engines a while.

    Raises:
        HTTPError: requests still fail after :data:`INTRODUCTIONS`.
    """
    body = {"model": "model", "prompt": "The sea was calm.", "max_tokens": 2, "temperature": 0}
    for left in reversed(range(INTRODUCTIONS)):
        try:
            fleet.front.post("/v1/completions", body)
            return
        except urllib.error.HTTPError as error:
            if not left:
                raise
            error.close()
            time.sleep(1.0)


def measure(names: Sequence[str], requests: list[Request], rounds: int) -> dict[str, float]:
    """Return the figures of fleets that take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(requests, parts.FULL, Path(folder), texts=True)
        with started(BASELINE) as fleet:
            replay.spread_for(fleet)
        for number in range(rounds):
            for name in list(names)[:: -1 if number % 2 else 1]:
                with started(name) as fleet:
                    saved = replay.ask(fleet, whole=False)
                found[name].append(saved)
                shown = ", ".join(f"{key} {saved[FIGURES[key]]:.1f}" for key in FIGURES)
                progress(f"round {number + 1} of {rounds}, {name}: {shown}")
    return figures(found)


def figures(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return medians, their spread, and KVConnect's over those of others, from what the load
    generator has saved of each fleet and round."""
    result: dict[str, float] = {}
    for name, saved in found.items():
        for key, theirs in FIGURES.items():
            values = [one[theirs] for one in saved]
            result[f"{key}_{name}"] = statistics.median(values)
            result[f"{key}_{name}_low"], result[f"{key}_{name}_high"] = min(values), max(values)
        result[f"failed_{name}"] = sum(map(failed, saved))
        ours = found.get(FLEETS[name].ours, ())
        for key in COMPARED if ours else ():
            ratios = [a[FIGURES[key]] / b[FIGURES[key]] for a, b in zip(ours, saved, strict=True)]
            result[f"{key.removesuffix('_ms')}_over_{name}"] = statistics.median(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=150, help="of the trace")
    parser.add_argument("--only", choices=FLEETS, action="append", help="a fleet; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end_when_terminated()
    for needed in (VLLM_ROUTER, SMG, LMCACHE_PACKAGES):
        if not needed.exists():
            raise SystemExit(f"{needed} is not there: run scripts/setup peers")
    if not SGLANG.exists():
        raise SystemExit(f"{SGLANG} is not there: run scripts/setup sglang")
    asked = scaled(sample(read(TRACE), options.requests, options.seed))
    model_dir(MODEL)  # made once, before several engines need it
    try:
        result = measure(options.only or list(FLEETS), asked, options.rounds)
    except LoadFailed as error:
        raise SystemExit(str(error)) from error
    if options.only:
        print(json.dumps({"benchmark": "choosing", **result}), flush=True)
    else:
        emit("choosing", {**result, "requests": len(asked), "rounds": options.rounds})


if __name__ == "__main__":
    main()
