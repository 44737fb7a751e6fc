"""State shared by the parts of one TCP transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from kvconnect.errors import Misuse
from kvconnect.transport.base import (
    ConnectionOptions,
    Memory,
)
from kvconnect.transport.event_queue import EventQueue
from kvconnect.transport.tcp.event_loop import EventLoop
from kvconnect.transport.tcp.page_path import ConnectionContext, PagePath
from kvconnect.transport.tcp.send_queue import MAX_FRAME_BYTES, MAX_STAGED_FRAME_BYTES

DIGEST_PERIOD = {"off": 0, "sampled": 16, "full": 1}


@dataclass
class TransportContext:
    """One per transport. Only ``memory`` and ``make_page_path`` are set later."""

    options: ConnectionOptions
    events: EventQueue
    loop: EventLoop
    memory: Memory | None = None
    make_page_path: Callable[[ConnectionContext], PagePath | None] | None = None

    def pages(self) -> Memory:
        """Return the registered memory; :class:`Misuse` if there is none."""
        if self.memory is None:
            raise Misuse("register the memory before pages move")
        return self.memory

    @cached_property
    def most_frame_bytes(self) -> int:
        """Limit of a frame to send. Pages on a device are staged."""
        staged = any(region.device >= 0 for region in self.pages().regions())
        return MAX_STAGED_FRAME_BYTES if staged else MAX_FRAME_BYTES
