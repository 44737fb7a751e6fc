"""State shared by the parts of one TCP transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvconnect.errors import Misuse
from kvconnect.transport.base import (
    ConnectionOptions,
    Memory,
)
from kvconnect.transport.event_queue import EventQueue
from kvconnect.transport.tcp.event_loop import EventLoop
from kvconnect.transport.tcp.page_path import ConnectionContext, PagePath

DIGEST_PERIOD = {"off": 0, "sampled": 16, "full": 1}


@dataclass
class TransportContext:
    """One per transport. Only ``memory`` and ``make_page_path`` are set later."""

    options: ConnectionOptions
    events: EventQueue
    loop: EventLoop
    memory: Memory | None = None
    make_page_path: Callable[[ConnectionContext], PagePath] | None = None

    def pages(self) -> Memory:
        """Return the registered memory; :class:`Misuse` if there is none."""
        if self.memory is None:
            raise Misuse("register the memory before pages move")
        return self.memory
