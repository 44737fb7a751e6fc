"""Pages between two processes: the TCP transport against raw sockets, NIXL over TCP, and iperf3.

    python -m benchmarks.transport [--quick]

**Loopback.** A sample moves 256 MiB: pages picked and paired at random out of 768 MiB in either
process, so that caches hold little of them; the destination is compared afterwards. It is timed in
the process that asks, from asking until the last byte is in place. Variants take turns within one
run, and ratios are of medians of throughput, so more is better:

- ``ours``: ``TcpTransport`` as it comes, with 2 connections and sampled digests; ``off`` and
  ``full`` with others. The reader requests pages with a message, as in a hand-off.
- ``raw``: 2 connections, a thread for each, ``sendmsg`` and ``recvmsg_into`` in a loop over lists
  of pages made beforehand: no protocol, no checks. The faster of lists of 512 KiB and 4 MiB.
- ``ours_nixl``: KVConnect's NIXL path, over TCP too; ``ours_nixl_off`` without digests, which plain
  NIXL does not have. ``ratio_plain_nixl_*`` is ``ours_nixl_off`` over plain NIXL's ``write`` with
  the same settings and descriptors. ``handshake_ms``: to connect, authenticate and agree on both
  paths; the median of 21. ``idle_cores_ours_nixl``: CPU seconds per second of both processes
  together while no pages are sent.
- ``nixl``: NIXL's UCX backend over TCP, the fastest of reading and writing, with UCX's own segment
  sizes and with larger ones. Descriptors are made beforehand. Its thread and its caller sleep
  between polls; as it comes the thread takes a core.

``cpu_per_gb_*``: CPU seconds of both processes, user and system, per 1e9 bytes.
``digest_cost``, ``digest_cost_sampled``: throughput lost to digests, at 64 KiB.
``ratio_busy_gil``: ``ours`` with a thread that runs Python code in each process over ``ours``
without. Such threads take time from a transport twice: they use cores, and they hold the
interpreter lock. ``ratio_busy_cores`` has the same loops in two processes of their own, and
``ratio_busy_lock``, one over the other, is what is left for the lock. ``busy_raw`` and
``busy_nixl``: what busy threads do to those. ``page_ms_*``: the same for a single page, in ms.

**Link.** ``ratio_iperf_1g`` and ``_10g``: over a ``veth`` link between two network namespaces,
shaped to 1 and 10 Gbit/s, against iperf3 with as many connections and bytes. Left out where
namespaces are not permitted or iperf3 is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import emit, progress
from benchmarks.link import LOOPBACK, End, Link, Unavailable
from benchmarks.transfer_methods import CONNECTIONS, MIB, NIXL, PATIENCE_S, serve
from kvconnect.copy import native_unavailable_reason

AREA_BYTES = 768 * MIB  # of either process
SAMPLE_BYTES = 256 * MIB
PAGES = {"16k": 16 << 10, "64k": 64 << 10, "256k": 256 << 10, "2m": 2 * MIB}
PAGE = "64k"  # of the figures that are taken of one size only
RATES = {"1g": (1e9, SAMPLE_BYTES), "10g": (1e10, AREA_BYTES)}  # bits per second, bytes of a sample
READY_S = 0.02  # for a source to wait to be asked

OURS = {"off": "tcp off", "ours": "tcp sampled", "full": "tcp full"}
OURS_NIXL = {"ours_nixl": "nixl sampled", "ours_nixl_off": "nixl off"}
HANDSHAKES = 21
IDLE_S = 3.0
RAW = {"raw_512k": str(512 << 10), "raw_4m": str(4 * MIB)}
NIXL_WAYS = {"read": "READ", "write": "WRITE"}
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib", "NIXL_LOG_LEVEL": "WARN"}
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "128k", "UCX_TCP_RX_SEG_SIZE": "256k"}


class Child:
    """A process with a :class:`Host`."""

    def __init__(self, end: End, source: bool, env: Mapping[str, str]) -> None:
        role = "source" if source else "reader"
        what = ("--serve", role, end.address, str(AREA_BYTES))
        command = (sys.executable, "-m", "benchmarks.transport", *what)
        self._process = subprocess.Popen(
            (*end.inside, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            cwd=Path(__file__).parents[1],
        )

    def start(self, *call: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise SystemExit("a process that moves pages " + ("died" if ready else "hangs"))
        return json.loads(line)

    def call(self, *call: Any) -> Any:
        self.start(*call)
        return self.answer()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its threads; the clock is that of clock_getcpuclockid."""
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def kill(self) -> None:
        self._process.kill()
        with self._process:  # waits, and closes the pipes
            pass


