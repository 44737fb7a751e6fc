"""Byte runs against a brute-force walk over every element of a KV view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry, view_segments
from kvconnect.errors import Incompatible, Misuse

# vLLM's layouts: memory order of the logical axes [L, B, H, N, C], outermost first.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def dense_strides(shape: Sequence[int], order: Sequence[int], pad: int = 0) -> list[int]:
    """Element strides of a tensor whose axes lie in memory in ``order``; pads before the last."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * shape[axis] + pad
    return strides


def element_bytes(
    offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, rows: range
) -> set[int]:
    """Every byte address that the given rows of dim 0 touch."""
    indices = product(rows, *map(range, shape[1:]))
    starts = (offset + itemsize * sum(map(prod, zip(i, strides, strict=True))) for i in indices)
    return {start + k for start in starts for k in range(itemsize)}


def run_bytes(segments: Sequence[ByteRun], block: int) -> list[int]:
    """Byte addresses of a block in slot order."""
    return [s.offset + block * s.stride + k for s in segments for k in range(s.length)]


def layer_views(layout: str, shape: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield (element offset, shape, strides) of each layer's [B, H, N, C] view."""
    strides = dense_strides(shape, LAYOUTS[layout])
    for layer in range(shape[0]):
        yield layer * strides[0], list(shape[1:]), strides[1:]


def group_of(layout: str, shape: Sequence[int], itemsize: int, num_blocks: int) -> GroupGeometry:
    views = layer_views(layout, shape)
    cut = [view_segments(o * itemsize, s, t, itemsize, num_blocks) for o, s, t in views]
    return GroupGeometry(tuple(s for layer in cut for s in layer), num_blocks)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_each_block_exactly_its_bytes(layout: str, ratio: int) -> None:
    shape, itemsize, num_blocks = (3, 4 * ratio, 2, 5, 6), 2, 4
    group = group_of(layout, shape, itemsize, num_blocks)
    for block in range(num_blocks):
        expected: set[int] = set()
        for offset, view, strides in layer_views(layout, shape):
            rows = range(block * ratio, (block + 1) * ratio)
            expected |= element_bytes(offset * itemsize, view, strides, itemsize, rows)
        found = run_bytes(group.segments, block)
        assert len(found) == len(expected) == group.block_bytes
        assert set(found) == expected
        # Negative control: the neighbour's bytes are not mistaken for this block's.
        assert set(run_bytes(group.segments, (block + 1) % num_blocks)) != expected
    assert group.area_bytes == prod(shape) * itemsize


@pytest.mark.parametrize(
    ("layout", "runs"),
    [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 6), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)],
)
def test_runs_are_as_few_as_the_layout_allows(layout: str, runs: int) -> None:
    """3 layers, 2 heads: block-outermost layouts merge across layers into one run per block."""
    assert len(group_of(layout, (3, 4, 2, 5, 6), 2, 4).segments) == runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_in_as_many_leading_runs_as_are_told(layout: str) -> None:
    shape, itemsize, num_blocks = (3, 4, 2, 5, 6), 2, 4
    group = group_of(layout, shape, itemsize, num_blocks)
    for offset, view, strides in layer_views(layout, shape):
        parts = view_segments(offset * itemsize, view, strides, itemsize, num_blocks)
        wanted = set(run_bytes(parts, 1))
        reach = group.reach(parts)
        assert wanted <= set(run_bytes(group.segments[:reach], 1))
        # Negative control: with one run less something is missing.
        assert not wanted <= set(run_bytes(group.segments[: reach - 1], 1))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_order_padding_and_ratio(data: st.DataObject) -> None:
    rank = data.draw(st.integers(2, 4))
    inner = data.draw(st.lists(st.integers(1, 3), min_size=rank - 1, max_size=rank - 1))
    num_blocks = data.draw(st.integers(1, 3))
    ratio = data.draw(st.integers(1, 2))
    shape = [num_blocks * ratio, *inner]
    order = data.draw(st.sampled_from(list(permutations(range(rank)))))
    strides = dense_strides(shape, order, pad=data.draw(st.integers(0, 2)))
    offset, itemsize = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([1, 2, 4]))

    segments = view_segments(offset, shape, strides, itemsize, num_blocks)

    for block in range(num_blocks):
        rows = range(block * ratio, (block + 1) * ratio)
        found = run_bytes(segments, block)
        assert found == sorted(found)
        assert set(found) == element_bytes(offset, shape, strides, itemsize, rows)
        assert len(found) == len(set(found))
    for left, right in pairwise(segments):
        assert left.offset + left.length < right.offset, "two runs that touch should be one"


