"""What all parts of one TCP transport have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvconnect.errors import Misuse
from kvconnect.transport.base import LinkOptions, Memory
from kvconnect.transport.mailbox import Mailbox
from kvconnect.transport.tcp.line import Line, Rail
from kvconnect.transport.tcp.loop import Loop

DIGEST_PERIOD = {"off": 0, "sampled": 16, "full": 1}


@dataclass
class Shared:
    """Made once; only ``memory`` and ``make_rail`` are set later."""

    options: LinkOptions
    events: Mailbox
    loop: Loop
    memory: Memory | None = None
    make_rail: Callable[[Line], Rail] | None = None  # another path for pages, beside these

    def pages(self) -> Memory:
        """Return the registered memory; :class:`Misuse` if there is none."""
        if self.memory is None:
            raise Misuse("register the memory before pages move")
        return self.memory
