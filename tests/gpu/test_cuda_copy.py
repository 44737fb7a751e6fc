"""Kernels and batched copies on a real device, byte for byte, and what they must not disturb."""

from __future__ import annotations

import random
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
xxhash = pytest.importorskip("xxhash")

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry  # noqa: E402
from kvconnect.copy import cuda, open_driver  # noqa: E402
from kvconnect.copy import driver as cuda_driver  # noqa: E402
from kvconnect.copy.calibration import PAGES, CopyThreshold, measure  # noqa: E402
from kvconnect.copy.cuda import CudaCopier, sample_move  # noqa: E402
from kvconnect.copy.reference import ReferenceCopier  # noqa: E402
from kvconnect.copy.wire_blocks import BlockCopier  # noqa: E402
from kvconnect.errors import Incompatible, TransferFailed  # noqa: E402
from kvconnect.offload.messages import LoadBlocks, StoreBlocks  # noqa: E402
from kvconnect.offload.streams import make_streams  # noqa: E402
from kvconnect.testing.page_memory import PageMemory, phased_unit, plain_unit, split_unit  # noqa: E402
from kvconnect.types import TransferType  # noqa: E402
from tests.gpu.worker import DEVICE, DMA, KERNEL, STAGED, Worker, layers, noise  # noqa: E402

POISON = 0xA5
ways = pytest.mark.parametrize("choice", [KERNEL, DMA], ids=["kernel", "dma"])


CASES = [
    (3, 7, 1, 1, 0),
    (2, 9, 33, 0, 5),
    (2, 9, 255, 1, 0),
    (4, 5, 1000, 8, 4),
    (4, 33, 4096, 0, 0),
    (3, 17, 8191, 1, 16),
    (2, 65, 16 << 10, 0, 8),
    (2, 12, (64 << 10) + 16, 0, 0),
    (1, 5, 1 << 20, 0, 3),
]


