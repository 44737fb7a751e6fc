"""A block cut into units that do not depend on how many ranks share the heads.

A rank's slot holds the heads of that rank, in whatever order its KV cache has. Engines with other
ranks can use the same records only if those are cut by the model's heads and not by the rank's. A
*unit* is the part of a block that belongs to a few consecutive heads, in canonical order
("HNC"): layer by layer, then head by head, then token by token::

    8 heads, one per unit     TP 1 |0|1|2|3|4|5|6|7|    TP 4, rank 1 |2|3|    TP 8, rank 5 |5|

A unit is a list of byte runs of a slot. Two workers that name the same layers with
rows alike get the same bytes for the same unit. A row may lie in parts: where one worker keeps K
and V of a token side by side and the other in two tensors, that one names both as parts.

Not encoded in the record, so the fingerprint must include it: ``unit_heads``, the number of heads,
the tokens of a block and, without ``tokens_apart``, the packing and the tokens of a page.

Arithmetic only. All sizes and offsets are bytes unless a name says otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product
from typing import TYPE_CHECKING

from kvconnect.errors import Incompatible, Misuse

if TYPE_CHECKING:
    from kvconnect.cache.layout import GroupGeometry
    from kvconnect.cache.pages import LayerPages

_MOST_RANKS = 8
"""Ranks that share heads, in all but rare engines: as many units are enough, and few are fast."""

Run = tuple[int, int]
"""Offset in the slot, length."""


Rows = Sequence["LayerPages"]
"""The pages of one layer: the parts of its rows, in order."""


@dataclass(frozen=True, slots=True)
class HeadUnit:
    """One of the model's units, with its byte runs in a slot.

    ``number`` is the same on all ranks of all engines. ``runs`` are in canonical order, none goes
    on where the one before ends.
    """

    number: int
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Size of the unit."""
        return sum(length for _, length in self.runs)


def unit_heads(total_heads: int, own_heads: int) -> int:
    """Return the heads of a unit: an eighth of the model's heads if those can be cut so.

    Otherwise one, which any number of ranks can share. A rank that has fewer heads than that cuts
    smaller units, which only ranks like it can use.
    """
    wanted = 1 if total_heads % _MOST_RANKS else total_heads // _MOST_RANKS
    return min(wanted, own_heads)


def units(
    group: GroupGeometry,
    layers: Sequence[Rows],
    heads: tuple[int, int],
    total_heads: int,
    tokens_apart: bool = True,
) -> tuple[HeadUnit, ...]:
    """Return the units of a block that a rank has, in ascending order of their numbers.

    Every byte of the slot is in exactly one run of one unit.

    Args:
        group: the geometry of a block in a slot.
        layers: the pages of the group, in the model's order, with the parts of their rows. Layers
            that share another one's bytes are left out.
        heads: (first, end) of the model's KV heads that this rank has. Ranks that have the same
            heads get the same units.
        total_heads: KV heads of the model; 1 where all ranks have the same (MLA), which is one
            unit with the number 0.
        tokens_apart: whether a page is rows, token by token. If not, what a head has of a page is
            opaque, and taken as a whole.

    Raises:
        Misuse: no layers, or heads that the model does not have.
        Incompatible: heads that are not whole units, or layers that cannot be cut: of other
            heads, with rows outside of the block, over one another, or of opaque heads in more
            than one piece. The message names the layer.
    """
    first, end = heads
    if not layers or not 0 <= first < end <= total_heads:
        raise Misuse(f"heads {first} to {end} of {total_heads}, in {len(layers)} layers")
    step = unit_heads(total_heads, end - first)
    if first % step or (end - first) % step:
        raise Incompatible(f"heads {first} to {end} of {total_heads} are not units of {step}")
    for part in chain.from_iterable(layers):
        _check_part(part, end - first, tokens_apart)
    slot = _Slot(group)
    found = []
    for start in range(0, end - first, step):
        runs = (run for layer in layers for run in slot.runs(layer, range(start, start + step)))
        found.append(HeadUnit((first + start) // step, _merged(runs)))
    _check_cover(found, group.block_bytes)
    return tuple(found)


def _check_part(layer: LayerPages, heads: int, tokens_apart: bool) -> None:
    if layer.heads != heads:
        raise Incompatible(f"layer {layer.name} has {layer.heads} heads, the rank has {heads}")
    if not tokens_apart and layer.tokens > 1 and layer.token_stride != layer.row_bytes:
        raise Incompatible(
            f"layer {layer.name}: what a head has of a page is opaque and not in one piece "
            f"(rows of {layer.row_bytes} bytes every {layer.token_stride})"
        )


def _check_cover(found: Sequence[HeadUnit], block_bytes: int) -> None:
    """Raise :class:`Incompatible` unless every byte of the slot is in one run, and in one only."""
    at = 0
    for offset, length in sorted(run for unit in found for run in unit.runs):
        if offset < at:
            raise Incompatible(f"layers lie over one another at byte {offset} of the slot")
        if offset > at:
            break
        at = offset + length
    if at != block_bytes:
        raise Incompatible(f"byte {at} of a slot of {block_bytes} belongs to no layer's heads")


class _Slot:
    """Where bytes of block 0 in the area have their place in a slot."""

    def __init__(self, group: GroupGeometry) -> None:
        self._segments = group.segments
        self._starts = [segment.offset for segment in group.segments]
        self._places = list(accumulate((s.length for s in group.segments), initial=0))

    def runs(self, layer: Rows, heads: range) -> Iterator[Run]:
        """Yield the byte runs of some of this rank's heads, in canonical order."""
        pages = self._pages_per_block(layer[0])
        rows = layer[0].tokens
        lengths = [part.row_bytes for part in layer]
        if len(layer) == 1 and layer[0].token_stride == lengths[0]:
            rows, lengths = 1, [rows * lengths[0]]
        for head, page, row in product(heads, range(pages), range(rows)):
            for part, length in zip(layer, lengths, strict=True):
                start = part.offset + page * part.page_stride + head * part.head_stride
                yield self._place(part, start + row * part.token_stride, length), length

    def _pages_per_block(self, layer: LayerPages) -> int:
        stride = self._segments[self._find(layer, layer.offset)].stride
        pages, rest = divmod(stride, max(layer.page_stride, 1))
        if rest or not pages:
            raise Incompatible(
                f"layer {layer.name}: pages every {layer.page_stride} bytes, blocks every {stride}"
            )
        return pages

    def _place(self, layer: LayerPages, offset: int, length: int) -> int:
        """Return the slot's offset of a run in the area."""
        number = self._find(layer, offset)
        inside = offset - self._starts[number]
        if inside + length > self._segments[number].length:
            raise self._outside(layer, offset)
        return self._places[number] + inside

    def _find(self, layer: LayerPages, offset: int) -> int:
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            raise self._outside(layer, offset)
        return number

    def _outside(self, layer: LayerPages, offset: int) -> Incompatible:
        return Incompatible(f"layer {layer.name}: byte {offset} of the area is not of block 0")


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join runs that go on where the one before ends."""
    merged: list[Run] = []
    for offset, length in runs:
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((offset, length))
    return tuple(merged)
