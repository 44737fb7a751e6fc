"""Two prefill engines, two decode engines and a router, with something breaking every few seconds.

Clients keep asking for prompts whose tokens are known from a single engine, half of them for
streams, which the router continues. Every answer must be those tokens or one clean error, every
request must end, and afterwards no engine may hold a block.

    python -m benchmarks.chaos [--minutes 10] [--seed 1]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import emit, progress
from benchmarks.settings import chosen
from tests.engines.models import prompt_tokens
from tests.engines.server import Process, Router, Server, StreamBroken, events, kv_transfer
from tests.servers import free_port

MODEL = "llama"
PROMPTS = 24
NEW, STREAMED_NEW = 12, 96  # tokens of a whole answer, and of a stream
CLIENTS = 4  # every other one asks for streams
CONTINUED = 3  # times that a stream may lose its engine
THINK_S = 0.3  # between two requests of a client
DEADLINE_S = 8.0  # of a transfer; short, so that cuts longer than it fit in
REQUEST_LIMIT_S = 120.0  # nothing that a client asks may take longer
QUIET_S = 90.0
SHORT_S, LONG_S = 2.0, 1.5 * DEADLINE_S  # of pauses and cuts
BETWEEN_S = (2.0, 5.0)  # two faults
YIELDING = 5  # priority of what serves, against 0 of what starts
ENGINE_KILLS = ("kill prefill", "kill decode")


@dataclass
class Tally:
    """What clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, outcome: str, error: str = "") -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if error:
                self.errors[error] += 1


@dataclass
class Fleet:
    """Engines and router; any of them may be down for a while."""

    prefill: list[Server]
    decode: list[Server]
    router: Router
    restarts: list[threading.Thread] = field(default_factory=list)

    @property
    def restarting(self) -> bool:
        """Whether an engine is on its way back."""
        return any(thread.is_alive() for thread in self.restarts)

    @property
    def engines(self) -> list[Server]:
        return self.prefill + self.decode


def length(number: int) -> int:
    """Prompts of 64 to about 700 tokens."""
    return 64 + number * 27


def prompts() -> list[list[int]]:
    return [prompt_tokens(length(number), start=1300 * number) for number in range(PROMPTS)]


def client(
    fleet: Fleet,
    want: list[tuple[int, ...]],
    tally: Tally,
    stop: threading.Event,
    *,
    streams: bool,
) -> None:
    """Ask for prompts in random order until told to stop. ``want``: their longest answers."""
    asked, new = prompts(), STREAMED_NEW if streams else NEW
    while not stop.wait(THINK_S):
        number = random.randrange(PROMPTS)
        if random.random() < 0.1:
            give_up(fleet.router, asked[number], tally)
            continue
        started = time.monotonic()
        try:
            if streams:
                found = streamed(fleet.router, asked[number], new)
            else:
                found = fleet.router.complete(asked[number], new).tokens
            tally.note("right" if found == want[number][:new] else "wrong")
        except StreamBroken as error:
            tally.note("error", str(error))
        except urllib.error.HTTPError as error:
            error.close()
            tally.note("error", f"HTTP {error.code}")
        except TimeoutError:
            tally.note("hung")
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            # The router itself was killed: the connection breaks off.
            tally.note("broken", type(error).__name__)
            time.sleep(0.2)
        if time.monotonic() - started > REQUEST_LIMIT_S:
            tally.note("hung")


def streamed(router: Router, prompt: list[int], new: int) -> tuple[int, ...]:
    """Return the tokens of a stream.

    Raises:
        StreamBroken: it ends with an error.
        IncompleteRead: it breaks off, which ``http.client`` takes for its end.
    """
    with router.open("/v1/completions", router.body(prompt, new, stream=True)) as reply:
        lines = list(reply)
    choices = [choice for chunk in events(lines) for choice in chunk["choices"]]
    if b"data: [DONE]\n" not in lines:
        raise http.client.IncompleteRead(b"")
    return tuple(token for choice in choices for token in choice["token_ids"] or ())


