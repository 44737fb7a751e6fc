"""What the engine's thread has launched of a step, on its way to a thread that sends it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from kvconnect import threads
from kvconnect.errors import TransferFailed
from kvconnect.transport.base import Fence


class Behind:
    """Calls ``take(name, fence)`` for each layer, and ``take(None, fence)`` for the rest of a step,
    in order and with ``lock`` held.

    Threads: :meth:`put` is for the engine's; it takes no lock and leaves the work to a thread of
    its own, started here. :meth:`catch_up` is for whoever holds ``lock``: what it does from then
    on comes after all that was put.
    """

    def __init__(
        self, lock: threading.Lock, take: Callable[[str | None, Fence | None], None]
    ) -> None:
        self._lock = lock
        self._take = take
        self._layers: deque[tuple[str | None, Fence | None]] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False: end
        kind = threads.ThreadKind.LAYERS
        self._thread = threads.make(kind, "kvconnect-layers", self._loop)
        self._thread.start()

    def put(self, name: str | None, fence: Fence | None) -> None:
        """A layer, or the rest of the step, can be read once ``fence`` has passed."""
        self._layers.append((name, fence))
        self._wake.put(True)

    def catch_up(self) -> None:
        """Take all that was put. Raises what ``take`` raises."""
        # Off the queue with the lock held only: a layer in nobody's hands would be taken late,
        # for one of the next step.
        while self._layers:
            self._take(*self._layers.popleft())

    def check(self) -> None:
        """Raise :class:`TransferFailed` if the thread has died of a bug."""
        if not self._thread.is_alive():
            raise TransferFailed("the thread of written layers has ended, see its traceback above")

    def close(self, timeout_s: float) -> None:
        """End the thread. Idempotent."""
        self._wake.put(False)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while self._wake.get():
            with self._lock:
                self.catch_up()
