"""An HTTP server that answers ``kvconnect try`` as vLLM or SGLang do, without a model.

It computes and loads on a clock of its own, so tests do not depend on how busy the machine is.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMPUTE_S, LOAD_S, DEVICE_S = 2.0, 0.1, 0.05
BLOCK = 16
TICKET = "kvconnect_ticket"


@dataclass
class Clock:
    """Time that only the engines' work takes."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class TrialEngine:
    """What one engine has cached and counted, and how it misbehaves.

    Attributes:
        offloads: whether KVConnect is there, and keeps ``host_tokens``.
        resets: whether the device's cache can be emptied by a request.
        counts: whether there are metrics.
        forgets: tokens differ where a prompt was loaded or received.
        rounds: tokens differ where a prompt was not computed whole, as in half precision.
        computes: it computes what it was handed.
        half: of a hand-off that a server of SGLang says it is.
        most: answers; then it only fails, and counts what it has ``refused``.
        answer: sent in place of any completion.
        hang: completions are never answered while it is not set.
    """

    clock: Clock
    name: str = "vllm"
    offloads: bool = True
    resets: bool = True
    counts: bool = True
    forgets: bool = False
    rounds: bool = False
    computes: bool = False
    host_tokens: int = 100_000
    device_tokens: int = 8192
    longest: int | None = 4096
    load_s: float = LOAD_S
    answer: bytes | None = None
    drips: bool = False
    api_key: str = ""
    half: str = "null"
    most: int = 1 << 30
    refused: int = 0
    hang: threading.Event = field(default_factory=threading.Event)
    counters: Counter[str] = field(default_factory=Counter)
    prompts: list[str] = field(default_factory=list)
    device: OrderedDict[str, int] = field(default_factory=OrderedDict)
    host: OrderedDict[str, int] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def __post_init__(self) -> None:
        self.hang.set()

    def complete(self, prompt: str, received: bool) -> tuple[list[int], int, int, str]:
        """Return (answer's tokens, prompt's tokens, cached tokens, where they were)."""
        with self.lock:
            self.prompts.append(prompt)
            tokens = len(prompt.split())
            whole = tokens // BLOCK * BLOCK
            source = self._source(prompt, received)
            took = {"device": DEVICE_S, "host": self.load_s, "handoff": self.load_s}
            self.clock.now += took.get(source, COMPUTE_S)
            if source != "device":
                self.counters["lookups"] += 1
            self.counters["hits"] += whole * (source == "host")
            self.counters["device"] += whole * (source == "device")
            if source == "handoff":
                self.counters["received"] += 1
            self._keep(prompt, tokens)
            wrong = self.forgets and source in ("host", "handoff")
            rounded = self.rounds and source != "computed"
            seed = zlib.crc32(prompt.encode()) + 2 * wrong + rounded
            return [(seed + 7 * n) % 2000 for n in range(4)], tokens, whole, source

    def _source(self, prompt: str, received: bool) -> str:
        if received and not self.computes:
            return "handoff"
        if prompt in self.device:
            return "device"
        return "host" if self.offloads and prompt in self.host else "computed"

    def _keep(self, prompt: str, tokens: int) -> None:
        for kept, room in ((self.device, self.device_tokens), (self.host, self.host_tokens)):
            kept[prompt] = tokens
            kept.move_to_end(prompt)
            while sum(kept.values()) > room:
                kept.popitem(last=False)
                self.counters["evicted"] += kept is self.host
        if self.host_tokens:
            self.counters["stored"] += tokens

    def metrics(self) -> str:
        """Return the text of a scrape."""
        cache = f'kv_cache_size_tokens="{self.device_tokens}",block_size="{BLOCK}",engine="0"'
        lines = [
            f"vllm:cache_config_info{{{cache}}} 1.0",
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.counters["device"]}',
        ]
        if self.name == "sglang":
            lines = [f'sglang:max_total_num_tokens{{dp_rank="0"}} {self.device_tokens}']
        if self.offloads:
            own = (
                ("lookups_total", "", "lookups"),
                ("hit_tokens_total", 'tier="host"', "hits"),
                ("transfer_bytes_total", 'transfer_type="GPU_to_CPU"', "stored"),
                ("transfer_bytes_total", 'transfer_type="CPU_to_GPU"', "hits"),
                ("transfer_seconds_total", 'transfer_type="CPU_to_GPU"', "hits"),
                ("evicted_blocks_total", 'tier="host"', "evicted"),
                ("handoff_received_requests_total", 'outcome="done"', "received"),
                ("jobs_in_flight", 'transfer_type="SEND"', "jobs"),
            )
            for metric, label, count in own:
                labels = f'engine="0",{label}'.rstrip(",")
                value = self.counters[count]
                lines.append(f"{self.name}:kvconnect_{metric}{{{labels}}} {value}")
            capacity = f'{self.name}:kvconnect_host_bytes_capacity{{engine="0"}}'
            lines.append(f"{capacity} {self.host_tokens}")
        return "\n".join(lines)