def test_size_one_dims_may_have_any_stride() -> None:
    assert view_segments(0, (4, 1, 8), (8, 0, 1), 2, 4) == (ByteRun(0, 16, 16),)
    assert view_segments(0, (1, 2, 8), (0, 8, 1), 2, 1) == (ByteRun(0, 0, 32),)


@pytest.mark.parametrize(
    ("shape", "strides", "num_blocks", "why"),
    [
        ((4, 2, 8), (16, 0, 1), 4, "overlap"),  # a broadcast dim
        ((4, 2, 8), (8, 8, 1), 4, "overlap"),  # blocks share a half
        ((4, 2, 8), (16, -8, 1), 4, "overlap"),
        ((4, 2, 3), (6, 2, 1), 4, "overlap"),
        ((4, 0, 8), (8, 8, 1), 4, "empty"),
        ((5, 8), (8, 1), 4, "multiple"),
        ((4, 8), (8, 1), 0, "multiple"),
        ((4,), (1,), 4, "rank"),
        ((4, 8), (8,), 4, "rank"),
    ],
)
def test_views_without_runs_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], num_blocks: int, why: str
) -> None:
    with pytest.raises(Incompatible, match=why) as caught:
        view_segments(0, shape, strides, 2, num_blocks)
    assert f"shape={shape}, strides={strides}" in str(caught.value)


def test_group_is_canonical() -> None:
    a, b, c = ByteRun(0, 64, 16), ByteRun(16, 64, 16), ByteRun(512, 64, 8)
    group = GroupGeometry((c, b, a, b), num_blocks=4)
    assert group == GroupGeometry((a, b, c), num_blocks=4)
    assert group.segments == (ByteRun(0, 64, 32), c)
    assert group.block_bytes == 40
    assert group.area_bytes == 512 + 3 * 64 + 8
    # Touching runs that advance differently stay apart.
    assert len(GroupGeometry((a, ByteRun(16, 128, 16)), 1).segments) == 2


@pytest.mark.parametrize(
    "segments",
    [
        (ByteRun(0, 64, 16), ByteRun(8, 64, 16)),
        (ByteRun(0, 64, 16), ByteRun(0, 64, 32)),
        (ByteRun(0, 64, 64), ByteRun(64, 64, 64)),  # one layer's blocks run into the next layer
    ],
)
def test_overlapping_layers_are_refused(segments: tuple[ByteRun, ...]) -> None:
    with pytest.raises(Incompatible, match="overlap"):
        GroupGeometry(segments, num_blocks=2)


def test_nothing_to_copy_is_a_bug_of_the_caller() -> None:
    with pytest.raises(Misuse):
        GroupGeometry((), num_blocks=2)
    with pytest.raises(Misuse):
        GroupGeometry((ByteRun(0, 1, 1),), num_blocks=0)
    with pytest.raises(Misuse):
        Geometry(())


@pytest.mark.parametrize(("block_bytes", "slot_bytes"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_slot_fits_the_largest_group_in_whole_pages(block_bytes: int, slot_bytes: int) -> None:
    small = GroupGeometry((ByteRun(0, 1, 1),), num_blocks=2)
    large = GroupGeometry((ByteRun(0, block_bytes, block_bytes),), num_blocks=3)
    geometry = Geometry((small, large))
    assert geometry.slot_bytes == slot_bytes
    assert geometry.area_bytes == 3 * block_bytes
