"""The engines and routers that are compared. Those that are not asked are stopped."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.common import progress
from benchmarks.machines import cores, move
from benchmarks.serve.load import PEERS, LoadFailed
from benchmarks.settings import chosen
from tests.engines import pd
from tests.engines.models import BLOCK_SIZE
from tests.engines.server import Client, Process, Router, Server, kv_transfer
from tests.servers import free_port

MODEL = "bench"
MAX_LEN = 4096
DEVICE_BLOCKS = 256
"""Two of the longest prompts; a working set of many documents or conversations does not fit."""
HOST_BYTES = "1GiB"
HOST_BLOCKS = 2048
"""Of ``HOST_BYTES``: a block of 32 tokens has 512 KiB."""
PLAIN, CONTROL, OURS, NIXL, LMCACHE = "plain", "control", "kvconnect", "nixl", "lmcache"
RESET_S = 60.0
INTRODUCTIONS = 5
"""Requests with which a pair of NIXL's engines may fail before the benchmark does."""
VLLM_ROUTER = PEERS / "vllm-router" / "bin" / "vllm-router"
LMCACHE_PACKAGES = PEERS / "lmcache-server"
"""LMCache and what it needs beside vLLM's packages, for its server and the engine that asks it."""


@dataclass
class Variant:
    """Something that the load generators ask: one engine, or a router and its engines."""

    name: str
    engines: Sequence[Server]
    router: Process | None = None
    store: LmcacheServer | None = None
    """What keeps blocks outside the engine."""

    @property
    def front(self) -> Client:
        return self.router or self.engines[0]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run, ask once for a prompt that does not count, stop it again."""
        self.signal(signal.SIGCONT)
        self.front.complete([5] * 8, 2)
        yield
        self.signal(signal.SIGSTOP)

    def place(self, apart: bool) -> None:
        """Have the stopped engines run on cores of their own from now on, or all on all. A router
        stays on all: it is hardly ever awake."""
        for engine, allowed in zip(self.engines, cores(len(self.engines), apart), strict=True):
            move(engine.pids(), allowed)

    def signal(self, number: signal.Signals) -> None:
        for process in filter(None, (*self.engines, self.router, self.store)):
            for pid in process.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def reset(self) -> None:
        """Forget all blocks, on the device and in host memory."""
        for engine in self.engines:
            reset(engine, external=not self.store)
        if self.store:
            self.store.post("/cache/clear", {"tier": "l1"})


def reset(engine: Server, external: bool) -> None:
    """Empty an engine's prefix cache, and with ``external`` what its connector keeps.

    Raises:
        TimeoutError: its blocks stay in use.
    """
    query = "?reset_external=true" if external and engine.connector else ""
    deadline = time.monotonic() + RESET_S
    while time.monotonic() < deadline:
        if json.loads(engine.post(f"/reset_prefix_cache{query}"))["success"]:
            return
        time.sleep(0.2)  # blocks may still be on their way
    raise TimeoutError(f"{engine.url}: the prefix cache could not be reset")


@dataclass
class VllmRouter(Process):
    """``vllm-router`` in front of one prefill and one decode engine."""

    prefill: Server
    decode: Server

    def command(self) -> list[str]:
        if not VLLM_ROUTER.exists():
            raise LoadFailed(f"{VLLM_ROUTER} is not there: run scripts/setup peers")
        return [
            *(str(VLLM_ROUTER), "--vllm-pd-disaggregation", "--policy", "round_robin"),
            *("--prefill", self.prefill.url, "--decode", self.decode.url),
            *("--host", self.host, "--port", str(self.port), "--log-level", "warning"),
            *("--prometheus-port", str(free_port())),
        ]


@dataclass
class LmcacheServer(Process):
    """LMCache's server with ``gib`` of host memory, as much as KVConnect has."""

    gib: int = 1
    requests: int = field(default_factory=free_port)
    """Port that engines ask; ``port`` is its admin API's."""
    health: ClassVar[str] = "/healthcheck"

    def command(self) -> list[str]:
        if not LMCACHE_PACKAGES.exists():
            raise LoadFailed(f"{LMCACHE_PACKAGES} is not there: run scripts/setup peers")
        return [
            *(sys.executable, "-m", "lmcache.cli.main", "server"),
            *("--host", self.host, "--port", str(self.requests)),
            *("--http-host", self.host, "--http-port", str(self.port)),
            *(
                "--l1-size-gb",
                str(self.gib),
                "--eviction-policy",
                "LRU",
                "--chunk-size",
                str(BLOCK_SIZE),
            ),
            *("--supported-transfer-mode", "auto"),
            *("--worker-reap-timeout-seconds", "3600"),  # a stopped engine is not a dead one
        ]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.settings()}

    @staticmethod
    def settings() -> dict[str, str]:
        """Return the environment variables with which it, and an engine, find LMCache."""
        root = str(Path(__file__).resolve().parents[2])
        return {"PYTHONPATH": os.pathsep.join([root, str(LMCACHE_PACKAGES)])}

    def connector(self) -> str:
        """Return an engine's setting to ask it."""
        port = {"lmcache.mp.host": f"tcp://{self.host}", "lmcache.mp.port": self.requests}
        return kv_transfer("LMCacheMPConnector", **port, **{"lmcache.mp.heartbeat_interval": 3600})


