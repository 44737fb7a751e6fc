"""What SGLang does not tell its backend of a request, of which it says only the room.

Two hooks look at the requests for which SGLang makes senders and receivers.
"""

from __future__ import annotations

import sys
from typing import Any

from kvconnect.engines.sglang.spans import context_of

_SCHEDULER = "sglang.srt.managers.scheduler"
_SEND = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
_RECEIVE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"


def watch() -> None:
    """Register the hooks, if this is a scheduler's process; part of loading the plugin."""
    if _SCHEDULER not in sys.modules:
        return  # no others have senders and receivers
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SEND, _after_sender, HookType.AFTER)
    HookRegistry.register(_RECEIVE, _after_receiver, HookType.AFTER)


def _after_sender(_result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    manager = queue.kv_manager
    outbox = getattr(manager, "outbox", None)  # other backends have none
    if outbox is None or getattr(req, "disagg_kv_sender", None) is None:
        return
    manager.streams.forward = queue.scheduler.forward_stream
    manager.overlaps = queue.scheduler.enable_overlap
    room = outbox.find(req.bootstrap_room)
    if room is not None:
        room.most = len(req.origin_input_ids) // manager.kv_args.page_size
    if manager.spans is not None:
        manager.spans.begin("kvconnect.hold", req.bootstrap_room, context_of(req), None)


def _after_receiver(made: Any, queue: Any, *_: Any, **__: Any) -> None:
    manager = queue.kv_manager
    if getattr(manager, "inbox", None) is not None:
        manager.streams.forward = queue.scheduler.forward_stream
        made.kv_receiver.parent = context_of(made.req)
