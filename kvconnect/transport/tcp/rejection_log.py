"""Log lines about rejected connections: rate-limited, but never silent."""

from __future__ import annotations

import logging

from kvconnect.bounded import remember

logger = logging.getLogger(__name__)

MAX_KINDS = 1024
AGAIN_S = 300.0
"""Seconds after which the same kind of rejection of one address is logged again."""

LINES_PER_MINUTE = 20


class RejectionLog:
    """Logs rejected connections. Not thread-safe. ``now`` is a monotonic clock in seconds."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}  # time by address and kind, oldest first
        self._minute = 0.0
        self._lines = 0  # in that minute
        self._suppressed = 0  # since the last line

    def say(self, host: str, text: str, now: float) -> None:
        """Log that ``host`` was rejected, unless that was logged lately or the minute is full."""
        kind = f"{host}: {text.partition(':')[0]}"
        if now - self._minute >= 60.0:
            self._minute, self._lines = now, 0
        known = now - self._logged_at.get(kind, -AGAIN_S) < AGAIN_S
        if known or self._lines >= LINES_PER_MINUTE:
            self._suppressed += 1
            return
        remember(self._logged_at, kind, now, MAX_KINDS)
        more = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        self._lines, self._suppressed = self._lines + 1, 0
        logger.warning("%s: rejected: %s%s", host, text, more)