def engine(connector: str | None, threads: int, **env: str) -> Server:
    """Return an engine that is not started yet."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",  # a stopped engine is not a hung one
        # After 5 s, the server would close connections that vLLM's load generator still writes to.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        **env,
    }
    return Server(
        MODEL,
        connector,
        blocks=DEVICE_BLOCKS,
        max_len=MAX_LEN,
        env=settings,
        args=("--max-num-batched-tokens", "512"),
    )


def nixl_engine(role: str) -> Server:
    """Return an engine with vLLM's ``NixlConnector`` that is not started yet."""
    config = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "benchmarks.nixl",
        "kv_role": role,
        "kv_buffer_device": "cpu",
    }
    env = {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return engine(json.dumps(config), 1, **env)


@contextmanager
def single_engines(names: Sequence[str]) -> Iterator[dict[str, Variant]]:
    """Start an engine for each of the names and leave them stopped; one core is for the rest."""
    threads = max(1, (os.cpu_count() or 2) - 1)
    progress(f"starting engines: {', '.join(names)}")
    with ExitStack() as stack:
        variants = {}
        for name in names:
            store = stack.enter_context(LmcacheServer()) if name == LMCACHE else None
            if store:
                server = engine(store.connector(), threads, **store.settings())
            else:
                ours = kv_transfer(**chosen("serve", host_bytes=HOST_BYTES))
                server = engine(ours if name == OURS else None, threads)
            variants[name] = Variant(name, [server], store=store)
        stack.enter_context(pd.side_by_side(*(one.engines[0] for one in variants.values())))
        stack.enter_context(stopped(variants.values()))
        yield variants


@contextmanager
def disaggregated() -> Iterator[dict[str, Variant]]:
    """Start a prefill and a decode engine with KVConnect and its router, the same with NIXL and
    vllm-router, and one engine without a connector; leave them stopped."""

    no_tier = chosen("serve", host_bytes="off")
    ours = [
        engine(kv_transfer(role="kv_producer", **no_tier), 1),
        engine(kv_transfer(role="kv_consumer", **no_tier), 1),
    ]
    theirs = [nixl_engine("kv_producer"), nixl_engine("kv_consumer")]
    alone = engine(None, 1)
    progress("starting prefill and decode engines and routers")
    with ExitStack() as stack:
        stack.enter_context(pd.side_by_side(*ours, *theirs, alone))
        our_router = stack.enter_context(Router(ours[:1], ours[1:]))
        their_router = stack.enter_context(VllmRouter(theirs[0], theirs[1]))
        variants = {
            NIXL: Variant(NIXL, theirs, their_router),
            OURS: Variant(OURS, ours, our_router),
            PLAIN: Variant(PLAIN, [alone]),
        }
        introduce(variants[NIXL])
        with stopped(variants.values()):
            yield variants


def introduce(variant: Variant) -> None:
    """Let NIXL's engines connect. On a busy machine that takes longer than the five seconds that
    NixlConnector gives it, and then the first request fails; the next ones find the connection.

    Raises:
        HTTPError: requests still fail after :data:`INTRODUCTIONS`.
    """
    for left in reversed(range(INTRODUCTIONS)):
        try:
            variant.front.complete([5] * 8, 2)
            return
        except urllib.error.HTTPError as error:
            if not left:
                raise
            error.close()


@contextmanager
def stopped(variants: Any) -> Iterator[None]:
    """Stop the variants, and let them go on in the end: a stopped process does not terminate."""
    variants = list(variants)
    for variant in variants:
        variant.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for variant in variants:
            variant.signal(signal.SIGCONT)


Work = Callable[[Variant, int], dict[str, Any]]


def turns(variants: Sequence[Variant], rounds: int, work: Work) -> dict[str, list[dict[str, Any]]]:
    """Do the work with every variant in every round; every second round runs backwards."""
    found: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    for number in range(rounds):
        for variant in variants[:: -1 if number % 2 else 1]:
            with variant.awake():
                found[variant.name].append(work(variant, number))
    return found


def ratio(
    found: Mapping[str, Sequence[Mapping[str, float]]], ours: str, theirs: str, key: str
) -> float:
    """Return the median over rounds of one figure of ours over that of theirs."""
    pairs = zip(found[ours], found[theirs], strict=True)
    return statistics.median(a[key] / b[key] for a, b in pairs)
