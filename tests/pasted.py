"""Runs the shell blocks of a page in their order, as a reader does who pastes them.

    scripts/in-netns python -m tests.pasted README.md
    scripts/in-netns python -m tests.pasted --fork vllm   # reads the pages' names

Engines are real, with a small model on the CPU: programs in a folder in front of ``PATH`` add the
flags for that, and :data:`PLACEHOLDERS` says what stands for what a reader would put in. A block
that serves is left running, as in a terminal of its own, until another one needs its ports. A
``text`` block behind a shell block is what that must print; numbers may differ. A file that is no
page is run as a command.

With ``--fork``, engines are forked from a process that has imported them, and pages are those of
standard input. A line ``== PAGE: passed`` or ``failed`` ends each.

Ports are those of the page, so this runs in a network namespace where that is permitted.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.documents import ROOT, SHELL, Block, Command, blocks_of, commands_of
from tests.engines.models import BLOCK_SIZE, model_dir
from tests.fork_server import SGLANG as SGLANG_MODULES
from tests.fork_server import VLLM as VLLM_MODULES
from tests.fork_server import ForkServer
from tests.forked import listening

START_TIMEOUT_S = 480.0  # of servers, on a busy machine
BLOCK_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 30.0
TOKENS = 2560  # as many as the longest request, and a little more on the device

PAGES = tuple(
    ROOT / name
    for name in (
        *("README.md", "docs/quickstart-vllm.md", "docs/quickstart-sglang.md"),
        "examples/README.md",
    )
)
"""What is pasted. The scripts of the last one are run one by one: they need different engines."""

PLACEHOLDERS = {
    "Qwen/Qwen3-8B": "CHECKPOINT",
    "MODEL": "CHECKPOINT",
    "/nvme/kv": "FOLDER/kv",
    "/var/tmp/kv": "FOLDER/kv",
    "/etc/kvconnect.key": "FOLDER/key",
    "10.1.2.3": "127.0.0.1",
    "64GiB": "256MiB",
    "8GiB": "256MiB",
    "500GiB": "1GiB",
    "20GiB": "1GiB",
}
"""What a page says -> what is run. FOLDER is one of this run, CHECKPOINT a small model."""

NOT_RUN = {
    "pip install": "installs into a user's environment: test_package.py installs the wheel in one",
    "make demo": "what it does is run by itself in CI",
    "make test": "runs this",
    "docker compose": "needs images: test_deploy.py checks what it reads",
}
"""How commands begin that are left out -> why."""

VLLM = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--enforce-eager"),
    *("--max-model-len", str(TOKENS), "--max-num-batched-tokens", "256"),
    *("--num-gpu-blocks-override", str(TOKENS // BLOCK_SIZE + 8)),
)
SGLANG = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--context-length", "1024", "--max-total-tokens", "1536", "--chunked-prefill-size", "256"),
    *("--skip-server-warmup", "--sleep-on-idle"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),  # the other one needs CUDA
)
ENVIRONMENT = {
    # Where a page leaves it to the machine's memory.
    "KVCONNECT_CONFIG": '{"host_bytes": "256MiB"}',
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "SGLANG_HOST_IP": "127.0.0.1",  # there may be no other address
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "false",  # asks CUDA for an event
}
_VLLM = "vllm.entrypoints.openai.api_server"
PROGRAMS = {
    # By module: the wheel for CPUs has another name, which the console command does not find.
    "vllm": f'shift; model=$1; shift\nexec LAUNCH {_VLLM} --model "$model" "$@" {" ".join(VLLM)}',
    "python": f'[ "$2" = sglang.launch_server ] || exec {sys.executable} "$@"\n'
    f'shift; exec LAUNCH "$@" {" ".join(SGLANG)}',
    # Live screens have no end.
    "kvconnect": '[ "$1" != top ] || set -- "$@" --once\n'
    f'exec {sys.executable} -m kvconnect.cli "$@"',
}
"""In front of ``PATH``. LAUNCH is what stands before the module of an engine."""
LAUNCH = f"{sys.executable} -m"
FORKED = {"vllm": VLLM_MODULES, "sglang": SGLANG_MODULES}
_DEFAULT_PORTS = {"vllm": 8000, "kvconnect": 8000, "sglang.launch_server": 30000}


class PastedFailed(Exception):
    """A block does not do what its page says; the message has its place, and what was printed."""


class Server(NamedTuple):
    """A block that serves."""

    process: subprocess.Popen[bytes]
    ports: tuple[int, ...]
    log: Path


def port_of(command: Command) -> int:
    """Return the port at which a command serves, 0 if it does not."""
    words = command.words
    served = words[:2] in (("vllm", "serve"), ("kvconnect", "router")) or words[2:3] in (
        ("sglang.launch_server",),
        ("sglang_router.launch_router",),
    )
    if not served:
        return 0
    if "--port" in words:
        return int(words[words.index("--port") + 1])
    return _DEFAULT_PORTS[words[2] if words[0] == "python" else words[0]]


def is_run(command: Command) -> bool:
    """Whether a command is none of :data:`NOT_RUN`."""
    return not command.line.startswith(tuple(NOT_RUN))


def counts() -> dict[str, int]:
    """Return how many commands :data:`PAGES` have, and how many of them are run."""
    found = [
        command
        for page in PAGES
        for block, _ in steps(page.read_text(encoding="utf-8"), page.name)
        for command in commands_of(block.text, block.place)
    ]
    return {"commands_in_docs": len(found), "commands_run": sum(map(is_run, found))}


def steps(text: str, page: str) -> Iterator[tuple[Block, str]]:
    """Yield the shell blocks of a page, each with what it must print."""
    found = list(blocks_of(text, page))
    for block, after in zip(found, [*found[1:], Block("", "", "")], strict=True):
        if block.language in SHELL:
            yield block, after.text if after.language == "text" else ""


def prints(output: str, expected: str) -> bool:
    """Whether all lines of ``expected`` were printed; numbers and spaces may differ."""
    lines = expected.strip().splitlines()
    return all(re.search(_pattern(line), output) for line in lines)


def _pattern(line: str) -> str:
    words = [re.sub(r"\d[\d.,]*", r"\\d[\\d.,]*", re.escape(word).replace(r"\.", "."))
             for word in line.split()]  # fmt: skip
    return r"\s+".join(words)


class Reader:
    """Pastes blocks, one after the other."""

    def __init__(self, folder: Path, model: str, launch: str = LAUNCH) -> None:
        self._folder = folder
        self._model = model
        self._servers: list[Server] = []
        (folder / "key").write_text("0" * 64)
        (folder / "key").chmod(0o600)
        (folder / "kv").mkdir()
        (folder / "bin").mkdir()
        for name, text in PROGRAMS.items():
            program = folder / "bin" / name
            program.write_text(f"#!/bin/sh\n{text.replace('LAUNCH', launch)}\n")
            program.chmod(0o755)

    def paste(self, block: Block, expected: str) -> None:
        """Run a block.

        Raises:
            PastedFailed: it does not work.
        """
        found = list(commands_of(block.text, block.place))
        ports = [port_of(command) for command in found]
        if not any(ports):
            self._run(block, expected)
            return
        first = next(number for number, port in enumerate(ports) if port)
        if not all(ports[first:]):
            raise PastedFailed(f"{block.place}: a command after a server's is never run")
        self._serve(block, tuple(filter(None, ports)))

    def stop(self, ports: tuple[int, ...] = ()) -> None:
        """End the servers at these ports, or all."""
        for server in list(self._servers):
            if ports and not set(ports) & set(server.ports):
                continue
            self._servers.remove(server)
            with suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(STOP_TIMEOUT_S)
            with suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()

    def _script(self, text: str) -> str:
        for name, value in PLACEHOLDERS.items():
            text = re.sub(rf"(?<![\w/]){re.escape(name)}(?!\w)", value, text)
        text = text.replace("FOLDER", str(self._folder)).replace("CHECKPOINT", self._model)
        left_out = "|".join(map(re.escape, NOT_RUN))
        text = re.sub(rf"^(?:{left_out})\b.*$", "", text, flags=re.M)
        return f"set -eo pipefail\n{text}\n"

    def _start(self, text: str, log: Path) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(self._folder / "bin"), os.environ["PATH"]])
        log.unlink(missing_ok=True)
        with log.open("ab") as output:  # engines that are forked open it too
            return subprocess.Popen(
                ["bash", "-c", self._script(text)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **{**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "PATH": path},
                    # Of the examples.
                    **{"MODEL": self._model, "HOST_BYTES": "256MiB"},
                    "FOLDER": str(self._folder / "example"),
                },
                start_new_session=True,
            )

    def _run(self, block: Block, expected: str) -> None:
        log = self._folder / "output"
        process = self._start(block.text, log)
        try:
            code = process.wait(BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise self._failed(block, "no end", log) from None
        sys.stdout.write(log.read_text(errors="replace"))
        if code:
            raise self._failed(block, f"exit code {code}", log)
        if not prints(log.read_text(errors="replace"), expected):
            raise self._failed(block, f"does not print\n{expected}", log)

    def _serve(self, block: Block, ports: tuple[int, ...]) -> None:
        self.stop(ports)
        log = self._folder / f"server-{block.place.replace('/', '-')}"
        # Where a page starts servers behind "&" alone, its shell stays.
        process = self._start(f"{block.text}\nwait", log)
        self._servers.append(Server(process, ports, log))
        deadline = time.monotonic() + START_TIMEOUT_S
        for port in ports:
            while not _healthy(port):
                if process.poll() is not None:
                    raise self._failed(block, "ended before it was healthy", log)
                if time.monotonic() > deadline:
                    raise self._failed(block, f"port {port} is not healthy", log)
                time.sleep(0.2)

    def _failed(self, block: Block, what: str, log: Path) -> PastedFailed:
        logs = dict.fromkeys([log, *(server.log for server in self._servers)])
        tails = "\n".join(f"-- {one.name}\n{one.read_text(errors='replace')[-4000:]}"
                          for one in logs)  # fmt: skip
        return PastedFailed(f"{block.place}: {what}\n{block.text}\n{tails}")


def _healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def run_page(name: str, launch: str) -> bool:
    """Paste a page's blocks; return whether all of them work."""
    path = Path(name)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvconnect-pasted-")))
        reader = Reader(folder, str(model_dir("bench")), launch)
        stack.callback(reader.stop)
        text = path.read_text(encoding="utf-8") if path.suffix == ".md" else f"```sh\n{path}\n```\n"
        try:
            for block, expected in steps(text, path.name):
                sys.stdout.write(f"== {block.place}\n{block.text}")
                sys.stdout.flush()
                reader.paste(block, expected)
        except PastedFailed as failed:
            sys.stdout.write(f"{failed}\n")
            return False
    return True


