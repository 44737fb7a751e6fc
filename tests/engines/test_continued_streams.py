"""One of two decode engines is killed in mid-stream: the other one continues its streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from kvconnect.router.requests import text_ends
from tests.engines.models import prompt_tokens
from tests.engines.pd import decode_config, prefill_config, side_by_side
from tests.engines.ranks import until
from tests.engines.server import Client, Router, Server

NEW = 480
STREAMS = 8
WELL_BEGUN = 8  # events
TEXT = "Say something about the sea, and about the wind. "
Ask = tuple[str, dict[str, Any]]


def asked(number: int) -> Ask:
    """Return the path and the body of a stream: of each API, with and without limits."""
    common = {"model": "model", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    text = TEXT * (4 + number)
    match number % 4:
        case 0:
            return "/v1/completions", common | {"prompt": prompt_tokens(100, start=50 * number)}
        case 1:
            return "/v1/completions", common | {"prompt": text, "stop": ["never said at all"]}
        case 2:
            return "/v1/completions", common | {"prompt": text, "return_token_ids": True}
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}


@dataclass
class Streamed(threading.Thread):
    """A stream that a thread reads."""

    client: Client
    ask: Ask
    events: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = False
    decode: int = -1
    """Number of the engine that begins it."""

    def __post_init__(self) -> None:
        super().__init__()
        self.start()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        with self.client.open(*self.ask) as reply:
            self.decode = int(reply.headers["X-KVConnect-Decode"])
            for line in reply:
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))
                self.whole = self.whole or line == b"data: [DONE]\n"

    @property
    def error(self) -> str:
        return "".join(event["error"]["message"] for event in self.events if "error" in event)


class Said(NamedTuple):
    """What a client makes of a stream."""

    text: str
    ids: list[int]
    roles: list[str]
    ends: list[str]
    usage: list[tuple[int, int, int]]
    heads: int


def said(stream: Streamed) -> Said:
    stream.join()
    assert stream.whole and not stream.error, stream.error
    choices = [choice for event in stream.events for choice in event["choices"]]
    texts = [c["delta"].get("content") if "delta" in c else c["text"] for c in choices]
    usage = [event["usage"] for event in stream.events if event.get("usage")]
    heads = {(e["id"], e["object"], e["created"], e["model"]) for e in stream.events}
    return Said(
        "".join(filter(None, texts)),
        [id for choice in choices for id in choice.get("token_ids") or ()],
        [c["delta"]["role"] for c in choices if c.get("delta", {}).get("role")],
        [c["finish_reason"] for c in choices if c["finish_reason"]],
        [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usage],
        len(heads),
    )


class Fleet(NamedTuple):
    decode: list[Server]
    router: Router
    control: Router


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    size: Any = {"blocks": 512}
    p = Server("llama", prefill_config(), **size)
    decode = [Server("llama", decode_config(), **size) for _ in range(2)]
    with (
        side_by_side(p, *decode),
        Router([p], decode, ("--continue", "1")) as router,
        Router([p], decode) as control,
    ):
        for each in (router, control):
            until(lambda each=each: count(each, "standing_ticket_fetches", outcome="ok") > 0, "one")
        yield Fleet(decode, router, control)


def count(router: Router, name: str, **labels: str) -> float:
    return router.metric(f"kvconnect_router_{name}_total", **labels)


def test_streams_survive_kill_9_of_their_engine(fleet: Fleet) -> None:
    asks = [asked(number) for number in range(STREAMS)]
    want = [said(each) for each in [Streamed(fleet.control, ask) for ask in asks]]
    assert all(each.text and each.heads == 1 for each in want)
    both = [(Streamed(fleet.router, ask), Streamed(fleet.control, ask)) for ask in asks]
    streams, control = [first for first, _ in both], [second for _, second in both]
    # All at once: the first must not have ended when the last has begun.
    until(lambda: all(well_begun(each) for each in (*streams, *control)), "all streams")
    open_at = [{each.decode for each in some if not each.whole} for some in (streams, control)]
    victim = min(open_at[0] & open_at[1])
    fleet.decode[victim].kill()
    assert [said(each) for each in streams] == want
    lost = sum(each.decode == victim for each in streams)
    assert 0 < count(fleet.router, "lost_streams", result="continued") <= lost
    for each in control:
        each.join()
    broken = [each for each in control if each.error]
    assert broken, "the control: these are lost without the flag"
    assert count(fleet.control, "requests", outcome="broken") == len(broken)
    assert count(fleet.router, "requests", outcome="broken") == 0


def well_begun(stream: Streamed) -> bool:
    return len(stream.events) > WELL_BEGUN


def test_engines_tell_where_a_character_is_incomplete(fleet: Fleet) -> None:
    """On which :mod:`text_ends` relies."""
    engine = next(each for each in fleet.decode if each.process.poll() is None)
    asked = {"model": "model", "prompt": "the sea \U0001f600", "add_special_tokens": False}
    tokens = json.loads(engine.post("/tokenize", asked))["tokens"]
    told = [
        text_ends.ends(engine.post(text_ends.PATH, {"tokens": tokens[:end]}).encode())
        for end in range(1, len(tokens) + 1)
    ]
    assert told[0] and told[-1] and False in told
