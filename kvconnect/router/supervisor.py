"""Background tasks whose errors are logged and counted. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

from kvconnect.errors import contained

logger = logging.getLogger(__name__)

PAUSE_FIRST_S = 0.5  # before the first restart; doubles with every further error
PAUSE_MOST_S = 30.0
_WELL_S = 60.0  # after a run of this length, the pause is the first one again

Work = Coroutine[Any, Any, None]


class TaskKind(StrEnum):
    """Kind of a background task; a label of the metric that counts errors."""

    PROBE = "probe"  # checks an engine's health
    LEARN = "learn"  # asks an engine for its models and version
    LOAD = "load"  # queries an engine's load
    TICKETS = "standing_tickets"  # renews an engine's tickets of all kinds
    EVENTS = "events"  # follows an engine's KV events
    HANDOFFS = "handoffs"  # starts hand-off probes that are due
    HANDOFF = "handoff"  # one hand-off probe
    CREDENTIALS = "credentials"  # reads changed files of keys, tokens and certificates again
    SCRAPE = "scrape"  # makes the text of the metrics
    SOURCE = "source"  # follows a source of engines
    REMOVE = "remove"  # removes an engine after its last request
    ROLES = "roles"  # changes roles as the load asks for it
    PREFILL = "prefill"  # a prefill request whose response is not needed any more


class Supervisor:
    """Starts tasks; logs and counts their errors. ``count`` gets a metric's name and the kind."""

    def __init__(self, count: Callable[[str, str], None]) -> None:
        self._counter = count

    def keep(self, kind: TaskKind, of: str, work: Callable[[], Work]) -> asyncio.Task[None]:
        """Start a task that runs ``work`` again after every error, with a pause that doubles.
        ``of`` names the task's subject in the log."""
        return asyncio.create_task(self._keep(kind, of, work))

    def once(self, kind: TaskKind, of: str, work: Work) -> asyncio.Task[None]:
        """Start a task that ends with its first error, which also reaches those that await it."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda ended: self.look(kind, of, ended))
        return task

    def look(self, kind: TaskKind, of: str, ended: asyncio.Task[Any]) -> None:
        """Log and count the error of a task that ended, if it had one."""
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self._count(kind)
            logger.error("task %s of %s ended with an error", kind.value, of, exc_info=error)

    def _count(self, kind: TaskKind) -> None:
        self._counter("task_failures", kind.value)

    async def _keep(self, kind: TaskKind, of: str, work: Callable[[], Work]) -> None:
        pause = PAUSE_FIRST_S
        while True:
            began = time.monotonic()
            errors: list[Exception] = []
            with contained(errors.append):
                await work()
                return
            self._count(kind)
            if time.monotonic() - began > _WELL_S:
                pause = PAUSE_FIRST_S
            text = "task %s of %s failed; it restarts in %g seconds"
            logger.error(text, kind.value, of, pause, exc_info=errors[0])
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_MOST_S)
