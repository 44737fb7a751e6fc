"""Has engines change their roles as the load asks for it. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import time

from kvconnect.errors import Refused
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.role_switch import RoleSwitch
from kvconnect.router.metrics import RoleChange, RouterMetrics
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.role_balance import LOOK_S, RoleBalance, other_role, waits_of

logger = logging.getLogger(__name__)

REFUSED_S = 3600.0
"""Seconds after a failed change until an engine is asked for the same role again: it was drained
for nothing."""


class AutoRoles:
    """Follows the waits of a fleet's prompts. An engine that could not change to a role is left
    alone for :data:`REFUSED_S`."""

    def __init__(
        self, fleet: Fleet, switch: RoleSwitch, metrics: RouterMetrics, drain_s: float
    ) -> None:
        self._fleet, self._switch, self._metrics = fleet, switch, metrics
        self._drain_s = drain_s
        self._balance = RoleBalance()
        self._refused: dict[tuple[Role, str], float] = {}  # until when

    async def run(self) -> None:
        """Look at the fleet and change roles, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Change one role, if that is proposed and possible."""
        role = self._balance.look(waits_of(self._fleet.view()), time.monotonic())
        if role is None:
            return
        engine = self._spare(role)
        if engine is None:
            self._end(role, RoleChange.NONE)
            return
        logger.info("%s prompts wait: %s is to change its role", role.value, engine.url)
        try:
            await self._switch.switch(engine, self._drain_s)
        except Refused as error:
            logger.warning("%s keeps its role: %s", engine.url, error)
            now = time.monotonic()
            self._refused = {key: until for key, until in self._refused.items() if until > now}
            self._refused[role, engine.url] = now + REFUSED_S
            self._end(role, RoleChange.REFUSED)
        else:
            self._end(role, RoleChange.MADE)

    def _spare(self, role: Role) -> Engine | None:
        """Return the engine with the fewest requests that may change to ``role``."""
        engines = [e for e in self._fleet.all(other_role(role)) if self._may_change(e, role)]
        return min(engines, key=lambda engine: engine.open, default=None)

    def _may_change(self, engine: Engine, role: Role) -> bool:
        left_alone = time.monotonic() < self._refused.get((role, engine.url), 0.0)
        return not left_alone and self._switch.may(engine)

    def _end(self, role: Role, change: RoleChange) -> None:
        now = time.monotonic()
        if change is RoleChange.MADE:
            self._balance.changed(role, now)
        else:
            self._balance.refused(now)
        self._metrics.count("role_changes", role.value, change.value)
