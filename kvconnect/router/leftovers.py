"""Prefill legs that outlive the answer they were for."""

from __future__ import annotations

import asyncio
from typing import Any

from kvconnect.errors import KVConnectError
from kvconnect.router.supervise import Supervisor, TaskKind

END_S = 10.0


class Leftovers:
    """Prefills whose blocks are all there, but who have not said so yet.

    Decode can be done first: what prefill answers has to go through its own engine's steps. To hang
    up then would have that engine count a request as aborted, and cost the next one a connection.
    So they may end by themselves, within ``END_S`` seconds. On the event loop.
    """

    def __init__(self, tasks: Supervisor) -> None:
        self._tasks = tasks
        self._timers: dict[asyncio.Task[Any], asyncio.TimerHandle] = {}

    def add(self, prefill: asyncio.Task[Any]) -> None:
        """Let a task end. That an engine fails it is of no interest, only a bug is."""
        if prefill.done():
            self._look_at(prefill)
            return
        self._timers[prefill] = asyncio.get_running_loop().call_later(END_S, prefill.cancel)
        prefill.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel those that are left."""
        tasks = list(self._timers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, prefill: asyncio.Task[Any]) -> None:
        self._timers.pop(prefill).cancel()
        self._look_at(prefill)

    def _look_at(self, prefill: asyncio.Task[Any]) -> None:
        error = None if prefill.cancelled() else prefill.exception()
        if not isinstance(error, KVConnectError):
            self._tasks.look(TaskKind.PREFILL, "a client's request", prefill)
