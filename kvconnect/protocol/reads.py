"""Reads: what both kinds have in common, of hand-offs and of shared blocks.

The reader chooses a read's id, which is also the transport's, expects its pages and asks for them.
It may take the request back with :class:`Cancel`.

How it asks, and how it hears of the end, is each service's own. Pages of a hand-off may not be
computed yet, so their source says so now and then, and the reader says when it has all. Shared
blocks are there or not, and may be overwritten meanwhile, so their source says what became of each.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

LAST_READ_ID = (1 << 63) - 1
PROBE_READ_ID = LAST_READ_ID - 15
"""Read id of the first probe; the ids from here to ``LAST_READ_ID`` are for probes alone."""

ReadId = Annotated[int, Meta(ge=0, lt=PROBE_READ_ID)]


class Cancel(msgspec.Struct, tag="cancel"):
    """Reader: send nothing more for this read."""

    read_id: ReadId