class Sample(NamedTuple):
    """Seconds that the pages took, and of CPU in both processes."""

    seconds: float
    cpu_s: float


class Pair:
    """A source and a reader with the same transfer methods. As a context manager, ends both."""

    def __init__(
        self, env: Mapping[str, str], source: End = LOOPBACK, reader: End = LOOPBACK
    ) -> None:
        self.source, self.reader = Child(source, True, env), Child(reader, False, env)
        self._seeds = itertools.count()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.kill()
        self.reader.kill()

    def open(self, kind: str, options: Mapping[str, str]) -> None:
        """Make transfer methods by name; see Host.open."""
        for name, option in options.items():
            hellos = self._both("open", kind, name, option)
            self.reader.call("meet", name, hellos[0])
            self.source.call("meet", name, hellos[1])

    def sample(self, name: str, page: int, nbytes: int, load: Sequence[Load] = ()) -> Sample:
        # Other pages each time: what an earlier sample left is not taken for this one's.
        self._both("prepare", name, page, nbytes, next(self._seeds))
        for each in load:
            each.busy(True)
        cpu_s = -self.cpu_s()
        if name == "write":
            seconds = self.source.call("move", name)
        else:
            self.source.start("move", name)
            time.sleep(READY_S)
            seconds = self.reader.call("move", name)
            self.source.answer()
        cpu_s += self.cpu_s()
        for each in load:
            each.busy(False)
        if not self.same():
            raise SystemExit(f"{name}: wrong bytes with pages of {page}")
        return Sample(seconds, cpu_s)

    def cpu_s(self) -> float:
        """Return the CPU seconds of both processes."""
        return self.source.cpu_s() + self.reader.cpu_s()

    def same(self) -> bool:
        """Say whether the reader's pages are the source's."""
        source, reader = self._both("digest")
        return bool(source == reader)

    def busy(self, on: bool) -> None:
        """Keep the interpreter of both processes busy, or stop that."""
        self._both("busy", on)

    def _both(self, *call: Any) -> tuple[Any, Any]:
        self.source.start(*call)
        self.reader.start(*call)
        return self.source.answer(), self.reader.answer()


class Spinners:
    """Busy Python loops in two other processes. As a context manager, ends them."""

    def __init__(self) -> None:
        loop = (sys.executable, "-c", "while True: pass")
        self._processes = [subprocess.Popen(loop) for _ in range(2)]
        self.busy(False)

    def __enter__(self) -> Spinners:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def busy(self, on: bool) -> None:
        """Let them run, or stop them."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)


Load = Pair | Spinners


class Variant(NamedTuple):
    """A transfer method, and what keeps the machine busy meanwhile."""

    pair: Pair
    method: str
    load: tuple[Load, ...] = ()


def interleave(
    variants: Mapping[str, Variant], rounds: int, page: int, nbytes: int
) -> dict[str, Sample]:
    """Return the medians of variants that take turns, as benchmarks.common does it."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    for number in range(rounds + 1):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            pair, method, load = variants[name]
            sample = pair.sample(method, page, nbytes, load)
            if number:
                samples[name].append(sample)
    return {name: median(many) for name, many in samples.items()}


