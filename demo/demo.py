"""Multi-turn conversations on real vLLM CPU engines, with and without KVConnect.

A few readers take turns to discuss a long text. Their histories do not fit into an engine's KV
cache together, so each turn finds its history evicted: without KVConnect it is computed again,
with KVConnect it comes back from host memory. Both engines must answer the same tokens. They are
asked in turn, so that what else the machine does disturbs both alike. First turns are the control:
nothing can be found, so both take as long.

The last line is ``DEMO OK`` (exit status 0) or the reason why not (exit status 1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from demo.summary import Turn, problem, sentence, summarize
from tests.engines.models import BLOCK_SIZE, prompt_tokens
from tests.engines.server import Server, ServerDied, kv_transfer

READERS = 4
TURNS = 4
PASSAGE = 480  # tokens of text that each turn adds to a reader's history
REPLY = 16
MAX_LEN = 2560
DEVICE_BLOCKS = MAX_LEN // BLOCK_SIZE + 8  # about one full history; the others are evicted
HOST_BYTES = "1GiB"
SIZE: dict[str, Any] = {
    "blocks": DEVICE_BLOCKS,
    "max_len": MAX_LEN,
    # Threads of two engines that wait for one another spin.
    "env": {"OMP_NUM_THREADS": "1"},
}

ROW = "{:>6} {:>5} {:>7} {:>7} {:>7} {:>10} {:>9} {:>6} {:>7}"
HEADS = ("reader", "turn", "prompt", "device", "host", "TTFT with", "without", "ratio", "tokens")
LEGEND = """
prompt   tokens that the reader sends: the history so far, and a new passage
device   of these, found in the KV cache of the engine with KVConnect
host     of these, loaded from KVConnect's host memory; all others are computed
TTFT     time to the first token, with KVConnect and without; ratio is the one over the other
tokens   whether both engines answered the same
"""


@dataclass
class Reader:
    """A reader's history: passages and the engine's replies."""

    number: int
    history: list[int] = field(default_factory=list)

    def next_prompt(self, turn: int) -> list[int]:
        """Add the next passage of the reader's part of the text, and return the whole history."""
        start = (self.number * TURNS + turn) * PASSAGE
        self.history += prompt_tokens(PASSAGE, start)
        return list(self.history)


@dataclass
class Side:
    """One of the two engines, and the readers' histories with it."""

    server: Server
    readers: list[Reader] = field(
        default_factory=lambda: [Reader(number) for number in range(READERS)]
    )

    def ask(self, number: int, turn: int) -> tuple[int, float, tuple[int, ...]]:
        """Send a reader's next prompt; return its length, seconds to the first token, the reply."""
        reader = self.readers[number]
        prompt = reader.next_prompt(turn)
        ttft, answer = self.server.stream(prompt, REPLY)
        reader.history += answer.tokens
        return len(prompt), ttft, answer.tokens


def converse(ours: Side, theirs: Side) -> Iterator[Turn]:
    """Let the readers take turns with both engines, which go first in turn; print each turn."""
    print(LEGEND)
    print(ROW.format(*HEADS))
    for turn in range(TURNS):
        for number in range(READERS):
            before = hits(ours.server)
            asked = {}
            order = (ours, theirs) if (turn + number) % 2 else (theirs, ours)
            for side in order:
                asked[id(side)] = side.ask(number, turn)
            device, host = (
                int(now - then) for now, then in zip(hits(ours.server), before, strict=True)
            )
            length, with_s, tokens = asked[id(ours)]
            _, without_s, others = asked[id(theirs)]
            same = tokens == others
            row = (number + 1, turn + 1, length, device, host, f"{with_s * 1e3:.0f} ms")
            rest = (f"{without_s * 1e3:.0f} ms", f"{with_s / without_s:.2f}")
            print(ROW.format(*row, *rest, "equal" if same else "DIFFER"), flush=True)
            yield Turn(turn == 0, host, with_s, without_s, same)


def hits(server: Server) -> tuple[float, float]:
    """Prompt tokens found on the device and in host memory so far."""
    return (
        server.metric("vllm:prefix_cache_hits_total"),
        server.metric("vllm:external_prefix_cache_hits_total"),
    )


def print_transfers(server: Server) -> None:
    """What moved, as the metrics tell it."""
    server.settle()
    print(f"\n{'transfer':<12} {'operations':>10} {'bytes':>14} {'seconds':>9} {'GB/s':>6}")
    for kind in ("GPU_to_CPU", "CPU_to_GPU"):
        operations, nbytes, seconds = (
            server.metric(f"vllm:kvconnect_transfer_{name}_total", transfer_type=kind)
            for name in ("operations", "bytes", "seconds")
        )
        rate = nbytes / seconds / 1e9 if seconds else 0.0
        print(f"{kind:<12} {operations:>10.0f} {nbytes:>14,.0f} {seconds:>9.4f} {rate:>6.1f}")


def held_blocks(server: Server) -> str | None:
    """Return what is wrong with the ledger after the last turn, None if nothing is."""
    for owner in ("store", "load"):
        held = server.metric("vllm:kvconnect_ledger_held_blocks", owner=owner)
        if held:
            return f"{held:.0f} blocks are still held by a {owner} after the last turn"
    return None


def main() -> int:
    """Run the demo; return the exit status. A failure is one line."""
    try:
        return compare()
    except ServerDied as error:
        print("the engine ended:", str(error).strip().splitlines()[-1])
    except (OSError, KeyError) as error:
        print(f"the engine does not answer as expected: {type(error).__name__}: {error}")
    return 1


def compare() -> int:
    """Run both engines and compare; return the exit status."""
    print(f"{READERS} readers x {TURNS} turns; device cache {DEVICE_BLOCKS * BLOCK_SIZE} tokens,")
    print(f"histories of up to {TURNS * (PASSAGE + REPLY)} tokens each; host tier {HOST_BYTES}")
    print("\nStarting vLLM with KVConnect and without (about a minute) ...", flush=True)
    ours = Server("bench", kv_transfer(host_bytes=HOST_BYTES), **SIZE)
    theirs = Server("bench", **SIZE)
    with ours, theirs:
        turns = list(converse(Side(ours), Side(theirs)))
        print_transfers(ours)
        wrong = problem(turns) or held_blocks(ours)
    print(f"\n{sentence(summarize(turns))}")
    print(wrong or "DEMO OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
