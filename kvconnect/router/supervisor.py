"""Background tasks that do not die unseen. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from kvconnect.errors import contained

logger = logging.getLogger(__name__)

PAUSE_FIRST_S = 0.5  # from an error to the next start; doubles
PAUSE_MOST_S = 30.0
_WELL_S = 60.0  # a task that ran so long had a good start: its pause is the first one again

Work = Coroutine[Any, Any, None]


class TaskKind(str, Enum):
    """What a background task does; a label of the metric that counts their errors."""

    PROBE = "probe"  # is an engine well
    LEARN = "learn"  # what it serves
    LOAD = "load"  # how busy it is
    STANDING_TICKETS = "standing_tickets"  # its standing offers
    EVENTS = "events"  # what it has cached
    HANDOFFS = "handoffs"  # which hand-offs are to be probed
    HANDOFF = "handoff"  # probes one of them
    SOURCE = "source"  # which engines there are
    REMOVE = "remove"  # forgets one when its last request has ended
    PREFILL = "prefill"  # ends a prefill whose answer nobody waits for


class Supervisor:
    """Starts tasks, and logs and counts the errors that end them; ``count`` gets the name of a
    metric and the kind."""

    def __init__(self, count: Callable[[str, str], None]) -> None:
        self._counter = count

    def keep(self, kind: TaskKind, of: str, work: Callable[[], Work]) -> asyncio.Task[None]:
        """Start a task that begins ``work`` again whenever an error ends it, after a pause that
        doubles. ``of`` says in the log whose task it is."""
        return asyncio.create_task(self._keep(kind, of, work))

    def once(self, kind: TaskKind, of: str, work: Work) -> asyncio.Task[None]:
        """Start a task that ends with its first error: whoever waits for it has to see that."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda ended: self.look(kind, of, ended))
        return task

    def look(self, kind: TaskKind, of: str, ended: asyncio.Task[Any]) -> None:
        """A task has ended: log and count its error, if it had one."""
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