def median(samples: Sequence[Sample]) -> Sample:
    return Sample(*map(statistics.median, zip(*samples, strict=True)))


def fastest(samples: Mapping[str, Sample], prefix: str) -> str:
    """Return the name of the fastest variant whose name starts so; "" if there is none."""
    names = [name for name in samples if name.startswith(prefix)]
    return min(names, key=lambda name: samples[name].seconds, default="")


# What is measured -----------------------------------------------------------------------------


def check_sees_wrong_bits(pair: Pair) -> None:
    """End the benchmark if one wrong bit among a sample's pages would go unnoticed."""
    pair.sample("ours", PAGES[PAGE], SAMPLE_BYTES)
    pair.reader.call("spoil")
    if pair.same():
        raise SystemExit("a wrong bit was not noticed")


def measure_page(variants: Mapping[str, Variant], name: str, rounds: int) -> dict[str, object]:
    progress(f"pages of {name}: {rounds} rounds")
    found = interleave(variants, rounds, PAGES[name], SAMPLE_BYTES)
    figures: dict[str, object] = {
        f"gbps_{variant}_{name}": SAMPLE_BYTES / sample.seconds / 1e9
        for variant, sample in found.items()
    }
    ours, raw, nixl = found["ours"], fastest(found, "raw"), fastest(found, "nixl")
    if "ours_nixl_off" in found:
        plain = found["nixl_write"].seconds
        figures[f"ratio_plain_nixl_{name}"] = plain / found["ours_nixl_off"].seconds
        figures[f"cpu_ratio_plain_nixl_{name}"] = (
            found["ours_nixl_off"].cpu_s / found["nixl_write"].cpu_s
        )
    figures[f"ratio_raw_{name}"] = found[raw].seconds / ours.seconds
    if nixl:
        figures[f"ratio_nixl_{name}"] = found[nixl].seconds / ours.seconds
    if name != PAGE:
        return figures
    for label, variant in (("ours", "ours"), ("raw", raw), ("nixl", nixl)):
        if variant:
            figures[f"cpu_per_gb_{label}"] = found[variant].cpu_s / SAMPLE_BYTES * 1e9
    if nixl:
        figures["cpu_per_gb_ratio_nixl"] = ours.cpu_s / found[nixl].cpu_s
    figures["digest_cost"] = 1 - found["off"].seconds / found["full"].seconds
    figures["digest_cost_sampled"] = 1 - found["off"].seconds / ours.seconds
    return figures


def measure_busy(variants: Mapping[str, Variant], rounds: int) -> dict[str, object]:
    """The same variants with and without a busy thread in both processes; and on busy cores."""
    progress(f"busy interpreters: {rounds} rounds")
    page = PAGES[PAGE]
    every = {f"idle_{name}": each for name, each in variants.items()}
    every |= {f"busy_{name}": each._replace(load=(each.pair,)) for name, each in variants.items()}
    pages = interleave(every, rounds, page, page)
    with Spinners() as spinners:
        every["cores"] = variants["ours"]._replace(load=(spinners,))
        found = interleave(every, rounds, page, SAMPLE_BYTES)
        seconds = {name: sample.seconds for name, sample in found.items()}
    return {
        "ratio_busy_gil": seconds["idle_ours"] / seconds["busy_ours"],
        "ratio_busy_cores": seconds["idle_ours"] / seconds["cores"],
        "ratio_busy_lock": seconds["cores"] / seconds["busy_ours"],
        **{
            f"busy_{name}": seconds[f"idle_{name}"] / seconds[f"busy_{name}"]
            for name in variants
            if name != "ours"
        },
        **{f"page_ms_{name}": sample.seconds * 1e3 for name, sample in pages.items()},
    }


