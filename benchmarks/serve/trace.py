"""The Mooncake conversation trace, made small enough for this machine; and what a cache can hit.

A line of the trace: ``timestamp`` in ms, ``input_length`` and ``output_length`` in tokens, and
``hash_ids``, one id per 512 tokens; equal ids are equal tokens. The small trace is the same graph
of prefixes: an id stands for 16 tokens, and lengths are divided by 32.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

SCALE = 32
ID_TOKENS = 512 // SCALE
CONVERSATION_IDS = 2
"""The first id is the same in every request; the first two tell the conversation."""


@dataclass(frozen=True)
class Request:
    """One line of a trace; the names are those of its fields."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(path: Path) -> list[Request]:
    """Return the requests of a trace; a name that ends in ``.gz`` is decompressed."""
    whole = path.read_bytes()
    text = gzip.decompress(whole) if path.suffix == ".gz" else whole
    rows = [json.loads(line) for line in text.splitlines()]
    return [
        Request(
            float(row["timestamp"]),
            int(row["input_length"]),
            int(row["output_length"]),
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]


def sample(requests: Iterable[Request], count: int, seed: int) -> list[Request]:
    """Return whole conversations, drawn until there are at least ``count`` requests, by time.

    Requests in a row would lose most of the reuse: the turns of a conversation are minutes apart.
    """
    conversations: dict[tuple[int, ...], list[Request]] = defaultdict(list)
    for request in requests:
        conversations[request.hash_ids[:CONVERSATION_IDS]].append(request)
    names = list(conversations)
    random.Random(seed).shuffle(names)
    drawn: list[Request] = []
    for name in names:
        if len(drawn) >= count:
            break
        drawn += conversations[name]
    return sorted(drawn, key=lambda request: request.timestamp)


def scaled(requests: Iterable[Request]) -> list[Request]:
    """Return the requests with lengths divided by :data:`SCALE`, rounded up."""
    return [
        replace(
            one,
            input_length=-(-one.input_length // SCALE),
            output_length=max(1, -(-one.output_length // SCALE)),
        )
        for one in requests
    ]


def spread(requests: Sequence[Request], seconds: float) -> list[Request]:
    """Return the requests with times from 0 to ``seconds``, their distances in proportion."""
    first, last = requests[0].timestamp, requests[-1].timestamp
    factor = seconds * 1e3 / (last - first) if last > first else 0.0
    return [replace(one, timestamp=(one.timestamp - first) * factor) for one in requests]


def write(path: Path, requests: Iterable[Request]) -> None:
    """Write a trace that vLLM's ``timed_trace`` reads."""
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in requests))


def prompt_of(request: Request) -> list[int]:
    """Return a prompt with 16 tokens for each id of the trace."""
    tokens: list[int] = []
    for number in request.hash_ids:
        rng = random.Random(number)
        tokens += [rng.randrange(10, 2000) for _ in range(ID_TOKENS)]
    return tokens[: request.input_length]


def ideal_hits(requests: Iterable[Request], capacity: int, block: int) -> int:
    """Return how many prompt tokens a cache of ``capacity`` blocks of ``block`` tokens can hit.

    The requests come one after the other, whole blocks are kept, the least recently used are
    evicted, and the last token of a prompt is always computed. What is generated is not kept.
    """
    assert block % ID_TOKENS == 0
    per_block = block // ID_TOKENS
    kept: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for one in requests:
        blocks = [
            one.hash_ids[: (number + 1) * per_block] for number in range(one.input_length // block)
        ]
        usable = blocks[: (one.input_length - 1) // block]
        missing = (n for n, name in enumerate(usable) if name not in kept)
        hits += next(missing, len(usable)) * block
        for name in reversed(blocks):  # the beginning of a prompt is used last, evicted last
            kept.pop(name, None)
            kept[name] = None
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits
