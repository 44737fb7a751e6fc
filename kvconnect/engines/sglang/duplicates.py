"""Pages on offer that SGLang would give away while they are being sent.

A page that a batch computes is offered before it runs. When SGLang then enters the request into its
prefix cache, the tree may have that page already: another prompt with the same beginning was
entered first, or the page was computed again because the last token always is. The request's own
page is then freed, its row points at the tree's, and the next batch may write to what is still
being sent. So those frees wait until the hand-off is over: whoever sends a page owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvconnect.copy.driver import own_stream
from kvconnect.offload.streams import DeviceFence
from kvconnect.transport.base import Fence

_FREES = ("free", "free_full", "free_segment", "free_full_segment")
"""What of SGLang's allocators gives pages of the group that is offered back. Slots of a sliding
window, which are sent with the last chunk only, have functions of their own."""


class Duplicates:
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
def kept(allocator: Any) -> Iterator[Duplicates]:
    """Collect what ``allocator`` is told to free."""
    found = Duplicates()
    names = [name for name in _FREES if hasattr(allocator, name)]
    for name in names:
        setattr(allocator, name, partial(found.add, getattr(allocator, name)))
    try:
        yield found
    finally:
        for name in names:
            delattr(allocator, name)


# Points after what SGLang has launched on both of its streams: its scheduler's and the model's.


class BothStreams:
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
