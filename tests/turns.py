"""Bodies that take turns in one thread of the system, for worlds that a test moves on.

Threads could take turns too, but beside a busy engine each turn of one waits for a core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet


class Turns:
    """A body that runs from :meth:`resume` until it pauses or ends. It may resume others."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body: Any = greenlet(body)

    def resume(self) -> None:
        """Let the body go on."""
        self._body.parent = getcurrent()  # where a pause and the end go back to
        self._body.switch()

    def pause(self) -> None:
        """Go back to who resumed the body; for the body itself."""
        self._body.parent.switch()
