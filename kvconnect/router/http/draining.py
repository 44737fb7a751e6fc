"""Prefill requests that outlive the response that they were for."""

from __future__ import annotations

import asyncio
from typing import Any

from kvconnect.errors import KVConnectError
from kvconnect.router.supervisor import Supervisor, TaskKind

END_S = 10.0


class DrainingPrefills:
    """Prefill requests whose blocks have arrived and whose response is pending.

    Decode can end first. Closing the connection then would make the prefill engine count an aborted
    request, and cost the next request a new connection. So these requests have ``END_S`` seconds
    to end by themselves. Event loop only.
    """

    def __init__(self, tasks: Supervisor) -> None:
        self._tasks = tasks
        self._timers: dict[asyncio.Task[Any], asyncio.TimerHandle] = {}

    def add(self, prefill: asyncio.Task[Any]) -> None:
        """Let a prefill request end. An engine's failure is ignored; other errors are reported."""
        if prefill.done():
            self._report(prefill)
            return
        self._timers[prefill] = asyncio.get_running_loop().call_later(END_S, prefill.cancel)
        prefill.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel the requests that are left."""
        tasks = list(self._timers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, prefill: asyncio.Task[Any]) -> None:
        self._timers.pop(prefill).cancel()
        self._report(prefill)

    def _report(self, prefill: asyncio.Task[Any]) -> None:
        error = None if prefill.cancelled() else prefill.exception()
        if not isinstance(error, KVConnectError):
            self._tasks.look(TaskKind.PREFILL, "a client's request", prefill)
