"""Log lines about whom was turned away: they neither fill the log nor ever fall silent."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_KINDS = 1024
AGAIN_S = 300.0
"""After which the same kind of trouble with the same address is worth another line."""

LINES_PER_MINUTE = 20


class Complaints:
    """Not thread-safe. ``now`` is in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}  # when, by address and kind; oldest first
        self._minute = 0.0
        self._lines = 0  # in that minute
        self._kept_back = 0  # since the last line

    def say(self, host: str, text: str, now: float) -> None:
        """Log that ``host`` was turned away, unless that was said lately, or much else was."""
        kind = f"{host}: {text.partition(':')[0]}"
        if now - self._minute >= 60.0:
            self._minute, self._lines = now, 0
        known = now - self._said.get(kind, -AGAIN_S) < AGAIN_S
        if known or self._lines >= LINES_PER_MINUTE:
            self._kept_back += 1
            return
        self._said.pop(kind, None)
        self._said[kind] = now
        if len(self._said) > MAX_KINDS:
            del self._said[next(iter(self._said))]
        more = f" ({self._kept_back} more were since the last such line)" if self._kept_back else ""
        self._lines, self._kept_back = self._lines + 1, 0
        logger.warning("%s: turned away: %s%s", host, text, more)
