"""Where a block's bytes are: strides turned into byte runs. Arithmetic only.

A worker's KV cache is one backing *area* of bytes (one torch storage). A block of a group is
spread over it, one piece per layer and often one per head, in whatever order the engine's layout
put it. A *slot* of the host tier holds the same bytes back to back::

    area   |..L0b0|L0b1|L0b2|....|..L1b0|L1b1|L1b2|...        one Segment per layer here:
                 ^offset(L0)+1*stride    ^offset(L1)+1*stride    block 1 = two runs
    slot   |L0b1|L1b1|pad to 4 KiB|

Everything that copies, sizes or hashes blocks takes these objects and knows nothing of layouts.
All sizes and offsets are bytes unless a name says otherwise. Objects are immutable and may be
shared between threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from kvconnect.errors import Incompatible, Misuse

SLOT_ALIGNMENT = 4096
"""Slots start on page boundaries, so that direct I/O and page-locking can use them as they are."""


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
    """Return the fewest contiguous byte runs that make up one block of one layer's KV view.

    ``offset`` is the view's first byte in the backing area. ``shape`` and ``strides`` (elements,
    as torch gives them) describe a view of rank >= 2 whose dim 0 counts blocks; the other dims may
    lie in memory in any order, so all of vLLM's layouts (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC)
    are served alike. Where the attention kernel's blocks are smaller than the manager's, dim 0 is
    ``ratio * num_blocks`` and block ``b`` owns rows ``b * ratio`` to ``(b + 1) * ratio - 1``.

    Runs come in ascending order of offset, which is also their order in a slot.

    Raises :class:`Incompatible` for a view that has no such runs: dims that overlap (stride 0),
    run backwards or interleave, an empty dim, or a dim 0 that ``num_blocks`` does not divide. The
    message holds shape and strides; the caller adds the layer's name.
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
    """True if every dim, smallest stride first, steps over all that lies inside it."""
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
    """All byte runs of one KV-cache group's blocks, in the order a slot holds them.

    Give it the segments of every layer of the group in any order. They are brought into canonical
    form: identical ones (layers that share another layer's KV) are kept once, the rest is sorted
    by offset, and neighbours that touch are merged. So two workers with the same cache agree on
    the bytes of a slot.

    Raises :class:`Incompatible` if two layers partly overlap, :class:`Misuse` for no segments.
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
        """Return how many leading segments of this group hold all bytes of its parts ``segments``,
        say, those of a layer."""
        starts = [own.offset for own in self.segments]
        return max(bisect_right(starts, part.offset) for part in segments)

    @property
    def area_bytes(self) -> int:
        """Size a backing area needs at least to hold all blocks of this group."""
        last = self.num_blocks - 1
        return max(s.offset + last * s.stride + s.length for s in self.segments)


def _merge(segments: Sequence[ByteRun]) -> list[ByteRun]:
    """Join segments, sorted by offset, that touch and advance alike from block to block."""
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
    """All groups of one worker, indexed by KV-cache group id. Groups may lie over one another."""

    groups: tuple[GroupGeometry, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise Misuse("a geometry needs at least one group")

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: room for the largest group's block, rounded up to whole 4 KiB pages."""
        largest = max(group.block_bytes for group in self.groups)
        return -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def area_bytes(self) -> int:
        """Size a backing area needs at least."""
        return max(group.area_bytes for group in self.groups)
