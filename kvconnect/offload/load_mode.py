"""Loads run inside the step that needs them, or park their request until they are done.

A load inside the step makes every other request of the engine wait. A parked request waits for the
load and then for the step that runs meanwhile. So a load runs inside the step if its time,
multiplied by the number of other requests, is at most a step. Both times are measured.
"""

from __future__ import annotations

_FRESH = 0.125  # the weight of the newest observation


class LoadMode:
    """Chooses the mode of loads from measured times. For one thread; its state does not grow."""

    def __init__(self) -> None:
        self._block_s: float | None = None
        self._step_s: float | None = None
        self._began: float | None = None  # start of the running step

    def loaded(self, blocks: int, seconds: float) -> None:
        """Record a load of ``blocks`` that took ``seconds``."""
        if blocks > 0 and seconds > 0:
            self._block_s = _mean(self._block_s, seconds / blocks)

    def began(self, now: float, plain: bool) -> None:
        """A step begins; measure it if it is ``plain``: it computes, and no load is inside."""
        self._began = now if plain else None

    def ended(self, now: float) -> None:
        """The step that began last has ended."""
        if self._began is not None:
            self._step_s, self._began = _mean(self._step_s, now - self._began), None

    def inside(self, blocks: int, others: int) -> bool:
        """Whether a load of ``blocks`` runs inside the step, with ``others`` other requests.

        Without other requests nobody waits. With others, not before both times are known.
        """
        if not others:
            return True
        if self._block_s is None or self._step_s is None:
            return False
        return others * blocks * self._block_s <= self._step_s


def _mean(known: float | None, seen: float) -> float:
    return seen if known is None else known + _FRESH * (seen - known)
