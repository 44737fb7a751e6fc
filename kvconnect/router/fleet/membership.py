"""Adds and removes engines while the router runs. Event loop only.

Engines come from the command line, from sources and from administrators. A source owns the engines
that it names. An engine that its source no longer names is drained: it gets no more requests, and
is removed when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from kvconnect.errors import Refused
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.engine_spec import EngineSpec
from kvconnect.router.fleet import sources
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.handoff_probes import Prober
from kvconnect.router.fleet.kv_subscriber import Subscriber
from kvconnect.router.fleet.receipts import OwedReceipts
from kvconnect.router.fleet.sources import EngineSource, NamedEngines, OnRefused
from kvconnect.router.fleet.watch import Watcher
from kvconnect.router.metrics import InputKind, RouterMetrics
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.fleet_view import EngineKind, Role
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
        self._watchers: dict[Engine, Watcher] = {}
        self._source: dict[Engine, str] = {}
        self._named: dict[str, dict[Role, tuple[EngineSpec, ...]]] = {}  # by each source, at last
        self._drained: set[Engine] = set()  # by an operator
        self._indexes = indexes
        self._readers: dict[Engine, asyncio.Task[None]] = {}
        self.receipts: dict[Engine, OwedReceipts] = {}  # of engines that publish them
        self.prober = Prober(fleet, pool, metrics)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Probe the engines of the command line once, then start all background tasks."""
        for engine in self._fleet.all():
            self._adopt(engine, FLAGS)
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

    def find(self, role: Role, url: str) -> Engine | None:
        """Return the newest engine of a role at a URL, None if there is none. Older ones are being
        drained."""
        found = [engine for engine in self._fleet.all(role) if engine.url == url]
        return found[-1] if found else None

    def source_of(self, engine: Engine) -> str:
        """Return the owner of an engine, "" once it is being removed."""
        return self._source.get(engine, "")

    def add(self, role: Role, spec: EngineSpec, source: str) -> Engine:
        """Add an engine. It replaces one at the same URL that is being drained.

        Raises:
            Refused: the role has an engine at this URL that is not being drained, or no use here.
        """
        if self._fleet.unified and role is Role.PREFILL:
            fix = "the router has --unified, so name it as a decode engine"
            raise Refused("worker", f"prefill engine {spec.url} would get no requests: {fix}")
        known = self.find(role, spec.url)
        if known is not None:
            if not known.draining:
                raise Refused("worker", f"{role.value} engine {spec.url} is there already")
            self.remove(known)
        engine = self._fleet.add(role, spec)
        self._adopt(engine, source).start(self._options.intervals.load_s)
        engine.suspect()  # have it probed at once
        logger.info("%s engine %s was added by %s", role.value, spec.url, source)
        return engine

    def drain(self, engine: Engine) -> None:
        """Send no more requests to an engine, as an operator says. Its journaled streams go on
        elsewhere."""
        self._drained.add(engine)
        engine.drain()

    def is_kept(self, engine: Engine) -> bool:
        """Return whether nobody has removed an engine, or had it drained."""
        return engine in self._source and engine not in self._drained

    def remove(self, engine: Engine) -> None:
        """Drain an engine, and remove it when its last request has ended. Idempotent."""
        if not engine.draining or engine in self._source:
            engine.drain()
            self._source.pop(engine, None)
            self._background(TaskKind.REMOVE, engine.url, partial(self._forget, engine))

    def update(self, source: str, named: NamedEngines) -> None:
        """Replace a source's engines, in the roles that ``named`` contains. What it names no longer
        is taken from another source that names it, too."""
        known = self._named.setdefault(source, {})
        for role, wanted in named.items():
            known[role] = tuple(wanted)
            mine = {u.url: u for u, of in self._source.items() if of == source and u.role is role}
            for url, engine in mine.items():
                if engine.spec not in wanted:  # not named, or with other settings
                    logger.info("%s engine %s: no longer named by %s", role.value, url, source)
                    self.remove(engine)
            for spec in wanted:
                if spec.url not in mine or mine[spec.url].spec != spec:
                    self._add_named(role, spec, source)
            lost = mine.keys() - {spec.url for spec in wanted}
            for other, theirs in self._named.items():
                for spec in theirs.get(role, ()) if other != source else ():
                    if spec.url in lost:
                        self._add_named(role, spec, other)

    def _add_named(self, role: Role, spec: EngineSpec, source: str) -> None:
        try:
            self.add(role, spec, source)
        except Refused as error:  # as when another source owns the URL
            logger.warning("%s: %s", source, error)

    def _adopt(self, engine: Engine, source: str) -> Watcher:
        index = self._indexes.get(engine.role)
        watcher = Watcher(engine, self._pool, self._metrics, shares=index is not None)
        self._watchers[engine], self._source[engine] = watcher, source
        if engine.spec.events:
            self._read_events(engine)
        return watcher

    def _read_events(self, engine: Engine) -> None:
        index, owed = self._indexes.get(engine.role), None
        answers = engine.role is Role.DECODE and engine.spec.kind is EngineKind.VLLM
        if answers and self._options.listening.receipts:
            count = partial(self._metrics.count, "stream_receipts", engine.url)
            owed = self.receipts[engine] = OwedReceipts(count)
        if index is not None or owed is not None:
            reading = Subscriber(engine, index, self._metrics.count, owed).run
            reader = self._background(TaskKind.EVENTS, engine.url, reading)
            self._readers[engine] = reader

    async def _forget(self, engine: Engine) -> None:
        while engine.open:
            await asyncio.sleep(DRAIN_LOOK_S)
        await self._watchers[engine].stop()
        reader = self._readers.pop(engine, None)
        if reader is not None:  # a later event would stay in the index for ever
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        self._watchers.pop(engine, None)
        self.receipts.pop(engine, None)
        self._drained.discard(engine)
        self._fleet.remove(engine)
        self._pool.forget(engine.base)
        logger.info("%s engine %s was removed", engine.role.value, engine.url)

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
