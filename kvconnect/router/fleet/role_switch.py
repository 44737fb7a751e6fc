"""Switches engines to the other role while the router runs. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvconnect.errors import Refused
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.handoff_probes import ProbeFailed
from kvconnect.router.fleet.membership import ADMIN, FLAGS, Membership
from kvconnect.router.fleet.pairing import EnginePair
from kvconnect.router.policy.fleet_view import Role

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_UP_S = 15.0  # limit for an engine to report its models


class RoleSwitch:
    """Switches engines of one router to the other role."""

    def __init__(self, membership: Membership, fleet: Fleet) -> None:
        self._membership = membership
        self._fleet = fleet

    async def switch(self, old: Engine, drain_s: float) -> Engine:
        """Switch an engine to the other role if a probe passes there; return it in its new role.

        The engine is drained first; its open requests have ``drain_s`` seconds to end.

        Raises:
            Refused: the engine continues in its old role; the message says why.
        """
        role = Role.DECODE if old.role is Role.PREFILL else Role.PREFILL
        self._check(old, role)
        old.drain()
        new: Engine | None = None

        def idle() -> bool:
            self._check_kept(old)
            if not self._partners(old, old.role):
                raise Refused("url", f"no other {old.role.value} engine is up any more")
            return not old.open

        try:
            await _until(idle, drain_s, "its open requests did not end in time")
            self._check_kept(old)
            new = await self._proven(old, role)
        finally:
            if new is None and self._membership.is_kept(old):
                old.draining = False
        new.draining = False
        self._membership.remove(old)
        logger.info("engine %s serves as %s engine now", new.url, role.value)
        return new

    def may(self, engine: Engine) -> bool:
        """Return whether :meth:`switch` would try."""
        try:
            self._check(engine, Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL)
        except Refused:
            return False
        return True

    def _check(self, old: Engine, role: Role) -> None:
        """Refuse a switch that cannot succeed, before anything changes."""
        source = self._membership.source_of(old)
        if self._fleet.unified:
            raise Refused("url", "the router has --unified, so its engines have one role")
        if old.native:
            raise Refused("url", "SGLang's servers have the role that they were started with")
        if source not in (FLAGS, ADMIN):
            raise Refused(
                "url", f"its role is named by {source or 'nobody any more'}: change it there"
            )
        if self._membership.find(role, old.url) is not None:
            raise Refused("url", f"it is a {role.value} engine too")
        if old.draining or not old.up:
            raise Refused("url", "it is down, or being drained")
        if not self._partners(old, old.role):
            raise Refused("url", f"no other {old.role.value} engine that it could work with is up")

    async def _proven(self, old: Engine, role: Role) -> Engine:
        """Return the engine in its new role after a passed probe. It gets no requests yet."""
        new = self._membership.add(role, old.spec, ADMIN)
        new.drain()
        proven = False
        try:
            await _until(lambda: new.up and bool(new.info.models), _UP_S, "it does not answer")
            partners = self._partners(new, old.role)
            if not partners:
                raise Refused("url", "no engine that it could work with is up any more")
            prefill, decode = (partners[0], new) if role is Role.DECODE else (new, partners[0])
            try:
                await self._membership.prober.probe(prefill, decode)
            except ProbeFailed as error:
                raise Refused(
                    "url", f"no KV from {prefill.url} to {decode.url}: {error}"
                ) from error
            self._check_kept(old, new)
            self._fleet.pairing.mark_proven(EnginePair(prefill.index, decode.index))
            proven = True
            return new
        finally:
            if not proven:
                self._membership.remove(new)

    def _check_kept(self, *engines: Engine) -> None:
        """Refuse to go on with engines that an operator or a source did not want meanwhile."""
        if not all(map(self._membership.is_kept, engines)):
            raise Refused("url", "it was removed or drained meanwhile")

    def _partners(self, engine: Engine, role: Role) -> list[Engine]:
        """Return other engines of a role that ``engine`` can pair with, proven ones first."""
        view = self._fleet.view()
        sides = {Role.PREFILL: view.prefill, Role.DECODE: view.decode}
        own = next(each for each in sides[engine.role] if each.index == engine.index)
        found = [w for w in sides[role] if w.up and w.name != engine.url and w.pairs_with(own)]
        return [self._fleet.get(role, w.index) for w in sorted(found, key=lambda w: not w.proven)]


async def _until(true: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    ends = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > ends:
            raise Refused("url", otherwise)
        await asyncio.sleep(_LOOK_S)
