"""Whether an engine should change its role: slowly, by measured waits. Pure.

Prompts wait for prefill engines in a queue, and for decode engines after prefill. Where one side
has long waits and the other short ones, for a while, an engine of the other side is to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvconnect.router.policy.fleet_view import FleetView, Role

LOOK_S = 5.0
"""Seconds between two looks."""
LONG_S = 1.0
"""A wait from which on a role needs an engine."""
SPARE_SHARE = 0.25
"""Part of that wait up to which the other role can spare one. Between both nothing changes."""
SUSTAINED_S = 60.0
"""Seconds for which this must have been so at every look."""
PAUSE_S = 300.0
"""Seconds after a change in which nothing changes: waits tell of it late."""
BACK_FACTOR = 3
"""How many times as long it must have been so to undo the last change; with every change that was
undone, so many times as long again."""
MOST_SUSTAINED_S = 3600.0
"""Limit of that time: loads change in the course of a day."""


_MOST_BACK = 10  # so many times the factor is beyond that limit


class RoleWait(NamedTuple):
    """Seconds that a role's prompts wait, and how many engines it has that are up. ``wait_s`` None:
    nothing was measured lately."""

    engines: int
    wait_s: float | None


Waits = Mapping[Role, RoleWait]


class RoleBalance:
    """Proposes changes of one fleet. Not thread-safe."""

    def __init__(self) -> None:
        self._needy: Role | None = None
        self._since = 0.0
        self._changed_at = float("-inf")
        self._last: Role | None = None  # the role that got the last engine
        self._undone = 0  # changes that undid the one before

    def look(self, waits: Waits, now: float) -> Role | None:
        """Return the role that should get an engine of the other one; None: all stay."""
        needy = next((role for role in Role if _needs(waits, role)), None)
        if needy is not self._needy:
            self._needy, self._since = needy, now
        if needy is None or now - self._changed_at < PAUSE_S:
            return None
        exponent = min(self._undone + (self._last not in (None, needy)), _MOST_BACK)
        sustained_s = min(SUSTAINED_S * BACK_FACTOR**exponent, MOST_SUSTAINED_S)
        return needy if now - self._since >= sustained_s else None

    def changed(self, role: Role, now: float) -> None:
        """Note that ``role`` got an engine, at the end of the change."""
        self._undone += self._last not in (None, role)
        self._last, self._needy = role, None
        self._changed_at = now

    def refused(self, now: float) -> None:
        """Note that a change was not possible. The next one is proposed after the same pause."""
        self._needy, self._changed_at = None, now


def _needs(waits: Waits, role: Role) -> bool:
    """Whether a role's prompts wait long, and the other role can spare an engine."""
    mine, other = waits[role], waits[other_role(role)]
    if mine.wait_s is None or mine.wait_s < LONG_S or other.engines < 2:
        return False
    return other.wait_s is None or other.wait_s <= SPARE_SHARE * mine.wait_s


def other_role(role: Role) -> Role:
    """Return the role that is not ``role``."""
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def waits_of(view: FleetView) -> Waits:
    """Return how long prompts wait: for prefill engines, the mean of their queues; for decode
    engines, the mean of the times from the end of prefill to the first token."""
    up = {
        Role.PREFILL: [engine for engine in view.prefill if engine.up],
        Role.DECODE: [engine for engine in view.decode if engine.up],
    }
    queues = [
        engine.times.compute.token_s * sum(engine.times.waiting_tokens.values()) / len(engine.ranks)
        for engine in up[Role.PREFILL]
        if engine.times.compute is not None
    ]
    arrivals = [s for engine in up[Role.DECODE] if (s := engine.times.arrival_s) is not None]
    return {
        Role.PREFILL: RoleWait(len(up[Role.PREFILL]), _mean(queues)),
        Role.DECODE: RoleWait(len(up[Role.DECODE]), _mean(arrivals)),
    }


def _mean(seconds: list[float]) -> float | None:
    return sum(seconds) / len(seconds) if seconds else None
