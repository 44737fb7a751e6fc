"""What a router adds to a request, and how many it serves per core: KVConnect's, `smg` and
`vllm-router` in front of the same fake engines, and no router at all.

    python -m benchmarks.router [--seconds 15] [--rate 100]

The peers are those of `.venv-peers` (`scripts/setup peers`); one that is not there is left out, and
said to be.

Latency: 100 streaming requests per second, 50 tokens each, arriving at random. Added is the time to
the first event (`added_p50_ms_*`, `added_p99_ms_*`) and to the last (`added_end_*`), less the
median of going to the decode engine directly. The variants take turns, slice by slice. Throughput:
per second of CPU time of the router's process, all its threads (read from /proc), because the load
generator and the engines share the machine. `answers_per_core_second_*`: answers in one piece, 32
at a time. `streams_per_core_second_*`: ``OPEN`` streams of 50 tokens at a time, which get their
tokens at the same moments, as from the steps of an engine. `calm_streams_per_core_second_*`: the
streaming requests of the latency.

Memory: ``SLOW`` clients ask for streams without end and read nothing; `mib_per_slow_stream_*` is
what the router's process gains by one, once it has taken all it takes. Then ``HOSTILE`` clients ask
for answers of 64 MiB that are no streams, and read nothing: `peak_mib_hostile_*` is the most that
the process ever had.

`*_over_smg` and `*_over_vllm_router` divide KVConnect's figure by the peer's, in the same mode of
prefill and decode: both at once, as SGLang does it (`bootstrap`), and one after the other, as vLLM
does it (`pull`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.balance import process
from benchmarks.common import emit, progress
from benchmarks.fake_engines import MODEL
from tests.servers import free_port

PEERS = Path(__file__).resolve().parents[1] / ".venv-peers"
RATE = 100.0  # requests per second
TOKENS = 50
EVERY_S = 0.02  # between two tokens
ROUNDS = 3
CROWD = 32
OPEN = 200
PROMPT = "The sea was calm. " * 64
START_S = 60.0
SLOW = 20  # clients that do not read
HOSTILE = 12
RECEIVED = 64 << 10  # bytes that the sockets of these take
FLOOD = 10**9  # tokens of a stream without end
SETTLE_S = 60.0
LIKE = {"smg": "bootstrap", "vllm_router": "pull"}  # which of ours does what a peer does
RATIOS = (
    *("added_p50_ms", "added_p99_ms", "added_end_p50_ms", "added_end_p99_ms"),
    *("answers_per_core_second", "streams_per_core_second", "calm_streams_per_core_second"),
    *("mib_per_slow_stream", "peak_mib_hostile"),
)


class Variant(NamedTuple):
    """Something to send requests to. ``pid`` None: an engine itself."""

    name: str
    port: int
    pid: int | None


def request_of(stream: bool, **more: object) -> bytes:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "stream": stream, **more}
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[float, float]:
    """Send a request; return the seconds to the first byte of the body, and to its end."""
    start = time.perf_counter()
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b" 200 " in head.split(b"\r\n")[0], head
    if b"chunked" not in head:
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        seconds = time.perf_counter() - start
        return seconds, seconds
    first = 0.0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
        first = first or time.perf_counter() - start
    await reader.readexactly(2)
    return first, time.perf_counter() - start


async def paced(port: int, seconds: float, seed: int, rate: float) -> list[tuple[float, float]]:
    """Send streaming requests at random moments, on connections that are kept."""
    loop, draw = asyncio.get_running_loop(), random.Random(seed)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    request, begin = request_of(stream=True), loop.time()

    async def one(at: float) -> tuple[float, float]:
        await asyncio.sleep(begin + at - loop.time())
        both = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        found = await exchange(*both, request)
        idle.append(both)
        return found

    moments = sorted(draw.uniform(0, seconds) for _ in range(int(rate * seconds)))
    found = await asyncio.gather(*(one(at) for at in moments))
    for _, writer in idle:
        writer.close()
    return list(found)


async def crowded(port: int, seconds: float, requests: int, *, stream: bool) -> int:
    """Keep so many requests open; return how many were answered."""
    end, request = time.perf_counter() + seconds, request_of(stream=stream)

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count = 0
        while time.perf_counter() < end:
            await exchange(reader, writer, request)
            count += 1
        writer.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(requests))))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, its threads and its children that still run."""
    total, children = 0.0, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total + sum(cpu_seconds(int(child)) for child in children)


