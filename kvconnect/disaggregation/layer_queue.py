"""Launched layers of the prefill side, which a thread of their own offers to readers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from kvconnect import threads
from kvconnect.errors import TransferFailed, contained
from kvconnect.transport.base import Fence


class LayerQueue:
    """Queue of launched layers, drained by a thread of its own.

    The thread calls ``take(name, fence)`` for each layer and ``take(None, fence)`` for the rest of
    a step, in order and with ``lock`` held. Threads: the engine's thread calls :meth:`put`, which
    takes no lock; a holder of ``lock`` calls :meth:`catch_up` to drain the queue at once.
    """

    def __init__(
        self,
        lock: threading.Lock,
        take: Callable[[str | None, Fence | None], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``failed`` gets the errors of ``take``, with ``lock`` held."""
        self._lock = lock
        self._take = take
        self._failed = failed
        self._layers: deque[tuple[str | None, Fence | None]] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False ends the thread
        kind = threads.ThreadKind.LAYERS
        self._thread = threads.make(kind, "kvconnect-layers", self._loop)
        self._thread.start()

    def put(self, name: str | None, fence: Fence | None) -> None:
        """A layer, or the rest of the step, can be read once ``fence`` has passed."""
        self._layers.append((name, fence))
        self._wake.put(True)

    def catch_up(self) -> None:
        """Drain the queue. The caller holds ``lock``."""
        # Entries leave the queue under the lock only; otherwise a layer could be taken late, as one
        # of the next step.
        while self._layers:
            with contained(self._failed):
                name, fence = self._layers.popleft()
                self._take(name, fence)

    def check(self) -> None:
        """Raise :class:`TransferFailed` if the thread has died of a bug."""
        if not self._thread.is_alive():
            raise TransferFailed("the thread that sends layers has ended, see its traceback above")

    def close(self, timeout_s: float) -> None:
        """End the thread. Idempotent."""
        self._wake.put(False)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while self._wake.get():
            with self._lock:
                self.catch_up()
