"""Layer by layer: which layers of a forward have their loaded pages, told to those who wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from kvconnect.errors import TransferFailed

_STUCK_S = 120.0  # past any deadline: the copy thread or the device is dead


class LayerCounter(LayerWiseLoadCounter):
    """SGLang's counter, which also says how long a forward waited and does not wait for ever.

    For the engine's thread; :class:`LoadBatch` has what copy threads call.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self._waited: dict[int, float] = {}
        self._passed: dict[int, int] = {}  # by batch, how many layers are decided

    def wait_until(self, threshold: int) -> None:
        """Block until all layers of the forward's batch up to this one are decided, in every pool.

        SGLang asks at each layer, or, with a graph of the whole prefill, once for the last: pools
        load side by side, so a later layer may be there before an earlier one.
        """
        index = self.consumer_index
        if index not in self.futures:
            return
        for layer in range(self._passed.get(index, 0), threshold + 1):
            self._wait(index, layer)
        self._passed[index] = max(self._passed.get(index, 0), threshold + 1)

    def finish(self, index: int) -> bool:
        """Block until every layer of batch ``index`` is decided; return whether all are there.

        Raises:
            TransferFailed: as for a layer.
        """
        for layer in range(self.num_layers if index in self.futures else 0):
            self._wait(index, layer)
        self._passed.pop(index, None)
        return bool(super().finish(index))

    def take_waited(self, index: int) -> float:
        """Return the seconds that the engine's thread waited for a batch, once."""
        return self._waited.pop(index, 0.0)

    def reset(self) -> None:
        super().reset()
        self._waited.clear()
        self._passed.clear()

    def _wait(self, index: int, layer: int) -> None:
        """Raises :class:`TransferFailed` if the copy thread is stuck. Its bytes may still land, so
        the step that needs them cannot go on."""
        future = self.futures[index][layer]
        if future.done():
            return
        started = time.perf_counter()
        try:
            future.exception(_STUCK_S)
        except FutureTimeout:
            what = f"layer {layer} of a load did not land within {_STUCK_S:.0f} s"
            raise TransferFailed(what) from None
        waited = time.perf_counter() - started
        self._waited[index] = self._waited.get(index, 0.0) + waited


class LoadBatch:
    """One batch of loads: a layer is there when every pool that has a part of it says so.

    ``stages`` are, per pool that takes part, the layers of each of its stages. Layers that no
    pool loads are there at once.
    """

    def __init__(
        self, counter: LayerCounter, stages: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        self.index: int = counter.update_producer()
        self._futures = counter.futures[self.index]  # the counter may forget them before us
        self._stages = stages
        self._lock = threading.Lock()
        self._failed: set[int] = set()
        self._waiting = [0] * counter.num_layers
        for layer in _flat(stages.values()):
            self._waiting[layer] += 1
        for pools, future in zip(self._waiting, self._futures, strict=True):
            if not pools:
                future.set_result(None)

    def landed(self, pool: str, stage: int, good: bool) -> None:
        """A stage of a pool is there, or never will be; any thread."""
        with self._lock:
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


def _flat(stages: Iterable[Sequence[Sequence[int]]]) -> Iterable[int]:
    return (layer for pool in stages for stage in pool for layer in stage)
