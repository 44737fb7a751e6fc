"""Hands what the parts of a scheduler process have measured to its metrics, once per second."""

from __future__ import annotations

import threading
from collections.abc import Callable

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

    def loop() -> None:
        while not stop.wait(_INTERVAL_S):
            ours.publish(take())
        ours.publish(take())

    threading.Thread(target=loop, name="kvconnect-metrics", daemon=True).start()
    return stop
