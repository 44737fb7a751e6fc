"""Adds, removes and switches engines while the router runs. Event loop only.

Engines come from the command line, from sources and from administrators. A source owns the engines
that it names. An engine that its source no longer names is drained: it gets no more requests, and
is removed when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from kvconnect.errors import Refused
from kvconnect.router.fleet import sources
from kvconnect.router.fleet.pairing import EnginePair
from kvconnect.router.fleet.probe import ProbeFailed, Prober
from kvconnect.router.fleet.sources import EngineSource, NamedEngines, OnRefused
from kvconnect.router.fleet.upstreams import Fleet, Upstream
from kvconnect.router.fleet.watch import Subscriber, Watcher
from kvconnect.router.http.pool import ConnectionPool
from kvconnect.router.http.receipts import OwedReceipts
from kvconnect.router.metrics import InputKind, RouterMetrics
from kvconnect.router.options import RouterOptions, Worker
from kvconnect.router.policy.loads import Engine, Role
from kvconnect.router.policy.prefixes import PrefixIndex
from kvconnect.router.supervisor import Supervisor, TaskKind

logger = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.05

FLAGS, ADMIN = "flags", "admin"  # owners of engines, besides the names of sources


class Membership:
    """The engines of a router, their owners and background tasks."""

    def __init__(
        self,
        options: RouterOptions,
        fleet: Fleet,
        pool: ConnectionPool,
        metrics: RouterMetrics,
        indexes: Mapping[Role, PrefixIndex],
    ) -> None:
        self._options = options
        self._fleet = fleet
        self._pool = pool
        self._metrics = metrics
        self._watchers: dict[Upstream, Watcher] = {}
        self._source: dict[Upstream, str] = {}
        self._indexes = indexes
        self._readers: dict[Upstream, asyncio.Task[None]] = {}
        self.receipts: dict[Upstream, OwedReceipts] = {}  # of engines that publish them
        self.prober = Prober(fleet, pool, metrics)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Probe the engines of the command line once, then start all background tasks."""
        for upstream in self._fleet.all():
            self._adopt(upstream, FLAGS)
        once = Supervisor(self._metrics.count).once
        probes = [once(TaskKind.PROBE, u.url, w.probe()) for u, w in self._watchers.items()]
        await asyncio.gather(*probes, return_exceptions=True)
        for watcher in self._watchers.values():
            watcher.start(self._options.intervals.load_s)
        if self._options.intervals.probe_s:
            self._background(TaskKind.HANDOFFS, "the fleet", self.prober.run)
        for name, follow in sources.configured_sources(self._options.sources):
            self._background(TaskKind.SOURCE, name, partial(self._follow, name, follow))

    async def stop(self) -> None:
        """End the background tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for watcher in self._watchers.values():
            await watcher.stop()

    def find(self, role: Role, url: str) -> Upstream | None:
        """Return the newest engine of a role at a URL, None if there is none. Older ones are being
        drained."""
        found = [upstream for upstream in self._fleet.all(role) if upstream.url == url]
        return found[-1] if found else None

    def source_of(self, upstream: Upstream) -> str:
        """Return the owner of an engine, "" once it is being removed."""
        return self._source.get(upstream, "")

    def add(self, role: Role, worker: Worker, source: str) -> Upstream:
        """Add an engine. It replaces one at the same URL that is being drained.

        Raises:
            Refused: the role has an engine at this URL that is not being drained, or no use here.
        """
        if self._fleet.unified and role is Role.PREFILL:
            fix = "the router has --unified, so name it as a decode engine"
            raise Refused("worker", f"prefill engine {worker.url} would get no requests: {fix}")
        known = self.find(role, worker.url)
        if known is not None:
            if not known.draining:
                raise Refused("worker", f"{role.value} engine {worker.url} is there already")
            self.remove(known)
        upstream = self._fleet.add(role, worker)
        self._adopt(upstream, source).start(self._options.intervals.load_s)
        upstream.suspect()  # have it probed at once
        logger.info("%s engine %s was added by %s", role.value, worker.url, source)
        return upstream

    def drain(self, upstream: Upstream) -> None:
        """Send no more requests to an engine."""
        upstream.draining = True

    def remove(self, upstream: Upstream) -> None:
        """Drain an engine, and remove it when its last request has ended. Idempotent."""
        if not upstream.draining or upstream in self._source:
            self.drain(upstream)
            self._source.pop(upstream, None)
            self._background(TaskKind.REMOVE, upstream.url, partial(self._forget, upstream))

    def update(self, source: str, named: NamedEngines) -> None:
        """Replace a source's engines, in the roles that ``named`` contains."""
        for role, wanted in named.items():
            mine = {u.url: u for u, of in self._source.items() if of == source and u.role is role}
            for url, upstream in mine.items():
                if upstream.worker not in wanted:  # not named, or with other settings
                    logger.info("%s engine %s: no longer named by %s", role.value, url, source)
                    self.remove(upstream)
            for worker in wanted:
                if worker.url not in mine or mine[worker.url].worker != worker:
                    try:
                        self.add(role, worker, source)
                    except Refused as error:  # as when another source owns the URL
                        logger.warning("%s: %s", source, error)

    def _adopt(self, upstream: Upstream, source: str) -> Watcher:
        index = self._indexes.get(upstream.role)
        computes = upstream.role is Role.PREFILL or self._fleet.unified
        shares = computes and index is not None
        watcher = Watcher(upstream, self._pool, self._metrics, shares=shares)
        self._watchers[upstream], self._source[upstream] = watcher, source
        if upstream.worker.events:
            self._read_events(upstream)
        return watcher

    def _read_events(self, upstream: Upstream) -> None:
        index, owed = self._indexes.get(upstream.role), None
        answers = upstream.role is Role.DECODE and upstream.worker.engine is Engine.VLLM
        if answers and self._options.listening.receipts:
            count = partial(self._metrics.count, "stream_receipts", upstream.url)
            owed = self.receipts[upstream] = OwedReceipts(count)
        if index is not None or owed is not None:
            reading = Subscriber(upstream, index, self._metrics.count, owed).run
            reader = self._background(TaskKind.EVENTS, upstream.url, reading)
            self._readers[upstream] = reader

    async def _forget(self, upstream: Upstream) -> None:
        while upstream.open:
            await asyncio.sleep(DRAIN_LOOK_S)
        await self._watchers[upstream].stop()
        reader = self._readers.pop(upstream, None)
        if reader is not None:  # a later event would stay in the index for ever
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        self._watchers.pop(upstream, None)
        self.receipts.pop(upstream, None)
        self._fleet.remove(upstream)
        self._pool.forget(upstream.base)
        logger.info("%s engine %s was removed", upstream.role.value, upstream.url)

    def _background(
        self, kind: TaskKind, of: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        task = Supervisor(self._metrics.count).keep(kind, of, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _follow(self, name: str, follow: Callable[[OnRefused], EngineSource]) -> None:
        async with aclosing(follow(self._refuse)) as source:
            async for named in source:
                self.update(name, named)

    def _refuse(self, what: InputKind, text: str) -> None:
        self._metrics.count("refused_answers", what.value)
        logger.warning("%s", text)


# Role switches ------------------------------------------------------------------------------------

_LOOK_S = 0.05
_UP_S = 15.0  # limit for an engine to report its models


async def switch(membership: Membership, fleet: Fleet, old: Upstream, drain_s: float) -> Upstream:
    """Switch an engine to the other role if a probe passes there; return it in its new role.

    The engine is drained first; its open requests have ``drain_s`` seconds to end.

    Raises:
        Refused: the engine continues in its old role; the message says why.
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
    """Refuse a switch that cannot succeed, before anything changes."""
    source = membership.source_of(old)
    if fleet.unified:
        raise Refused("url", "the router has --unified, so its engines have one role")
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
    """Return the engine in its new role after a passed probe. It gets no requests yet."""
    new = membership.add(role, old.worker, ADMIN)
    membership.drain(new)
    proven = False
    try:
        await _until(lambda: new.up and bool(new.info.models), _UP_S, "it does not answer")
        partners = _partners(fleet, new, old.role)
        if not partners:
            raise Refused("url", "no engine that it could work with is up any more")
        pair = (partners[0], new) if role is Role.DECODE else (new, partners[0])
        try:
            await membership.prober.probe(*pair)
        except ProbeFailed as error:
            raise Refused("url", f"no KV from {pair[0].url} to {pair[1].url}: {error}") from error
        fleet.pairing.mark_proven(EnginePair(*(each.index for each in pair)))
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