@ways
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"page{case[2]}gap{case[3]}at{case[4]}")
def test_bytes_are_those_of_the_reference(choice: CopyThreshold, case: tuple[int, ...]) -> None:
    geometry = layers(*case)
    blocks = geometry.groups[0].num_blocks
    generator = random.Random(1)
    ids = generator.sample(range(blocks), blocks // 2 + 1)
    slots = generator.sample(range(blocks + 3), len(ids))
    results = []
    for kind in (partial(CudaCopier, driver=open_driver(DEVICE), choice=choice), ReferenceCopier):
        area = noise(geometry.area_bytes + 64, 2).to(DEVICE)
        arena = torch.full(((blocks + 3) * geometry.slot_bytes,), POISON, dtype=torch.uint8)
        arena = arena.pin_memory()
        copier = kind(area, arena, geometry)
        copier.store(0, ids, slots)
        stored = arena.clone()
        copier.load(0, ids, slots[::-1])
        results.append((stored, arena, area.cpu()))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    assert not torch.equal(results[0][2], noise(geometry.area_bytes + 64, 2))  # negative control


@ways
@pytest.mark.parametrize("nbytes", [1, 17, 255, 4095, 65_537])
def test_a_copy_writes_its_blocks_and_nothing_else(choice: CopyThreshold, nbytes: int) -> None:
    """Both sides lie between guards and are full of a pattern that no source has."""
    guard, blocks = 512, 6
    geometry = layers(2, blocks, nbytes, 0, 0)
    source = noise(geometry.area_bytes, 8) | 1
    source[source == POISON] = 1
    sizes = geometry.area_bytes, blocks * geometry.slot_bytes
    poisoned = [torch.full((size + 2 * guard,), POISON, dtype=torch.uint8) for size in sizes]
    around, held = poisoned[0].to(DEVICE), poisoned[1].pin_memory()
    area, arena = around[guard:-guard], held[guard:-guard]
    copier = CudaCopier(area, arena, geometry, open_driver(DEVICE), choice)
    area.copy_(source)
    copier.store(0, [4, 1], [0, 5])
    area.fill_(POISON)
    copier.load(0, [2, 3], [5, 0])
    found, pages = around.cpu(), source.view(2, blocks, nbytes)
    blocks_wanted, slots_wanted = (torch.full_like(whole, POISON) for whole in poisoned)
    blocks_wanted[guard:-guard].view(2, blocks, nbytes)[:, 2:4] = pages[:, [1, 4]]
    slots = slots_wanted[guard:-guard].view(blocks, -1)[:, : 2 * nbytes]
    slots[0], slots[5] = pages[:, 4].flatten(), pages[:, 1].flatten()
    assert torch.equal(found, blocks_wanted) and torch.equal(held, slots_wanted)
    copier.load(0, [3, 2], [5, 0])  # negative control
    assert not torch.equal(around.cpu(), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@ways
def test_a_block_is_bytes_whatever_they_mean(choice: CopyThreshold, dtype: torch.dtype) -> None:
    cache = noise(16 * 4096, 3).to(DEVICE).view(dtype).view(16, -1)
    geometry = layers(1, 16, 4096, 0, 0)
    area = cache.view(torch.uint8).view(-1)
    arena = torch.zeros(16 * 4096, dtype=torch.uint8).pin_memory()
    copier = CudaCopier(area, arena, geometry, open_driver(DEVICE), choice)
    before = area.clone()
    copier.store(0, range(16), range(15, -1, -1))
    area.zero_()
    copier.load(0, range(16), range(15, -1, -1))
    assert torch.equal(area, before) and area.any()


DIGESTED = {
    "odd": [241, 256, 257, 1023, 1025, 2049, 5000, 8448, 100_003, (1 << 20) + 24],
    "aligned": [1024, 4096, 8448, 65_536, 65_552, 2 << 20, (20 << 20) + 16],
}
"""Sizes of blocks: in runs at odd addresses, and in runs that can be read in words of 16 bytes."""


def check_digests(segments: tuple[ByteRun, ...], blocks: int) -> None:
    geometry = Geometry((GroupGeometry(segments, blocks),))
    area = noise(geometry.area_bytes, 4).to(DEVICE)
    arena = torch.zeros(blocks * geometry.slot_bytes, dtype=torch.uint8).pin_memory()
    copier = CudaCopier(area, arena, geometry, open_driver(DEVICE), KERNEL)
    copier.store(0, range(blocks), range(blocks))
    ids = range(blocks - 1, -1, -1)
    digests = copier.enqueue_digests(0, ids)
    torch.cuda.synchronize()
    size = geometry.groups[0].block_bytes
    slots = [arena[i * geometry.slot_bytes :][:size].numpy().tobytes() for i in ids]
    assert digests().tolist() == [xxhash.xxh3_64_intdigest(slot) for slot in slots]
    area[segments[-1].offset + segments[-1].length - 1] ^= 1  # negative control: block 0
    changed = copier.enqueue_digests(0, ids)
    torch.cuda.synchronize()
    assert changed()[:-1] == digests()[:-1] and changed()[-1] != digests()[-1]


@pytest.mark.parametrize("nbytes", DIGESTED["odd"])
def test_digests_of_blocks_at_odd_addresses_are_those_of_xxhash(nbytes: int) -> None:
    part = nbytes // 3
    rest = nbytes - part
    check_digests((ByteRun(7, part, part), ByteRun(nbytes * 4, rest + 1, rest)), 5)


@pytest.mark.parametrize("nbytes", DIGESTED["aligned"])
def test_digests_of_aligned_blocks_are_those_of_xxhash(nbytes: int) -> None:
    """One run per block, and two whose border lies within a step."""
    part = nbytes // 2 // 16 * 16 + 16
    rest = nbytes - part
    check_digests((ByteRun(0, nbytes, nbytes),), 5)
    check_digests((ByteRun(16, part, part), ByteRun(6 * nbytes + 32, rest + 16, rest)), 5)


def test_digests_of_more_blocks_than_one_launch_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_SUMS_BYTES", 1 << 20)  # of 16 MiB
    check_digests((ByteRun(0, 4096, 4096),), 5_000)
    check_digests((ByteRun(0, 3 << 20, 3 << 20),), 7)


def test_staged_blocks_have_their_bytes_and_digests() -> None:
    """More chunks than there are segments, in both directions at once."""
    worker = Worker(STAGED, blocks=256, page=64 << 10)
    before = worker.area.clone()
    worker.submit(1, StoreBlocks, range(256))
    assert worker.ended(1) == [1]
    worker.area.view(2, 256, -1)[:, :128].zero_()
    worker.submit(2, LoadBlocks, range(128))
    worker.submit(3, StoreBlocks, range(128, 256))
    assert sorted(worker.ended(2)) == [2, 3]
    torch.cuda.synchronize()
    assert torch.equal(worker.area, before)
    worker.store.view(7)[3] ^= 1  # negative control: what is damaged is found
    worker.submit(4, LoadBlocks, range(128))
    (done,) = worker.finished(1)
    assert done.report.failures[0].slot == 7
    worker.close()


@pytest.mark.parametrize(
    "unit",
    [plain_unit(4096), split_unit(208, 6, 12), phased_unit(96, 3, 4), phased_unit(512, 8, 2)],
    ids=["one run", "layers", "parts of a page", "heads"],
)
def test_wire_blocks_are_packed_and_unpacked(unit: object) -> None:
    pages = PageMemory(1 << 16, seed=5)
    ids = array("q", [3, 0, 7, 4])
    staged = torch.full((4 * unit.block_bytes + 64,), POISON, dtype=torch.uint8).pin_memory()  # type: ignore[attr-defined]
    area = torch.frombuffer(pages.data, dtype=torch.uint8).to(DEVICE)
    copier = BlockCopier(area, open_driver(DEVICE))
    copier.pack(unit.segments, unit.phases, ids, staged.data_ptr())  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    assert staged[:-64].numpy().tobytes() == pages.read(unit, ids)  # type: ignore[arg-type]
    assert staged[-64:].eq(POISON).all()
    back = ids[::-1]
    copier.unpack(unit.segments, unit.phases, back, staged.data_ptr())  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    pages.write(unit, back, staged[:-64].numpy().tobytes())  # type: ignore[arg-type]
    assert area.cpu().numpy().tobytes() == bytes(pages.data)


@ways
def test_both_directions_overlap_and_keep_their_bytes(choice: CopyThreshold) -> None:
    worker = Worker(choice)
    before = worker.area.clone()
    worker.submit(0, StoreBlocks, range(0, 32))
    worker.ended(1)
    worker.area.view(2, 64, -1)[:, :32] = 0
    for number in range(1, 9):  # loads of the lower half beside stores of the upper
        start = 4 * (number - 1)
        worker.submit(number, LoadBlocks, range(start, start + 4))
        worker.submit(number + 10, StoreBlocks, range(32 + start, 36 + start))
    worker.ended(16)
    torch.cuda.synchronize()
    assert torch.equal(worker.area, before)
    worker.area.zero_()
    worker.submit(30, LoadBlocks, range(64))
    worker.ended(1)
    torch.cuda.synchronize()
    assert torch.equal(worker.area, before)
    worker.close()


@ways
def test_a_copy_waits_for_its_fence_and_for_nothing_else(choice: CopyThreshold) -> None:
    worker = Worker(choice, blocks=8)
    worker.submit(1, StoreBlocks, range(8))
    worker.ended(1)
    fence = worker.executor.fence()
    torch.cuda._sleep(2_000_000_000)  # the model goes on for about a second
    busy = torch.cuda.Event()
    busy.record()
    worker.submit(2, LoadBlocks, range(8), fence)
    worker.ended(1)
    assert not busy.query()  # the load did not wait for the model, nor the model for the load
    worker.submit(3, StoreBlocks, range(8))  # negative control: its fence is behind the model
    worker.ended(1)
    assert busy.query()
    worker.close()


@ways
def test_events_tell_the_time(choice: CopyThreshold) -> None:
    page, blocks = 1 << 20, 1024
    geometry = layers(1, blocks, page, 0, 0)
    area = torch.zeros(geometry.area_bytes, dtype=torch.uint8, device=DEVICE)
    arena = torch.zeros(geometry.area_bytes, dtype=torch.uint8).pin_memory()
    copier = CudaCopier(area, arena, geometry, open_driver(DEVICE), choice)
    streams = make_streams(DEVICE)
    copy = partial(copier.enqueue_store, 0, range(blocks), range(blocks))
    ratios = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        seconds = streams.run(TransferType.GPU_TO_CPU, streams.fence(), copy)
        ratios.append(seconds / (time.perf_counter() - start))
    assert 0.95 <= sorted(ratios)[2] <= 1.05


def test_ways_can_be_measured() -> None:
    found = measure(open_driver(DEVICE), sample_move(open_driver(DEVICE)))
    assert {found.threshold.store, found.threshold.load} <= {0, *PAGES}
    assert all(0 < rate < 1000 for rates in found.gbps.values() for rate in rates)


def test_the_time_to_submit_work_counts() -> None:
    page = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()

    def work() -> None:
        for _ in range(2):
            page.to(DEVICE, non_blocking=True)
            time.sleep(0.01)

    driver = open_driver(DEVICE)
    taken = driver.seconds([work, work])
    assert taken.total_s >= taken.submit_s >= 0.04


def test_without_kernels_dma_copies_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(index: int) -> dict[str, int]:
        raise Incompatible(f"none for device {index}")

    monkeypatch.setattr(cuda_driver, "load_kernels", load)
    driver = open_driver(DEVICE)
    assert driver.kernels_unavailable_reason == "none for device 0"
    geometry = layers(2, 8, 4096, 0, 0)
    area = noise(geometry.area_bytes, 7).to(DEVICE)
    arena = torch.zeros(8 * geometry.slot_bytes, dtype=torch.uint8).pin_memory()
    copier = CudaCopier(area, arena, geometry, driver, KERNEL)
    before = area.clone()
    copier.store(0, range(8), range(7, -1, -1))
    area.zero_()
    copier.load(0, range(8), range(7, -1, -1))
    assert torch.equal(area, before) and area.any()
    assert not copier.hashes(0)


def test_memory_that_is_not_there_is_a_failed_transfer() -> None:
    with pytest.raises(TransferFailed):
        open_driver(DEVICE).device_memory(1 << 50)
