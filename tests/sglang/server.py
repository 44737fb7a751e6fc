"""A real SGLang server on the CPU for tests, the demo and benchmarks: start, ask, scrape, kill."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Literal, Self

from tests.engines.models import model_dir
from tests.engines.server import REQUEST_TIMEOUT_S, Answer, Client, Process, Router
from tests.servers import free_port

PAGE = 16  # tokens per page
CHUNK = 64  # tokens of prefill per step
IDLE_TIMEOUT_S = 60.0
Role = Literal["null", "prefill", "decode"]


@dataclass
class GenerateClient(Client):
    """Asks whatever serves SGLang's own ``/generate`` on a port of this machine."""

    def complete(self, prompt: list[int], max_tokens: int = 16, **extra: Any) -> Answer:
        """Return the greedy continuation of a prompt of token ids."""
        with self.open("/generate", self.body(prompt, max_tokens, **extra)) as answer:
            return _answer(json.load(answer), answer.headers)

    def stream(self, prompt: list[int], max_tokens: int = 16, **extra: Any) -> tuple[float, Answer]:
        """Return (seconds to the first token, the greedy continuation) of a streamed request."""
        first, reply = 0.0, b""
        started = time.perf_counter()
        with self.open("/generate", self.body(prompt, max_tokens, stream=True, **extra)) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - started
                    reply = line
        return first, _answer(json.loads(reply.removeprefix(b"data: ")))

    def abort(
        self, prompt: list[int], after_chunks: int, max_tokens: int = 256, **extra: Any
    ) -> None:
        """Ask for a stream and hang up after some chunks."""
        link = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        body = json.dumps(self.body(prompt, max_tokens, stream=True, **extra))
        link.request("POST", "/generate", body, {"Content-Type": "application/json"})
        if after_chunks:
            reply = link.getresponse()
            for _ in range(after_chunks):
                reply.readline()
                reply.readline()
        link.close()

    def body(self, prompt: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, **extra}


@dataclass
class GenerateRouter(GenerateClient, Router):
    """A router that is asked in SGLang's own way: the servers have no tokenizer."""


@dataclass
class SglangServer(GenerateClient, Process):
    """One SGLang server; use as a context manager.

    ``role`` is the half of a hand-off it is, ``"null"`` for a server of its own; ``backend`` moves
    the pages and ``settings`` are KVConnect's. ``tokens`` is the size of the KV cache, ``chunk``
    how many tokens one step prefills, ``tp`` the number of ranks and ``dp`` how many times there
    are so many. ``texts``: with a tokenizer, and named "model", as OpenAI's API needs; else only
    ``/generate`` with token ids. ``grpc``: routers ask it over gRPC. ``prefix`` is what the command
    starts with, ``host`` where clients reach the API and ``address`` where other servers reach this
    one, for servers in network namespaces. A server that was killed starts again on the same ports
    with :meth:`restart`.
    """

    model: str = "llama"
    role: Role = "null"
    backend: str = "kvconnect"
    settings: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    dp: int = 1
    tokens: int = 8192
    chunk: int = CHUNK
    texts: bool = False
    grpc: bool = False
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"

    running: ClassVar[list[SglangServer]] = []
    """Those whose log is worth a look when a test fails."""

    def __post_init__(self) -> None:
        self.bootstrap_port = free_port() if self.role == "prefill" else 0
        self.grpc_port = free_port() if self.grpc else 0
        self.scratch = ""

    def __enter__(self) -> Self:
        # What a killed server leaves behind (sockets, metrics of its processes) goes with this.
        self.scratch = tempfile.mkdtemp(prefix="kvc-")
        try:
            super().__enter__()
        except BaseException:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        self.running.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.running.remove(self)
        super().__exit__(kind, error, trace)
        shutil.rmtree(self.scratch, ignore_errors=True)

    @property
    def worker(self) -> str:
        meeting = f",bootstrap={self.bootstrap_port}" if self.role == "prefill" else ""
        url = f"grpc://{self.host}:{self.grpc_port}" if self.grpc else self.url
        return f"{url},engine=sglang{meeting}"

    def forget(self) -> None:
        """Wait until the scheduler has no request in any of its queues, then empty its cache."""
        self.post(f"/flush_cache?timeout={IDLE_TIMEOUT_S:.0f}")

    def used_tokens(self) -> int:
        """Return how many tokens of the KV cache requests or the prefix cache hold."""
        with urllib.request.urlopen(f"{self.url}/v1/loads", timeout=REQUEST_TIMEOUT_S) as reply:
            return sum(rank["num_used_tokens"] for rank in json.load(reply)["loads"])

    def command(self) -> list[str]:
        listen = self.host if self.host == self.address else "0.0.0.0"
        command = [
            *(*self.prefix, sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model_dir(self.model))),
            *(("--served-model-name", "model") if self.texts else ("--skip-tokenizer-init",)),
            *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
            *("--page-size", str(PAGE), "--max-total-tokens", str(self.tokens)),
            *("--chunked-prefill-size", str(self.chunk)),
            *("--tp-size", str(self.tp), "--dp-size", str(self.dp)),
            *("--skip-server-warmup", "--sleep-on-idle"),
            *("--enable-metrics", "--enable-metrics-for-all-schedulers"),
            *("--host", listen, "--port", str(self.port)),
        ]
        if self.role != "null":
            command += ["--disaggregation-mode", self.role]
            command += ["--disaggregation-transfer-backend", self.backend]
        if self.grpc:
            command += ["--grpc-port", str(self.grpc_port)]
        if self.role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if self.role == "decode":
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]  # no CUDA
        return [*command, *self.args]

    def environment(self) -> dict[str, str]:
        environment = {
            **super().environment(),
            "TMPDIR": self.scratch,
            "OMP_NUM_THREADS": "1",
            "SGLANG_HOST_IP": self.address,
            # Sending a cached prefix before the forward asks CUDA for an event.
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "false",
            # For how long a server waits for the other half of a request; as SGLang comes, 300.
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
            "KVCONNECT_CONFIG": json.dumps(self.settings),
        }
        ranks = self.tp * self.dp
        if ranks > 1:  # a core per rank, else SGLang counts NUMA nodes
            cores = sorted(os.sched_getaffinity(0))
            bind = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = bind
        return {**environment, **self.env}


def _answer(reply: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> Answer:
    cached = reply["meta_info"].get("cached_tokens") or 0
    return Answer(tuple(reply["output_ids"]), cached, headers)


def plugin_path(folder: Path) -> dict[str, str]:
    """Return the environment in which a server also loads the plugin of ``folder``."""
    root = Path(__file__).resolve().parents[2]
    path = filter(None, (str(folder), str(root), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(path)}
