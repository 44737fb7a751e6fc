"""Times and bytes of a session's reads, for metrics and traces."""

from __future__ import annotations

import pytest

from kvconnect.disaggregation import transfer_meter
from kvconnect.disaggregation.messages import Chunk
from kvconnect.disaggregation.transfer_meter import ChunkKey, TransferMeter, TransferTrace
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.transport.base import PagesReceived, PeerId
from kvconnect.types import TransferType


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfer_meter, "time", clock)
    return clock


def test_layers_of_a_chunk_are_one_and_chunks_stay_apart(clock: Clock) -> None:
    book = TransferTrace(worker=3)
    book.open(7)
    first, second = ChunkKey(0, 0, 8), ChunkKey(0, 8, 5)
    for chunk in (first, first, second):  # two layers of one, all layers of the other
        clock.now += 1
        book.queued(7, chunk)
    for nbytes in (10, 10, 30):
        clock.now += 1
        book.moved(7, nbytes, 0.5)
    clock.now += 1
    found = book.close(7, "tcp", 50, 1.5)
    assert found is not None
    assert (found.worker, found.path, found.nbytes, found.seconds) == (3, "tcp", 50, 1.5)
    assert (found.asked, found.first, found.ready, found.ended) == (100.0, 103.5, 0.0, 107.0)
    assert found.chunks == (Chunk(0, 8, 101.0, 105.0, 20), Chunk(8, 5, 103.0, 106.0, 30))
    assert book.close(7, "tcp", 50, 1.5) is None


def test_what_is_not_open_is_left_alone(clock: Clock) -> None:
    """Messages cross: events of a finished read may still arrive."""
    book = TransferTrace(worker=0)
    book.open(1)
    book.forget(1)
    for event in (
        lambda: book.queued(1, ChunkKey(0, 0, 1)),
        lambda: book.moved(1, 1, 0.0),
        lambda: book.ready(1),
        lambda: book.forget(1),
    ):
        event()
    assert book.close(1, "tcp", 0, 0.0) is None


def test_a_meter_tells_it_and_without_one_nothing(clock: Clock) -> None:
    event = PagesReceived(PeerId(0), 1, 0, 0, 8, (), 64, 0.25)
    for book in (TransferTrace(0), None):
        stats, meter = OffloadingConnectorStats(), TransferMeter(path="nixl", trace=book)
        meter.open(1, asked=True)
        clock.now += 1
        meter.record(stats, TransferType.RECV, event, "peer")
        meter.all_ready(1)
        measured = meter.finish(stats, 1, "recv")
        moved = measured.moved
        assert (measured.nbytes, measured.seconds) == (64, 0.25)
        if book is None:
            assert moved is None
        else:
            assert moved is not None and moved.path == "nixl"
            assert moved.asked + 0.75 == moved.first == moved.ready - 0.25
