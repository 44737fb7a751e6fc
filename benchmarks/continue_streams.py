"""What it takes that streams survive the loss of their decode engine (`--continue` of the router).

    python -m benchmarks.continue_streams [--seconds 15] [--rate 200]

The cost of the journal, in front of engines without a model: streams of 50 tokens per second of CPU
time of the router's process (`streams_per_core_second_*`), and microseconds of it per token
(`us_per_token_*`): with native code (`relay`), in Python (`python`), and journaled (`journal`). The
variants take turns. `journal_over_relay` and `journal_over_python` divide streams per second.

What a client sees of a loss, with one prefill and three decode engines of real vLLM: one decode
engine after the other is killed in the middle of ``STREAMS`` streams. `extra_ms_*` is the longest
pause of a stream that was cut, less the median of the longest pauses of those that were not.
`computed_again` is the share of the cut streams' tokens, prompt and answer, that an engine computed
again. `wrong_streams` counts those whose text is not that of an undisturbed run, `broken_streams`
those that ended with an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks import fake_engines
from benchmarks.balance import process
from benchmarks.common import emit, end_when_terminated, progress
from benchmarks.router import EVERY_S, TOKENS, Variant, cpu_seconds, paced, wait_for
from benchmarks.settings import chosen
from tests.engines.models import prompt_tokens
from tests.engines.server import Router, Server, StreamBroken, events, kv_transfer
from tests.servers import free_port

MODEL = "llama"
ROUNDS = 3
KILLS = 2
STREAMS = 24
PROMPT, NEW = 400, 120  # tokens
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


def begun(streams: Sequence[Stream]) -> None:
    """Wait until all streams are well on their way, or have ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(len(each.times) >= BEGUN or not each.is_alive() for each in streams):
        if time.monotonic() > deadline:
            raise TimeoutError("the streams do not begin")
        time.sleep(0.01)


def losses() -> dict[str, float]:
    """Return the figures of streams whose engine is killed."""
    role = chosen("continue_streams", host_bytes="off")
    with ExitStack() as stack:
        progress(f"starting a prefill engine, {KILLS + 1} decode engines and a router")
        p = stack.enter_context(Server(MODEL, kv_transfer(role="kv_producer", **role), **SIZE))
        consumer = kv_transfer(role="kv_consumer", **role)
        decode = [Server(MODEL, consumer, **SIZE) for _ in range(KILLS + 1)]
        for server in decode:
            stack.enter_context(server)
        router = stack.enter_context(Router([p], decode, ("--continue", "1")))
        extra: list[float] = []
        wrong = broken = cut = asked = again = 0.0
        for kill in range(KILLS):
            numbers = range(STREAMS * kill, STREAMS * (kill + 1))
            prompts = [prompt_tokens(PROMPT, start=700 * number) for number in numbers]
            want = [Stream(router, prompt) for prompt in prompts]
            ended(want)
            if any(each.error or not each.times for each in want):
                raise RuntimeError(f"undisturbed streams fail: {want[0].error}")
            streams = [Stream(router, prompt) for prompt in prompts]
            begun(streams)
            left = [p, *decode[kill + 1 :]]
            before = prompt_tokens_of([p]), prompt_tokens_of(left, "local_compute")
            decode[kill].kill()
            ended(streams)
            asked += prompt_tokens_of([p]) - before[0]
            again += prompt_tokens_of(left, "local_compute") - before[1]
            lost = [each for each in streams if each.decode == kill]
            others = [each.pause() for each in streams if each.decode != kill]
            usual = statistics.median(others) if others else 0.0
            extra += [1000 * (each.pause() - usual) for each in lost if not each.error]
            cut += len(lost)
            broken += sum(bool(each.error) for each in streams)
            pairs = zip(streams, want, strict=True)
            wrong += sum(each.text != whole.text for each, whole in pairs if not each.error)
            progress(f"kill {kill + 1}: {len(lost)} of {STREAMS} streams were cut")
        continued = router.metric("kvconnect_router_lost_streams_total", result="continued")
    return {
        "cut_streams": cut,
        "continued_streams": continued,
        "wrong_streams": wrong,
        "broken_streams": broken,
        "extra_ms_p50": statistics.median(extra),
        "extra_ms_max": max(extra),
        "computed_again": again / max(1.0, asked),
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
