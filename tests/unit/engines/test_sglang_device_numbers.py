"""Layer-wise push waits for no page number: the scheduler's thread goes on, and what it launches
meanwhile is offered when they have come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvconnect.engines.sglang.device_numbers import DeviceNumbers
from kvconnect.engines.sglang.layerwise import LayerwisePush
from tests.unit.engines.sglang_ranks import (
    LAYERS,
    ROOM,
    TOKENS,
    Decode,
    Prefill,
    engines,
    expected,
    until,
)
from tests.unit.engines.sglang_scheduler import Scheduler, batch_of, request_of

OWN, THEIRS = [3, 9], [7, 2]


class Device:
    """Stands in for a device that works when it is told to. ``waits``: how often its user did."""

    def __init__(self) -> None:
        self.passed, self.waits = False, 0

    def event(self, **_: Any) -> Device:
        return self

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += not self.passed
        self.passed = True


class OnItsWay:
    """A tensor of the device, and its copy, which can be read once the device has got there."""

    is_cuda = True

    def __init__(self, device: Device, tensor: torch.Tensor) -> None:
        self.device, self.tensor = device, tensor

    def to(self, where: str, non_blocking: bool) -> OnItsWay:
        assert where == "cpu" and non_blocking
        return self

    def reshape(self, _: int) -> OnItsWay:
        return self

    def tolist(self) -> Any:
        assert self.device.passed, "read before it came"
        return self.tensor.tolist()


class Pushing:
    """Both ends of a hand-off that can begin, with a prefill engine on a device."""

    def __init__(self, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        monkeypatch.setattr(torch.cuda, "Event", self.device.event)
        sources, readers = engines(closing, (1, 1), 4)
        self.source: Prefill = sources[0]
        self.reader: Decode = readers[0]
        self.push = LayerwisePush(self.source.agent, self.source.prefill_rooms, self.source.names)
        self.scheduler = Scheduler(OWN)
        allocator: Any = self.scheduler.token_to_kv_pool_allocator
        allocator.translate_kv_indices_for_transfer = lambda slots: OnItsWay(self.device, slots)
        self.source.prefill_rooms.open(ROOM)
        self.reader.ask(THEIRS, [self.source])
        self.until(lambda: bool(self.source.ready))

    def until(self, condition: Any) -> None:
        until([self.source, self.reader], condition)

    def begin(self) -> None:
        request = request_of(TOKENS * 2, TOKENS * 2)
        self.push.begin(self.scheduler, batch_of(request))

    def is_there(self, layer: int) -> bool:
        return bool(self.reader.page(layer, THEIRS[1]).any())


@pytest.fixture
def pushing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pushing]:
    with ExitStack() as stack:
        yield Pushing(stack, monkeypatch)


def test_layers_that_were_launched_before_the_numbers_came_go_then(pushing: Pushing) -> None:
    pushing.begin()
    pushing.push.layer(0)
    pushing.push.layer(1)
    assert not pushing.source.agent.offering and not pushing.device.waits
    pushing.device.passed = True
    pushing.push.layer(2)
    pushing.until(lambda: all(pushing.is_there(layer) for layer in range(LAYERS)))
    pushing.push.end()
    assert not pushing.device.waits
    pushing.source.send_all(OWN, chunks=1)
    pushing.until(lambda: bool(pushing.reader.done and pushing.source.done))
    for layer in range(len(pushing.reader.kv)):
        for ours, theirs in zip(THEIRS, OWN, strict=True):
            got = pushing.reader.page(layer, ours)
            assert torch.equal(got, expected(pushing.reader, layer, theirs))
    stats = pushing.source.agent.take_stats()
    assert stats is not None and stats.reduce()["SEND_operations"] == LAYERS + 1  # and the row


def test_a_batch_that_ends_before_the_numbers_come_goes_at_the_next_poll(
    pushing: Pushing,
) -> None:
    pushing.begin()
    pushing.push.layer(0)
    pushing.push.end()
    pushing.source.prefill_rooms.settle(False)
    assert not pushing.device.waits
    room = pushing.source.prefill_rooms.find(ROOM)
    assert room is not None and not room.offered_ahead
    pushing.device.passed = True
    pushing.source.prefill_rooms.settle(False)
    assert room.offered_ahead == dict(enumerate(OWN)) and not pushing.device.waits
    pushing.until(lambda: all(pushing.is_there(layer) for layer in range(LAYERS)))


def test_what_sglang_sends_comes_after_what_was_offered_ahead(pushing: Pushing) -> None:
    pushing.begin()
    pushing.push.end()
    pushing.source.send_all(OWN, chunks=1)
    assert pushing.device.waits == 1  # SGLang sends when the batch is over: for nothing
    pushing.until(lambda: bool(pushing.reader.done and pushing.source.done))


def test_nothing_of_a_closed_room_is_offered_later(pushing: Pushing) -> None:
    pushing.begin()
    pushing.source.prefill_rooms.close(ROOM)
    assert pushing.device.waits == 1
    pushing.push.layer(0)
    pushing.push.end()
    pushing.until(lambda: bool(pushing.reader.failed))
    assert not any(pushing.is_there(layer) for layer in range(len(pushing.reader.kv)))


def test_reading_too_early_would_be_noticed(
    pushing: Pushing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above."""
    monkeypatch.setattr(DeviceNumbers, "are_here", lambda _: True)
    pushing.begin()
    assert "read before it came" in pushing.source.failed[0]
