"""Who is inside a store, so that it can be closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Counts calls under way, and lets none in once it is closed. Threads: any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self.closed = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Be inside during the context, if this yields True."""
        with self._changed:
            let_in = not self.closed
            self._inside += let_in
        try:
            yield let_in
        finally:
            with self._changed:
                self._inside -= let_in
                self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more; return False if that was so before."""
        with self._changed:
            was, self.closed = self.closed, True
            return not was

    def wait(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)
