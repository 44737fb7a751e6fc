"""What a forward waits for when its pages are loaded layer by layer."""

from __future__ import annotations

import threading

import pytest
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from kvconnect.engines.sglang.layerwise_loads import LayerCounter, LoadBatch
from kvconnect.offload.streams import HostStreams

WAIT_S = 20.0  # a bound for a test that would hang, not a time that is measured


class FollowedStreams(HostStreams):
    """Notes the fences that were followed, and on which stream."""

    def __init__(self) -> None:
        self.number = 0
        self.followed: list[tuple[int, object]] = []

    def current(self) -> int:
        return self.number

    def follow(self, fence: object) -> None:
        self.followed.append((self.number, fence))


class Stock(LayerCounter):
    """The control: SGLang's counter waits for one layer."""

    wait_until = LayerWiseLoadCounter.wait_until


def batch_of(counter: LayerCounter) -> LoadBatch:
    batch = LoadBatch(counter, {"full": [[0], [2]], "window": [[1], [3]]})
    counter.set_consumer(batch.index)
    return batch


@pytest.mark.parametrize("kind", [LayerCounter, Stock])
def test_who_waits_for_a_layer_waits_for_those_before_it(kind: type[LayerCounter]) -> None:
    """A graph of the whole prefill asks once, for the last layer; pools load side by side."""
    counter = kind(4, HostStreams())
    batch = batch_of(counter)
    batch.landed("window", 0, True)
    batch.landed("window", 1, True)  # its last layer, before the first of the other pool
    waiting = threading.Thread(target=counter.wait_until, args=(3,))
    waiting.start()
    if kind is Stock:
        waiting.join(WAIT_S)
        assert not waiting.is_alive()  # although layers 0 and 2 are missing
        return
    batch.launched("full", 0, None)  # says nothing without streams
    batch.landed("full", 0, True)
    assert waiting.is_alive()
    batch.landed("full", 1, True)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert counter.finish(batch.index)


def test_a_forward_waits_for_the_device_only() -> None:
    """Copies that are launched are waited for by the stream; their end, after the forward."""
    streams = FollowedStreams()
    counter = LayerCounter(4, streams)
    batch = batch_of(counter)
    for stage in range(2):
        batch.launched("full", stage, f"full {stage}")
        batch.launched("window", stage, f"window {stage}")
    counter.wait_until(1)
    assert streams.followed == [(0, "full 0"), (0, "window 0")]
    counter.wait_until(3)
    assert streams.followed[2:] == [(0, "full 1"), (0, "window 1")]
    counter.wait_until(3)  # costs nothing more
    assert len(streams.followed) == 4
    streams.number = 7  # a model may read layers on several streams
    counter.wait_until(1)
    assert streams.followed[4:] == [(7, "full 0"), (7, "window 0")]
    for stage in range(2):
        batch.landed("full", stage, True)
        batch.landed("window", stage, stage == 0)
    assert not counter.finish(batch.index)  # one failed, after it was launched


def test_a_stage_that_failed_before_its_launch_holds_up_nobody() -> None:
    counter = LayerCounter(4, FollowedStreams())
    batch = batch_of(counter)
    for stage in range(2):
        batch.landed("full", stage, False)
        batch.landed("window", stage, False)
    counter.wait_until(3)
    assert not counter.finish(batch.index)
