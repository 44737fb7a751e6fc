"""Prefill on one engine, decode on another, a router in front: same tokens, and where time went.

A single engine answers the prompts first. Then a prefill engine, a decode engine and the router
start on loopback and answer them again, pushed layer by layer. Per request it shows how long pages
moved (wire), how long the decode engine had the request parked (latency), and how much of that was
left after prefill had ended (exposed).

The last line is ``DEMO OK`` (exit status 0) or the reason why not (exit status 1).
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass

from tests.engines.models import prompt_tokens
from tests.engines.pd import decode_config, prefill_config
from tests.engines.server import Answer, Router, Server, ServerDied

LENGTHS = (256, 512, 1024, 1536, 2048)
REPLY = 16
MAX_LEN = 2304
DEVICE_BLOCKS = 400
TIMES = {
    "wire": ("vllm:kvconnect_handoff_wire_seconds_sum", {"role": "recv"}),
    "latency": ("vllm:kvconnect_handoff_latency_seconds_sum", {}),
    "exposed": ("vllm:kvconnect_handoff_exposed_seconds_sum", {}),
}
ROW = "{:>6} {:>12} {:>10} {:>10} {:>10} {:>10} {:>8}"


@dataclass(frozen=True)
class Served:
    """One request: what the client saw, and the decode engine's account of it, in seconds."""

    prompt: list[int]
    answer: Answer
    ttft: float
    nbytes: float
    times: dict[str, float]


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


def print_rows(served: list[Served], plain: list[Answer]) -> None:
    print()
    print(ROW.format("prompt", "bytes", "wire", "latency", "exposed", "TTFT", "tokens"))
    for one, other in zip(served, plain, strict=True):
        times = [f"{one.times[name] * 1e3:.1f} ms" for name in TIMES]
        same = "equal" if one.answer.tokens == other.tokens else "DIFFER"
        print(
            ROW.format(
                len(one.prompt), f"{one.nbytes:,.0f}", *times, f"{one.ttft * 1e3:.0f} ms", same
            )
        )


def verdict(served: list[Served], plain: list[Answer], engines: list[Server]) -> str | None:
    """Return what is wrong, None if nothing is."""
    differ = sum(a.answer.tokens != b.tokens for a, b in zip(served, plain, strict=True))
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
    print("Starting a single engine (about half a minute) ...", flush=True)
    with engine() as single:
        plain = [single.complete(prompt, REPLY) for prompt in prompts()]
    print("Starting a prefill engine, a decode engine and the router ...", flush=True)
    with ExitStack() as stack:
        p = stack.enter_context(engine(prefill_config(digest="full")))
        d = stack.enter_context(engine(decode_config(digest="full")))
        # What single requests move is shown, so nothing else may.
        router = stack.enter_context(Router([p], [d]))
        router.complete([1, 2, 3], 1)  # connects
        served = [serve(router, d, prompt) for prompt in prompts()]
        print_rows(served, plain)
        problem = verdict(served, plain, [p, d])
    print(problem or "DEMO OK")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
