"""Layer-wise push: each layer's KV is sent as soon as its attention has been launched.

SGLang hands a chunk to its backend when the chunk's forward is over. ``KVCONNECT_LAYERWISE=1`` sets
hooks in its scheduler processes. The hook around ``Scheduler.run_batch`` offers the whole pages
that a batch will fill. After each call of the one around ``AttentionBackend.forward``, one layer of
these pages can be sent. SGLang's own send then covers only the rest. A forward that never calls the
second hook (full CUDA graphs, torch.compile) is handed off whole at its end. So is one with
two-batch overlap, which calls each layer once per half of a batch.

Offered pages must not change until they have been sent. But when SGLang enters the request into its
prefix cache, the tree may already have such a page: another prompt with the same prefix was entered
first, or the page was computed again because the last token always is. SGLang then frees the
request's own page, and the next batch may overwrite it while it is being sent. So a third hook,
around ``Scheduler.checkpoint_disagg_prefill``, defers these frees until the hand-off is over. It is
always set: SGLang's own send of a chunk may cover pages that only the next checkpoint enters, as
the last one where the tree's keys are pairs of tokens (EAGLE, MTP).

The state of a linear attention layer (GDN, KDA) is final once the layer has run in the batch that
ends the prompt. That batch offers the request's slot too; SGLang copies it into its cache, and
frees it with the request. States that other code writes (Mamba 2, short convolutions) follow at the
end of that forward. Pages of sliding windows follow with the last chunk: SGLang names them only
after it has entered the request into its cache, which may free some or give it other ones.

The numbers of pages lie on the device, and begin to come to the host before the batch is launched.
Until they are here, the hooks note what was launched, and where; the batch is offered then.

An event per attention layer is the idea of SGLang's pull request 19931, which records them inside
its Mooncake backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch

from kvconnect.copy.driver import own_stream
from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.messages import DisaggregationInstructions
from kvconnect.engines.sglang.ahead_offers import AheadOffer, UnresolvedBatch
from kvconnect.engines.sglang.device_numbers import DeviceNumbers
from kvconnect.engines.sglang.rooms import (
    PrefillRooms,
    SendRoom,
    contain_room_errors,
)
from kvconnect.engines.sglang.translate import LayerNames
from kvconnect.errors import contained
from kvconnect.offload.streams import DeviceFence
from kvconnect.transport.base import Fence

logger = logging.getLogger(__name__)

RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
CHECKPOINT = "sglang.srt.managers.scheduler.Scheduler.checkpoint_disagg_prefill"
_BACKENDS = "sglang.srt.layers.attention"
ATTENTION = (
    f"{_BACKENDS}.base_attn_backend.AttentionBackend.forward",
    # Has a forward of its own, for attention and linear attention.
    f"{_BACKENDS}.hybrid_linear_attn_backend.HybridLinearAttnBackend.forward",
)
_LINEAR = "RadixLinearAttention"  # SGLang's class of layers that write their state in this call


class LayerwisePush:
    """Offers, before a batch runs, the pages that it will fill. For the scheduler's thread.

    ``once``: a forward calls each layer's attention once for the whole batch; otherwise layers are
    not followed.
    """

    def __init__(
        self,
        agent: HandoffAgent,
        prefill_rooms: PrefillRooms,
        names: LayerNames,
        once: bool = True,
    ) -> None:
        self._agent = agent
        self._prefill_rooms = prefill_rooms
        self._names = names
        self._layers_called_once = once
        self._offering = False  # the running batch has offered pages
        self._rooms: list[int] = []  # whose pages it has offered
        # The last batch, until its numbers are here.
        self._unresolved: UnresolvedBatch | None = None
        self._layer_seen = False  # in the running batch
        self._warned = False
        prefill_rooms.settle = self.settle

    def begin(self, scheduler: Any, batch: Any) -> None:
        """Offer the whole pages that a batch fills, and earlier ones that were not offered yet."""
        self.settle()
        with contained(self._fail_step):
            self._rooms.clear()
            offers = self._offers(scheduler, batch) if batch.forward_mode.is_extend() else []
            if offers:
                self._rooms += [offer.number for offer in offers]
                size = scheduler.token_to_kv_pool_allocator.page_size
                self._unresolved = UnresolvedBatch(offers, size)
                self._offering, self._layer_seen = True, False
                self.settle(wait=False)

    def settle(self, wait: bool = True) -> None:
        """Offer the last batch, if its numbers had not come: now, or if they have come by now.

        What a room does next may depend on it, and comes after the batch before: there is
        hardly anything to wait for then. Only a request that ends in any other way may wait, at
        most for that batch.
        """
        found = self._unresolved
        if found is None or not (wait or all(each.are_here() for each in found.numbers)):
            return
        self._unresolved = None
        with contained(self._fail_step):
            for numbers in found.numbers if wait else ():
                numbers.wait()
            group = self._names.state_group
            offers = [offer.resolve(found.page_tokens, group) for offer in found.offers]
            self._agent.begin_step(DisaggregationInstructions(offers=offers), epoch=0)
            for name, fence in found.launched:
                self._tell(name, fence)

    def _launched(self, name: str | None) -> None:
        """Record that a layer has been launched, or with None the whole batch."""
        self.settle(wait=False)
        if self._unresolved is None:
            self._tell(name)
        else:
            self._unresolved.launched.append((name, self._agent.mark()))

    def _tell(self, name: str | None, fence: Fence | None = None) -> None:
        if name is None:
            self._agent.end_step(fence)
        else:
            self._agent.layer_written(name, fence)

    def layer(self, layer_id: int, linear: bool = False) -> None:
        """Record that a layer's attention has been launched; ``linear``: its linear attention. A
        layer may have both."""
        if self._offering and self._layers_called_once:
            self._layer_seen = True
            names = self._names.states if linear else self._names.kv
            with contained(self._fail_step):
                for name in names.get(layer_id, ()):
                    self._launched(name)

    def end(self) -> None:
        """Record that the whole batch has been launched on the current stream."""
        if not self._offering:
            return
        self._offering = False
        with contained(self._fail_step):
            self._launched(None)
        if not (self._layer_seen or self._warned):
            self._warned = True
            logger.warning(
                "kvconnect: the attention layers of a prefill could not be followed (a full CUDA "
                "graph, torch.compile, two-batch overlap or --elastic-ep-backend): such chunks are "
                "handed off at the end of their forward"
            )

    @contextmanager
    def entering(self, scheduler: Any, req: Any) -> Iterator[None]:
        """Wrap SGLang's entry of a request into its prefix cache: defer frees of pages that were
        offered or sent before the tree had them."""
        room = self._find(req)
        self.settle()
        if room is None:
            yield
            return
        allocator = scheduler.token_to_kv_pool_allocator
        size = allocator.page_size
        # All ranks must free the same pages at the same point, whatever each of them has offered.
        entered, end = req.kv.cache_protected_len // size, _end_block(req, size)
        if room.ahead_until <= entered:
            yield
        else:
            slots = None  # of what was sent, if this is not all
            if room.ahead_until < end:
                row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                slots = row[entered * size : room.ahead_until * size].clone()
            with deferring_frees(allocator, slots) as found:
                yield
            if found.frees:
                pages = []
                with self._contain(req.bootstrap_room):
                    pages.append(found.pages(size))
                room.keep(pages, found.frees)
        if not req.pending_bootstrap:  # SGLang sends the chunk next
            room.ahead_until = max(room.ahead_until, end)

    def _find(self, req: Any) -> SendRoom | None:
        """Return a request's open room, or the one that it has left, perhaps on this rank alone."""
        sender = getattr(req, "disagg_kv_sender", None)
        if getattr(sender, "owns_room", False):
            return self._prefill_rooms.find(req.bootstrap_room)
        left: SendRoom | None = getattr(sender, "left", None)
        return left

    def _contain(self, room: int) -> AbstractContextManager[None]:
        return contain_room_errors(self._agent, room, self._prefill_rooms.give_up)

    def _fail_step(self, error: Exception) -> None:
        """Give up the rooms of the running batch: how much of it was offered is not known."""
        self._offering, self._unresolved = False, None
        for room in self._rooms:
            with self._contain(room):
                raise error

    def _offers(self, scheduler: Any, batch: Any) -> list[AheadOffer]:
        offers = []
        for req in batch.reqs:
            room = None if req.pending_bootstrap else self._find(req)
            if room is not None:
                with self._contain(req.bootstrap_room):
                    offer = self._offer(scheduler, req, room)
                    if any(offer.numbers):
                        offers.append(offer)
        return offers

    def _offer(self, scheduler: Any, req: Any, room: SendRoom) -> AheadOffer:
        size = scheduler.token_to_kv_pool_allocator.page_size
        end = _end_block(req, size)
        if room.deferred_frees:  # a long prompt must not take its memory twice
            end = min(end, req.kv.cache_protected_len // size)
        room.ahead_until = max(room.ahead_until, end)
        blocks, pages = room.unoffered_until(end), None
        if blocks:
            pages = DeviceNumbers(_first_slots(scheduler, req, blocks, size))
        state = self._state(scheduler, req, room)
        return AheadOffer(req.bootstrap_room, room, blocks.start, pages, state)

    def _state(self, scheduler: Any, req: Any, room: SendRoom) -> DeviceNumbers | None:
        """Return the state of a request whose prompt ends in the starting step."""
        ends = req.extend_end >= len(req.origin_input_ids)
        if not (ends and self._names.states and room.asked and room.state_ahead is None):
            return None
        # The slot is found as in SGLang's own sender.
        pool = scheduler.req_to_token_pool
        slot = pool.req_index_to_mamba_index_mapping[req.kv.req_pool_idx]
        return DeviceNumbers(pool.translate_mamba_indices(slot))


def _end_block(req: Any, size: int) -> int:
    """Return the end of the whole pages of a request's prompt that its last batch fills."""
    return int(min(req.extend_end, len(req.origin_input_ids)) // size)


def _first_slots(scheduler: Any, req: Any, blocks: range, size: int) -> torch.Tensor:
    """Return the first slots of a request's blocks, found as in SGLang's own sender."""
    table = scheduler.req_to_token_pool.req_to_token
    first = table[req.kv.req_pool_idx, blocks.start * size : blocks.stop * size : size]
    allocator = scheduler.token_to_kv_pool_allocator
    slots: torch.Tensor = allocator.translate_kv_indices_for_transfer(first)
    return slots


_push: LayerwisePush | None = None  # of this process; there is one prefill rank in it


def follow_layers(
    agent: HandoffAgent, prefill_rooms: PrefillRooms, names: LayerNames, once: bool
) -> None:
    """Follow the layers of this process's prefills from now on, if the hooks are set. Arguments are
    those of :class:`LayerwisePush`."""
    global _push
    _push = LayerwisePush(agent, prefill_rooms, names, once)


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
    """Hook around ``AttentionBackend.forward(self, q, k, v, layer, ...)``: the layer's KV, or its
    state, is written when it returns."""
    output = original(*args, **kwargs)
    if _push is not None:
        layer = kwargs["layer"] if "layer" in kwargs else args[4]
        _push.layer(layer.layer_id, type(layer).__name__ == _LINEAR)
    return output


_FREES = ("free", "free_full", "free_segment", "free_full_segment")
"""Functions of SGLang's allocators that free pages of the offered group. Slots of a sliding window
have other functions; they are sent with the last chunk only."""


class DeferredFrees:
    """Deferred frees and their slots. For the scheduler's thread. ``only``: the slots whose frees
    are deferred, None for all."""

    def __init__(self, only: torch.Tensor | None = None) -> None:
        self._only = only
        self.frees: list[Callable[[], object]] = []
        self._slots: list[torch.Tensor] = []

    def pages(self, size: int) -> Callable[[], set[int]]:
        """Return a function that returns the deferred pages, of ``size`` tokens each. It is called
        only if SGLang sends other pages than a step has offered."""
        every = [DeviceNumbers(slots) for slots in self._slots]

        @cache
        def read() -> set[int]:
            for numbers in every:
                numbers.wait()
            return {slot // size for numbers in every for slot in numbers.read()}

        return read

    def add(self, free: Callable[..., object], slots: torch.Tensor, **more: Any) -> None:
        """Defer a call of ``free``."""
        if self._only is None:
            slots = slots.clone()  # a view of the request's row, which is about to change
        else:
            ahead = torch.isin(slots, self._only.to(slots))
            if (rest := slots[~ahead]).numel():
                free(rest, **more)
            slots = slots[ahead]
        if slots.numel():
            self._slots.append(slots)
            self.frees.append(partial(free, slots, **more))


@contextmanager
def deferring_frees(allocator: Any, only: torch.Tensor | None = None) -> Iterator[DeferredFrees]:
    """Defer the frees of ``allocator`` inside the context; ``only``: of these slots."""
    found = DeferredFrees(only)
    names = [name for name in _FREES if hasattr(allocator, name)]
    for name in names:
        setattr(allocator, name, partial(found.add, getattr(allocator, name)))
    try:
        yield found
    finally:
        for name in names:
            delattr(allocator, name)


class EngineStreams:
    """SGLang's two streams: its scheduler's and that of forwards. For the scheduler's thread.

    ``forward``: the stream of forwards, set once known.
    """

    def __init__(self, device: torch.device) -> None:
        self.forward: Any = None
        self._join = own_stream(device) if device.type == "cuda" else None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Make current a stream that waits for both; neither waits for it.

        The forward of a finished request may still run, and write to slots that the next request
        already has.
        """
        if self._join is None or self.forward is None:
            yield
            return
        self._join.wait_stream(torch.cuda.current_stream(self._join.device))
        self._join.wait_stream(self.forward)
        with torch.cuda.stream(self._join):
            yield

    def mark(self) -> Fence | None:
        """Return a fence after both streams; None on the CPU."""
        if self._join is None:
            return None
        with self.joined():
            event = torch.cuda.Event(blocking=True)  # waiters must not spin
            event.record()
        return DeviceFence(event)
