"""Kernels and batched copies on a real device, byte for byte, and what they must not disturb."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from array import array
from functools import partial

import pytest

torch = pytest.importorskip("torch")
xxhash = pytest.importorskip("xxhash")
pytest.importorskip("cupy")

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry  # noqa: E402
from kvconnect.copy import open_driver  # noqa: E402
from kvconnect.copy.calibration import PAGES, CopyThreshold, measure  # noqa: E402
from kvconnect.copy.cuda import (  # noqa: E402
    BlockCopier,
    CudaCopier,
    sample_move,
)
from kvconnect.copy.reference import ReferenceCopier  # noqa: E402
from kvconnect.errors import TransferFailed  # noqa: E402
from kvconnect.offload.copy_executor import CopyExecutor  # noqa: E402
from kvconnect.offload.host_arena import HostArena  # noqa: E402
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks  # noqa: E402
from kvconnect.offload.streams import make_streams  # noqa: E402
from kvconnect.testing.memory import PageMemory, phased_unit, plain_unit, split_unit  # noqa: E402
from kvconnect.types import JobId, TransferType  # noqa: E402

DEVICE = torch.device("cuda")
POISON = 0xA5
KERNEL, DMA = CopyThreshold(1 << 40, 1 << 40), CopyThreshold(0, 0)
ways = pytest.mark.parametrize("choice", [KERNEL, DMA], ids=["kernel", "dma"])


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def layers(count: int, blocks: int, page: int, gap: int, start: int) -> Geometry:
    """Blocks of ``count`` layers, with ``gap`` bytes between their pages, from ``start`` on."""
    stride = page + gap
    segments = tuple(ByteRun(start + i * blocks * stride, stride, page) for i in range(count))
    return Geometry((GroupGeometry(segments, blocks),))


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


@pytest.mark.parametrize("nbytes", [241, 1024, 1025, 4096, 65_536, 100_003, (1 << 20) + 24])
def test_digests_are_those_of_xxhash(nbytes: int) -> None:
    segments = (ByteRun(7, nbytes // 3, nbytes // 3), ByteRun(nbytes * 4, nbytes, nbytes * 2 // 3))
    geometry = Geometry((GroupGeometry(segments, 5),))
    area = noise(geometry.area_bytes, 4).to(DEVICE)
    arena = torch.zeros(5 * geometry.slot_bytes, dtype=torch.uint8).pin_memory()
    copier = CudaCopier(area, arena, geometry, open_driver(DEVICE), KERNEL)
    copier.store(0, range(5), range(5))
    if not copier.hashes(0):
        pytest.skip("hashed on the host")
    digests = copier.enqueue_digests(0, range(5))
    torch.cuda.synchronize()
    size = geometry.groups[0].block_bytes
    slots = [arena[i * geometry.slot_bytes :][:size].numpy().tobytes() for i in range(5)]
    assert digests().tolist() == [xxhash.xxh3_64_intdigest(slot) for slot in slots]


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


class Worker:
    """Copies of one worker on the device."""

    def __init__(self, choice: CopyThreshold, blocks: int = 64, page: int = 256 << 10) -> None:
        self.geometry = layers(2, blocks, page, 0, 0)
        self.area = noise(self.geometry.area_bytes, 6).to(DEVICE)
        self.store = HostArena(blocks, self.geometry.slot_bytes, "full")
        assert self.store.pin()
        driver = open_driver(DEVICE)
        copier = CudaCopier(self.area, self.store.tensor(), self.geometry, driver, choice)
        self.executor = CopyExecutor(copier, self.store, self.geometry, make_streams(DEVICE))
        torch.cuda.synchronize()

    def submit(
        self, number: int, kind: type[StoreBlocks] | type[LoadBlocks], blocks: range
    ) -> None:
        part = GroupBlocks(0, array("q", blocks), array("q", blocks))
        more = ("r",) if kind is LoadBlocks else ()
        tail = (False,) if kind is LoadBlocks else ()
        job = kind(JobId(number), *more, (part,), 60.0, *tail)  # type: ignore[arg-type]
        self.executor.submit(job, self.executor.fence())

    def ended(self, count: int) -> list[JobId]:
        found: list[JobId] = []
        while len(found) < count:
            for done in self.executor.poll():
                assert not done.report.failures and done.seconds > 0
                found.append(done.report.job)
            time.sleep(0)
        return found

    def close(self) -> None:
        self.executor.close()
        self.store.close()


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
    part = GroupBlocks(0, array("q", range(8)), array("q", range(8)))
    worker.executor.submit(LoadBlocks(JobId(2), "r", (part,), 60.0, False), fence)
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
    choice = measure(open_driver(DEVICE), sample_move(open_driver(DEVICE)))
    assert {choice.store, choice.load} <= {0, *PAGES}


def test_memory_that_is_not_there_is_a_failed_transfer() -> None:
    with pytest.raises(TransferFailed):
        open_driver(DEVICE).device_memory(1 << 50)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    chosen = "reference and page8191 and kernel or packed or (xxhash and 1025)"
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
    made = subprocess.run(
        [*command, "-m", "pytest", "-q", __file__, "-k", chosen], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout[-4000:]
