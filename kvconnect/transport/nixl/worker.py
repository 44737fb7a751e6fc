"""Threads of one NIXL agent, which all NIXL paths of one direction share.

One thread makes every call into NIXL, which is not thread-safe, and polls the writes under way:
every 50 us at first, every millisecond later, never while there are none. Another does slow work:
waits for the device, computes addresses, hashes pages.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

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
"""Returns whether the operation has ended, so that it is not polled again."""


def _nothing() -> None:
    """Do nothing."""


class NixlWorker:
    """Owns the agent and its threads. All methods except ``watch`` are for any thread.

    Steps and checks handle their own errors. Prepared work may raise :class:`KVConnectError`, whose
    text goes to its ``failed`` function.

    Raises:
        ConfigError: NIXL cannot be used.
    """

    def __init__(
        self, backend: str, areas: Sequence[MemoryRegion], *, local: bool, owner: str = ""
    ) -> None:
        self._start = partial(NixlAgent, backend, areas, local=local, owner=owner)
        self._enter = _context_of(areas)
        self._enter()
        self._agent = self._start()
        self.offer: NixlOffer | None = self._agent.offer
        self._changed = threading.Condition()
        self._steps: deque[tuple[Step, Callable[[], None]]] = deque()
        self._work: deque[Callable[[], None]] = deque()
        self._checks: list[Check] = []
        self._on_lost: list[Callable[[str], None]] = []
        self._retired = self._closing = self._dead = False
        turns = {"agent": self._move, "work": self._prepare}
        self._threads = [
            make(ThreadKind.NIXL, f"kvconnect-nixl-{name}", partial(self._run, turn))
            for name, turn in turns.items()
        ]
        for thread in self._threads:
            thread.start()

    def call(self, step: Step, done: Callable[[], None] = _nothing) -> None:
        """Run ``step``, then ``done``, on the agent's thread, in the order of calls. If that thread
        has ended, only ``done`` is called."""
        with self._changed:
            if not self._dead:
                self._steps.append((step, done))
                self._changed.notify_all()
                return
        done()

    def watch(self, check: Check) -> None:
        """Poll ``check`` until it returns True. Only steps and checks may call this."""
        self._checks.append(check)

    def prepare(self, work: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Run slow work on its own thread, in the order of calls; ``failed`` gets the reason if
        the work raises."""
        with self._changed:
            self._work.append(partial(_guarded, work, failed))
            self._changed.notify_all()

    def join(self, lost: Callable[[str], None]) -> NixlOffer | None:
        """Return the agent's offer, None if there is no agent.

        ``lost`` is called with the reason when this agent ends: its transfers are lost and its
        offer is invalid.
        """
        with self._changed:
            self._on_lost.append(lost)
            return self.offer

    def leave(self, lost: Callable[[str], None]) -> None:
        """Undo ``join``."""
        with self._changed:
            if lost in self._on_lost:
                self._on_lost.remove(lost)

    def renew(self, exposed: NixlOffer | None, reason: str, done: Callable[[], None]) -> None:
        """Replace the agent that made the offer ``exposed``, unless it was replaced already.

        Writes of a lost peer may still be under way, in its machine or in the network. Only the end
        of this side's agent guarantees that they cannot arrive.
        """
        self.call(partial(self._replace, exposed, reason), done)

    def retire(self) -> None:
        """The transport closes: an agent that ends from now on gets no successor, which would
        register all memory once more."""
        self._retired = True

    def close(self) -> None:
        """End the threads and the agent. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _replace(self, exposed: NixlOffer | None, reason: str, agent: NixlAgent) -> None:
        if agent.offer is not exposed or self.offer is not exposed:
            return  # replaced already, or it does not start: several peers were lost together
        self._checks.clear()
        agent.close()
        offer = None if self._retired else self._restart(reason)
        what = "ended" if offer is None else "was replaced"
        self._report_lost(offer, f"its NIXL agent {what}: {reason}")

    def _restart(self, reason: str) -> NixlOffer | None:
        """Start a new agent and return its offer, None if it does not start."""
        logger.warning("starting a new NIXL agent: %s", reason)
        try:
            self._agent = self._start()
        except KVConnectError as error:
            logger.error("NIXL is not used any more: %s", error)
            return None
        return self._agent.offer

    def _report_lost(self, offer: NixlOffer | None, reason: str) -> None:
        with self._changed:
            self.offer = offer
            callbacks, self._on_lost = self._on_lost, []
        for lost in callbacks:
            lost(reason)

    def _run(self, turn: Callable[[], None]) -> None:
        try:
            self._enter()
            turn()
        finally:
            with self._changed:
                self._closing = True  # the threads cannot work without one another
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
        self._report_lost(None, "the threads of its NIXL path ended; see the log")

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
                action, done = step
                self._make(action, done)
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
                with self._changed:  # ``_end`` calls ``done``, after the agent was closed
                    self._steps.appendleft((step, done))
        done()

    def _prepare(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closing)
                if self._closing:
                    return
                work = self._work.popleft()
            work()


def _context_of(areas: Sequence[MemoryRegion]) -> Callable[[], None]:
    """Return a function that gives the calling thread a CUDA context of the regions' device.

    Without a context, UCX assumes a machine without CUDA and moves pages through the host.
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
