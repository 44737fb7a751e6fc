"""How two workers number the same blocks and layers: wire blocks and units."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvconnect.types import Span


class GroupView(NamedTuple):
    """How this worker and one peer number the units of a KV-cache group.

    ``ratio``: wire blocks per block here. ``unit_all``: the unit of all layers that both workers
    have. ``unit_of_layer[i]``: the unit of this worker's layer i, or -1 if the peer does not have
    the layer. Wire block w of block b has the id ``b * ratio + w``. ``heads``: KV heads of a unit.
    """

    ratio: int
    unit_all: int
    unit_of_layer: tuple[int, ...]
    heads: int = 1


def wire_ids(span: Span, ratio: int, first: int, stop: int) -> array[int]:
    """Return the ids of the wire blocks [first, stop) of a span whose blocks have ``ratio``."""
    begin, end = first // ratio, -(-stop // ratio)
    blocks = span.block_ids[begin - span.first : end - span.first]
    if ratio == 1:
        return blocks
    ids = array("q", [block * ratio + phase for block in blocks for phase in range(ratio)])
    return ids[first - begin * ratio : stop - begin * ratio]
