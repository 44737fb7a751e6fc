"""One of two decode engines is killed in mid-stream: the other one continues its streams."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvconnect.router.requests import text_ends
from tests.engines.lost_streams import Fleet, survive_a_kill, vllm_fleet
from tests.engines.streams import asked, said

STREAMS = 8


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with vllm_fleet() as fleet:
        yield fleet


def test_streams_survive_kill_9_of_their_engine(fleet: Fleet) -> None:
    want = survive_a_kill(fleet, [asked(number) for number in range(STREAMS)], said)
    assert all(each.text and each.heads == 1 for each in want)


def test_engines_tell_where_a_character_is_incomplete(fleet: Fleet) -> None:
    """On which :mod:`text_ends` relies."""
    engine = next(each for each in fleet.decode if each.process.poll() is None)
    text = {"model": "model", "prompt": "the sea \U0001f600", "add_special_tokens": False}
    tokens = json.loads(engine.post("/tokenize", text))["tokens"]
    texts = [
        text_ends.told(engine.post(text_ends.PATH, {"tokens": tokens[:end]}).encode())
        for end in range(1, len(tokens) + 1)
    ]
    told = [text is not None and text_ends.whole(text) for text in texts]
    assert told[0] and told[-1] and False in told
