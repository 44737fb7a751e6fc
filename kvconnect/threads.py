"""Supervised threads: unexpected errors are logged and counted, and the work may be restarted.

Counts are per process, because transports and copies have no access to statistics. The publisher
of statistics collects the counts with :func:`take_failures`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from functools import partial

from kvconnect.errors import contained

logger = logging.getLogger(__name__)

PAUSE_FIRST_S = 0.1  # between an error and the restart; doubles with each error
PAUSE_MOST_S = 10.0


class ThreadKind(StrEnum):
    """The work of a thread, and its label in the metric of errors."""

    COPY = "copy"  # between device and host memory
    LAYERS = "layers"  # sends layers as the engine writes them
    HANDOFF = "handoff"  # answers peers
    TCP = "tcp"  # connections
    DATA = "data"  # pages of one connection
    NIXL = "nixl"
    PEERS = "peers"  # shares blocks of host memory with other engines
    TIER = "tier"  # calls to a disk or remote store
    METRICS = "metrics"  # publishes statistics
    SOURCE = "source"  # discovers engines for a router
    RESOLVER = "resolver"  # looks up host names of other engines
    DOCTOR = "doctor"  # answers a link test


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
    """Return a daemon thread, not yet started, that runs ``work``.

    An error in ``work`` is logged and counted. Without ``again``, an error ends the thread, and its
    owner must notice. With ``again``, ``work`` is restarted after a pause that doubles, until it
    returns or ``stopped`` is true; ``work`` must then be restartable at any point.
    """
    args = (kind, name, work, again, stopped)
    return threading.Thread(target=_run, args=args, name=name, daemon=True)


def failed(kind: ThreadKind, name: str, error: BaseException) -> None:
    """Log and count an error of a thread, or of a call on a pool's thread."""
    with _lock:
        _failures[kind.value] += 1
    logger.error("thread %s: an error ended its work", name, exc_info=error)


def take_failures() -> dict[str, int]:
    """Return the number of failures since the last call, by kind. Any thread may call this."""
    if not _failures:  # the usual case; needs no lock
        return {}
    with _lock:
        taken = dict(_failures)
        _failures.clear()
    return taken


def _run(
    kind: ThreadKind, name: str, work: Callable[[], None], again: bool, stopped: Callable[[], bool]
) -> None:
    pause, wait = PAUSE_FIRST_S, threading.Event().wait
    while True:
        with contained(partial(failed, kind, name)):
            work()
            return
        if not again or stopped():
            return
        wait(pause)
        pause = min(2 * pause, PAUSE_MOST_S)
