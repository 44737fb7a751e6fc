"""Prefill on one SGLang server, decode on another, SGLang's router in front: tokens and times.

A single server answers the prompts first. Then a prefill server, a decode server and the router
start on loopback and answer them again, pushed layer by layer.

    make demo-sglang

The last line is ``DEMO OK`` (exit status 0) or the reason why not (exit status 1).
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from demo.handoff import LENGTHS, REPLY, Plain, Served, print_rows, prompts
from tests.engines.server import Process, ServerDied
from tests.servers import free_port
from tests.sglang.pd import LAYERWISE, decode_server, prefill_server, side_by_side
from tests.sglang.scenario import settled
from tests.sglang.server import GenerateClient, SglangServer

TIMES = {
    "wire": ("sglang:kvconnect_handoff_wire_seconds_sum", {"role": "recv"}),
    "latency": ("sglang:kvconnect_handoff_latency_seconds_sum", {}),
    "exposed": ("sglang:kvconnect_handoff_exposed_seconds_sum", {}),
}
SIZE: dict[str, Any] = {"model": "bench", "tokens": 2 * max(LENGTHS), "chunk": 256}


@dataclass
class MiniLb(GenerateClient, Process):
    """SGLang's own router in its simplest form: it asks both servers at once."""

    prefill: SglangServer
    decode: SglangServer

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang_router.launch_router", "--mini-lb"),
            *("--pd-disaggregation", "--host", self.host, "--port", str(self.port)),
            *("--prefill", self.prefill.url, str(self.prefill.bootstrap_port)),
            *("--decode", self.decode.url),
            *("--prometheus-host", self.host, "--prometheus-port", str(free_port())),
        ]


def account(server: SglangServer) -> dict[str, float]:
    """What the decode server has counted so far."""
    found = {name: server.metric(series, **labels) for name, (series, labels) in TIMES.items()}
    found["bytes"] = server.metric("sglang:kvconnect_transfer_bytes_total", transfer_type="RECV")
    return found


def received(server: SglangServer) -> float:
    """How many requests the decode server has received so far, as its metrics have it."""
    return server.metric("sglang:kvconnect_handoff_received_requests_total", outcome="done")


def serve(router: MiniLb, decode: SglangServer, prompt: list[int]) -> Served:
    """Send one request through the router."""
    before, done = account(decode), received(decode)
    ttft, answer = router.stream(prompt, REPLY)
    settled(lambda: received(decode), done + 1)
    gained = {name: value - before[name] for name, value in account(decode).items()}
    return Served(prompt, answer, ttft, gained.pop("bytes"), gained)


def verdict(served: list[Served], plain: list[Plain], servers: list[SglangServer]) -> str | None:
    """Return what is wrong, None if nothing is."""
    differ = sum(a.answer.tokens != b.answer.tokens for a, b in zip(served, plain, strict=True))
    if differ:
        return f"{differ} of {len(served)} requests got other tokens than from a single server"
    if not all(one.nbytes for one in served):
        return "a request was not handed off"
    for server in servers:
        server.forget()
        if server.used_tokens():
            return f"{server.used_tokens()} tokens are still held after the last request"
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
    print("Starting a single server (about a minute) ...", flush=True)
    with SglangServer(**SIZE) as single:
        plain = [Plain(*single.stream(prompt, REPLY)) for prompt in prompts()]
    print("Starting a prefill server, a decode server and the router ...", flush=True)
    p = prefill_server(**SIZE, settings={"digest": "full"}, env=LAYERWISE)
    d = decode_server(**SIZE, settings={"digest": "full"})
    with ExitStack() as stack:
        stack.enter_context(side_by_side(p, d))
        router = stack.enter_context(MiniLb(prefill=p, decode=d))
        router.complete([1, 2, 3], 1)  # connects
        settled(lambda: received(d), 1)
        served = [serve(router, d, prompt) for prompt in prompts()]
        print_rows(served, plain)
        problem = verdict(served, plain, [p, d])
    print(problem or "DEMO OK")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