def resident_mib(pid: int) -> float:
    """Resident memory of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    own = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return own + sum(resident_mib(int(child)) for child in children)


def queued_bytes() -> int:
    """Bytes in the sockets of this machine: to be sent, or received and not read."""
    connections = (line.split()[4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(int(part, 16) for both in connections for part in both.split(":"))


def peak_mib(pid: int) -> float:
    """The most memory that a process and its children have had."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    status = Path(f"/proc/{pid}/status").read_text()
    own = int(status.split("VmHWM:")[1].split()[0]) / 2**10
    return own + sum(peak_mib(int(child)) for child in children)


@contextmanager
def unread(variant: Variant, clients: int, request: bytes) -> Iterator[None]:
    """Have clients ask and read nothing; enter the block once all sockets are full."""
    with ExitStack() as ends:
        for _ in range(clients):
            client = ends.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED)
            client.connect(("127.0.0.1", variant.port))
            client.sendall(request)
        end, last, queued = time.monotonic() + SETTLE_S, -1, 0
        while time.monotonic() < end and queued != last:
            time.sleep(2.0)
            last, queued = queued, queued_bytes()
        yield


def memory_of(variant: Variant) -> dict[str, float]:
    """Return what a router's memory gains by a client that reads nothing of an endless stream, and
    its peak with those that read nothing of long answers."""
    assert variant.pid is not None, "an engine's memory is not measured"
    before = resident_mib(variant.pid)
    with unread(variant, SLOW, request_of(stream=True)):
        gained = resident_mib(variant.pid) - before
    with unread(variant, HOSTILE, request_of(stream=False, user="long answers")):
        peak = peak_mib(variant.pid)
    return {
        f"mib_per_slow_stream_{variant.name}": gained / SLOW,
        f"peak_mib_hostile_{variant.name}": peak,
    }


# What is compared -------------------------------------------------------------------------------


@contextmanager
def variants(tokens: int = TOKENS, every_s: float = EVERY_S) -> Iterator[list[Variant]]:
    """Run engines and routers; yield what there is to compare, the engine first."""
    with ExitStack() as ends:
        prefill, decode = free_port(), free_port()
        fakes = [sys.executable, "-m", "benchmarks.fake_engines", str(prefill), str(decode)]
        ends.enter_context(process([*fakes, "--tokens", str(tokens), "--every", str(every_s)]))
        p, d = (f"http://127.0.0.1:{port}" for port in (prefill, decode))
        ours = [sys.executable, "-m", "kvconnect.cli", "router"]
        commands = {
            "push": [*ours, "--prefill", p, "--decode", d],
            "pull": [*ours, "--pull", "--prefill", p, "--decode", d],
            "bootstrap": [*ours, *_both(f"{p},engine=sglang", f"{d},engine=sglang")],
            **_peer_commands(p, d),
        }
        found = [Variant("direct", decode, None)]
        wait_for(decode)
        for name, command in commands.items():
            port = free_port()
            running = ends.enter_context(process([*command, "--port", str(port)]))
            if wait_for(port, running):
                found.append(Variant(name, port, running.pid))
            else:
                progress(f"{name} does not come up, and is left out")
        yield found


def _both(prefill: str, decode: str) -> list[str]:
    return ["--prefill", prefill, "--decode", decode]


def _peer_commands(p: str, d: str) -> Mapping[str, list[str]]:
    """Commands of the peers that are installed; with everything off that they need not do."""
    smg, vllm = PEERS / "smg" / "bin" / "smg", PEERS / "vllm-router" / "bin" / "vllm-router"
    common = ["--host", "127.0.0.1", "--policy", "round_robin", "--log-level", "error"]
    commands = {
        "smg": [
            *(str(smg), "launch", "--backend", "sglang", "--pd-disaggregation"),
            *("--prefill", p, "8998", "--decode", d, *common),
        ],
        "vllm_router": [str(vllm), "--vllm-pd-disaggregation", *_both(p, d), *common],
    }
    found = {}
    for name, command in commands.items():
        if Path(command[0]).exists():
            found[name] = [*command, "--prometheus-port", str(free_port())]
        else:
            progress(f"{name} is left out: no {command[0]} (scripts/setup peers installs it)")
    return found


