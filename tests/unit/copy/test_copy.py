"""Copiers: the reference against torch indexing, the native one against the reference."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry, view_segments
from kvconnect.errors import Misuse, TransferFailed

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from kvconnect.copy import Copier, make_copier, native_unavailable_reason
from kvconnect.copy.reference import ReferenceCopier

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]

needs_native = pytest.mark.skipif(
    native_unavailable_reason() is not None, reason=str(native_unavailable_reason())
)


def copier_class(kind: str) -> type:
    if kind == "reference":
        return ReferenceCopier
    from kvconnect.copy.native import NativeCopier

    return NativeCopier


kinds = pytest.mark.parametrize("kind", ["reference", pytest.param("native", marks=needs_native)])


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def kv_cache(layout: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one storage as bytes, and its [B, H, N, C] int16 view of every layer."""
    sizes = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), strict=True))
    area = random_bytes(2 * LAYERS * BLOCKS * HEADS * TOKENS * CONTENT, seed=1)
    physical = area.view(torch.int16).view([sizes[axis] for axis in layout])
    logical = physical.permute([layout.index(axis) for axis in "LBHNC"])
    return area, list(logical.unbind(0))


def geometry_of(views: list[torch.Tensor]) -> Geometry:
    segments = [
        segment
        for v in views
        for segment in view_segments(
            2 * v.storage_offset(), v.shape, v.stride(), v.element_size(), BLOCKS
        )
    ]
    return Geometry((GroupGeometry(tuple(segments), BLOCKS),))


@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_whole_and_alone(kind: str, layout: str) -> None:
    area, views = kv_cache(layout)
    geometry = geometry_of(views)
    arena = torch.zeros(4 * geometry.slot_bytes, dtype=torch.uint8)
    copier = copier_class(kind)(area, arena, geometry)
    before = [v.clone() for v in views]

    copier.store(0, [3, 1], [2, 0])
    assert all(torch.equal(v, b) for v, b in zip(views, before, strict=True))
    slot = arena[2 * geometry.slot_bytes :][: geometry.groups[0].block_bytes]
    expected = torch.cat([v[3].reshape(-1) for v in views]).view(torch.uint8)
    assert torch.equal(slot.sort().values, expected.sort().values)  # order depends on the layout
    assert not arena[geometry.slot_bytes : 2 * geometry.slot_bytes].any()

    area.zero_()
    copier.load(0, [4, 1], [2, 0])  # block 3's bytes go to block 4
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view[4], old[3])
        assert torch.equal(view[1], old[1])
        assert not view[[0, 2, 3]].any()

    # Negative control: one flipped bit in the slot arrives in exactly that block.
    arena[2 * geometry.slot_bytes] ^= 1
    copier.load(0, [4, 1], [2, 0])
    same = [torch.equal(v[4], old[3]) for v, old in zip(views, before, strict=True)]
    assert same.count(False) == 1
    assert all(torch.equal(v[1], old[1]) for v, old in zip(views, before, strict=True))


@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_are_loaded_as_blocks_are(kind: str, layout: str) -> None:
    """Also of the last slot. The reference has no parts of a block: all comes with the first."""
    area, views = kv_cache(layout)
    geometry = geometry_of(views)
    segments = geometry.groups[0].segments
    arena = random_bytes(4 * geometry.slot_bytes, seed=2)
    copier = copier_class(kind)(area, arena, geometry)
    copier.load(0, [4, 1], [3, 0])
    wanted = area.clone()
    area.zero_()
    place = 0
    for run, segment in enumerate(segments):
        copier.enqueue_runs(0, [4, 1], [3, 0], (run, run + 1))
        found = area[segment.offset + 4 * segment.stride :][: segment.length]
        assert torch.equal(found, arena[3 * geometry.slot_bytes + place :][: segment.length])
        place += segment.length
        if kind == "native" and run == 0 and len(segments) > 1:
            behind = area[segments[1].offset + 4 * segments[1].stride :][: segments[1].length]
            assert not behind.any()  # negative control: it was not there from the start
    wanted_blocks = wanted.clone()
    for block in (0, 2, 3):
        for s in segments:
            wanted_blocks[s.offset + block * s.stride :][: s.length] = 0
    assert torch.equal(area, wanted_blocks)


def test_slot_holds_segments_back_to_back_in_order_of_offset() -> None:
    geometry = Geometry((GroupGeometry((ByteRun(8, 2, 2), ByteRun(0, 4, 3)), 2),))
    area = torch.arange(12, dtype=torch.uint8)
    arena = torch.zeros(4096, dtype=torch.uint8)
    ReferenceCopier(area, arena, geometry).store(0, [1], [0])
    assert arena[:6].tolist() == [4, 5, 6, 10, 11, 0]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Geometry, list[int], list[int], int]:
    num_blocks = draw(st.integers(1, 6))
    length = st.integers(1, 300) | st.integers(16_000, 40_000)  # native code streams long runs
    lengths = draw(st.lists(length, min_size=1, max_size=4))
    segments, at = [], draw(st.integers(0, 5))
    for length in lengths:
        stride = length + draw(st.integers(0, 3))
        segments.append(ByteRun(at, stride, length))
        at += num_blocks * stride + draw(st.integers(0, 3))
    geometry = Geometry((GroupGeometry(tuple(segments), num_blocks),))
    num_slots = draw(st.integers(num_blocks, 8))
    count = draw(st.integers(0, num_blocks))
    blocks = draw(st.permutations(range(num_blocks)))[:count]
    slots = draw(st.permutations(range(num_slots)))[:count]
    return geometry, blocks, slots, num_slots


