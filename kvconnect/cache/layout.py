"""The byte runs of a block, computed from the strides of the KV cache. Arithmetic only.

A worker's KV cache is one backing *area* of bytes (one torch storage). A block of a group has one
piece per layer in it, often one per head, in the order of the engine's layout. A *slot* of the
host tier holds the same bytes back to back::

    area   |..L0b0|L0b1|L0b2|....|..L1b0|L1b1|L1b2|...        one Segment per layer here:
                 ^offset(L0)+1*stride    ^offset(L1)+1*stride    block 1 = two runs
    slot   |L0b1|L1b1|pad to 4 KiB|

Code that copies, sizes or hashes blocks uses these objects and no layouts. All sizes and offsets
are bytes unless a name says otherwise. Objects are immutable; threads may share them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from kvconnect.errors import Incompatible, Misuse

SLOT_ALIGNMENT = 4096
"""Slots start on page boundaries, as direct I/O and page-locking require."""


@dataclass(frozen=True, slots=True, order=True)
class ByteRun:
    """One byte run of every block: block ``b`` owns ``[offset + b * stride, + length)``.

    ``offset`` counts from the start of the backing area.
    """

    offset: int
    stride: int
    length: int


@dataclass(frozen=True, slots=True)
class _Dim:
    stride: int
    size: int


def view_segments(
    offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, num_blocks: int
) -> tuple[ByteRun, ...]:
    """Return the fewest contiguous byte runs of one block in one layer's KV view.

    The runs are in ascending order of offset, which is also their order in a slot.

    Args:
        offset: first byte of the view in the backing area.
        shape: of the view, rank >= 2. Dim 0 counts blocks. Where the attention kernel's blocks are
            smaller than the manager's, dim 0 is ``ratio * num_blocks``, and block ``b`` owns rows
            ``b * ratio`` to ``(b + 1) * ratio - 1``.
        strides: in elements, as torch gives them. All dims but 0 may be in any order in memory;
            this covers all layouts of vLLM (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC).

    Raises:
        Incompatible: dims overlap (stride 0), run backwards or interleave, a dim is empty, or
            ``num_blocks`` does not divide dim 0. The message has shape and strides; the caller
            adds the layer's name.
    """
    _check_view(shape, strides, num_blocks)
    ratio = shape[0] // num_blocks
    block = _Dim(strides[0] * ratio, num_blocks)
    inner = [_Dim(strides[0], ratio), *map(_Dim, strides[1:], shape[1:])]
    inner = sorted((d for d in inner if d.size > 1), key=lambda d: d.stride)
    if not _nested(sorted([block, *inner] if num_blocks > 1 else inner, key=lambda d: d.stride)):
        raise _refused("its dims overlap", shape, strides, num_blocks)

    run = 1  # elements
    while inner and inner[0].stride == run:
        run *= inner.pop(0).size
    starts = product(*([i * d.stride for i in range(d.size)] for d in inner))
    return tuple(
        ByteRun(offset + start * itemsize, block.stride * itemsize, run * itemsize)
        for start in sorted(map(sum, starts))
    )


def _check_view(shape: Sequence[int], strides: Sequence[int], num_blocks: int) -> None:
    if len(shape) != len(strides) or len(shape) < 2:
        raise _refused("rank must be at least 2, with a stride per dim", shape, strides, num_blocks)
    if min(shape) < 1:
        raise _refused("a dim is empty", shape, strides, num_blocks)
    if num_blocks < 1 or shape[0] % num_blocks:
        raise _refused("dim 0 is not a multiple of the blocks", shape, strides, num_blocks)


def _nested(dims: Iterable[_Dim]) -> bool:
    """Return whether every dim, smallest stride first, steps over the span of those before it."""
    span = 1
    for dim in dims:
        if dim.stride < span:
            return False
        span += (dim.size - 1) * dim.stride
    return True


def _refused(
    why: str, shape: Sequence[int], strides: Sequence[int], num_blocks: int
) -> Incompatible:
    return Incompatible(
        f"KV view cannot be cut into blocks: {why} "
        f"(shape={tuple(shape)}, strides={tuple(strides)}, num_blocks={num_blocks})"
    )


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """All byte runs of the blocks of one KV-cache group, in slot order.

    The constructor takes the segments of all layers in any order and makes them canonical, so that
    two workers with the same cache agree on the bytes of a slot. Identical segments (layers that
    share KV) are kept once, the rest is sorted by offset, and adjacent ones are merged.

    Raises:
        Incompatible: two layers partly overlap, or a segment is longer than its stride.
        Misuse: no segments or no blocks.
    """

    segments: tuple[ByteRun, ...]
    num_blocks: int
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.segments or self.num_blocks < 1:
            raise Misuse(f"a group of {len(self.segments)} segments and {self.num_blocks} blocks")
        merged = _merge(sorted(set(self.segments)))
        for segment in merged:
            if self.num_blocks > 1 and segment.length > segment.stride:
                raise Incompatible(f"blocks overlap: {segment} is longer than its stride")
        object.__setattr__(self, "segments", tuple(merged))
        object.__setattr__(self, "block_bytes", sum(s.length for s in merged))

    def reach(self, segments: Iterable[ByteRun]) -> int:
        """Return the number of leading segments of this group that cover ``segments``, for
        instance those of one layer."""
        starts = [own.offset for own in self.segments]
        return max(bisect_right(starts, part.offset) for part in segments)

    @property
    def area_bytes(self) -> int:
        """Least size of a backing area that holds all blocks of this group."""
        last = self.num_blocks - 1
        return max(s.offset + last * s.stride + s.length for s in self.segments)


def _merge(segments: Sequence[ByteRun]) -> list[ByteRun]:
    """Merge adjacent segments with equal strides. ``segments`` are sorted by offset."""
    merged = [segments[0]]
    for segment in segments[1:]:
        last = merged[-1]
        end = last.offset + last.length
        if segment.offset < end:
            raise Incompatible(f"layers overlap in the KV cache: {last} and {segment}")
        if segment.offset == end and segment.stride == last.stride:
            merged[-1] = ByteRun(last.offset, last.stride, last.length + segment.length)
        else:
            merged.append(segment)
    return merged


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups of one worker, indexed by KV-cache group id. Groups may overlap in memory."""

    groups: tuple[GroupGeometry, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise Misuse("a geometry needs at least one group")

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: the largest block of any group, rounded up to ``SLOT_ALIGNMENT``."""
        largest = max(group.block_bytes for group in self.groups)
        return -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def area_bytes(self) -> int:
        """Least size of the backing area."""
        return max(group.area_bytes for group in self.groups)
