"""Copies by way of device memory: bytes, digests, and whose turn a segment is."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
xxhash = pytest.importorskip("xxhash")

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry  # noqa: E402
from kvconnect.copy.base import MAX_IN_FLIGHT, StagedCopy  # noqa: E402
from kvconnect.copy.calibration import CopyThreshold  # noqa: E402
from kvconnect.copy.cuda import CudaCopier  # noqa: E402
from kvconnect.copy.reference import ReferenceCopier  # noqa: E402
from kvconnect.copy.staged import Staging  # noqa: E402
from kvconnect.errors import Misuse, TransferFailed  # noqa: E402
from kvconnect.offload.copy_executor import CopyExecutor  # noqa: E402
from kvconnect.offload.host_arena import HostArena  # noqa: E402
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks  # noqa: E402
from kvconnect.offload.streams import HostStreams  # noqa: E402
from kvconnect.types import FailureCause, JobId  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402

BLOCKS, SLOTS = 7, 9
SEGMENTS = (ByteRun(3, 700, 700), ByteRun(5000, 401, 400), ByteRun(8000, 16, 16))
SHORT = (ByteRun(0, 64, 24), ByteRun(32, 64, 24))
GEOMETRY = Geometry((GroupGeometry(SEGMENTS, BLOCKS), GroupGeometry(SHORT, 5)))
BLOCK_BYTES = GEOMETRY.groups[0].block_bytes
STAGED = CopyThreshold(0, 0, staged_store=1 << 30, staged_load=1 << 30)
SEGMENT_BYTES = 4 * 1120  # of four blocks


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def memories() -> tuple[torch.Tensor, torch.Tensor]:
    return noise(9000, 0), noise(SLOTS * GEOMETRY.slot_bytes, 1)


def made(driver: FakeDriver, area: torch.Tensor, arena: torch.Tensor) -> CudaCopier:
    make_staging = partial(Staging, driver, segment_bytes=SEGMENT_BYTES)
    return CudaCopier(area, arena, GEOMETRY, driver, STAGED, make_staging)


def staged(copy: StagedCopy | None) -> StagedCopy:
    assert copy is not None
    copy.work()
    return copy


def test_bytes_are_those_of_the_reference() -> None:
    (area, arena), (wanted_area, wanted_arena) = memories(), memories()
    copier = made(FakeDriver(), area, arena)
    reference = ReferenceCopier(wanted_area, wanted_arena, GEOMETRY)
    for group in (0, 1):
        staged(copier.stage("store", group, [4, 0, 2], [8, 1, 3], hashed=False)).release()
        reference.store(group, [4, 0, 2], [8, 1, 3])
        assert torch.equal(arena, wanted_arena)
        staged(copier.stage("load", group, [0, 1, 2], [3, 8, 0], hashed=False)).release()
        reference.load(group, [0, 1, 2], [3, 8, 0])
        assert torch.equal(area, wanted_area)
    untouched = memories()
    assert not torch.equal(arena, untouched[1])  # negative control: something moved
    assert not torch.equal(area, untouched[0])


def test_a_block_is_one_descriptor_and_a_chunk_one_launch() -> None:
    driver = FakeDriver()
    copier = made(driver, *memories())
    assert copier.method("load", 0) == "staged" and copier.descriptors("load", 0) == 1
    assert copier.most_blocks("load", 0) == 4
    driver.calls.clear()
    copy = staged(copier.stage("load", 0, [1, 2, 5], [0, 3, 4], hashed=True))
    assert driver.calls == ["copy_batch", "copy_batch", "scatter_staged"]
    assert driver.batches[-2:] == [True, True]
    slots = [3, 0, 4]
    arena = copier._owners[1]
    held = [arena[slot * GEOMETRY.slot_bytes :][:BLOCK_BYTES] for slot in sorted(slots)]
    assert copy.digests is not None
    assert copy.digests().tolist() == [
        xxhash.xxh3_64_intdigest(block.numpy().tobytes()) for block in held
    ]
    copy.release()
    stored = staged(copier.stage("store", 0, [1], [0], hashed=False))
    assert stored.digests is None and driver.calls[-2:] == ["gather_staged", "copy_batch"]
    assert driver.batches[-1] is False  # behind the kernel


def test_a_segment_is_in_one_copy_at_a_time() -> None:
    copier = made(FakeDriver(), *memories())
    copies = [staged(copier.stage("load", 0, [n], [n], False)) for n in range(MAX_IN_FLIGHT)]
    assert {copy.lane for copy in copies} == {*range(MAX_IN_FLIGHT)}
    assert copier.stage("load", 0, [5], [5], hashed=False) is None  # none is free
    assert copier.stage("store", 0, [5], [5], hashed=False) is not None  # these have their own
    copies[2].release()
    again = copier.stage("load", 0, [5], [5], hashed=False)
    assert again is not None and again.lane == 2


def test_what_cannot_be_staged_is_copied_otherwise() -> None:
    copier = made(FakeDriver(), *memories())
    assert copier.stage("load", 0, range(5), range(5), hashed=False) is None  # too many
    assert copier.stage("load", 0, [], [], hashed=False) is None
    with pytest.raises(Misuse, match="block 7 does not exist"):
        copier.stage("load", 0, [7], [0], hashed=False)
    with pytest.raises(Misuse, match="48 bytes cannot be hashed"):
        copier.stage("load", 1, [1], [0], hashed=True)


def test_without_memory_for_segments_dma_copies(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(direction: object) -> Staging:
        raise TransferFailed("out of memory")

    area, arena = memories()
    copier = CudaCopier(area, arena, GEOMETRY, FakeDriver(), STAGED, refuse)
    assert copier.method("load", 0) == "dma" and copier.descriptors("load", 0) == 3
    assert copier.stage("load", 0, [1], [0], hashed=False) is None
    assert "copies are not staged, which is slower: out of memory" in caplog.text
    tiny = partial(Staging, driver := FakeDriver(), segment_bytes=1000)
    copier = CudaCopier(area, arena, GEOMETRY, driver, STAGED, tiny)
    assert copier.method("load", 0) == "dma"  # no block fits
    assert copier.method("load", 1) == "staged"
    whole = Geometry((GroupGeometry((ByteRun(0, 64, 64),), 5),))
    arena = noise(SLOTS * whole.slot_bytes, 1)
    copier = CudaCopier(area, arena, whole, driver, STAGED, tiny)
    assert copier.method("load", 0) == "dma"  # a block is one run anyway
    kernels = replace(STAGED, store=64, load=64)
    copier = CudaCopier(area, arena, whole, driver, kernels, tiny)
    assert copier.method("load", 0) == "kernel"  # what is not staged takes the next best way


def ended(executor: CopyExecutor) -> list[FailureCause]:
    """Wait for the next job; return the causes of its failures."""
    while True:
        for done in executor.poll():
            return [failure.cause for failure in done.report.failures]


@pytest.mark.parametrize("digest", ["full", "off"])
def test_damage_on_the_way_is_found_by_the_digest_of_the_staged_copy(digest: str) -> None:
    geometry = Geometry(GEOMETRY.groups[:1])
    area, driver = memories()[0], FakeDriver()
    store = HostArena(SLOTS, geometry.slot_bytes, digest)  # type: ignore[arg-type]
    make_staging = partial(Staging, driver, segment_bytes=SEGMENT_BYTES)
    copier = CudaCopier(area, store.tensor(), geometry, driver, STAGED, make_staging)
    executor = CopyExecutor(copier, store, geometry, HostStreams())
    ids = array("q", range(6))
    part, before = GroupBlocks(0, ids, ids[::-1]), area.clone()
    executor.submit(StoreBlocks(JobId(1), (part,), 60.0), None)
    assert ended(executor) == []
    area.zero_()
    executor.submit(LoadBlocks(JobId(2), "r", (part,), 60.0, sync=False), None)
    assert ended(executor) == []
    for run in SEGMENTS:
        for block in ids:
            start = run.offset + block * run.stride
            assert torch.equal(area[start:][: run.length], before[start:][: run.length])
    store.view(5)[1] ^= 1
    executor.submit(LoadBlocks(JobId(3), "r", (part,), 60.0, sync=False), None)
    wanted = [FailureCause.DIGEST] + [FailureCause.SKIPPED] * 5
    assert ended(executor) == (wanted if digest == "full" else [])
    assert driver.calls.count("scatter_staged") >= 3 and "hash_blocks" not in driver.calls
    executor.close()
    store.close()
