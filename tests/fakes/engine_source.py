"""A follower of a source of engines, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from kvconnect.router.fleet.sources import EngineSource, NamedEngines
from kvconnect.router.metrics import InputKind
from kvconnect.router.policy.fleet_view import Role


def refused(what: InputKind, text: str) -> None:
    """What a source calls for an entry that makes no sense."""
    logging.getLogger(__name__).warning("%s: %s", what.value, text)


class Latest:
    """Follows a source and keeps what it said last."""

    def __init__(self, source: EngineSource) -> None:
        self._source = source
        self.named: NamedEngines = {}
        self.times = 0

    async def __aenter__(self) -> Latest:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._source) as source:
            async for self.named in source:
                self.times += 1

    def urls(self, role: Role) -> list[str]:
        return [worker.url for worker in self.named.get(role, ())]
