"""What a rank breaks on purpose, so that tests see what they would not miss.

Each takes the scheduler and returns how to mend it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconnect.engines.sglang.backend import KVConnectManager

_Mend = Callable[[], None]


def _page(scheduler: Any) -> _Mend:
    """Change one number of the KV that the first running request has."""
    request = scheduler.running_batch.reqs[0]
    slots = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
    keys = scheduler.token_to_kv_pool_allocator.get_kvcache().get_key_buffer(1)
    slot = int(slots[2])
    keys[slot, 0, 4] += 1

    def mend() -> None:
        keys[slot, 0, 4] -= 1

    return mend


def _room(scheduler: Any) -> _Mend:
    """Keep an entry of a room."""
    statuses = scheduler.disagg_prefill_bootstrap_queue.kv_manager.request_status
    statuses[-1] = 1

    def mend() -> None:
        del statuses[-1]

    return mend


def _loop(scheduler: Any) -> _Mend:
    """End the scheduler's loop."""
    raise RuntimeError("ended on purpose")


def _order(scheduler: Any) -> _Mend:
    """Send a chunk's pages in another order."""
    original = KVConnectManager.add_transfer_request

    def reverse(self: Any, room: int, kv_indices: Any, *rest: Any, **more: Any) -> None:
        original(self, room, kv_indices[::-1].copy(), *rest, **more)

    KVConnectManager.add_transfer_request = reverse  # type: ignore[assignment]
    return lambda: setattr(KVConnectManager, "add_transfer_request", original)


def _deaf(scheduler: Any) -> _Mend:
    """Never take what the agent reports."""
    original = KVConnectManager.poll_agent
    KVConnectManager.poll_agent = lambda self: None  # type: ignore[method-assign]
    return lambda: setattr(KVConnectManager, "poll_agent", original)


def _unseen(scheduler: Any) -> _Mend:
    """Never look at transfers under way."""
    scheduler.process_disagg_prefill_inflight_queue = lambda *_: []
    return lambda: delattr(scheduler, "process_disagg_prefill_inflight_queue")


BREAKAGES: dict[str, Callable[[Any], _Mend]] = {
    "page": _page,
    "room": _room,
    "loop": _loop,
    "order": _order,
    "deaf": _deaf,
    "unseen": _unseen,
}
