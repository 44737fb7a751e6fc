"""Has an engine change its role while the router runs, if its hand-offs work in the other one.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvconnect.errors import Refused
from kvconnect.router.membership import ADMIN, FLAGS, Membership
from kvconnect.router.probe import ProbeFailed
from kvconnect.router.proofs import Pair
from kvconnect.router.upstreams import Fleet, Upstream
from kvconnect.router.view import Role

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_UP_S = 15.0  # for an engine to say what it serves


async def switch(membership: Membership, fleet: Fleet, old: Upstream, drain_s: float) -> Upstream:
    """Drain an engine, and have it serve in the other role once a probe has passed in that one; if
    none does, the engine goes on as before. Returns it in its new role.

    Raises:
        Refused: it goes on in its old role; says why.
    """
    role = Role.DECODE if old.role is Role.PREFILL else Role.PREFILL
    _check(membership, fleet, old, role)
    membership.drain(old)
    new: Upstream | None = None
    try:
        await _until(lambda: not old.open, drain_s, "its open requests did not end in time")
        new = await _proven(membership, fleet, old, role)
    finally:
        if new is None and membership.source_of(old):  # not removed meanwhile
            old.draining = False
    new.draining = False
    membership.remove(old)
    logger.info("engine %s serves as %s engine now", new.url, role.value)
    return new


def _check(membership: Membership, fleet: Fleet, old: Upstream, role: Role) -> None:
    """Refuse what cannot succeed, before anything is changed."""
    source = membership.source_of(old)
    if old.native:
        raise Refused("url", "SGLang's servers have the role that they were started with")
    if source not in (FLAGS, ADMIN):
        raise Refused("url", f"its role is named by {source or 'nobody any more'}: change it there")
    if membership.find(role, old.url) is not None:
        raise Refused("url", f"it is a {role.value} engine too")
    if old.draining or not old.up:
        raise Refused("url", "it is down, or being drained")
    if not _partners(fleet, old, old.role):
        raise Refused("url", f"no other {old.role.value} engine that it could work with is up")


async def _proven(membership: Membership, fleet: Fleet, old: Upstream, role: Role) -> Upstream:
    """Return the engine in a new role in which a probe has passed. It gets no requests yet."""
    new = membership.add(role, old.worker, ADMIN)
    membership.drain(new)
    proven = False
    try:
        await _until(lambda: new.up and bool(new.said.models), _UP_S, "it does not answer")
        partners = _partners(fleet, new, old.role)
        if not partners:
            raise Refused("url", "no engine that it could work with is up any more")
        pair = (partners[0], new) if role is Role.DECODE else (new, partners[0])
        try:
            await membership.prober.probe(*pair)
        except ProbeFailed as error:
            raise Refused("url", f"no KV from {pair[0].url} to {pair[1].url}: {error}") from error
        fleet.proofs.vouched(Pair(*(each.index for each in pair)))
        proven = True
        return new
    finally:
        if not proven:
            membership.remove(new)


def _partners(fleet: Fleet, engine: Upstream, role: Role) -> list[Upstream]:
    """Return other engines of a role that ``engine`` can pair with, proven ones first."""
    view = fleet.view()
    sides = {Role.PREFILL: view.prefill, Role.DECODE: view.decode}
    own = next(each for each in sides[engine.role] if each.index == engine.index)
    found = [w for w in sides[role] if w.up and w.name != engine.url and w.pairs_with(own)]
    return [fleet.get(role, w.index) for w in sorted(found, key=lambda w: not w.proven)]


async def _until(true: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    ends = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > ends:
            raise Refused("url", otherwise)
        await asyncio.sleep(_LOOK_S)
