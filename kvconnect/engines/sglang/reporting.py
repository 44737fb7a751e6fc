"""Hands what the parts of a scheduler process have measured to its metrics, once per second."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvconnect import threads
from kvconnect.engines.sglang.metrics import publisher
from kvconnect.stats import OffloadingConnectorStats

_INTERVAL_S = 1.0


def publish_regularly(take: Callable[[], OffloadingConnectorStats | None]) -> threading.Event:
    """Publish what ``take`` returns, from a thread of its own, until the returned event is set.

    An idle scheduler calls nobody, so what was measured last would never be seen without one.
    ``take`` must be thread-safe. Call it where SGLang has published its configuration.
    """
    stop = threading.Event()
    ours = publisher()

    def publish() -> None:
        ours.publish(take())
        ours.publish(_failures())

    def loop() -> None:
        while not stop.wait(_INTERVAL_S):
            publish()
        publish()

    kind = threads.ThreadKind.METRICS
    threads.make(kind, "kvconnect-metrics", loop, again=True, stopped=stop.is_set).start()
    return stop


def _failures() -> OffloadingConnectorStats:
    """Return what threads of this process died of since the last call."""
    stats = OffloadingConnectorStats()
    for thread, number in threads.take_failures().items():
        stats.count("thread_failures", number, label=thread)
    return stats
