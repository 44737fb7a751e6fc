"""Which engines a router has: those of the command line, of its sources and of its administrators.
Everything here runs on the event loop.

Each source owns the engines that it named. One that it names no longer is drained: it gets no
requests, and is forgotten when its last one has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from kvconnect.errors import Refused
from kvconnect.router import sources
from kvconnect.router.metrics import RouterMetrics, What
from kvconnect.router.options import Options, Worker
from kvconnect.router.pool import Client
from kvconnect.router.prefixes import PrefixIndex
from kvconnect.router.probe import Prober
from kvconnect.router.sources import Named, Refusal, Source
from kvconnect.router.subscribe import subscribe
from kvconnect.router.supervise import Supervisor, TaskKind
from kvconnect.router.upstreams import Fleet, Upstream
from kvconnect.router.view import Role
from kvconnect.router.watch import Watcher

logger = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.05

FLAGS, ADMIN = "flags", "admin"  # sources; the others name themselves


class Membership:
    """Adds and removes engines while the router runs."""

    def __init__(
        self,
        options: Options,
        fleet: Fleet,
        client: Client,
        metrics: RouterMetrics,
        indexes: Mapping[Role, PrefixIndex],
    ) -> None:
        self._options = options
        self._fleet = fleet
        self._client = client
        self._metrics = metrics
        self._watchers: dict[Upstream, Watcher] = {}
        self._source: dict[Upstream, str] = {}
        self._indexes = indexes
        self._readers: dict[Upstream, asyncio.Task[None]] = {}
        self.prober = Prober(fleet, client, metrics)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Probe the engines of the command line, then look after all of them in the background."""
        for upstream in self._fleet.all():
            self._adopt(upstream, FLAGS)
        once = Supervisor(self._metrics.count).once
        probes = [once(TaskKind.PROBE, u.url, w.probe()) for u, w in self._watchers.items()]
        await asyncio.gather(*probes, return_exceptions=True)
        for watcher in self._watchers.values():
            watcher.start(self._options.intervals.load_s)
        if self._options.intervals.probe_s:
            self._background(TaskKind.HANDOFFS, "the fleet", self.prober.run)
        for name, follow in sources.wanted(self._options.sources):
            self._background(TaskKind.SOURCE, name, partial(self._follow, name, follow))

    async def stop(self) -> None:
        """End the background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for watcher in self._watchers.values():
            await watcher.stop()

    def find(self, role: Role, url: str) -> Upstream | None:
        """Return the engine of a role at a URL; one that is being drained only if it is the last
        that was there."""
        found = [upstream for upstream in self._fleet.all(role) if upstream.url == url]
        return found[-1] if found else None

    def source_of(self, upstream: Upstream) -> str:
        """Return who named an engine; nobody, if it is being removed."""
        return self._source.get(upstream, "")

    def add(self, role: Role, worker: Worker, source: str) -> Upstream:
        """Add an engine; one at the same URL that is drained already is forgotten.

        Raises:
            Refused: it is there already.
        """
        known = self.find(role, worker.url)
        if known is not None:
            if not known.draining:
                raise Refused("worker", f"{role.value} engine {worker.url} is there already")
            self.remove(known)
        upstream = self._fleet.add(role, worker)
        self._adopt(upstream, source).start(self._options.intervals.load_s)
        upstream.suspect()  # probed at once
        logger.info("%s engine %s was added by %s", role.value, worker.url, source)
        return upstream

    def drain(self, upstream: Upstream) -> None:
        """No more requests go there."""
        upstream.draining = True

    def remove(self, upstream: Upstream) -> None:
        """Drain it, and forget it when its last request has ended."""
        if not upstream.draining or upstream in self._source:
            self.drain(upstream)
            self._source.pop(upstream, None)
            self._background(TaskKind.REMOVE, upstream.url, partial(self._forget, upstream))

    def update(self, source: str, named: Named) -> None:
        """A source names these engines now."""
        for role, wanted in named.items():
            mine = {u.url: u for u, of in self._source.items() if of == source and u.role is role}
            for url, upstream in mine.items():
                if upstream.worker not in wanted:  # gone, or with other settings
                    logger.info("%s engine %s: no longer named by %s", role.value, url, source)
                    self.remove(upstream)
            for worker in wanted:
                if worker.url not in mine or mine[worker.url].worker != worker:
                    try:
                        self.add(role, worker, source)
                    except Refused as error:  # of another source
                        logger.warning("%s: %s", source, error)

    def _adopt(self, upstream: Upstream, source: str) -> Watcher:
        watcher = Watcher(upstream, self._client, self._metrics)
        self._watchers[upstream], self._source[upstream] = watcher, source
        index = self._indexes.get(upstream.role)
        if index is not None and upstream.worker.events:
            reading = partial(subscribe, upstream, index, self._metrics.count)
            reader = self._background(TaskKind.EVENTS, upstream.url, reading)
            self._readers[upstream] = reader
        return watcher

    async def _forget(self, upstream: Upstream) -> None:
        while upstream.open:
            await asyncio.sleep(DRAIN_LOOK_S)
        await self._watchers[upstream].stop()
        reader = self._readers.pop(upstream, None)
        if reader is not None:  # what it still told would be kept for ever
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        self._watchers.pop(upstream, None)
        self._fleet.remove(upstream)
        self._client.forget(upstream.base)
        logger.info("%s engine %s was removed", upstream.role.value, upstream.url)

    def _background(
        self, kind: TaskKind, of: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        task = Supervisor(self._metrics.count).keep(kind, of, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _follow(self, name: str, follow: Callable[[Refusal], Source]) -> None:
        async with aclosing(follow(self._refuse)) as source:
            async for named in source:
                self.update(name, named)

    def _refuse(self, what: What, text: str) -> None:
        self._metrics.count("refused_answers", what.value)
        logger.warning("%s", text)
