"""The threads behind all NIXL paths of one transport.

One makes every call into NIXL, which is not thread-safe, and asks again and again for what is under
way: often at first, once per millisecond later, not at all when nothing is. Two others do what may
take long before and after, for what is sent and what is received: waiting for the device, working
out addresses, hashing pages.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from kvconnect.cuda import CudaContext
from kvconnect.errors import ConfigError, KVConnectError, contained
from kvconnect.protocol.nixl_messages import NixlOffer
from kvconnect.threads import ThreadKind, make
from kvconnect.transport.base import MemoryRegion
from kvconnect.transport.nixl.agent import NixlAgent

logger = logging.getLogger(__name__)

_SHORTEST_S = 50e-6
_LONGEST_S = 1e-3
_CLOSE_S = 10.0

Step = Callable[[NixlAgent], None]
Check = Callable[[NixlAgent], bool]
"""Says whether it is over and need not be asked again."""

WorkQueue = Literal["launches", "landings"]


def _nothing() -> None:
    """Do nothing."""


class NixlWorker:
    """Owns the agent and the threads. All methods but ``watch`` are for any thread.

    Steps and checks handle their own failures; work may raise :class:`KVConnectError`, which goes
    to the function given with it.

    Raises:
        ConfigError: NIXL cannot be used here.
    """

    def __init__(self, backend: str, areas: Sequence[MemoryRegion], *, local: bool) -> None:
        self._start = partial(NixlAgent, backend, areas, local=local)
        self._enter = _context_of(areas)
        self._enter()
        self._agent = self._start()
        self.offer: NixlOffer | None = self._agent.offer
        self._changed = threading.Condition()
        self._steps: deque[tuple[Step, Callable[[], None]]] = deque()
        self._work: dict[WorkQueue, deque[Callable[[], None]]] = {
            "launches": deque(),
            "landings": deque(),
        }
        self._checks: list[Check] = []
        self._losers: list[Callable[[str], None]] = []
        self._closing = self._dead = False
        turns: dict[str, Callable[[], None]] = {"moves": self._move}
        turns |= {half: partial(self._prepare, half) for half in self._work}
        self._threads = [
            make(ThreadKind.NIXL, f"kvconnect-nixl-{name}", partial(self._run, turn))
            for name, turn in turns.items()
        ]
        for thread in self._threads:
            thread.start()

    def call(self, step: Step, done: Callable[[], None] = _nothing) -> None:
        """Have a step made with the agent, in the order of calls, and then ``done`` called. If the
        agent is gone, ``done`` alone is called: nothing can move any more."""
        with self._changed:
            if not self._dead:
                self._steps.append((step, done))
                self._changed.notify_all()
                return
        done()

    def watch(self, check: Check) -> None:
        """Ask again until it is over. For steps and checks."""
        self._checks.append(check)

    def prepare(
        self, half: WorkQueue, work: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """Have work done that may take long, in the order of calls; ``failed`` gets the reason if
        it raises."""
        with self._changed:
            self._work[half].append(partial(_guarded, work, failed))
            self._changed.notify_all()

    def join(self, lost: Callable[[str], None]) -> NixlOffer | None:
        """Return what other agents have to know of this one, None if there is none.

        ``lost`` is called with the reason when it ends: what was under way is gone, and what was
        told to others is void.
        """
        with self._changed:
            self._losers.append(lost)
            return self.offer

    def leave(self, lost: Callable[[str], None]) -> None:
        """Undo ``join``."""
        with self._changed:
            if lost in self._losers:
                self._losers.remove(lost)

    def renew(self, exposed: NixlOffer | None, reason: str, done: Callable[[], None]) -> None:
        """End the agent that made the offer ``exposed``, so that no write can land any more, and
        start another one, unless that has happened since.

        A peer that was lost may have writes under way, in its machine or the network. Its
        connections end with this side's agent; nothing less proves that they have.
        """
        self.call(partial(self._replace, exposed, reason), done)

    def close(self) -> None:
        """End the threads and the agent. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _replace(self, exposed: NixlOffer | None, reason: str, agent: NixlAgent) -> None:
        if agent.offer is not exposed:
            return  # several peers were lost together
        logger.warning("starting a new NIXL agent: %s", reason)
        self._checks.clear()
        agent.close()
        try:
            self._agent = self._start()
            offer: NixlOffer | None = self._agent.offer
        except KVConnectError as error:
            logger.error("NIXL is not used any more: %s", error)
            offer = None
        self._lose(offer, f"its NIXL agent was replaced: {reason}")

    def _lose(self, offer: NixlOffer | None, reason: str) -> None:
        with self._changed:
            self.offer = offer
            losers, self._losers = self._losers, []
        for lost in losers:
            lost(reason)

    def _run(self, turn: Callable[[], None]) -> None:
        try:
            self._enter()
            turn()
        finally:
            with self._changed:
                self._closing = True  # the others are of no use without it
                self._changed.notify_all()
            if threading.current_thread() is self._threads[0]:
                self._end()

    def _end(self) -> None:
        self._agent.close()
        with self._changed:
            self._dead = True
            steps, self._steps = self._steps, deque()
        for _, done in steps:
            done()
        self._lose(None, "the threads of its NIXL path ended; an error would be in the log")

    def _move(self) -> None:
        pause = _SHORTEST_S
        while True:
            with self._changed:
                timeout = pause if self._checks else None
                self._changed.wait_for(lambda: self._steps or self._closing, timeout)
                step = self._steps.popleft() if self._steps else None
                if self._closing and not step:
                    return
            if step:
                self._make(*step)
            checks, self._checks = self._checks, []
            left = [check for check in checks if not check(self._agent)]
            moved = step or len(left) < len(checks)
            pause = _SHORTEST_S if moved else min(2 * pause, _LONGEST_S)
            self._checks += left

    def _make(self, step: Step, done: Callable[[], None]) -> None:
        made = False
        try:
            step(self._agent)
            made = True
        finally:
            if not made:
                with self._changed:  # ``done`` is called once the agent is gone
                    self._steps.appendleft((step, done))
        done()

    def _prepare(self, half: WorkQueue) -> None:
        queue = self._work[half]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._closing)
                if self._closing:
                    return
                work = queue.popleft()
            work()


def _context_of(areas: Sequence[MemoryRegion]) -> Callable[[], None]:
    """Return what gives the calling thread a context of the device that memory is on.

    Without one, UCX takes the machine for one without CUDA and moves pages through the host.
    """
    device = max((area.device for area in areas), default=-1)
    if device < 0:
        return _nothing
    try:
        return CudaContext(device).enter
    except KVConnectError as error:
        fix = f"this thread can have no CUDA context: {error}"
        raise ConfigError("transport", "nixl", fix) from error


def _guarded(work: Callable[[], None], failed: Callable[[str], None]) -> None:
    def end(error: Exception) -> None:
        if not isinstance(error, KVConnectError):
            logger.error("pages over NIXL", exc_info=error)
        failed(f"{type(error).__name__}: {error}")

    with contained(end):
        work()
