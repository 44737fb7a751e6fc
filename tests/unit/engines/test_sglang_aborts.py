"""A prefill server that aborts a request while its pages are being sent."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from kvconnect.disaggregation import agent as agents
from kvconnect.engines.sglang import translate
from kvconnect.engines.sglang.decode_rooms import RoomRequest
from kvconnect.engines.sglang.rooms import transfer_of
from kvconnect.testing import proxy as proxies
from kvconnect.testing.proxy import FaultProxy
from kvconnect.types import Endpoint, Span
from tests.unit.engines import sglang_ranks
from tests.unit.engines.sglang_ranks import ROOM, Decode, Prefill, engines, until

HERE, THERE = [3, 9, 4, 11], [7, 2, 13, 1]
FREED = -1.0


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> tuple[Prefill, Decode, FaultProxy]:
    """Return two ranks of which one sends all pages of a request through a link that stands still:
    some are under way, since more are sent than sockets hold."""
    monkeypatch.setattr(sglang_ranks, "WIDTH", 16384)
    monkeypatch.setattr(sglang_ranks, "PAGES", 14)
    monkeypatch.setattr(proxies, "_QUEUED_CHUNKS", 2)
    (source,), (reader,) = engines(closing, (1, 1), 4)
    assert source.agent.address is not None
    link = closing.enter_context(FaultProxy(*source.agent.address))
    source.prefill_rooms.open(ROOM)
    rest = (Span(translate.AUX, 0, array("q", [4])),)
    worker = Endpoint(0, 0, *link.address)
    reader.decode_rooms.request(ROOM, RoomRequest(0, array("q", THERE), rest, (worker,), 1, 1))
    until([source, reader], lambda: bool(source.ready))
    link.stall("down")
    source.send_all(HERE, chunks=1)
    until([source, reader], lambda: bool(sending(source)))
    return source, reader, link


def sending(source: Prefill) -> list[int]:
    return list(source.agent._sending_to(transfer_of(ROOM)))


def free(source: Prefill) -> None:
    """Play SGLang, which gives the pages to another request."""
    for layer in range(len(source.kv)):
        for page in HERE:
            source.page(layer, page).fill_(FREED)


def test_no_page_is_sent_after_an_abort(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader, link = begin(closing, monkeypatch)
    source.prefill_rooms.close(ROOM)
    assert not sending(source), "the pages may be freed now"
    free(source)
    link.clear()
    until([source, reader], lambda: bool(reader.done or reader.failed))
    assert reader.failed and not reader.done
    for layer in range(len(reader.kv)):
        assert not any(torch.any(reader.page(layer, page) == FREED) for page in THERE)


def test_without_the_wait_pages_are_sent_after_an_abort(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(agents.HandoffAgent, "await_stopped", lambda *_: None)
    source, _, _ = begin(closing, monkeypatch)
    source.prefill_rooms.close(ROOM)
    assert sending(source)


def test_a_request_that_ends_well_waits_for_nothing(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    (source,), (reader,) = engines(closing, (1, 1), 4)
    source.prefill_rooms.open(ROOM)
    reader.ask(THERE, [source])
    until([source, reader], lambda: bool(source.ready))
    source.send_all(HERE)
    until([source, reader], lambda: bool(source.done and reader.done))
    monkeypatch.setattr(agents.time, "sleep", waited.append)
    source.prefill_rooms.close(ROOM)
    assert waited == []
