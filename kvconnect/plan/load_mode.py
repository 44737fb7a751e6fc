"""Which loads run inside the step that needs them, and which park their request until they are
done.

A load inside the step makes every other request of the engine wait for it. A parked request waits
for the load and then for the step that runs meanwhile. So a load belongs inside where what it
takes, once for each of the others, is no longer than a step. Both times are measured.
"""

from __future__ import annotations

_FRESH = 0.125  # the weight of the newest observation


class LoadMode:
    """Estimates for one engine, and the choice. For one thread; its state does not grow."""

    def __init__(self) -> None:
        self._block_s: float | None = None
        self._step_s: float | None = None
        self._began: float | None = None  # when the step did that is under way

    def loaded(self, blocks: int, seconds: float) -> None:
        """Note a load: so many blocks were copied in so many seconds."""
        if blocks > 0 and seconds > 0:
            self._block_s = _mean(self._block_s, seconds / blocks)

    def began(self, now: float, plain: bool) -> None:
        """A step begins. One that computes nothing, or has a load inside, is not ``plain`` and does
        not count."""
        self._began = now if plain else None

    def ended(self, now: float) -> None:
        """The step that began last has ended."""
        if self._began is not None:
            self._step_s, self._began = _mean(self._step_s, now - self._began), None

    def inside(self, blocks: int, others: int) -> bool:
        """Whether a load of so many blocks belongs inside the step, with so many other requests.

        Nobody waits where there are none. Where others would and nothing is known yet: no.
        """
        if not others:
            return True
        if self._block_s is None or self._step_s is None:
            return False
        return others * blocks * self._block_s <= self._step_s


def _mean(known: float | None, seen: float) -> float:
    return seen if known is None else known + _FRESH * (seen - known)
