"""What the tests with SGLang ask and whom, and what a page weighs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.engines.models import MODELS, prompt_tokens
from tests.engines.server import Answer
from tests.sglang.server import PAGE, SglangServer

NEW = 16
LENGTHS = (20, 48, 64, 65, 200, 333, 512, 800)  # around a page and a chunk, and many of them
CROWD = 6
PUBLISHED_S = 10.0
QUIET_S = 2.5
AT_REST_S = 2.0
T = TypeVar("T")
Tokens = list[tuple[int, ...]]


class Fleet(NamedTuple):
    """``single`` serves by itself. ``layers`` pushes layer by layer, ``chunks`` chunk by chunk;
    ``tcp`` takes pages over TCP, ``nixl`` has two ranks and takes them over NIXL. ``shift`` is a
    file: while it exists, the prefill servers send wrong pages."""

    single: SglangServer
    layers: SglangServer
    chunks: SglangServer
    tcp: SglangServer
    nixl: SglangServer
    shift: Path


def prompts(number: int = 0) -> list[list[int]]:
    """Real texts of every length; those of another number share no page with them."""
    base = 7000 * number
    return [prompt_tokens(length, base + 811 * i) for i, length in enumerate(LENGTHS)]


def tokens(answers: list[Answer]) -> Tokens:
    return [answer.tokens for answer in answers]


def page_bytes(model: str = "llama") -> int:
    """Bytes of one page, all layers and ranks together, in float32."""
    config = MODELS[model].config
    if "kv_lora_rank" in config:  # one row for all heads
        row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        head = config["hidden_size"] // config["num_attention_heads"]
        row = 2 * config["num_key_value_heads"] * head
    return int(config["num_hidden_layers"] * row * PAGE * 4)


def pages(asked: list[list[int]]) -> int:
    return sum(-(-len(prompt) // PAGE) for prompt in asked)


def moved_bytes(server: SglangServer, kind: str) -> float:
    return server.metric("sglang:kvconnect_transfer_bytes_total", transfer_type=kind)


MOST_ROW_BYTES = 8192
"""Of what SGLang sends beside the pages of a request to each decode rank: the first token, room
for its log probabilities, counters."""


def moved_so_far(p: SglangServer, d: SglangServer) -> tuple[float, float]:
    """Return the bytes (sent, received) once what moved before has been published: when they have
    been the same for longer than servers take for that."""
    read, since = (-1.0, -1.0), time.monotonic()
    while time.monotonic() - since < AT_REST_S:
        time.sleep(0.05)
        now = moved_bytes(p, "SEND"), moved_bytes(d, "RECV")
        if now != read:
            read, since = now, time.monotonic()
    return read


def traded(p: SglangServer, d: SglangServer, before: tuple[float, float], least: float) -> float:
    """Return the bytes that went from one server to the other since ``before`` (sent, received),
    once both say the same, and at least so many."""

    def agree() -> bool:
        sent, received = moved_bytes(p, "SEND"), moved_bytes(d, "RECV")
        return sent - before[0] == received - before[1] >= least

    assert settled(agree, True)
    return moved_bytes(p, "SEND") - before[0]


def settled(read: Callable[[], T], want: T) -> T:
    """Return a count once it is what it should be, or what it still is after a while. Servers
    publish their metrics about once a second."""
    deadline = time.monotonic() + PUBLISHED_S
    while (value := read()) != want and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def assert_quiet(*servers: SglangServer) -> None:
    """When nothing runs, nobody holds a page."""
    for server in servers:
        server.forget()
        assert server.used_tokens() == 0
        assert settled(partial(server.metric, "sglang:kvconnect_ledger_held_blocks"), 0) == 0
