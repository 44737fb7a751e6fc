"""Prefill on one engine, decode on another, a router in front: same tokens, and where time went.

A single engine, and a prefill engine, a decode engine and the router, all on loopback, answer the
same prompts in turn. Pages are pushed layer by layer.

The last line is ``DEMO OK`` (exit status 0) or the reason why not (exit status 1).
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.engines.models import prompt_tokens
from tests.engines.server import Answer, Router, Server, ServerDied, kv_transfer

LENGTHS = (256, 512, 1024, 1536, 2048)
REPLY = 16
MAX_LEN = 2304
DEVICE_BLOCKS = 400
SETTINGS: dict[str, Any] = {"host_bytes": "off", "transport": "tcp", "digest": "full"}
TIMES = {
    "wire": ("vllm:kvconnect_handoff_wire_seconds_sum", {"role": "recv"}),
    "latency": ("vllm:kvconnect_handoff_latency_seconds_sum", {}),
    "exposed": ("vllm:kvconnect_handoff_exposed_seconds_sum", {}),
}
ROW = "{:>6} {:>12} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}"
LEGEND = """
wire     for how long pages moved
latency  for how long the decode engine had the request parked
exposed  how much of that was left after prefill had ended; the rest was hidden behind it
TTFT     time to the first token through the router
single   TTFT of one engine that does both, asked in turn
tokens   whether both answered the same"""


@dataclass(frozen=True)
class Served:
    """One request: what the client saw, and the decode engine's account of it, in seconds."""

    prompt: list[int]
    answer: Answer
    ttft: float
    nbytes: float
    times: dict[str, float]


class Plain(NamedTuple):
    """The same request, as a single engine answered it."""

    ttft: float
    answer: Answer


def prompts() -> list[list[int]]:
    return [prompt_tokens(length, start=2500 * n) for n, length in enumerate(LENGTHS)]


def engine(connector: str | None = None) -> Server:
    return Server(
        "bench", connector, blocks=DEVICE_BLOCKS, max_len=MAX_LEN, env={"OMP_NUM_THREADS": "1"}
    )


def account(server: Server) -> dict[str, float]:
    """What the decode engine has counted so far."""
    found = {name: server.metric(series, **labels) for name, (series, labels) in TIMES.items()}
    found["bytes"] = server.metric("vllm:kvconnect_transfer_bytes_total", transfer_type="RECV")
    return found


def serve(router: Router, decode: Server, prompt: list[int]) -> Served:
    """Send one request through the router."""
    before = account(decode)
    ttft, answer = router.stream(prompt, REPLY)
    decode.settle()
    gained = {name: value - before[name] for name, value in account(decode).items()}
    return Served(prompt, answer, ttft, gained.pop("bytes"), gained)


def print_rows(served: list[Served], plain: list[Plain]) -> None:
    print(LEGEND)
    print()
    heads = ("prompt", "bytes", *TIMES, "TTFT", "single", "tokens")
    print(ROW.format(*heads))
    for one, other in zip(served, plain, strict=True):
        times = [f"{one.times[name] * 1e3:.1f} ms" for name in TIMES]
        both = [f"{ttft * 1e3:.0f} ms" for ttft in (one.ttft, other.ttft)]
        same = "equal" if one.answer.tokens == other.answer.tokens else "DIFFER"
        print(ROW.format(len(one.prompt), f"{one.nbytes:,.0f}", *times, *both, same))
    exposed = sum(one.times["exposed"] for one in served)
    ttft = sum(one.ttft for one in served)
    moved = sum(one.nbytes for one in served)
    print(
        f"\n{len(served)} prompts were handed off, {moved / 1e6:,.0f} MB of KV blocks;"
        f" {exposed / ttft:.1%} of the time to the first token was spent on them after prefill had"
        " ended."
    )


def verdict(served: list[Served], plain: list[Plain], engines: list[Server]) -> str | None:
    """Return what is wrong, None if nothing is."""
    differ = sum(a.answer.tokens != b.answer.tokens for a, b in zip(served, plain, strict=True))
    if differ:
        return f"{differ} of {len(served)} requests got other tokens than from a single engine"
    if not all(one.nbytes for one in served):
        return "a request was not handed off"
    for server in engines:
        server.settle()
        held = server.metric("vllm:kvconnect_ledger_held_blocks")
        if held:
            return f"{held:.0f} blocks are still held after the last request"
    return None


def main() -> int:
    """Run the demo; return the exit status. A failure is one line."""
    try:
        return compare()
    except ServerDied as error:
        print("a server ended:", str(error).strip().splitlines()[-1])
    except (OSError, KeyError) as error:
        print(f"a server does not answer as expected: {type(error).__name__}: {error}")
    return 1


def compare() -> int:
    print(
        "\nStarting a single engine, a prefill and a decode engine (about a minute) ...", flush=True
    )
    with ExitStack() as stack:
        single = stack.enter_context(engine())
        p = stack.enter_context(engine(kv_transfer(role="kv_producer", **SETTINGS)))
        d = stack.enter_context(engine(kv_transfer(role="kv_consumer", **SETTINGS)))
        router = stack.enter_context(Router([p], [d]))
        first = prompt_tokens(LENGTHS[0], start=20_000)  # connects, and makes all warm
        for each in (single, router):
            each.complete(first, REPLY)
        served, plain = [], []
        for prompt in prompts():
            plain.append(Plain(*single.stream(prompt, REPLY)))
            served.append(serve(router, d, prompt))
        print_rows(served, plain)
        problem = verdict(served, plain, [p, d])
    print(problem or "DEMO OK")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
