"""Hooks on SGLang's queues: what its backend is not told, and a poll that SGLang leaves out.

SGLang gives its backend only the room of a request. Two hooks read more from the requests for which
SGLang makes senders and receivers. A third polls the agent on every pipeline stage of a prefill
engine, since SGLang polls new requests on the first stage alone. A fourth checks what a bootstrap
server says of ranks. A fifth, on HiCache, detaches a storage backend that a rank has refused. A
sixth keeps pages until they are sent: see ``layerwise.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from kvconnect.engines.sglang.bootstrap import ranks_of
from kvconnect.engines.sglang.layerwise import CHECKPOINT, around_checkpoint
from kvconnect.engines.sglang.prompts import prompt_identity
from kvconnect.engines.sglang.rooms import contain_room_errors
from kvconnect.protocol.prompts import PromptIdentity

_SCHEDULER = "sglang.srt.managers.scheduler"
_BOOTSTRAP = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
SEND = f"{_BOOTSTRAP}.create_sender"
POP = f"{_BOOTSTRAP}.pop_bootstrapped"
RECEIVE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"

RANKS = "sglang.srt.disaggregation.common.conn.CommonKVReceiver.query_prefill_dp_ranks"
_HICACHE = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
ATTACH = f"{_HICACHE}.attach_storage_backend"


def watch() -> None:
    """Register the hooks if this is a scheduler's process. The plugin calls this when loaded."""
    if _SCHEDULER not in sys.modules:
        return  # other processes have no senders and receivers
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SEND, after_sender, HookType.AFTER)
    HookRegistry.register(POP, before_pop, HookType.BEFORE)
    HookRegistry.register(RECEIVE, after_receiver, HookType.AFTER)
    HookRegistry.register(RANKS, around_ranks, HookType.AROUND)
    HookRegistry.register(ATTACH, around_attach, HookType.AROUND)
    HookRegistry.register(CHECKPOINT, around_checkpoint, HookType.AROUND)


def after_sender(_result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """Hook after ``PrefillBootstrapQueue.create_sender``: streams, and the prompt."""
    manager = queue.kv_manager
    prefill_rooms = getattr(manager, "prefill_rooms", None)  # other backends have none
    sender: Any = getattr(req, "disagg_kv_sender", None)
    if prefill_rooms is None or not getattr(sender, "owns_room", False):
        return
    with contain_room_errors(manager.agent, req.bootstrap_room, sender.give_up):
        manager.streams.forward = queue.scheduler.forward_stream
        manager.overlaps = queue.scheduler.enable_overlap
        sender.open(_prompt(req, queue))
        room = prefill_rooms.find(req.bootstrap_room)
        if room is not None:
            room.prompt_blocks = len(req.origin_input_ids) // manager.kv_args.page_size
        if manager.spans is not None:
            parent = manager.spans.context_of(req)
            manager.spans.begin("kvconnect.hold", req.bootstrap_room, parent, None)


def before_pop(queue: Any, *_: Any, **__: Any) -> None:
    """Hook before ``PrefillBootstrapQueue.pop_bootstrapped``, which runs on every stage."""
    manager = queue.kv_manager
    if getattr(manager, "prefill_rooms", None) is not None:
        manager.poll_agent()


def after_receiver(made: Any, queue: Any, *_: Any, **__: Any) -> None:
    """Hook after ``DecodePreallocQueue._create_receiver_and_enqueue``: streams, span and prompt."""
    manager = queue.kv_manager
    receiver = made.kv_receiver
    # Warm-up requests have a receiver of SGLang's own.
    if getattr(manager, "decode_rooms", None) is None or not hasattr(receiver, "owns_room"):
        return
    with contain_room_errors(manager.agent, receiver.bootstrap_room, receiver.give_up):
        _forget_addresses(queue)
        manager.streams.forward = queue.scheduler.forward_stream
        if manager.spans is not None:
            receiver.parent = manager.spans.context_of(made.req)
        receiver.prompt = _prompt(made.req, queue)


def _prompt(req: Any, queue: Any) -> PromptIdentity:
    manager = queue.kv_manager
    compares = manager.compares_media
    return prompt_identity(req, queue.scheduler, manager.adapters, compares_media=compares)


def _forget_addresses(queue: Any) -> None:
    """Forget when bootstrap servers were asked that no request waits for any more. Clients name
    them, and SGLang remembers each one for ever whose requests ended before it had answered."""
    asked: dict[str, float] = getattr(queue, "_ensure_last_attempt_time", {})
    if not asked:
        return
    receivers = (waiting.kv_receiver for waiting in queue.pending_reqs)
    named = {receiver.bootstrap_addr for receiver in receivers if receiver is not None}
    recently = time.monotonic() - queue._ensure_retry_interval  # not to be asked again yet
    for address in [a for a, when in asked.items() if a not in named and when <= recently]:
        del asked[address]
        queue._ensure_retry_count.pop(address, None)


def around_ranks(query: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, int]:
    """Hook around ``CommonKVReceiver.query_prefill_dp_ranks``, whose answer SGLang trusts."""
    return ranks_of(query(*args, **kwargs))


def around_attach(attach: Callable[..., None], controller: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around ``HybridCacheController.attach_storage_backend``, which leaves a backend attached
    that could not be set up once SGLang's pools were known."""
    try:
        attach(controller, *args, **kwargs)
    finally:
        if getattr(controller.storage_backend, "refused", False):
            controller.detach_storage_backend()
