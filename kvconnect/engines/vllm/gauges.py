"""Which gauges the scheduler's half publishes, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_LOOK_S = 0.1  # between two looks at the gauges while the engine works


class Gauges:
    """The gauges that were published last, and whether they may have moved since.

    Reading them takes a tenth of a millisecond: too much for every step, and nobody looks that
    often. But what an engine comes to rest with stays on display.
    """

    def __init__(self) -> None:
        self.moved = True
        self._values: dict[tuple[str, str | None], float] = {}
        self._looked = 0.0  # when

    def due(self, now: float, at_rest: bool) -> bool:
        """Whether to look at them again. The oldest hold's age moves by itself."""
        return now - self._looked >= (_LOOK_S if self.moved else 1.0) or (self.moved and at_rest)

    def news(
        self, read: Iterable[tuple[str, float, str | None]], now: float
    ) -> Mapping[tuple[str, str | None], float]:
        """Return all of them if one has moved: some series are quotients of two."""
        self.moved, self._looked = False, now
        found: dict[tuple[str, str | None], float] = {}
        for name, value, label in read:
            # Only the age comes from several books; in whole seconds, it moves once in a while.
            found[name, label] = max(int(value), found.get((name, label), 0))
        if found == self._values:
            return {}
        self._values = found
        return found