def _run_pages(names: Iterable[str], launch: str) -> bool:
    passed = True
    for name in names:
        works = run_page(name, launch)
        passed &= works
        sys.stdout.write(f"== {name}: {'passed' if works else 'failed'}\n")
        sys.stdout.flush()
    return passed


@contextmanager
def forking(engine: str) -> Iterator[Callable[[str], tuple[bool, str]]]:
    """Start a process that pastes pages with ``--fork``; yields what runs one.

    It takes a page's path, and returns whether all blocks work and what was printed.
    """
    command = ["scripts/in-netns", sys.executable, "-m", "tests.pasted", "--fork", engine]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def run(page: str) -> tuple[bool, str]:
            ask.write(f"{page}\n")
            ask.flush()
            printed = []
            for line in answers:
                if line in (f"== {page}: passed\n", f"== {page}: failed\n"):
                    return line.endswith("passed\n"), "".join(printed)
                printed.append(line)
            raise RuntimeError(f"ended at {page}:\n{''.join(printed)}")

        yield run


def main() -> int:
    """Run the pages that are named; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="none: the lines of standard input")
    parser.add_argument("--fork", choices=FORKED, help="start this engine by forking")
    options = parser.parse_args()
    with ExitStack() as stack:
        launch = LAUNCH
        if options.fork:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fork_server = ForkServer(FORKED[options.fork], {**os.environ, **ENVIRONMENT})
            stack.enter_context(fork_server)
            stack.enter_context(listening(folder / "socket", fork_server))
            launch = f"{LAUNCH} tests.forked {folder / 'socket'}"
        passed = _run_pages(options.pages or map(str.strip, sys.stdin), launch)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
