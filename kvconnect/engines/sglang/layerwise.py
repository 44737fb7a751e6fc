"""Layer-wise push: each layer's KV leaves as soon as its attention has been launched.

SGLang hands a chunk to its backend when the chunk's forward is over. With ``KVCONNECT_LAYERWISE=1``
hooks are set in its scheduler processes: around ``Scheduler.run_batch``, where the whole pages
that a batch will fill are put on offer, and around ``AttentionBackend.forward``, after which one
layer of them can be sent. What SGLang sends later is only what has not gone. A forward in which
the second hook stays silent (full CUDA graphs, torch.compile) is handed off as a whole at its end.

Pages on offer must stay what they are until they have been sent, so a third hook is set around
``Scheduler.checkpoint_disagg_prefill``: see ``duplicates.py``. Two-batch overlap calls each layer
once per half of a batch; chunks are then handed off at the end of their forward.

The idea of following the attention layers, with an event for each, is that of SGLang's open pull
request 19931, which does so inside its Mooncake backend.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvconnect.copy.driver import own_stream
from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.messages import DisaggregationInstructions, OfferBlocks
from kvconnect.engines.sglang.rooms import PrefillRooms, transfer_of
from kvconnect.offload.streams import DeviceFence
from kvconnect.transport.base import Fence
from kvconnect.types import Span

logger = logging.getLogger(__name__)

RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
CHECKPOINT = "sglang.srt.managers.scheduler.Scheduler.checkpoint_disagg_prefill"
ATTENTION = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward"


class LayerwisePush:
    """The pages that the current batch fills, offered before it runs. For the scheduler's thread.

    ``names``: by layer id, the name of what that layer writes. ``once``: a forward calls each
    layer's attention for all of the batch at a time; otherwise layers are not followed.
    """

    def __init__(
        self, agent: HandoffAgent, outbox: PrefillRooms, names: Mapping[int, str], once: bool = True
    ) -> None:
        self._agent = agent
        self._outbox = outbox
        self._names = names
        self._once = once
        self._open = False  # pages of the batch that runs are on offer
        self._heard = False  # of one of its layers
        self._told = False

    def begin(self, scheduler: Any, batch: Any) -> None:
        """Offer the whole pages that a batch fills, and those before it that were not yet."""
        offers = list(self._offers(scheduler, batch)) if batch.forward_mode.is_extend() else []
        if offers:
            self._agent.begin_step(DisaggregationInstructions(offers=offers), epoch=0)
            self._open, self._heard = True, False

    def layer(self, layer_id: int) -> None:
        """A layer's attention has been launched."""
        if self._open and self._once:
            self._heard = True
            self._agent.layer_written(self._names.get(layer_id, ""))

    def end(self) -> None:
        """The batch has been launched; the current stream is the one it runs on."""
        if not self._open:
            return
        self._open = False
        self._agent.end_step()
        if not (self._heard or self._told):
            self._told = True
            logger.warning(
                "kvconnect: the attention layers of a prefill could not be followed (a full CUDA "
                "graph, torch.compile or two-batch overlap): such chunks are handed off at the end "
                "of their forward"
            )

    @contextmanager
    def entering(self, scheduler: Any, req: Any) -> Iterator[None]:
        """SGLang enters a request into its prefix cache."""
        room = self._outbox.find(req.bootstrap_room)
        if room is None or not room.ahead:
            yield
            return
        allocator = scheduler.token_to_kv_pool_allocator
        with deferring_frees(allocator) as found:
            yield
        if found.frees:
            room.keep(found.pages(allocator.page_size), found.frees)

    def _offers(self, scheduler: Any, batch: Any) -> Iterator[OfferBlocks]:
        size = scheduler.token_to_kv_pool_allocator.page_size
        for req in batch.reqs:
            if req.pending_bootstrap or getattr(req, "disagg_kv_sender", None) is None:
                continue
            room = self._outbox.find(req.bootstrap_room)
            if room is None:
                continue
            end = min(req.extend_end, len(req.origin_input_ids)) // size
            if room.frees:  # it keeps pages already: a long prompt must not take its room twice
                end = min(end, req.kv.cache_protected_len // size)
            blocks = room.ahead_to(end)
            if blocks:
                ids = _page_ids(scheduler, req, blocks, size)
                room.note_ahead(blocks.start, ids)
                span = Span(0, blocks.start, ids)
                yield OfferBlocks(transfer_of(req.bootstrap_room), (span,))


def _page_ids(scheduler: Any, req: Any, blocks: range, size: int) -> array[int]:
    """Return the pool's pages of some of a request's blocks, as SGLang's own sending finds them."""
    table = scheduler.req_to_token_pool.req_to_token
    first = table[req.kv.req_pool_idx, blocks.start * size : blocks.stop * size : size]
    slots = scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(first)
    return array("q", [slot // size for slot in slots.tolist()])


_push: LayerwisePush | None = None  # of this process; there is one prefill rank in it


def follow_layers(
    agent: HandoffAgent, outbox: PrefillRooms, names: Mapping[int, str], once: bool
) -> None:
    """From now on, follow the layers of this process's prefills, if the hooks are set. ``once``
    as for :class:`LayerwisePush`."""
    global _push
    _push = LayerwisePush(agent, outbox, names, once)


def around_run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around ``Scheduler.run_batch``."""
    push = _push
    if push is None:
        return original(scheduler, batch, *args, **kwargs)
    push.begin(scheduler, batch)
    try:
        return original(scheduler, batch, *args, **kwargs)
    finally:
        if scheduler.enable_overlap:
            with scheduler.forward_stream_ctx:
                push.end()
        else:
            push.end()


def around_checkpoint(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around ``Scheduler.checkpoint_disagg_prefill``."""
    if _push is None:
        return original(scheduler, req, *args, **kwargs)
    with _push.entering(scheduler, req):
        return original(scheduler, req, *args, **kwargs)


def around_attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around ``AttentionBackend.forward(self, q, k, v, layer, ...)``: the layer's KV is
    written when it returns."""
    output = original(*args, **kwargs)
    if _push is not None:
        layer = kwargs["layer"] if "layer" in kwargs else args[4]
        _push.layer(layer.layer_id)
    return output


# ---


_FREES = ("free", "free_full", "free_segment", "free_full_segment")
"""What of SGLang's allocators gives pages of the group that is offered back. Slots of a sliding
window, which are sent with the last chunk only, have functions of their own."""


class DeferredFrees:
    """Frees that wait, and the slots they are of. For the scheduler's thread."""

    def __init__(self) -> None:
        self.frees: list[Callable[[], object]] = []
        self._slots: list[torch.Tensor] = []

    def pages(self, size: int) -> set[int]:
        """Return the pages of ``size`` tokens that wait; waits for the device."""
        return {slot // size for slots in self._slots for slot in slots.tolist()}

    def add(self, free: Callable[..., object], slots: torch.Tensor, **more: Any) -> None:
        """Stand in for ``free``."""
        slots = slots.clone()  # it may be a part of the row, which is about to change
        self._slots.append(slots)
        self.frees.append(partial(free, slots, **more))


@contextmanager
def deferring_frees(allocator: Any) -> Iterator[DeferredFrees]:
    """Collect what ``allocator`` is told to free."""
    found = DeferredFrees()
    names = [name for name in _FREES if hasattr(allocator, name)]
    for name in names:
        setattr(allocator, name, partial(found.add, getattr(allocator, name)))
    try:
        yield found
    finally:
        for name in names:
            delattr(allocator, name)


# Points after what SGLang has launched on both of its streams: its scheduler's and the model's.


class EngineStreams:
    """For the scheduler's thread. ``forward`` is SGLang's stream of forwards, set once known."""

    def __init__(self, device: torch.device) -> None:
        self.forward: Any = None
        self._join = own_stream(device) if device.type == "cuda" else None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Make a stream the current one that comes after both; no other one waits for it.

        A request that has ended can have its forward on its way still, which writes to slots that
        the next request was given already.
        """
        if self._join is None or self.forward is None:
            yield
            return
        self._join.wait_stream(torch.cuda.current_stream(self._join.device))
        self._join.wait_stream(self.forward)
        with torch.cuda.stream(self._join):
            yield

    def mark(self) -> Fence | None:
        """Return a fence after both; None where there is nothing to wait for."""
        if self._join is None:
            return None
        with self.joined():
            event = torch.cuda.Event(blocking=True)  # whoever waits must not spin on a core
            event.record()
        return DeviceFence(event)