@needs_native
@settings(max_examples=100, deadline=None)
@given(request=requests())
def test_native_matches_the_reference_byte_for_byte(
    request: tuple[Geometry, list[int], list[int], int],
) -> None:
    geometry, blocks, slots, num_slots = request
    results = []
    for kind in ("reference", "native"):
        area = random_bytes(geometry.area_bytes, seed=2)
        arena = random_bytes(num_slots * geometry.slot_bytes, seed=3)
        copier = copier_class(kind)(area, arena, geometry)
        copier.store(0, blocks, slots)
        stored = arena.clone()
        copier.load(0, blocks, slots[::-1])
        results.append((stored, arena, area))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[tuple[Copier, torch.Tensor, torch.Tensor]]:
    geometry = Geometry((GroupGeometry((ByteRun(0, 16, 16),), 4),))
    area, arena = random_bytes(64, seed=4), torch.zeros(2 * 4096, dtype=torch.uint8)
    yield copier_class(request.param)(area, arena, geometry), area, arena


small_of_each_kind = pytest.mark.parametrize(
    "small", ["reference", pytest.param("native", marks=needs_native)], indirect=True
)


@small_of_each_kind
@pytest.mark.parametrize(
    ("group", "blocks", "slots", "why"),
    [
        (1, [0], [0], "group 1"),
        (-1, [0], [0], "group -1"),
        (0, [0, 1], [0], "2 blocks but 1 slots"),
        (0, [0, 4], [0, 1], "block 4"),
        (0, [0, -1], [0, 1], "block -1"),
        (0, [0, 1], [0, 2], "slot 2"),
        (0, [0, 1], [0, -1], "slot -1"),
    ],
)
def test_misuse_is_named_before_a_byte_moves(
    small: tuple[Copier, torch.Tensor, torch.Tensor],
    group: int,
    blocks: list[int],
    slots: list[int],
    why: str,
) -> None:
    copier, area, arena = small
    before = area.clone()
    for call in (copier.store, copier.load):
        with pytest.raises(Misuse, match=why):
            call(group, blocks, slots)
    assert torch.equal(area, before)
    assert not arena.any()
    copier.store(0, [0, 3], [0, 1])  # negative control: a request in range does move bytes
    assert torch.equal(arena[4096:][:16], area[48:])


@small_of_each_kind
def test_empty_request_does_nothing(small: tuple[Copier, torch.Tensor, torch.Tensor]) -> None:
    copier, _, arena = small
    copier.store(0, [], [])
    copier.load(0, [], [])
    assert not arena.any()


@kinds
def test_memory_that_does_not_fit_is_refused(kind: str) -> None:
    geometry = Geometry((GroupGeometry((ByteRun(0, 16, 16),), 4),))
    area, arena = random_bytes(64, seed=5), torch.zeros(4096, dtype=torch.uint8)
    copier_class(kind)(area, arena, geometry)
    with pytest.raises(Misuse, match="need 64"):
        copier_class(kind)(area[:63], arena, geometry)
    with pytest.raises(Misuse, match="whole slots"):
        copier_class(kind)(area, arena[:4095], geometry)


@needs_native
@pytest.mark.parametrize("start", [0, 1, 16, 63])
@pytest.mark.parametrize("length", [16_383, 16_384, 16_385, 16_447, 16_448, 32_831, 65_536])
def test_native_streams_whole_runs_at_any_alignment(start: int, length: int) -> None:
    geometry = Geometry((GroupGeometry((ByteRun(start, length + 3, length),), 2),))
    area = random_bytes(geometry.area_bytes, seed=6)
    before = area.clone()
    arena = torch.zeros(2 * geometry.slot_bytes, dtype=torch.uint8)
    copier = copier_class("native")(area, arena, geometry)
    copier.store(0, [0, 1], [1, 0])
    area.zero_()
    copier.load(0, [0, 1], [1, 0])
    expected = before.clone()
    expected[:start] = 0
    expected[start + length : start + length + 3] = 0  # the gap between the blocks
    assert torch.equal(area, expected)
    arena[length - 1] ^= 1  # negative control: the very last byte counts
    copier.load(0, [1], [0])
    assert not torch.equal(area, expected)


@needs_native
def test_native_refuses_memory_it_cannot_address() -> None:
    geometry = Geometry((GroupGeometry((ByteRun(0, 16, 16),), 4),))
    arena = torch.zeros(4096, dtype=torch.uint8)
    for area in (torch.zeros(64, dtype=torch.uint8, device="meta"), torch.zeros(128)[::2]):
        with pytest.raises(Misuse, match="contiguous area in CPU"):
            copier_class("native")(area, arena, geometry)