class _Handler(BaseHTTPRequestHandler):
    engine: TrialEngine

    def log_message(self, format: str, *args: object) -> None: ...

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode())

    def do_GET(self) -> None:
        engine = self.engine
        if engine.api_key and self.headers["Authorization"] != f"Bearer {engine.api_key}":
            self._send(401, b"unauthorized")
        elif self.path == "/v1/models":
            entry = {"id": "m", "owned_by": engine.name, "max_model_len": engine.longest}
            self._json({"data": [entry]})
        elif self.path == "/metrics" and engine.counts:
            self._send(200, engine.metrics().encode())
        elif self.path in ("/version", "/server_info"):
            told = {"version": "0.1.2", "disaggregation_mode": engine.half}
            self._json({**told, "disaggregation_bootstrap_port": 8998})
        else:
            self._send(404, b"{}")

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset_prefix_cache" and engine.resets:
            engine.device.clear()
            self._json({"success": True})
        elif self.path in ("/v1/completions", "/generate"):
            engine.hang.wait(60)
            if len(engine.prompts) >= engine.most:
                engine.refused += 1
                self._send(500, b"out of memory")
                return
            if engine.answer is not None:
                self._send(200, engine.answer)
            else:
                self._complete(body)
        else:
            self._send(404, b"{}")

    def _complete(self, body: dict[str, Any]) -> None:
        engine, params = self.engine, body.get("kv_transfer_params") or {}
        received = TICKET in params or ("bootstrap_room" in body and engine.offloads)
        prompt = body["text"] if self.path == "/generate" else body["prompt"]
        output, tokens, cached, source = engine.complete(prompt, received)
        if params.get("do_remote_decode"):
            ticket = {TICKET: "signed"} if engine.offloads else None
            self._json({"choices": [], "kv_transfer_params": ticket})
            return
        if self.path == "/generate":
            device = cached if source == "device" else 0
            details = {"device": device, "host": cached if source == "host" else 0}
            meta = {"prompt_tokens": tokens, "cached_tokens": cached}
            meta["cached_tokens_details"] = details
            chunks: list[dict[str, Any]] = [{"text": str(output), "meta_info": meta}]
        else:
            chunks = [{"choices": [{"text": f"{n} ", "token_ids": [n]}]} for n in output]
            chunks.append({"choices": [], "usage": {"prompt_tokens": tokens}})
        lines = [*(b"data: " + json.dumps(chunk).encode() for chunk in chunks), b"data: [DONE]"]
        self._stream(b"\n\n".join(lines) + b"\n\n")

    def _stream(self, raw: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        if not self.engine.drips:
            self.wfile.write(raw)
            return
        while not self.engine.hang.wait(0.01):  # a byte now and then, and no end
            self.wfile.write(b":")


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news."""


@contextmanager
def serving(*engines: TrialEngine) -> Iterator[None]:
    """Serve engines on ports of this machine; their ``url`` says where."""
    servers = []
    for engine in engines:
        handler = type("Handler", (_Handler,), {"engine": engine})
        server = _Server(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        engine.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        for engine in engines:
            engine.hang.set()
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join()