def wait_for(port: int, running: subprocess.Popen[bytes] | None = None) -> bool:
    """Wait until requests are answered; return whether they are."""
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    end = time.monotonic() + START_S
    while time.monotonic() < end and (running is None or running.poll() is None):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    return False


def measure(all_variants: list[Variant], seconds: float, rate: float) -> dict[str, float]:
    """Return the figures, the variants taking turns."""
    timings: dict[str, list[tuple[float, float]]] = {v.name: [] for v in all_variants}
    served: dict[str, dict[str, list[float]]] = {v.name: {} for v in all_variants}
    slice_s = seconds / ROUNDS

    def count(variant: Variant, what: str, load: Coroutine[Any, Any, int]) -> None:
        assert variant.pid is not None, "an engine's CPU time is not measured"
        before = cpu_seconds(variant.pid)
        done = uvloop.run(load)
        rate = done / (cpu_seconds(variant.pid) - before)
        served[variant.name].setdefault(f"{what}_per_core_second", []).append(rate)

    async def calm(variant: Variant, seed: int) -> int:
        found = await paced(variant.port, slice_s, seed, rate)
        timings[variant.name] += found
        return len(found)

    for number in range(ROUNDS):
        for variant in all_variants[:: -1 if number % 2 else 1]:
            if variant.pid is None:
                uvloop.run(calm(variant, number))
                continue
            count(variant, "calm_streams", calm(variant, number))
            count(variant, "streams", crowded(variant.port, slice_s, OPEN, stream=True))
            count(variant, "answers", crowded(variant.port, slice_s, CROWD, stream=False))
            progress(f"round {number + 1}, {variant.name}: done")
    return _figures(timings, served)


def _figures(
    timings: Mapping[str, list[tuple[float, float]]],
    served: Mapping[str, Mapping[str, list[float]]],
) -> dict[str, float]:
    figures: dict[str, float] = {}
    base_first = statistics.median(first for first, _ in timings["direct"])
    base_last = statistics.median(last for _, last in timings["direct"])
    for name, found in timings.items():
        firsts = statistics.quantiles((1000 * (first - base_first) for first, _ in found), n=100)
        lasts = statistics.quantiles((1000 * (last - base_last) for _, last in found), n=100)
        figures[f"added_p50_ms_{name}"], figures[f"added_p99_ms_{name}"] = firsts[49], firsts[98]
        figures[f"added_end_p50_ms_{name}"] = lasts[49]
        figures[f"added_end_p99_ms_{name}"] = lasts[98]
        for what, rates in served[name].items():
            figures[f"{what}_{name}"] = statistics.median(rates)
    for ours in ("added_p50_ms", "added_p99_ms", "answers_per_core_second"):
        figures[ours] = figures[f"{ours}_push"]
    return figures


def ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Return KVConnect's figures over those of every peer that was measured."""
    found = {}
    for peer, like in LIKE.items():
        for name in RATIOS:
            if f"{name}_{peer}" in figures:
                share = figures[f"{name}_{like}"] / figures[f"{name}_{peer}"]
                found[f"{name.removesuffix('_ms')}_over_{peer}"] = share
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="per variant and kind of load")
    parser.add_argument("--rate", type=float, default=RATE, help="streaming requests per second")
    arguments = parser.parse_args()
    with variants() as found:
        figures = measure(found, arguments.seconds, arguments.rate)
    with variants(FLOOD, 0.0) as found:
        for variant in found[1:]:
            figures |= memory_of(variant)
            progress(f"slow clients, {variant.name}: done")
    figures |= ratios(figures)
    for ours in ("mib_per_slow_stream", "peak_mib_hostile"):
        figures[ours] = figures[f"{ours}_push"]
    figures["rate"] = arguments.rate
    emit("router", figures)


if __name__ == "__main__":
    main()
