"""Points after what SGLang has launched on both of its streams: its scheduler's and the model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvconnect.copy.own_stream import own_stream
from kvconnect.transport.base import Fence
from kvconnect.worker.streams import DeviceFence


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
