"""Journaled streams that native code passes on: bytes, cuts and costs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvconnect.router.connections.relay import NO_MEMORY, Returned, StreamRelay
from kvconnect.router.options import Listening
from kvconnect.router.requests import event_form, retries
from kvconnect.router.requests.event_form import NotedEvents, TokenEvent
from kvconnect.router.requests.journal import StreamJournal
from tests.fakes.engine import FakeEngine, begin_stream, bench, on_loop, until
from tests.fakes.token_model import PROMPT, TOKENS, TokenModel, merged
from tests.unit.router.conftest import Seen

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 4000, "stream": True, "temperature": 0}
ASK |= {"stream_options": {"include_usage": True}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
PATHS = {"/v1/completions": ASK, "/v1/chat/completions": CHAT}
EVERY = pytest.mark.parametrize("path", PATHS)
BEGIN = 4  # events, of which a form can be learned
LONG = TOKENS * 100
ROOM = 1 << 10


@dataclass
class Paced:
    """An engine that says an answer event by event, once its stream is left to a relay.

    Attributes:
        dies: after so many events of its first answer; 0: never.
        asked: bodies of requests.
    """

    seen: Seen
    tokens: list[bytes] = field(default_factory=lambda: list(TOKENS))
    dies: int = 0
    waits: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def answer(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        self.asked.append(body)
        stream, started = await begin_stream(request), self.seen.started
        events = list(TokenModel("ab"[len(self.asked) - 1], self.tokens).events(body))
        ends = self.dies if len(self.asked) == 1 and self.dies else len(events)
        for number, event in enumerate(events[:ends]):
            await stream.write(event)
            if self.waits and number == BEGIN and len(self.asked) == 1:
                await until(lambda: self.seen.started > started)
            await asyncio.sleep(0)
        if ends < len(events):
            assert request.transport is not None
            request.transport.close()
        return stream


async def answered(paced: Paced, path: str, *, relay: bool = True, continuations: int = 1) -> bytes:
    engines = [FakeEngine(paced.answer), FakeEngine(paced.answer)]
    listening = Listening(relay=relay)
    async with bench(
        [], engines, handoff="none", listening=listening, continuations=continuations
    ) as made:
        return (await made.post(PATHS[path], path)).body


@pytest.fixture(autouse=True)
def many_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "LEAST_RETRIES", 10_000)


@pytest.fixture
def journaled(monkeypatch: pytest.MonkeyPatch) -> list[TokenEvent]:
    """The events whose notes were read."""
    found: list[TokenEvent] = []
    taken = NotedEvents.taken

    def noted(notes: NotedEvents) -> list[TokenEvent]:
        each = taken(notes)
        found.extend(each)
        return each

    monkeypatch.setattr(NotedEvents, "taken", noted)
    return found


@EVERY
@on_loop
async def test_a_stream_that_ends_well_is_passed_by_native_code_and_its_notes_are_not_read(
    path: str, seen: Seen, journaled: list[TokenEvent]
) -> None:
    body = await answered(Paced(seen), path)
    assert body == TokenModel("a").answer(PATHS[path])
    assert seen.chunks > len(TOKENS) - BEGIN - 8
    assert not journaled
    assert all(b"[1" not in each.unsent for each in seen), "ids that nobody asked for"


@EVERY
@on_loop
async def test_in_python_the_bytes_are_the_same(path: str, seen: Seen) -> None:
    body = await answered(Paced(seen, waits=False), path, relay=False)
    assert body == TokenModel("a").answer(PATHS[path])
    assert not seen


@EVERY
@on_loop
async def test_a_stream_that_is_cut_there_goes_on_after_each_event(path: str, seen: Seen) -> None:
    for dies in range(BEGIN + 2, len(TOKENS)):
        before, paced = seen.chunks, Paced(seen, dies=dies)
        assert merged(await answered(paced, path)) == merged(TokenModel("a").answer(PATHS[path]))
        assert seen.chunks > before
        assert len(paced.asked) == 2


@on_loop
async def test_notes_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    """The control."""
    monkeypatch.setattr(StreamJournal, "relayed", lambda *_: None)
    body = await answered(Paced(seen, dies=12), "/v1/completions")
    assert not body.endswith(b"[DONE]\n\n") or merged(body) != merged(TokenModel("a").answer(ASK))


@on_loop
async def test_a_stream_that_lost_bytes_for_want_of_memory_ends(
    monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    """Nobody can tell whether its client has all that counts as sent."""
    give, losses = StreamRelay._give, 0

    def given(relay: StreamRelay, returned: Returned) -> None:
        nonlocal losses
        if returned.chunks and not losses:
            losses += 1
            returned = returned._replace(reason=NO_MEMORY, unsent=b"", rest=b"")
        give(relay, returned)

    monkeypatch.setattr(StreamRelay, "_give", given)
    paced = Paced(seen)
    with pytest.raises(aiohttp.ClientError):
        await answered(paced, "/v1/completions")
    assert losses == 1 and len(paced.asked) == 1, "no other engine goes on"


@on_loop
async def test_a_stream_comes_back_when_its_notes_are_full(
    seen: Seen, journaled: list[TokenEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it leaves again: its notes have all tokens, and never more bytes than there is room."""
    monkeypatch.setattr(event_form, "NOTED_BYTES", ROOM)
    paced = Paced(seen, LONG, dies=len(LONG) - 5)
    body = await answered(paced, "/v1/completions")
    assert merged(body) == merged(TokenModel("a", LONG).answer(ASK))
    full = [len(each.notes) for each in seen if len(each.notes) > ROOM - 100]
    assert len(full) > 1 and max(full) <= ROOM
    generated = paced.asked[1]["prompt"][len(PROMPT) :]
    assert generated == [100 + at for at in range(len(generated))]
    assert len(LONG) - 16 < len(generated) <= len(LONG) - 5
    assert len(journaled) == seen.chunks > 0, "each note was read once"
