"""Units of a block that are the same for every tensor-parallel size.

A rank's slot holds that rank's heads, in the order of its KV cache. Records are cut by the model's
heads, so that engines with another number of ranks can use them. A *unit* is the part of a block
that belongs to a few consecutive heads, in canonical order ("HNC": layer, head, token)::

    8 heads, one per unit     TP 1 |0|1|2|3|4|5|6|7|    TP 4, rank 1 |2|3|    TP 8, rank 5 |5|

A unit is a list of byte runs of a slot. Two workers that list the same layers with equal rows get
the same bytes for the same unit. A row may have several parts: a worker with K and V in two tensors
lists both, and matches a worker that keeps them side by side.

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
"""Tensor-parallel size that most engines stay within; more units than that only cost time."""

Run = tuple[int, int]
"""Offset in the slot, length."""


Rows = Sequence["LayerPages"]
"""Pages of one layer: one entry per part of its rows, in order."""


@dataclass(frozen=True, slots=True)
class HeadUnit:
    """One unit of the model, with its byte runs in a slot.

    ``number`` is the same on all ranks of all engines. ``runs`` are in canonical order; adjacent
    runs are merged.
    """

    number: int
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Size of the unit in bytes."""
        return sum(length for _, length in self.runs)


def unit_heads(total_heads: int, own_heads: int) -> int:
    """Return the heads per unit: an eighth of the model's heads, or 1 if 8 does not divide them.

    A rank with fewer heads cuts smaller units, which only ranks with as few heads can use.
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
    """Return a rank's units of a block, in ascending order of their numbers.

    Every byte of the slot is in exactly one run of one unit.

    Args:
        group: geometry of a block in a slot.
        layers: pages of the group's layers, in the model's order. Layers that share another
            layer's bytes are left out.
        heads: (first, end) of this rank's KV heads. Ranks with the same heads get the same units.
        total_heads: KV heads of the model. 1 where all ranks hold the same bytes (MLA): one unit,
            number 0.
        tokens_apart: a page has one row per token. If not, each head's bytes of a page are opaque
            and stay together.

    Raises:
        Misuse: no layers, or heads that the model does not have.
        Incompatible: heads are not whole units, a layer has another number of heads, rows outside
            the block or an opaque head in several pieces, or the layers do not cover every byte of
            the slot exactly once. The message names the layer or the byte.
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
        found.append(HeadUnit((first + start) // step, merged(runs)))
    _check_cover(found, group.block_bytes)
    return tuple(found)


def page_units(
    block: Sequence[HeadUnit], lengths: Sequence[int], pages: int
) -> tuple[tuple[HeadUnit, ...], ...]:
    """Return the units of each of the ``pages`` pages of a block: parts with equally many tokens.

    A unit of a page is what :func:`units` returns for a block of as many tokens.

    Args:
        block: the units of the block. Its tokens are apart.
        lengths: bytes of the block of one head, per layer, in the model's order.

    Raises:
        Misuse: a unit is not whole heads of these layers, or a length is not whole pages.
    """
    if any(length % pages for length in lengths):
        raise Misuse(f"{pages} pages of heads with {list(lengths)} bytes")
    cut = []
    for unit in block:
        heads, rest = divmod(unit.nbytes, sum(lengths))
        if rest:
            raise Misuse(f"unit {unit.number} of {unit.nbytes} bytes, a head has {sum(lengths)}")
        sizes = [length // pages for length in lengths for _ in range(heads)]
        cut.append([HeadUnit(unit.number, runs) for runs in _dealt(unit.runs, sizes, pages)])
    return tuple(zip(*cut, strict=True))


def _dealt(runs: Iterable[Run], sizes: Iterable[int], pages: int) -> list[tuple[Run, ...]]:
    """Cut runs into pieces, ``pages`` of each size, and deal them out to the pages in turn."""
    dealt: list[list[Run]] = [[] for _ in range(pages)]
    rest, offset, left = iter(runs), 0, 0
    for size, page in product(sizes, range(pages)):
        missing = size
        while missing:
            if not left:
                offset, left = next(rest)
            taken = min(left, missing)
            dealt[page].append((offset, taken))
            offset, left, missing = offset + taken, left - taken, missing - taken
    return [merged(page) for page in dealt]


def _check_part(layer: LayerPages, heads: int, tokens_apart: bool) -> None:
    if layer.heads != heads:
        raise Incompatible(f"layer {layer.name} has {layer.heads} heads, the rank has {heads}")
    if not tokens_apart and layer.tokens > 1 and layer.token_stride != layer.row_bytes:
        raise Incompatible(
            f"layer {layer.name}: what a head has of a page is opaque and not in one piece "
            f"(rows of {layer.row_bytes} bytes every {layer.token_stride})"
        )


def _check_cover(found: Sequence[HeadUnit], block_bytes: int) -> None:
    """Raise :class:`Incompatible` unless every byte of the slot is in exactly one run."""
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
    """Maps bytes of block 0 in the area to offsets in a slot."""

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
        """Return the offset in the slot of a run of the area."""
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


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Merge runs that are adjacent."""
    found: list[Run] = []
    for offset, length in runs:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return tuple(found)
