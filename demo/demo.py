"""Multi-turn conversations on a real vLLM CPU engine, with and without KVConnect.

A few readers take turns to discuss a long text. Their histories do not fit into the engine's KV
cache together, so each turn finds its history evicted: without KVConnect it is computed again,
with KVConnect it comes back from host memory. Both engines must answer the same tokens.

The last line is ``DEMO OK`` (exit status 0) or the reason why not (exit status 1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.engines.models import BLOCK_SIZE, prompt_tokens
from tests.engines.server import Answer, Server, ServerDied, kv_transfer

READERS = 4
TURNS = 4
PASSAGE = 480  # tokens of text that each turn adds to a reader's history
REPLY = 16
MAX_LEN = 2560
DEVICE_BLOCKS = MAX_LEN // BLOCK_SIZE + 8  # about one full history; the others are evicted
HOST_BYTES = "1GiB"

COLUMNS = "{:>6} {:>6} {:>7} {:>7} {:>7} {:>10} {:>10} {:>7} {:>6}"


@dataclass(frozen=True)
class Turn:
    """One request as an engine served it; hits in prompt tokens, time in seconds."""

    prompt: list[int]
    answer: Answer
    ttft: float
    device_hits: int
    host_hits: int


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


def converse(server: Server) -> Iterator[Turn]:
    """Let the readers take turns; each reply joins the reader's history."""
    readers = [Reader(number) for number in range(READERS)]
    for turn in range(TURNS):
        for reader in readers:
            prompt = reader.next_prompt(turn)
            before = hits(server)
            ttft, answer = server.stream(prompt, REPLY)
            reader.history += answer.tokens
            device, host = (now - then for now, then in zip(hits(server), before, strict=True))
            yield Turn(prompt, answer, ttft, int(device), int(host))


def hits(server: Server) -> tuple[float, float]:
    """Prompt tokens found on the device and in host memory so far."""
    return (
        server.metric("vllm:prefix_cache_hits_total"),
        server.metric("vllm:external_prefix_cache_hits_total"),
    )


def serve(title: str, connector: str | None) -> Server:
    """Describe the engine about to be started."""
    print(f"\nStarting vLLM {title} (about half a minute) ...", flush=True)
    return Server("bench", connector, blocks=DEVICE_BLOCKS, max_len=MAX_LEN)


def print_turns(turns: list[Turn], plain: list[Turn]) -> None:
    """One row per turn, the two engines beside each other."""
    print()
    heads = [
        "reader",
        "turn",
        "prompt",
        "device",
        "host",
        "TTFT with",
        "without",
        "ratio",
        "tokens",
    ]
    print(COLUMNS.format(*heads))
    for number, (ours, theirs) in enumerate(zip(turns, plain, strict=True)):
        print(
            COLUMNS.format(
                number % READERS + 1,
                number // READERS + 1,
                len(ours.prompt),
                ours.device_hits,
                ours.host_hits,
                f"{ours.ttft * 1e3:.0f} ms",
                f"{theirs.ttft * 1e3:.0f} ms",
                f"{ours.ttft / theirs.ttft:.2f}",
                "equal" if ours.answer.tokens == theirs.answer.tokens else "DIFFER",
            )
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


def verdict(server: Server, turns: list[Turn], plain: list[Turn]) -> str | None:
    """Return what is wrong, None if nothing is."""
    differ = sum(a.answer.tokens != b.answer.tokens for a, b in zip(turns, plain, strict=True))
    if differ:
        return f"{differ} of {len(turns)} turns got other tokens with KVConnect than without"
    if not sum(turn.host_hits for turn in turns):
        return "nothing was loaded from host memory"
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
    with serve("without KVConnect", None) as server:
        plain = list(progress(converse(server)))
    with serve("with KVConnect", kv_transfer(host_bytes=HOST_BYTES)) as server:
        turns = list(progress(converse(server)))
        print_turns(turns, plain)
        print_transfers(server)
        problem = verdict(server, turns, plain)
    ours, theirs = (sum(turn.ttft for turn in run[READERS:]) for run in (turns, plain))
    print(f"\nTTFT from the second turn on, with KVConnect over without: {ours / theirs:.2f}")
    print(problem or "DEMO OK")
    return 1 if problem else 0


def progress(turns: Iterator[Turn]) -> Iterator[Turn]:
    """Show that something happens."""
    for number, turn in enumerate(turns):
        print(f"\r  turn {number + 1} of {READERS * TURNS}", end="", flush=True)
        yield turn
    print()


if __name__ == "__main__":
    sys.exit(main())
