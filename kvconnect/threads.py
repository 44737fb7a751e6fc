"""Threads that do not die unseen: an error that ends one is logged, counted, and mended or told.

Counts are kept per process, since transports and copies know nothing of statistics; whoever hands
statistics on takes them with :func:`take_failures`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)

PAUSE_FIRST_S = 0.1  # from an error to the next start; doubles
PAUSE_MOST_S = 10.0


class ThreadKind(str, Enum):
    """What a thread does; a label of the metric that counts their errors."""

    COPY = "copy"  # between device and host memory
    LAYERS = "layers"  # offers layers as they are written
    HANDOFF = "handoff"  # answers other engines
    TCP = "tcp"  # connections
    DATA = "data"  # pages of one connection
    NIXL = "nixl"
    TIER = "tier"  # calls to a tier below host memory
    METRICS = "metrics"  # hands numbers on
    SOURCE = "source"  # of engines of a router
    RESOLVER = "resolver"  # looks up host names of other engines
    DOCTOR = "doctor"  # answers a test of a link


_TEXT = "thread %s: an error ended its work"
_failures: Counter[str] = Counter()
_lock = threading.Lock()


def make(
    kind: ThreadKind,
    name: str,
    work: Callable[[], None],
    *,
    again: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> threading.Thread:
    """Return a daemon thread that does ``work`` once it is started.

    An error that ends the work is logged and counted. With ``again``, the work is begun once more
    after a pause that doubles, until it ends by itself or ``stopped`` says so; ``work`` must then
    leave nothing half done. Else the thread ends, and its owner has to notice.
    """
    args = (kind, name, work, again, stopped)
    return threading.Thread(target=_run, args=args, name=name, daemon=True)


def failed(kind: ThreadKind, name: str, error: BaseException) -> None:
    """Log and count an error of a thread, or of a call that ran on a pool's thread."""
    _count(kind)
    logger.error(_TEXT, name, exc_info=error)


def take_failures() -> dict[str, int]:
    """Return how often each kind failed since the last call, by its label. For any thread."""
    if not _failures:  # as a rule; costs no lock
        return {}
    with _lock:
        taken = dict(_failures)
        _failures.clear()
    return taken


def _count(kind: ThreadKind) -> None:
    with _lock:
        _failures[kind.value] += 1


def _run(
    kind: ThreadKind, name: str, work: Callable[[], None], again: bool, stopped: Callable[[], bool]
) -> None:
    pause, wait = PAUSE_FIRST_S, threading.Event().wait
    while True:
        try:
            work()
            return
        except Exception:  # boundary: what nobody expects must not vanish with its thread
            _count(kind)
            logger.exception(_TEXT, name)
        if not again or stopped():
            return
        wait(pause)
        pause = min(2 * pause, PAUSE_MOST_S)
