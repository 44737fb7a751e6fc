"""What it takes that streams survive the loss of their decode engine (`--continue` of the router).

    python -m benchmarks.continue_streams [--seconds 15] [--rate 200]

The cost of the journal, in front of engines without a model: streams of 50 tokens per second of CPU
time of the router's process (`streams_per_core_second_*`), and microseconds of it per token
(`us_per_token_*`): with native code (`relay`), in Python (`python`), and journaled (`journal`). The
variants take turns. `journal_over_relay` and `journal_over_python` divide streams per second.

What a client sees of a loss, with one prefill and two decode engines of real vLLM: one decode
engine is drained in the middle of ``STREAMS`` streams, and killed in the middle of others.
`extra_ms_*` is the longest pause of a stream that was cut, less the median of the longest pauses of
those that were not. `computed_again` is the share of the cut streams' tokens, prompt and answer,
that an engine computed again. `drain_*` is the same for the drain, and `drained_*` counts what
became of its streams. `wrong_streams` counts those whose text is not that of an undisturbed run,
`broken_streams` those that ended with an error.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import fake_engines
from benchmarks.balance import process
from benchmarks.common import emit, end_when_terminated, progress
from benchmarks.router import EVERY_S, TOKENS, Variant, cpu_seconds, paced, wait_for
from benchmarks.settings import chosen
from tests.engines.load import Admin
from tests.engines.models import prompt_tokens
from tests.engines.server import Router, Server, StreamBroken, events, kv_transfer
from tests.servers import free_port

MODEL = "llama"
ROUNDS = 3
STREAMS = 24
AT_ONCE = 6  # streams that nobody disturbs: more engines than cores would not answer checks
PROMPT, NEW = 400, 960  # tokens; the first streams go on when the last ones begin
BEGUN = 20  # events of each stream before the kill
PATIENCE_S = 300.0
SIZE: dict[str, Any] = {"blocks": 2048}
VARIANTS = {"relay": (), "python": ("--no-relay",), "journal": ("--continue", "1")}


# What the journal costs -------------------------------------------------------------------------


def serve_fakes(prefill: int, decode: int) -> None:
    """Serve engines without a model, whose events have token ids, on two ports until ended."""
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
    choice |= {"stop_reason": None, "prompt_token_ids": None, "token_ids": [12345]}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    event = json.dumps({**head, "choices": [choice]}, separators=(",", ":"))
    chunk = f"data: {event}\n\n".encode()
    vars(fake_engines)["_EVENT"] = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    uvloop.run(fake_engines.serve([prefill, decode], 1, TOKENS, EVERY_S))


@contextmanager
def routers() -> Iterator[list[Variant]]:
    """Run engines without a model, and a router of each variant."""
    with ExitStack() as ends:
        prefill, decode = free_port(), free_port()
        serve = f"from benchmarks import continue_streams as c; c.serve_fakes({prefill}, {decode})"
        ends.enter_context(process([sys.executable, "-c", serve]))
        wait_for(decode)
        found = []
        for name, flags in VARIANTS.items():
            port = free_port()
            command = [sys.executable, "-m", "kvconnect.cli", "router", "--port", str(port), *flags]
            for role, engine in (("prefill", prefill), ("decode", decode)):
                command += [f"--{role}", f"http://127.0.0.1:{engine}"]
            running = ends.enter_context(process(command))
            if not wait_for(port, running):
                raise RuntimeError(f"the router does not come up: {name}")
            found.append(Variant(name, port, running.pid))
        yield found


def cost(seconds: float, rate: float) -> dict[str, float]:
    """Return the figures of the journal's cost."""
    streams: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with routers() as found:
        for number in range(ROUNDS):
            for variant in found[:: -1 if number % 2 else 1]:
                assert variant.pid is not None, "it is a router"
                before = cpu_seconds(variant.pid)
                asked = len(uvloop.run(paced(variant.port, seconds / ROUNDS, number, rate)))
                streams[variant.name].append(asked / (cpu_seconds(variant.pid) - before))
                progress(f"round {number + 1}, {variant.name}: done")
    per_s = {name: statistics.median(found) for name, found in streams.items()}
    figures = {f"streams_per_core_second_{name}": found for name, found in per_s.items()}
    figures |= {f"us_per_token_{name}": 1e6 / found / TOKENS for name, found in per_s.items()}
    for other in ("relay", "python"):
        figures[f"journal_over_{other}"] = per_s["journal"] / per_s[other]
    return figures


