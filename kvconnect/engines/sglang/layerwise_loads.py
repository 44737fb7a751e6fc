"""Layer-wise loads of the linker: which layers of a forward have their pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from kvconnect.errors import TransferFailed
from kvconnect.offload.streams import Fence, Streams

STUCK_S = 120.0  # longer than any deadline: the copy thread or the device is dead


class LayerCounter(LayerWiseLoadCounter):
    """SGLang's counter of loaded layers, whose waits are the device's where it has streams.

    For the engine's thread; copy threads report to :class:`LoadBatch`.
    """

    def __init__(self, num_layers: int, streams: Streams) -> None:
        super().__init__(num_layers)
        self.batches: dict[int, LoadBatch] = {}
        self._streams = streams
        self._waited: dict[int, float] = {}
        # By batch and stream: layers that the stream waits for. Models may use several streams.
        self._passed: dict[int, dict[int, int]] = {}

    def wait_until(self, threshold: int) -> None:
        """Make later work of the current stream wait for each layer up to ``threshold`` of the
        forward's batch. Blocks until their copies are launched, or have failed.

        SGLang calls this at each layer or, with a graph of the whole prefill, only for the last
        one. Pools load side by side, so a later layer may be ready before an earlier one.
        """
        batch = self.batches.get(self.consumer_index)
        if batch is None:
            return
        started, stream = time.perf_counter(), self._streams.current()
        passed = self._passed.setdefault(batch.index, {})
        for layer in range(passed.get(stream, 0), threshold + 1):
            for fence in batch.fences(layer):
                self._streams.follow(fence)
            passed[stream] = layer + 1
        self._add_wait(batch.index, started)

    def finish(self, index: int) -> bool:
        """Block until each layer of batch ``index`` is loaded or failed; return whether all loaded.

        Raises:
            TransferFailed: the copy thread is stuck: it may still write the pages.
        """
        started = time.perf_counter()
        for layer, future in enumerate(self.futures.get(index, ())):
            try:
                future.exception(STUCK_S)
            except FutureTimeout:
                raise _stuck(layer) from None
        self._add_wait(index, started)
        self._passed.pop(index, None)
        self.batches.pop(index, None)
        return bool(super().finish(index))

    def take_waited(self, index: int) -> float:
        """Return the seconds that the engine's thread waited for a batch, and forget them."""
        return self._waited.pop(index, 0.0)

    def reset(self) -> None:
        super().reset()
        self.batches.clear()
        self._waited.clear()
        self._passed.clear()

    def _add_wait(self, index: int, started: float) -> None:
        waited = time.perf_counter() - started
        self._waited[index] = self._waited.get(index, 0.0) + waited


class LoadBatch:
    """One batch of loads. A layer is ready when each pool that loads a part of it has reported, or
    at once if there is none. ``stages``: for each pool that loads, the layers of each stage.

    Thread-safe.
    """

    def __init__(
        self, counter: LayerCounter, stages: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        self.index: int = counter.update_producer()
        counter.batches[self.index] = self
        self._futures = counter.futures[self.index]  # the counter may drop them before us
        self._stages = stages
        self._changed = threading.Condition()
        self._failed: set[int] = set()
        self._waiting = [0] * counter.num_layers
        for layer in _flat(stages.values()):
            self._waiting[layer] += 1
        self._not_launched = list(self._waiting)
        self._launched: set[tuple[str, int]] = set()  # pools and stages
        self._fences: list[list[Fence]] = [[] for _ in self._waiting]
        for pools, future in zip(self._waiting, self._futures, strict=True):
            if not pools:
                future.set_result(None)

    def fences(self, layer: int) -> Sequence[Fence]:
        """Return the fences behind a layer's copies; none on a device without streams, after their
        end. Blocks until they are launched.

        Raises:
            TransferFailed: the copy thread is stuck.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._not_launched[layer], STUCK_S):
                raise _stuck(layer)
            return self._fences[layer]

    def launched(self, pool: str, stage: int, fence: Fence) -> None:
        """Report that all copies of a stage are launched, with a fence behind them."""
        if fence is None:
            return  # no streams: what counts is the end
        with self._changed:
            for layer in self._stages[pool][stage]:
                self._fences[layer].append(fence)
            self._mark_launched(pool, stage)

    def landed(self, pool: str, stage: int, good: bool) -> None:
        """Report that a stage of a pool was loaded, or failed."""
        with self._changed:
            self._mark_launched(pool, stage)
            for layer in self._stages[pool][stage]:
                self._waiting[layer] -= 1
                if not good:
                    self._failed.add(layer)
                if self._waiting[layer]:
                    continue
                if layer in self._failed:
                    error = TransferFailed(f"layer {layer} could not be loaded")
                    self._futures[layer].set_exception(error)
                else:
                    self._futures[layer].set_result(None)

    def _mark_launched(self, pool: str, stage: int) -> None:
        if (pool, stage) not in self._launched:
            self._launched.add((pool, stage))
            for layer in self._stages[pool][stage]:
                self._not_launched[layer] -= 1
            self._changed.notify_all()


def _stuck(layer: int) -> TransferFailed:
    return TransferFailed(f"layer {layer} of a load did not land within {STUCK_S:.0f} s")


def _flat(stages: Iterable[Sequence[Sequence[int]]]) -> Iterable[int]:
    return (layer for pool in stages for stage in pool for layer in stage)
