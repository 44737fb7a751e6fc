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
from kvconnect.testing.page_memory import PageMemory
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


def digests(
    area: bytearray, table: array[int], ids: array[int], nbytes: int, grid: int = 2
) -> list[int]:
    """Return what the kernel makes of some blocks; check that it writes nothing else."""
    steps = -(-nbytes // kernels.DIGEST_STEP_BYTES)
    sums = array("Q", [POISON]) * (steps * kernels.DIGEST_LANES * len(ids) + 1)
    found = array("Q", [POISON]) * (len(ids) + 1)
    ready = array("q", [0])
    sources = address(area), address(table), long_(len(table) // kernels.ROW), address(ids)
    results = address(sums), address(ready), address(found)
    arguments = [*sources, long_(len(ids)), long_(nbytes), *results]
    launch_on_host("hash_blocks", grid, 64, arguments, seed=3)
    assert ready[0] == 0  # for the next launch
    assert sums[-1] == found[-1] == POISON
    return found.tolist()[:-1]


def cut(nbytes: int, ends: list[int], at: int, gap: int) -> list[ByteRun]:
    """Return the runs of blocks that are cut at ``ends``, three blocks per run."""
    segments = []
    for start, end in zip([0, *ends], [*ends, nbytes], strict=True):
        segments.append(ByteRun(at, end - start, end - start))
        at += 3 * (end - start) + gap
    return segments


def check_digests(segments: list[ByteRun], nbytes: int, piece: int, grid: int = 2) -> None:
    """Compare with xxhash, for blocks in any order; a byte that changes changes one digest."""
    area = noise(max(s.offset + 3 * s.stride for s in segments), nbytes)
    assert (address(area).value or 0) % 16 == 0  # so a run's offset says how it is aligned
    ids, table = array("q", [2, 0, 1]), page_table(segments, piece)
    contents = [
        b"".join(area[s.offset + b * s.stride :][: s.length] for s in segments) for b in ids
    ]
    found = digests(area, table, ids, nbytes, grid)
    assert found == [xxhash.xxh3_64_intdigest(content) for content in contents]
    assert found == reference.digest_blocks(memoryview(area), table, ids)
    last = segments[-1]
    area[last.offset + last.stride + last.length - 1] ^= 1  # negative control: block 1's last byte
    changed = digests(area, table, ids, nbytes, grid)
    assert changed[:2] == found[:2] and changed[2] != found[2]


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_digest_is_xxh3_of_the_block(nbytes: int, cuts: int) -> None:
    generator = random.Random(nbytes + cuts)
    ends = sorted(generator.sample(range(1, nbytes), cuts - 1))
    check_digests(cut(nbytes, ends, 3 if cuts > 2 else 0, generator.randrange(9)), nbytes, 900)


@pytest.mark.parametrize("at", [0, 1, 4, 8])
@pytest.mark.parametrize("run", [1024, 8448, 16_384])
def test_digest_of_runs_that_steps_fit_and_cross(run: int, at: int) -> None:
    """Whole steps in a run, which is read in words of 16 bytes where it is aligned to them; and
    steps that lie in two runs."""
    for nbytes in (3 * run, 3 * run - 16, 3 * run - 65):
        check_digests(cut(nbytes, [run, 2 * run], at, 0), nbytes, kernels.PIECE_BYTES, grid=3)


@pytest.mark.parametrize("nbytes", [(1 << 20) + 24, 2 << 20, (3 << 20) - 1008])
def test_digest_of_a_long_block(nbytes: int) -> None:
    """Its steps are spread over more threads than one block of the grid has."""
    check_digests(cut(nbytes, [nbytes // 2 // 16 * 16], 16, 0), nbytes, kernels.PIECE_BYTES, 5)


@settings(max_examples=30)
@given(
    nbytes=st.integers(241, 20_000),
    cuts=st.sets(st.integers(1, 19_999), max_size=4),
    at=st.integers(0, 17),
    piece=st.sampled_from([7, 900, 8192]),
)
def test_digest_of_any_block(nbytes: int, cuts: set[int], at: int, piece: int) -> None:
    check_digests(cut(nbytes, sorted(c for c in cuts if c < nbytes), at, at % 3), nbytes, piece)


def check_staged(segments: list[ByteRun], nbytes: int, piece: int, grid: int = 2) -> None:
    """Move blocks out of one cache and into another, with and without their digests."""
    size = max(s.offset + 3 * s.stride for s in segments)
    area, other = noise(size, nbytes), noise(size, nbytes + 1)
    ids, table = array("q", [2, 0, 1]), page_table(segments, piece)
    stride = -(-nbytes // 16) * 16
    wanted_copy, wanted_area = bytearray([POISON]) * (3 * stride + 8), bytearray(other)
    views = memoryview(wanted_copy), memoryview(wanted_area)
    wanted = reference.gather_staged(memoryview(area), views[0], table, ids, stride)
    assert reference.scatter_staged(views[1], views[0], table, ids, stride) == wanted
    assert wanted_area != other  # negative control
    for hashes in (nbytes > kernels.DIGEST_OVER, False):
        copy, target = bytearray([POISON]) * len(wanted_copy), bytearray(other)
        for kernel, cache in (("gather_staged", area), ("scatter_staged", target)):
            steps = -(-nbytes // kernels.DIGEST_STEP_BYTES)
            sums = array("Q", [POISON]) * (steps * kernels.DIGEST_LANES * 3 + 1)
            found, ready = array("Q", [POISON]) * 4, array("q", [0])
            sources = address(cache), address(table), long_(len(table) // kernels.ROW), address(ids)
            results = address(sums), address(ready), address(found) if hashes else long_(0)
            places = address(copy), long_(stride)
            arguments = [*sources, long_(3), long_(nbytes), *results, *places]
            launch_on_host(kernel, grid, 64, arguments, seed=3)
            assert found.tolist() == ([*wanted, POISON] if hashes else [POISON] * 4)
            assert ready[0] == 0 and sums[-1] == POISON
        assert copy == wanted_copy and target == wanted_area


@pytest.mark.parametrize("nbytes", [1, 16, 240, *LENGTHS])
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_blocks_move_and_are_hashed(nbytes: int, cuts: int) -> None:
    generator = random.Random(nbytes + cuts)
    ends = sorted(generator.sample(range(1, nbytes), min(cuts, nbytes) - 1))
    check_staged(cut(nbytes, ends, 3 if cuts > 2 else 0, generator.randrange(9)), nbytes, 900)


@pytest.mark.parametrize("at", [0, 1, 8])
@pytest.mark.parametrize("run", [1024, 8448, 16_384])
def test_blocks_move_in_runs_that_steps_fit_and_cross(run: int, at: int) -> None:
    for nbytes in (3 * run, 3 * run - 65):
        check_staged(cut(nbytes, [run, 2 * run], at, 0), nbytes, kernels.PIECE_BYTES, grid=3)


@pytest.mark.parametrize("seed", range(5))
def test_the_last_thread_block_folds_whichever_it_is(seed: int) -> None:
    """The control: if one seems to be ready that is not, one folds too early, or none does."""
    area, ids = noise(1 << 15, 1), array("q", [0])
    table = page_table([ByteRun(0, 1 << 15, 1 << 15)])
    sources = address(area), address(table), long_(len(table) // kernels.ROW), address(ids)
    for before in (0, 1, 5):
        sums, found = array("Q", bytes(64 * 32)), array("Q", [POISON])
        ready = array("q", [before])
        results = address(sums), address(ready), address(found)
        arguments = [*sources, long_(1), long_(1 << 15), *results]
        launch_on_host("hash_blocks", 4, 32, arguments, seed)
        assert (found[0] == xxhash.xxh3_64_intdigest(area)) is (before == 0)


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
    ("length", "lanes"),
    [(1, 1), (128, 1), (255, 1), (512, 4), (1024, 8), (2048, 16), (4096, 32), (8192, 32)],
)
def test_short_runs_get_few_lanes_so_that_each_has_its_loads_on_their_way(
    length: int, lanes: int
) -> None:
    assert lanes_for(page_table([ByteRun(0, length, length)])) == lanes
    words = length // 16
    assert words < kernels.IN_FLIGHT or words // lanes >= kernels.IN_FLIGHT
    assert f"#define IN_FLIGHT {kernels.IN_FLIGHT} " in (kernels.folder() / "runs.cuh").read_text()
