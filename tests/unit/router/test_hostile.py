"""Part of the corpora of hostile requests, answers and bombs, against a real router's process. With
a protection taken away, each corpus sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.hostile import corpora
from tests.hostile import Outcome, bombs, fleet, requests, responses


def play(corpus: Any, limit: int | None) -> Outcome:
    found: Outcome = asyncio.run(corpus.run(limit))
    return found


@pytest.mark.parametrize(("corpus", "limit"), [(requests, 60), (responses, None), (bombs, 8)])
def test_hostile_words_do_no_harm(corpus: Any, limit: int | None) -> None:
    found = play(corpus, limit)
    assert found.cases >= (limit or 100)
    assert (found.crashes, found.hangs, found.smuggled, found.wrong) == (0, 0, 0, 0), found.notes
    if corpus is bombs:
        assert found.figures["bomb_mib"] <= 128


def test_corpora_are_large_and_found() -> None:
    assert len(list(requests.malformed())) >= 109
    assert len([*requests.confused()]) >= 4000
    assert len(list(responses.answers())) >= 56
    assert {"requests", "responses", "bombs", "engines"} <= corpora().keys()
    assert "fleet" not in corpora()


def test_control_a_client_that_names_transfers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fleet,
        "BEFORE",
        "from kvconnect.router import decision; from kvconnect.router.requests import body; "
        "body._ROUTERS_OWN = (); "
        "decision.permitted = lambda kind, path, body, permissions: (body, ())",
    )
    told = b'{"model":"fake","prompt":"a","ec_transfer_params":{"host":"10.99.99.99"}}'
    monkeypatch.setattr(requests, "texts", lambda: iter([("/v1/completions", told)]))
    monkeypatch.setattr(requests, "confused", lambda: iter(()))
    monkeypatch.setattr(requests, "malformed", lambda: iter(()))
    assert play(requests, None).smuggled


MERGES = (
    "from kvconnect.router.connections.http1 import IncomingResponse as A; "
    "A.on_message_begin = lambda s: None; A.on_body = lambda s, b: s.chunks.append(b)"
)
PASSES_HALVES = (
    "from kvconnect.router.connections.http1 import Connection as C, IncomingResponse as A; "
)
PASSES_HALVES += (
    "C.connection_lost = lambda s, e, w=C.connection_lost: (s.response.cut_off(), w(s, e))"
)


@pytest.mark.parametrize(
    ("before", "case", "what"),
    [(MERGES, "two in one piece", "smuggled"), (PASSES_HALVES, "unframed, open", "wrong")],
)
def test_control_an_answer_of_another_or_half_of_one_is_seen(
    before: str, case: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = [said for said in responses.answers() if said.name == case]
    monkeypatch.setattr(responses, "answers", lambda: iter(one))
    assert getattr(play(responses, None), what) == 0
    monkeypatch.setattr(fleet, "BEFORE", before)
    assert getattr(play(responses, None), what) > 0


def test_control_a_bomb_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = "import gzip; from kvconnect.router.requests import body; read = body.read_body; "
    before += "unpack = lambda raw: gzip.decompress(raw) if raw[:1] == b'\\x1f' else raw; "
    before += "body.read_body = lambda raw: read(unpack(raw)); "
    before += "from kvconnect.router.http import request_reader as reading; "
    before += "reading._refuse_encoded = lambda request: None"
    monkeypatch.setattr(fleet, "BEFORE", before)
    one = [bomb for bomb in bombs.bombs() if bomb.name == "text, gzip"]
    monkeypatch.setattr(bombs, "bombs", lambda: iter(one))
    assert play(bombs, None).wrong
