"""Loads inside a step: each layer of the forward waits only for its own bytes.

The copy thread launches such a load some layers at a time and records a fence behind each piece
(:class:`SyncLoad`); the engine's thread puts its work behind the fences (:class:`SyncLoads`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from kvconnect.cache.layout import GroupGeometry
from kvconnect.copy.base import Runs
from kvconnect.errors import TransferFailed
from kvconnect.offload.streams import Fence, Streams
from kvconnect.types import JobId

PIECE_BYTES = 4 << 20
"""Smallest piece: about what the link copies while the next piece is launched."""

_STUCK_S = 120.0  # no memory copy of one step takes this long on a device that is alive


def pieces(group: GroupGeometry, num_blocks: int) -> Iterator[Runs]:
    """Yield ranges of runs that cut ``num_blocks`` blocks into pieces."""
    first, nbytes, count = 0, 0, len(group.segments)
    for end, segment in enumerate(group.segments, start=1):
        nbytes += segment.length * num_blocks
        if nbytes >= PIECE_BYTES or end == count:
            yield first, end
            first, nbytes = end, 0


class SyncLoad:
    """Progress of a load. ``mark_loaded`` and ``end`` are for the copy thread.

    ``runs``: per loaded group, the number of runs of a block.
    """

    def __init__(self, job: JobId, runs: Mapping[int, int]) -> None:
        self.runs = runs
        self._job = job
        self._changed = threading.Condition()
        self._loaded: dict[int, list[tuple[int, Fence]]] = {group: [] for group in runs}
        self._ended = False

    def mark_loaded(self, group: int, runs: int, fence: Fence) -> None:
        """The first ``runs`` runs of a group's blocks are loaded behind ``fence``."""
        with self._changed:
            self._loaded[group].append((runs, fence))
            self._changed.notify_all()

    def end(self) -> None:
        """The load ended, successfully or not; it writes nothing any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fence(self, group: int, runs: int) -> Fence | None:
        """Return the fence behind the first ``runs`` runs; None if the load has ended.

        Blocks until the runs were launched. Raises :class:`TransferFailed` like :meth:`wait`.
        """
        reached = self._loaded[group]
        self._wait_for(lambda: self._ended or bool(reached and reached[-1][0] >= runs))
        return None if self._ended else next(fence for end, fence in reached if end >= runs)

    def wait(self) -> None:
        """Block until the load has ended.

        Raises:
            TransferFailed: the copy thread is stuck in the load. Its bytes may still be written,
                so the step that needs them cannot go on.
        """
        self._wait_for(lambda: self._ended)

    def _wait_for(self, what: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(what, _STUCK_S):
                error = f"synchronous load {self._job} did not end within {_STUCK_S:.0f} s"
                raise TransferFailed(error)


class SyncLoads:
    """A step's synchronous loads; for the engine's thread.

    Engines call hooks ahead of a layer's attention, but not for every layer of every model, and
    for none in a graph of the whole forward. So only layers whose hook was seen in an earlier step
    are left to it, and the others are waited for ahead of the forward.

    ``layers``: per layer, its group and how many of the group's runs hold all its bytes. Until it
    is set, no layer is left to a hook.

    Raises :class:`TransferFailed` if the copy thread is stuck.
    """

    def __init__(self, streams: Streams) -> None:
        self.layers: Mapping[str, tuple[int, int]] = {}
        self._streams = streams
        self._hooked: set[str] = set()
        self._loads: list[SyncLoad] = []
        self._waited = 0.0

    def add(self, load: SyncLoad) -> None:
        """Add a load that the next forward reads."""
        self._loads.append(load)

    def before_forward(self, hooks: bool) -> None:
        """Make the forward wait for all layers that :meth:`before_layer` will not be called for.

        ``hooks``: this step calls :meth:`before_layer`.
        """
        if not self._loads:
            return
        left = self._hooked if hooks else set()
        needed: dict[int, int] = {}
        for name, (group, runs) in self.layers.items():
            if name not in left:
                needed[group] = max(needed.get(group, 0), runs)
        for load in self._loads:
            for group, runs in (needed if self.layers else load.runs).items():
                self._follow(load, group, runs)

    def before_layer(self, name: str) -> None:
        """Make later launches wait for a layer's bytes."""
        if name in self.layers:
            self._hooked.add(name)
            group, runs = self.layers[name]
            for load in self._loads:
                self._follow(load, group, runs)

    def finish(self) -> float:
        """Block until all loads have ended and can be polled. Return the seconds that the engine's
        thread has waited in this step, without waits of the device."""
        for load in self._loads:
            load.wait()
        self._loads.clear()
        waited, self._waited = self._waited, 0.0
        return waited

    def _follow(self, load: SyncLoad, group: int, runs: int) -> None:
        if group not in load.runs:
            return
        started = time.perf_counter()
        fence = load.fence(group, runs)
        self._waited += time.perf_counter() - started
        if fence is not None:
            self._streams.follow(fence)