# What a client sees -----------------------------------------------------------------------------


@dataclass
class Stream(threading.Thread):
    """A stream that a thread reads."""

    router: Router
    prompt: list[int]
    text: str = ""
    times: list[float] = field(default_factory=list)
    decode: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.start()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        body = self.router.body(self.prompt, NEW, stream=True, return_token_ids=False)
        try:
            with self.router.open("/v1/completions", body) as reply:
                self.decode = int(reply.headers.get("X-KVConnect-Decode", 0))
                for event in events(reply):
                    self.times.append(time.monotonic())
                    for choice in event["choices"]:
                        self.text += choice.get("text", "")
        except (StreamBroken, OSError) as error:
            self.error = str(error) or type(error).__name__

    def pause(self) -> float:
        """Return the longest time between two events, in seconds."""
        pairs = zip(self.times[BEGUN // 2 :], self.times[BEGUN // 2 + 1 :], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


def ended(streams: Sequence[Stream]) -> None:
    """Wait for the ends of streams.

    Raises:
        TimeoutError: one goes on and on.
    """
    deadline = time.monotonic() + PATIENCE_S
    for stream in streams:
        stream.join(max(0.0, deadline - time.monotonic()))
        if stream.is_alive():
            raise TimeoutError("a stream does not end")


def prompt_tokens_of(servers: Sequence[Server], source: str = "") -> float:
    """Return the prompt tokens of servers so far, of one source or all."""
    if not source:
        return sum(server.metric("vllm:prompt_tokens_total") for server in servers)
    name = "vllm:prompt_tokens_by_source_total"
    return sum(server.metric(name, source=source) for server in servers)


def open_streams(streams: Sequence[Stream], decode: int) -> list[Stream]:
    """Wait until all streams are well on their way; return those that are open at a decode engine.

    Raises:
        TimeoutError: they do not begin.
        RuntimeError: most have ended.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not all(len(each.times) >= BEGUN or not each.is_alive() for each in streams):
        if time.monotonic() > deadline:
            raise TimeoutError("the streams do not begin")
        time.sleep(0.01)
    found = [each for each in streams if each.is_alive() and each.decode == decode]
    if len(found) < STREAMS // 4:
        raise RuntimeError(f"{len(found)} of {STREAMS} streams are open at engine {decode}")
    return found


@dataclass
class Disturbed:
    """What became of streams that had to leave their engine.

    Attributes:
        extra_ms: of each, its longest pause less the usual one.
        asked: tokens of the prompts by which others continued them.
        again: those of them that were computed.
    """

    extra_ms: list[float]
    cut: int
    wrong: int
    broken: int
    asked: float
    again: float

    def figures(self, prefix: str = "") -> dict[str, float]:
        """Return the figures, with names that begin alike."""
        found = {
            "extra_ms_p50": statistics.median(self.extra_ms),
            "extra_ms_max": max(self.extra_ms),
            "computed_again": self.again / max(1.0, self.asked),
        }
        return {prefix + name: value for name, value in found.items()}


@dataclass
class Fleet:
    """A prefill engine, decode engines and their router."""

    prefill: Server
    decode: list[Server]
    router: Router
    admin: Admin
    runs: int = 0

    def disturbed(
        self, victim: Server, disturb: Callable[[], None], left: list[Server]
    ) -> Disturbed:
        """Have streams begin, and ``disturb`` their decode engine; ``left``: who can work then."""
        number = next(one["number"] for one in self.admin.workers() if one["url"] == victim.url)
        numbers = range(STREAMS * self.runs, STREAMS * (self.runs + 1))
        self.runs += 1
        prompts = [prompt_tokens(PROMPT, start=700 * each) for each in numbers]
        want: list[Stream] = []
        for begin in range(0, STREAMS, AT_ONCE):
            want += [Stream(self.router, each) for each in prompts[begin : begin + AT_ONCE]]
            ended(want)
        if any(each.error or not each.times for each in want):
            raise RuntimeError(f"undisturbed streams fail: {[each.error for each in want]}")
        streams = [Stream(self.router, prompt) for prompt in prompts]
        theirs = open_streams(streams, number)
        before, before_computed = prompt_tokens_of(left), prompt_tokens_of(left, "local_compute")
        received = prompt_tokens_of(left, "external_kv_transfer")
        disturb()
        ended(streams)
        # A decode engine receives what a prefill engine was asked for.
        asked = prompt_tokens_of(left) - before
        asked -= prompt_tokens_of(left, "external_kv_transfer") - received
        others = [each.pause() for each in streams if each.decode != number]
        usual = statistics.median(others) if others else 0.0
        pairs = zip(streams, want, strict=True)
        return Disturbed(
            extra_ms=[1000 * (each.pause() - usual) for each in theirs if not each.error],
            cut=len(theirs),
            wrong=sum(each.text != whole.text for each, whole in pairs if not each.error),
            broken=sum(bool(each.error) for each in streams),
            asked=asked,
            again=prompt_tokens_of(left, "local_compute") - before_computed,
        )


@contextmanager
def fleet_of_engines() -> Iterator[Fleet]:
    """Run engines and a router, whose admin API takes orders."""
    role = chosen("continue_streams", host_bytes="off")
    with ExitStack() as stack:
        progress("starting a prefill engine, two decode engines and a router")
        p = stack.enter_context(Server(MODEL, kv_transfer(role="kv_producer", **role), **SIZE))
        # kv_both: a drained one sends what its streams have.
        both = kv_transfer(role="kv_both", **role)
        decode = [Server(MODEL, both, **SIZE) for _ in range(2)]
        for server in decode:
            stack.enter_context(server)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(16))
        admin = Admin(free_port(), token.read_text())
        flags = ("--continue", "1", "--admin-token-file", str(token))
        flags += ("--admin-port", str(admin.port))
        router = stack.enter_context(Router([p], decode, flags))
        for number in range(2 * len(decode)):  # they meet: all at once, they answer no check
            ended([Stream(router, prompt_tokens(PROMPT, start=70000 + number))])
        yield Fleet(p, decode, router, admin)


def losses() -> dict[str, float]:
    """Return the figures of streams whose engine is drained, then killed."""
    with fleet_of_engines() as fleet:
        first, engines = fleet.decode[0], [fleet.prefill, *fleet.decode]
        drained = fleet.disturbed(first, lambda: fleet.admin.drain("decode", first.url), engines)
        progress(f"drain: {drained.cut} of {STREAMS} streams had to leave")
        count = fleet.router.metric
        figures = {
            f"drained_{result}": count("kvconnect_router_drained_streams_total", result=result)
            for result in ("handed_off", "computed", "stayed")
        }
        fleet.admin.add("decode", first.url)
        killed = fleet.disturbed(first, first.kill, [fleet.prefill, *fleet.decode[1:]])
        progress(f"kill: {killed.cut} of {STREAMS} streams were cut")
        continued = count("kvconnect_router_lost_streams_total", result="continued")
    return {
        "cut_streams": killed.cut,
        "continued_streams": continued,
        "left_streams": drained.cut,
        **figures,
        "wrong_streams": killed.wrong + drained.wrong,
        "broken_streams": killed.broken + drained.broken,
        **killed.figures(),
        **drained.figures("drain_"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="per variant of the router")
    parser.add_argument("--rate", type=float, default=200.0, help="streams per second")
    arguments = parser.parse_args()
    end_when_terminated()
    figures = cost(arguments.seconds, arguments.rate) | losses()
    emit("continue_streams", figures)
    return int(bool(figures["wrong_streams"] or figures["broken_streams"]))


if __name__ == "__main__":
    sys.exit(main())