def test_broken_copy_ends_as_transfer_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry((GroupGeometry((ByteRun(0, 16, 16),), 4),))
    area = torch.zeros(64, dtype=torch.uint8, device="meta")  # has no bytes to give
    copier = ReferenceCopier(area, torch.zeros(4096, dtype=torch.uint8), geometry)
    with pytest.raises(TransferFailed) as caught:
        copier.store(0, [0], [0])
    assert caught.value.__cause__ is not None


@needs_native
def test_make_copier_prefers_native_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    geometry = Geometry((GroupGeometry((ByteRun(0, 16, 16),), 4),))
    caplog.set_level("INFO", logger="kvconnect.copy")
    args = torch.zeros(64, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8), geometry
    assert isinstance(make_copier(*args), copier_class("native"))
    assert "native" in caplog.text
    meta = torch.zeros(64, dtype=torch.uint8, device="meta")
    assert isinstance(make_copier(meta, *args[1:]), ReferenceCopier)
    assert "is on meta" in caplog.text


def test_make_copier_without_the_extension(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import kvconnect

    monkeypatch.delattr(kvconnect, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "kvconnect._native", None)
    geometry = Geometry((GroupGeometry((ByteRun(0, 16, 16),), 4),))
    caplog.set_level("INFO", logger="kvconnect.copy")
    area, arena = torch.zeros(64, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    assert isinstance(make_copier(area, arena, geometry), ReferenceCopier)
    assert "was not built" in caplog.text
    assert "was not built" in str(native_unavailable_reason())


def int64(*numbers: int) -> array[int]:
    return array("q", numbers)


@needs_native
@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"segments": int64(0, 16)}, ValueError, "2 segment numbers"),
        ({"segments": array("i", [0, 16, 16])}, ValueError, "int64"),
        ({"segments": array("d", [0, 16, 16])}, ValueError, "int64"),
        ({"segments": int64(-1, 16, 16)}, ValueError, "segment 0"),
        ({"segments": int64(0, -16, 16)}, ValueError, "segment 0"),
        ({"segments": int64(0, 16, 0)}, ValueError, "segment 0"),
        ({"segments": int64(0, 16, 65)}, ValueError, "does not fit a slot of 64"),
        ({"segments": int64(0, 16, 2**62, 0, 16, 2**62)}, ValueError, "does not fit a slot"),
        ({"segments": int64(1, 16, 16)}, IndexError, "block 3, segment 0"),
        ({"segments": int64(0, 2**62, 16)}, IndexError, "block 3, segment 0"),
        ({"block_ids": int64(0, 4)}, IndexError, "block 4, segment 0"),
        ({"block_ids": int64(0, 2**62)}, IndexError, "segment 0 ends outside"),
        ({"block_ids": int64(0, -1)}, IndexError, "block -1"),
        ({"block_ids": int64(0)}, ValueError, "1 blocks, 2 slots"),
        ({"slots": int64(0, 2)}, IndexError, "slot 2"),
        ({"slots": int64(0, -1)}, IndexError, "slot -1"),
        ({"slot_bytes": 0}, ValueError, "malformed"),
    ],
)
def test_native_checks_everything_before_copying(
    change: dict[str, object], error: type[Exception], why: str
) -> None:
    from kvconnect import _native

    area, arena = bytearray(range(64)), bytearray(128)
    views = [torch.frombuffer(b, dtype=torch.uint8) for b in (area, arena)]
    good = {
        "area": (views[0].data_ptr(), 64),
        "arena": (views[1].data_ptr(), 128),
        "slot_bytes": 64,
        "segments": int64(0, 16, 16),
        "block_ids": int64(0, 3),
        "slots": int64(0, 1),
    }
    for function in (_native.gather, _native.scatter):
        with pytest.raises(error, match=why):
            function(*(good | change).values())
    assert (area, arena) == (bytearray(range(64)), bytearray(128))
    _native.gather(*good.values())  # negative control
    assert arena[64:80] == area[48:]


def other_thread_ran(work: object, rounds: int) -> bool:
    """Say whether another thread got the GIL while ``work`` was called ``rounds`` times."""
    ran, gate = threading.Event(), threading.Lock()
    gate.acquire()

    def wait_and_tell() -> None:
        with gate:
            ran.set()

    thread = threading.Thread(target=wait_and_tell)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody takes the GIL, it has to be given
    try:
        gate.release()
        for _ in range(rounds):
            work()  # type: ignore[operator]
            if ran.is_set():
                break
        result = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    return result


@needs_native
def test_native_copy_gives_up_the_gil() -> None:
    size = 1 << 20
    geometry = Geometry((GroupGeometry((ByteRun(0, size, size),), 32),))
    area = torch.zeros(32 * size, dtype=torch.uint8)
    copier = copier_class("native")(area, torch.zeros_like(area), geometry)
    ids = list(range(32))
    assert other_thread_ran(lambda: copier.store(0, ids, ids), rounds=200)
    assert not other_thread_ran(lambda: sum(range(1000)), rounds=200)  # negative control
