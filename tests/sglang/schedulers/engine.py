"""The test's side of an engine: starts its ranks, steps their loops, reads what they report."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.fork_server import Child, ForkServer
from tests.servers import free_port

MODULES = (
    "sglang.launch_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.layers.attention.torch_native_backend",
)
"""What a rank imports."""

PAGE = 4  # tokens
CHUNK = 32  # tokens of prefill per step
START_S = 240.0
STEP_S = 120.0


class EngineDied(AssertionError):
    """A scheduler's loop ended; the message has its traceback."""


@dataclass(frozen=True)
class Shape:
    """What one engine is: its half of a hand-off, its ranks, the ``tokens`` of its KV pool,
    SGLang's flags and its environment."""

    role: Literal["prefill", "decode"]
    tp: int = 1
    pp: int = 1
    tokens: int = 512
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass
class _Rank:
    """One rank's process and connection. ``state``: what it last reported, {} before that."""

    child: Child
    log: Path
    link: socket.socket
    buffer: bytes = b""
    state: dict[str, Any] = field(default_factory=dict)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived."""
        data = self.link.recv(1 << 20)
        if not data:
            raise EngineDied(f"a rank hung up\n{self.tail()}")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


class Engine:
    """One engine. For one thread. ``faults``: what its ranks' models found wrong."""

    def __init__(self, server: ForkServer, model: Path, shape: Shape) -> None:
        self.shape = shape
        self.bootstrap_port = free_port()
        self.port = free_port()
        self.ranks: list[_Rank] = []
        self.faults: list[str] = []
        self._server = server
        self._model = model
        self._folder = Path(tempfile.mkdtemp(prefix="kvc-"))

    def start(self) -> None:
        """Start the ranks' processes; :meth:`wait` waits for them."""
        spec = {
            "flags": self._flags(),
            "folder": str(self._folder),
            "nccl_port": free_port(),
            "instance": uuid.uuid4().hex[:12],
        }
        for pp in range(self.shape.pp):
            for tp in range(self.shape.tp):
                self.ranks.append(self._start_rank({**spec, "tp_rank": tp, "pp_rank": pp}))

    def _start_rank(self, spec: dict[str, Any]) -> _Rank:
        name = self._folder / f"{spec['pp_rank']}-{spec['tp_rank']}"
        log = Path(f"{name}.log")
        log.touch()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{name}.sock")
            listener.listen()
            listener.settimeout(START_S)
            argv = ["tests.sglang.schedulers.rank", json.dumps({**spec, "socket": f"{name}.sock"})]
            child = self._server.start(argv, self._environment(), log)
            link, _ = listener.accept()
        return _Rank(child, log, link)

    def wait(self) -> None:
        """Wait until every rank's loop has come to its first iteration."""
        for rank in self.ranks:
            while not rank.state:
                self._receive(START_S)

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.link.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.child.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.child.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def step(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        """Run one iteration of the loop with these requests; return what it put out.

        Raises:
            EngineDied: a rank's loop ended.
        """
        first = self.ranks[0]
        first.link.sendall(json.dumps(messages).encode() + b"\n")
        outputs: list[dict[str, Any]] = []
        first.state = {}
        while not first.state:
            outputs += self._receive(STEP_S)
        return outputs

    def _receive(self, limit_s: float) -> list[dict[str, Any]]:
        """Take the messages of any ranks, and wait for one; return the outputs in them."""
        links = {rank.link: rank for rank in self.ranks}
        ready = select.select(list(links), [], [], limit_s)[0]
        if not ready:
            logs = "\n".join(rank.tail() for rank in self.ranks)
            raise EngineDied(f"the {self.shape.role} engine's loop stands still\n{logs}")
        outputs: list[dict[str, Any]] = []
        for link in ready:
            for message in links[link].messages():
                if "died" in message:
                    raise EngineDied(f"{self.shape.role}: {message['died']}")
                outputs += message["outputs"]
                self.faults += message["faults"]
                links[link].state = message["state"]
        return outputs

    def _flags(self) -> list[str]:
        shape = self.shape
        flags = [
            *("--model-path", str(self._model), "--skip-tokenizer-init", "--device", "cpu"),
            *("--attention-backend", "torch_native", "--dtype", "float32"),
            *("--page-size", str(PAGE), "--max-total-tokens", str(shape.tokens)),
            *("--max-running-requests", "8", "--context-length", "1024"),
            *("--chunked-prefill-size", str(CHUNK)),
            *("--tp-size", str(shape.tp), "--pp-size", str(shape.pp)),
            *("--skip-server-warmup", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--disaggregation-mode", shape.role),
            *("--disaggregation-transfer-backend", "kvconnect"),
        ]
        if shape.role == "prefill":
            flags += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        else:
            flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]  # no CUDA
            flags += ["--num-reserved-decode-tokens", "8"]
        return [*flags, *shape.flags]

    def _environment(self) -> dict[str, str]:
        count = self.shape.tp * self.shape.pp
        cores = sorted(os.sched_getaffinity(0))
        cores_of_ranks = "|".join(str(cores[rank % len(cores)]) for rank in range(count))
        return {
            **os.environ,
            "TMPDIR": str(self._folder),
            "OMP_NUM_THREADS": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "KVCONNECT_CONFIG": json.dumps({"transport": "tcp"}),
            **({"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks} if count > 1 else {}),
            **dict(self.shape.env),
        }


class Engines:
    """Engines that stay up for whoever asks for one of their shape; use as a context manager."""

    def __init__(self, server: ForkServer, model: Path) -> None:
        self._server = server
        self._model = model
        self._running: dict[Shape, Engine] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for shape in list(self._running):
            self.discard(shape)

    def get(self, *shapes: Shape) -> list[Engine]:
        """Return engines of these shapes; those that are not up are started together."""
        missing = [shape for shape in shapes if shape not in self._running]
        for shape in missing:
            self._running[shape] = Engine(self._server, self._model, shape)
            self._running[shape].start()
        for shape in missing:
            self._running[shape].wait()
        return [self._running[shape] for shape in shapes]

    def discard(self, shape: Shape) -> None:
        """End the engine of this shape, if there is one."""
        if shape in self._running:
            self._running.pop(shape).close()
