"""Gauges of the connector in vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from kvconnect.stats import OffloadingConnectorStats

_LOOK_S = 0.1  # between two reads of the gauges while the engine works


class Gauges:
    """The last published gauges, and whether they may have changed since (``moved``).

    Reading all gauges takes a tenth of a millisecond, too long for every step. When the engine
    comes to rest, they are read once more, since their last values stay visible.
    """

    def __init__(self) -> None:
        self.moved = True
        self._values: dict[tuple[str, str | None], float] = {}
        self._looked = 0.0  # when the gauges were last read

    def due(self, now: float, at_rest: bool) -> bool:
        """Return whether to read the gauges: at least every second, since ages change always."""
        return now - self._looked >= (_LOOK_S if self.moved else 1.0) or (self.moved and at_rest)

    def publish(
        self,
        read: Iterable[tuple[str, float, str | None]],
        stats: OffloadingConnectorStats,
        now: float,
    ) -> None:
        """Set all gauges in ``stats`` if one has changed: some series are quotients of two."""
        self.moved, self._looked = False, now
        found: dict[tuple[str, str | None], float] = {}
        for name, value, label in read:
            # Only the age has several sources. Rounded to seconds, it changes seldom.
            found[name, label] = max(int(value), found.get((name, label), 0))
        if found == self._values:
            return
        self._values = found
        for (name, label), value in found.items():
            stats.gauge(name, value, label)