def give_up(router: Router, prompt: list[int], tally: Tally) -> None:
    """Hang up at some point."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        router.abort(prompt, after_chunks=random.randrange(3), max_tokens=NEW)
    tally.note("given up")


def restart(victim: Process, stack: ExitStack) -> None:
    """Kill a process and all its children, and start it again on the same port."""
    victim.kill()
    stack.enter_context(victim)
    yield_cores(victim)


def yield_cores(server: Process) -> None:
    """Let processes that start go first: beside busy engines on few cores that takes minutes.

    Each server is a session of its own; where the kernel shares cores out by session, only the
    session's priority counts.
    """
    for pid in server.pids():
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), YIELDING)
            Path(f"/proc/{pid}/autogroup").write_text(str(YIELDING))


def pause(victim: Server, seconds: float) -> None:
    """Stop all processes of an engine for a while."""
    pids = victim.pids()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def cut(ports: list[int]) -> Iterator[None]:
    """Drop every packet from and to some ports of loopback."""
    rules = [
        ["INPUT", "-i", "lo", "-p", "tcp", side, str(port), "-j", "DROP"]
        for port in ports
        for side in ("--dport", "--sport")
    ]
    for rule in rules:
        subprocess.run(["iptables", "-I", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run(["iptables", "-D", *rule], check=True)


def faults(fleet: Fleet, stack: ExitStack) -> dict[str, Callable[[], None]]:
    """Return what can be broken, by name."""

    def cut_link(seconds: float) -> None:
        with cut([handoff_port(server) for server in fleet.prefill]):
            time.sleep(seconds)

    def kill(engines: list[Server]) -> None:
        """Have an engine come back while other things break."""
        thread = threading.Thread(target=restart, args=(random.choice(engines), stack))
        thread.start()
        fleet.restarts.append(thread)

    found: dict[str, Callable[[], None]] = {
        "kill prefill": lambda: kill(fleet.prefill),
        "kill decode": lambda: kill(fleet.decode),
        "kill router": lambda: restart(fleet.router, stack),
        "pause prefill": lambda: pause(random.choice(fleet.prefill), SHORT_S),
        "pause prefill long": lambda: pause(random.choice(fleet.prefill), LONG_S),
        "pause decode": lambda: pause(random.choice(fleet.decode), SHORT_S),
    }
    if shutil.which("iptables") and os.geteuid() == 0:
        found["cut link"] = lambda: cut_link(SHORT_S)
        found["cut link long"] = lambda: cut_link(LONG_S)
    return found


def handoff_port(server: Server) -> int:
    """Return the port a prefill engine hands out blocks at."""
    extra = json.loads(server.connector or "{}")["kv_connector_extra_config"]
    return int(extra["listen"].rpartition(":")[2])


def start(stack: ExitStack, key_file: str) -> Fleet:
    """Start everything; engines one after the other, since they load both cores."""
    limits = chosen("chaos", deadline_s=DEADLINE_S, lease_s=DEADLINE_S)
    common = chosen("chaos", digest="full", transport="tcp", key_file=key_file)

    def server(role: str, settings: dict[str, Any]) -> Server:
        connector = kv_transfer(role=role, **limits, **common, **settings)
        return Server(MODEL, connector, env={"OMP_NUM_THREADS": "1"})

    prefill = [
        server("kv_producer", chosen("chaos", host_bytes="off", listen=f"127.0.0.1:{port}"))
        for port in (free_port(), free_port())
    ]
    decode = [server("kv_consumer", chosen("chaos", host_bytes="64MiB")) for _ in range(2)]
    for each in prefill + decode:
        stack.enter_context(each)
        yield_cores(each)
    flags = ("--timeout", "60", "--continue", str(CONTINUED))
    router = stack.enter_context(Router(prefill, decode, flags))
    return Fleet(prefill, decode, router)


def break_things(fleet: Fleet, stack: ExitStack, minutes: float) -> Counter[str]:
    """Break something every few seconds; return what was broken how often."""
    done: Counter[str] = Counter()
    actions = faults(fleet, stack)
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        # One engine at a time: of two, the other one still serves.
        names = [name for name in actions if name not in ENGINE_KILLS or not fleet.restarting]
        name = random.choice(names)
        progress(f"  {end - time.monotonic():5.0f} s left: {name}")
        actions[name]()
        done[name] += 1
        time.sleep(random.uniform(*BETWEEN_S))
    for thread in fleet.restarts:
        thread.join()
    return done


def leaked(server: Server) -> float:
    """Return what an engine still holds once it had time to let go of everything."""
    names = [("vllm:kvconnect_ledger_held_blocks", {}), ("vllm:kv_cache_usage_perc", {})]
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        held = sum(server.metric(name, **labels) for name, labels in names)
        if not held:
            return 0.0
        server.complete([1, 2, 3], 1)  # an idle engine publishes nothing new
        time.sleep(1.0)
    return held


def run(minutes: float, stack: ExitStack) -> dict[str, float]:
    progress("tokens of a single engine")
    with Server(MODEL, blocks=256) as plain:
        want = [plain.complete(prompt, STREAMED_NEW).tokens for prompt in prompts()]
    assert len({tokens[:NEW] for tokens in want}) > PROMPTS / 2, (
        "prompts must be told apart by their answers"
    )
    key = Path(stack.enter_context(tempfile.TemporaryDirectory()), "key")
    key.write_text("a key for one run of this benchmark")
    progress("starting 2 prefill engines, 2 decode engines and a router")
    fleet = start(stack, str(key))
    tally, stop = Tally(), threading.Event()
    clients = [
        threading.Thread(
            target=client, args=(fleet, want, tally, stop), kwargs={"streams": bool(number % 2)}
        )
        for number in range(CLIENTS)
    ]
    for thread in clients:
        thread.start()
    try:
        done = break_things(fleet, stack, minutes)
    finally:
        stop.set()
        for thread in clients:
            thread.join(2 * REQUEST_LIMIT_S)
    stuck = sum(thread.is_alive() for thread in clients)
    blocks = sum(leaked(server) for server in fleet.engines)
    answered = sum(tally.outcomes.values()) - tally.outcomes["given up"]
    alive = answered - tally.outcomes["broken"]  # requests during which the router lived
    retries = fleet.router.metric("kvconnect_router_retries_total")
    progress(f"faults: {dict(done)}\nerrors: {dict(tally.errors)}")
    return {
        "minutes": minutes,
        "faults": done.total(),
        "requests": answered,
        "right": tally.outcomes["right"],
        "served_share": tally.outcomes["right"] / max(1, alive),
        "clean_errors": tally.outcomes["error"],
        "router_killed_meanwhile": tally.outcomes["broken"],
        "given_up": tally.outcomes["given up"],
        "wrong_tokens": tally.outcomes["wrong"],
        "hangs": tally.outcomes["hung"] + stuck,
        "leaked_blocks": blocks,
        "retry_share": retries / max(1, answered),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    with ExitStack() as stack:
        figures = run(arguments.minutes, stack)
    emit("chaos", figures)
    return int(bool(figures["wrong_tokens"] or figures["hangs"] or figures["leaked_blocks"]))


if __name__ == "__main__":
    sys.exit(main())
