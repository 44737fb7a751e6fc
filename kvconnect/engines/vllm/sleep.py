"""Tells the connector when a worker's KV cache goes and comes back, where vLLM does not.

vLLM 0.33 calls ``unregister_kv_caches`` and ``restore_kv_caches`` of the connector when its workers
sleep and wake. vLLM 0.32 does not, so its worker's methods are extended to do the same.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.worker.gpu_worker import Worker


class HoldsCaches(Protocol):
    """A connector of this process. It uses the KV cache between two of these calls."""

    def unregister_kv_caches(self) -> None:
        """The KV cache's memory goes after this call."""

    def restore_kv_caches(self) -> None:
        """The KV cache's memory is back at the same address, with undefined contents."""


_told: WeakSet[Any] = WeakSet()  # a worker process has one


def tell(connector: HoldsCaches) -> None:
    """Have vLLM's worker of this process call the connector when it sleeps and wakes."""
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return  # it does
    if not _told:
        extend(Worker)
    _told.add(connector)


def extend(worker: type[Any]) -> None:
    """Make a worker class call the connectors as vLLM 0.33's does. Idempotent."""
    sleep, discard, wake_up = worker.sleep, worker.discard, worker.wake_up
    if hasattr(sleep, "__wrapped__"):
        return

    @wraps(sleep)
    def told_sleep(self: Any, level: int = 1) -> None:
        _free()
        sleep(self, level)

    @wraps(discard)
    def told_discard(self: Any, tags: Collection[str]) -> None:
        if "kv_cache" in tags:
            _free()
        discard(self, tags)

    @wraps(wake_up)
    def told_wake_up(self: Any, tags: Collection[str] | None = None) -> None:
        wake_up(self, tags)
        if tags is None or "kv_cache" in tags:
            for connector in _told:
                connector.restore_kv_caches()

    worker.sleep, worker.discard, worker.wake_up = told_sleep, told_discard, told_wake_up


def _free() -> None:
    for connector in _told:
        connector.unregister_kv_caches()
