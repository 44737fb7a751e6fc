"""A real vLLM server on loopback for tests, benchmarks and the demo: start, ask, scrape, stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.engines.models import engine_args, engine_blocks
from tests.fork_server import Child, ForkServer
from tests.servers import free_port

START_TIMEOUT_S = 480.0  # seconds on a free machine; several servers may start at once
STOP_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request, how many prompt tokens some cache had, and the headers of a
    whole answer."""

    tokens: tuple[int, ...]
    cached: int
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


class ServerDied(RuntimeError):
    """The server ended before it was healthy; the message holds the end of its log."""


class StreamBroken(RuntimeError):
    """A streamed answer ended with this error."""


def events(reply: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed completion.

    Raises:
        StreamBroken: it ends with an error.
    """
    for line in reply:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[len(b"data: ") :])
            if "error" in chunk:
                raise StreamBroken(chunk["error"]["message"])
            yield chunk


def kv_transfer(
    connector: str = "KVConnect", module: str | None = None, role: str = "kv_both", **extra: Any
) -> str:
    """Return the value of ``--kv-transfer-config`` for a connector and its settings."""
    config: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    if module:
        config["kv_connector_module_path"] = module
    return json.dumps(config)


def value_in(scrape: str, name: str, **labels: str) -> float:
    """Return a series' value in a scrape, summed over engines; KeyError if it is not there."""
    from prometheus_client.parser import text_string_to_metric_families

    # The parser is slow, and a scrape has a thousand lines of others.
    lines = "\n".join(line for line in scrape.split("\n") if line.startswith(name))
    found = [
        sample.value
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    if not found:
        raise KeyError(f"{name}{labels} is not in the scrape")
    return sum(found)


@dataclass
class Client:
    """Asks whatever serves the OpenAI-compatible API on a port of this machine."""

    port: int = field(default=0, kw_only=True)
    host: str = field(default="127.0.0.1", kw_only=True)
    headers: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Sent with every request."""

    def complete(self, prompt: list[int], max_tokens: int = 16, **extra: Any) -> Answer:
        """Return the greedy continuation of a prompt of token ids."""
        body = self.body(prompt, max_tokens, **extra)
        with self.open("/v1/completions", body) as answer:
            reply = json.load(answer)
        details = reply["usage"].get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return Answer(tuple(reply["choices"][0]["token_ids"]), cached, answer.headers)

    def complete_all(self, prompts: list[list[int]], max_tokens: int = 16) -> list[tuple[int, ...]]:
        """Return the tokens that continue all prompts, asked for by one request.

        However slow the machine, they are in the engine's queue at the same time.
        """
        body = self.body(prompts, max_tokens)
        with self.open("/v1/completions", body) as answer:
            choices = json.load(answer)["choices"]
        return [tuple(one["token_ids"]) for one in sorted(choices, key=lambda c: int(c["index"]))]

    def stream(self, prompt: list[int], max_tokens: int = 16, **extra: Any) -> tuple[float, Answer]:
        """Return (seconds to the first token, the greedy continuation) of a streamed request.

        Raises:
            StreamBroken: the answer ends with an error.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = self.body(prompt, max_tokens, **options, **extra)
        tokens: list[int] = []
        cached = first = 0.0
        started = time.perf_counter()
        with self.open("/v1/completions", body) as reply:
            for chunk in events(reply):
                for choice in chunk["choices"]:
                    first = first or time.perf_counter() - started
                    tokens += choice["token_ids"] or []
                if chunk.get("usage"):
                    details = chunk["usage"].get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens") or 0
        return first, Answer(tuple(tokens), int(cached), reply.headers)

    def abort(
        self, prompt: list[int], after_chunks: int, max_tokens: int = 256, **extra: Any
    ) -> None:
        """Ask for a stream and hang up after some chunks."""
        link = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        body = json.dumps(self.body(prompt, max_tokens, stream=True, **extra))
        link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if after_chunks:
            reply = link.getresponse()
            for _ in range(after_chunks):
                reply.readline()
                reply.readline()
        link.close()

    def post(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Send a POST request and return the reply's text; HTTP errors raise."""
        with self.open(path, body or {}) as reply:
            text: str = reply.read().decode()
            return text

    @property
    def url(self) -> str:
        """Where the API is."""
        return f"http://{self.host}:{self.port}"

    def scrape(self, path: str = "/metrics") -> str:
        """Return the text of ``/metrics``, or of some of it."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=REQUEST_TIMEOUT_S) as reply:
            text: str = reply.read().decode()
            return text

    def metric(self, name: str, **labels: str) -> float:
        """Return one series' value, summed over engines; KeyError if there is no such series."""
        return value_in(self.scrape(), name, **labels)

    def open(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        """Send a POST request; return the reply as it comes. HTTP errors raise."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self.headers, **headers},
        )
        return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)

    def body(
        self, prompt: list[int] | list[list[int]], max_tokens: int, **extra: Any
    ) -> dict[str, Any]:
        return {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **extra,
        }


class Process(Client, ABC):
    """A server started for the while of a ``with`` block. Its log is shown if that fails."""

    fork_server: ClassVar[ForkServer | None] = None
    """What forks servers of this class in tests; elsewhere they are started as users do it."""

    health: ClassVar[str] = "/health"
    """What answers when the server is up."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program and its arguments."""

    @property
    def worker(self) -> str:
        """How a router is told of it."""
        return self.url

    def environment(self) -> dict[str, str]:
        """Return the environment variables to start it with."""
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path}

    def launch(self) -> subprocess.Popen[bytes] | Child:
        """Start the program, its output in ``self.log``."""
        command = self.command()
        if self.fork_server and command[:2] == [self.fork_server.python, "-m"]:
            return self.fork_server.start(command[2:], self.environment(), self.log)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        self.port = self.port or free_port()
        handle, path = tempfile.mkstemp(prefix="kvconnect-server-", suffix=".log")
        os.close(handle)
        self.log = Path(path)
        self.process = self.launch()
        try:
            self._await_health()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if kind is not None:
            sys.stderr.write(self.tail())
        self.log.unlink(missing_ok=True)

    def pids(self) -> list[int]:
        """Return the server's processes, children included."""
        pids, parents = [], {self.process.pid}
        while parents:
            pids += sorted(parents)
            parents = {child for pid in parents for child in _children(pid)}
        return pids

    def stop(self) -> None:
        """End the server and all its processes by PID."""
        pids = self.pids()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        self.kill(pids)

    def kill(self, pids: list[int] | None = None) -> None:
        """Kill processes of the server (all by default) with SIGKILL."""
        for pid in pids or self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(STOP_TIMEOUT_S)

    def restart(self) -> None:
        """Start again on the same port."""
        self.__exit__(None, None, None)
        self.__enter__()

    def tail(self, chars: int = 6000) -> str:
        """Return the end of the server's log."""
        return self.log.read_text(errors="replace")[-chars:]

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerDied(self.log.read_text(errors="replace"))
            try:
                urllib.request.urlopen(f"{self.url}{self.health}", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise ServerDied(f"not healthy after {START_TIMEOUT_S:.0f} s\n{self.tail()}")


@dataclass
class Server(Process):
    """One engine behind the OpenAI-compatible API; use as a context manager.

    ``blocks`` is the size of the device's KV cache; small, so that it evicts. ``tp`` is the number
    of ranks. ``prefix`` is what the command starts with and ``host`` where the API listens, for a
    server in a network namespace.
    """

    model: str
    connector: str | None = None
    blocks: int = 64
    max_len: int = 1024
    tp: int = 1
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()

    def settle(self) -> None:
        """Wait until no transfer is in flight, as the metrics tell it."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while time.monotonic() < deadline:
            jobs = self.metric("vllm:kvconnect_jobs_in_flight")
            if not jobs and not self.metric("vllm:num_requests_running"):
                return
            time.sleep(0.1)
        raise TimeoutError(f"transfers still in flight: {jobs}")

    def command(self) -> list[str]:
        engine = engine_args(self.model)
        command = [
            *(*self.prefix, sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", engine["model"], "--served-model-name", "model"),
            *("--dtype", engine["dtype"], "--block-size", str(engine["block_size"])),
            *("--max-model-len", str(self.max_len), "--enforce-eager"),
            *("--num-gpu-blocks-override", str(engine_blocks(self.model, self.blocks))),
            *("--max-num-batched-tokens", "256", "--enable-prompt-tokens-details"),
            *("--tensor-parallel-size", str(self.tp)),
            *("--host", self.host, "--port", str(self.port)),
        ]
        if self.connector:
            command += ["--kv-transfer-config", self.connector]
        return [*command, *self.args]

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_SERVER_DEV_MODE": "1",
            **self.env,
        }


@dataclass
class Router(Process):
    """``kvconnect router`` in front of prefill and decode engines; without probes, unless ``args``
    ask for them: tests count what moves."""

    prefill: Sequence[Process]
    decode: Sequence[Process]
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.env}

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "kvconnect.cli", "router", "--port", str(self.port)),
            *(("--prefill", *(server.worker for server in self.prefill)) if self.prefill else ()),
            *(("--decode", *(server.worker for server in self.decode)) if self.decode else ()),
            *("--probe-interval", "0"),
            *self.args,
        ]


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]