def measure_loopback(rounds: int) -> dict[str, object]:
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(Pair({}))
        pair.open("ours", OURS)
        pair.open("raw", RAW)
        check_sees_wrong_bits(pair)
        variants = {name: Variant(pair, name) for name in (*OURS, *RAW)}
        figures: dict[str, object] = {}
        if importlib.util.find_spec(NIXL):
            for label, env in (("", UCX), ("_segments", UCX | SEGMENTS)):
                nixl = stack.enter_context(Pair(env))
                nixl.open("nixl", NIXL_WAYS)
                variants |= {f"nixl_{way}{label}": Variant(nixl, way) for way in NIXL_WAYS}
            path = stack.enter_context(Pair(UCX))
            path.open("ours", OURS_NIXL)
            variants |= {name: Variant(path, name) for name in OURS_NIXL}
            seconds = [path.reader.call("handshake", "ours_nixl") for _ in range(HANDSHAKES)]
            figures["handshake_ms"] = statistics.median(seconds) * 1e3
            cpu_s = path.cpu_s()
            time.sleep(IDLE_S)
            figures["idle_cores_ours_nixl"] = (path.cpu_s() - cpu_s) / IDLE_S
        else:
            progress(f"{NIXL} is not installed: nothing is compared with NIXL")
        for name in PAGES:
            figures |= measure_page(variants, name, rounds)
        speeds = {name: -float(str(figures[f"gbps_{name}_{PAGE}"])) for name in variants}
        contenders = {"ours": variants["ours"]}
        for label in ("raw", "nixl"):
            if names := [name for name in variants if name.startswith(label)]:
                contenders[label] = variants[min(names, key=speeds.__getitem__)]
        return figures | measure_busy(contenders, rounds)


def iperf3(link: Link, nbytes: int) -> float:
    """Return the bits per second that iperf3's receiver counts."""
    source, reader = link.ends
    at = ("-p", "5201", "-J")
    server = (*reader.inside, "iperf3", "-s", "-1", "-B", reader.address, *at)
    with subprocess.Popen(server, stdout=subprocess.DEVNULL) as receiving:
        try:
            time.sleep(0.5)  # until it listens
            amount = ("-n", str(nbytes), "-P", str(CONNECTIONS))
            client = (*source.inside, "iperf3", "-c", reader.address, *amount, *at)
            done = subprocess.run(client, check=True, capture_output=True, timeout=PATIENCE_S)
        finally:
            receiving.kill()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"])


def measure_link(rounds: int) -> dict[str, object]:
    if shutil.which("iperf3") is None:
        progress("iperf3 is not installed: no link is measured")
        return {}
    figures: dict[str, object] = {}
    try:
        with Link() as link, Pair({}, *link.ends) as pair:
            pair.open("ours", {"ours": OURS["ours"]})
            for name, (rate, nbytes) in RATES.items():
                progress(f"a link of {rate / 1e9:g} Gbit/s: {rounds} rounds")
                link.shape(rate)
                ours, theirs = [], []
                for number in range(rounds + 1):
                    seconds = pair.sample("ours", PAGES[PAGE], nbytes).seconds
                    bits = iperf3(link, nbytes)
                    if number:
                        ours.append(nbytes * 8 / seconds)
                        theirs.append(bits)
                figures[f"gbit_per_s_ours_{name}"] = statistics.median(ours) / 1e9
                figures[f"gbit_per_s_iperf3_{name}"] = statistics.median(theirs) / 1e9
                figures[f"ratio_iperf_{name}"] = statistics.median(ours) / statistics.median(theirs)
    except Unavailable as error:
        progress(f"no link is measured: {error}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="2 rounds, to see that it runs")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)  # what a child is started with
    options = parser.parse_args()
    if options.serve:
        role, address, area_bytes = options.serve
        serve(role == "source", address, int(area_bytes))
        return
    rounds = 2 if options.quick else options.rounds
    figures: dict[str, object] = {
        "native": native_unavailable_reason() is None,
        "connections": CONNECTIONS,
    }
    figures |= measure_loopback(rounds)
    figures |= measure_link(max(2, rounds // 2))
    emit("transport", figures)


if __name__ == "__main__":
    main()
