"""The CUDA kernels' sources, run on the CPU, against their references byte for byte."""

from __future__ import annotations

import ctypes
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.layout import ByteRun
from kvconnect.cache.pages import LayerPages, unit_segments
from kvconnect.copy import kernels
from kvconnect.copy.kernels import lanes_for, reference, unit_table
from kvconnect.testing.memory import PageMemory
from kvconnect.transport.base import Unit
from tests.kernels import address, launch_on_host

xxhash = pytest.importorskip("xxhash")

POISON = 0xA5
long_ = ctypes.c_longlong


def page_table(segments: list[ByteRun], piece: int = kernels.PIECE_BYTES) -> array[int]:
    return kernels.page_table([(s.offset, s.stride, s.length) for s in segments], piece)


def noise(nbytes: int, seed: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(nbytes))


def move(name: str, memories: tuple[bytearray, bytearray], numbers: dict[str, object]) -> None:
    """Launch one of the four copy kernels."""
    table, ids = numbers["table"], numbers["ids"]
    assert isinstance(table, array) and isinstance(ids, array)
    phases = numbers.get("phases")
    rows = len(table) // kernels.ROW // (phases or 1)  # type: ignore[operator]
    per_id = 1 if phases else 2
    middle = [long_(phases)] if phases else []  # type: ignore[arg-type]
    launch_on_host(
        name,
        numbers.get("grid", 3),  # type: ignore[arg-type]
        64,
        [
            *map(address, memories),
            address(table),
            long_(rows),
            *middle,
            address(ids),
            long_(len(ids) // per_id),
            long_(numbers["size"]),  # type: ignore[arg-type]
            long_(numbers["lanes"]),  # type: ignore[arg-type]
        ],
        seed=5,
    )


@st.composite
def block_copies(draw: st.DrawFn) -> tuple[list[ByteRun], array[int], int, int]:
    """Segments of any length and alignment, (block, slot) pairs, slot size, lanes."""
    blocks = draw(st.integers(1, 5))
    segments, at = [], draw(st.integers(0, 17))
    lengths = st.integers(1, 80) | st.integers(0, 40).map(lambda n: 16 * n + 16)
    for length in draw(st.lists(lengths | st.integers(900, 5000), min_size=1, max_size=4)):
        stride = length + draw(st.sampled_from([0, 0, 1, 3, 4, 8, 16]))
        segments.append(ByteRun(at, stride, length))
        at += blocks * stride + draw(st.sampled_from([0, 0, 1, 4, 8]))
    count = draw(st.integers(1, blocks))
    sources = draw(st.permutations(range(blocks)))[:count]
    slots = draw(st.permutations(range(blocks + 2)))[:count]
    pairs = array("q", [n for pair in zip(sources, slots, strict=True) for n in pair])
    slot_bytes = sum(s.length for s in segments) + draw(st.sampled_from([0, 5, 16]))
    return segments, pairs, slot_bytes, draw(st.sampled_from([1, 2, 4, 8, 16, 32]))


@settings(max_examples=30)
@given(case=block_copies(), piece=st.sampled_from([7, 64, 1000, 8192]))
@pytest.mark.parametrize("name", ["gather_pages", "scatter_pages"])
def test_pages_match_the_reference(
    name: str, case: tuple[list[ByteRun], array[int], int, int], piece: int
) -> None:
    segments, pairs, slot_bytes, lanes = case
    table = page_table(segments, piece)
    size = max(s.offset + 5 * s.stride + s.length for s in segments)
    memories = noise(size, 1), noise(8 * slot_bytes, 2)
    expected = bytearray(memories[0]), bytearray(memories[1])
    numbers = {"table": table, "ids": pairs, "size": slot_bytes, "lanes": lanes}
    move(name, memories, numbers)
    views = memoryview(expected[0]), memoryview(expected[1])
    getattr(reference, name)(*views, table, pairs, slot_bytes)
    assert memories == expected  # all of both memories: nothing beside the blocks was touched


def test_a_missing_row_shows() -> None:
    """Negative control: the comparison sees one run that was not copied."""
    table = page_table([ByteRun(0, 32, 32), ByteRun(64, 32, 32)])
    pairs = array("q", [0, 0, 1, 1])
    for rows, same in ((table, True), (table[: kernels.ROW], False)):
        area, arena = noise(128, 1), bytearray([POISON]) * 128
        wanted = bytearray(arena)
        reference.gather_pages(memoryview(area), memoryview(wanted), table, pairs, 64)
        move("gather_pages", (area, arena), {"table": rows, "ids": pairs, "size": 64, "lanes": 2})
        assert (arena == wanted) is same


def conversions() -> list[tuple[Unit, Unit]]:
    """Pairs of caches that differ in head slice, block size or order of heads and tokens."""
    row, tokens = 48, 8
    nhc = [LayerPages(f"n{i}", i * 10_000, 4 * tokens * row, row, 4 * row, 4, tokens, row)
           for i in range(2)]  # fmt: skip
    hnc = [LayerPages(f"h{i}", i * 10_000 + 8, 2 * 4 * row, 4 * row, row, 2, 4, row)
           for i in range(2)]  # fmt: skip
    pairs = []
    for first in (0, 2):
        pairs.append(
            (
                Unit(*unit_segments(nhc, (first, first + 2), 4, "HNC")),
                Unit(*unit_segments(hnc, (0, 2), 4, "HNC")),
            )
        )
    pairs.append(
        (
            Unit(*unit_segments(nhc, (1, 2), 2, "NHC")),
            Unit(*unit_segments(hnc, (1, 2), 2, "NHC")),
        )
    )
    return pairs


@pytest.mark.parametrize("pair", range(3))
@pytest.mark.parametrize("piece", [16, 100, 8192])
def test_hand_off_between_different_heads_and_block_sizes(pair: int, piece: int) -> None:
    source, target = conversions()[pair]
    there, here = PageMemory(30_000, seed=1), PageMemory(30_000, seed=2)
    ids, places = array("q", [5, 0, 2, 3]), array("q", [1, 6, 4, 0])
    staged = bytearray([POISON]) * (4 * source.block_bytes + 8)

    table, _ = unit_table(source.segments, source.phases, piece)
    common = {"size": source.block_bytes, "lanes": lanes_for(table)}
    move("pack_blocks", (there.data, staged), common | {"table": table, "ids": ids,
                                                        "phases": source.phases})  # fmt: skip
    assert staged[:-8] == there.read(source, ids)
    assert staged[-8:] == bytes([POISON]) * 8

    expected = PageMemory(30_000, seed=2)
    expected.write(target, places, staged)
    assert here.data != expected.data  # negative control
    table, _ = unit_table(target.segments, target.phases, piece)
    reference_data = bytearray(here.data)
    move("unpack_blocks", (here.data, staged), common | {"table": table, "ids": places,
                                                         "phases": target.phases})  # fmt: skip
    assert here.data == expected.data
    view = memoryview(reference_data)
    reference.unpack_blocks(view, memoryview(staged), table, target.phases, places)
    assert reference_data == expected.data
    packed = bytearray(len(staged))
    reference.pack_blocks(view, memoryview(packed), table, target.phases, places)
    assert packed[:-8] == staged[:-8]


LENGTHS = [241, 255, 256, 257, 320, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 5000,
           16_384, 16_385, 17_408, 17_409, 40_000]  # fmt: skip


def digests(area: bytearray, table: array[int], pairs: array[int], nbytes: int) -> list[int]:
    found = array("Q", bytes(8 * (len(pairs) // 2)))
    launch_on_host(
        "digest_pages",
        2,
        128,
        [
            address(area),
            address(table),
            long_(len(table) // kernels.ROW),
            address(pairs),
            long_(len(pairs) // 2),
            long_(nbytes),
            address(found),
        ],
        seed=3,
    )
    return found.tolist()


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_digest_is_xxh3_of_the_block(nbytes: int, cuts: int) -> None:
    generator = random.Random(nbytes + cuts)
    ends = [*sorted(generator.sample(range(1, nbytes), cuts - 1)), nbytes]
    segments, at = [], 3 if cuts > 2 else 0
    for start, end in zip([0, *ends], ends, strict=False):
        segments.append(ByteRun(at, end - start, end - start))
        at += 3 * (end - start) + generator.randrange(9)
    area = noise(at, nbytes)
    pairs = array("q", [2, 0, 0, 0, 1, 0])
    table = page_table(segments, 900)
    contents = [
        b"".join(area[s.offset + b * s.stride :][: s.length] for s in segments) for b in (2, 0, 1)
    ]
    found = digests(area, table, pairs, nbytes)
    assert found == [xxhash.xxh3_64_intdigest(content) for content in contents]
    assert found == reference.digest_pages(memoryview(area), table, pairs)
    last = segments[-1]
    area[last.offset + last.stride + last.length - 1] ^= 1  # negative control: block 1's last byte
    changed = digests(area, table, pairs, nbytes)
    assert changed[:2] == found[:2] and changed[2] != found[2]


def test_tables_cut_long_runs_and_pad_short_phases() -> None:
    table = page_table([ByteRun(5, 100, 20), ByteRun(1000, 50, 9)], 8)
    assert [tuple(table[i : i + 4]) for i in range(0, len(table), 4)] == [
        (5, 100, 8, 0),
        (13, 100, 8, 8),
        (21, 100, 4, 16),
        (1000, 50, 8, 20),
        (1008, 50, 1, 28),
    ]
    rows, per_phase = unit_table([0, 9, 10, 50, 9, 2, 20, 9, 4, 60, 9, 8], 2, 8)
    assert per_phase == 3
    assert rows.tolist()[12:] == [20, 9, 4, 0, 60, 9, 8, 4, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("length", "lanes"), [(1, 1), (16, 1), (48, 2), (128, 8), (256, 16), (512, 32), (8192, 32)]
)
def test_short_runs_get_few_lanes(length: int, lanes: int) -> None:
    assert lanes_for(page_table([ByteRun(0, length, length)])) == lanes
