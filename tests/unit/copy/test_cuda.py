"""The copier for CUDA devices over a driver that works on host memory and fails on demand."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
xxhash = pytest.importorskip("xxhash")

from kvconnect import copy  # noqa: E402
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry  # noqa: E402
from kvconnect.copy import calibration, cuda, kernels  # noqa: E402
from kvconnect.copy import driver as cuda_driver  # noqa: E402
from kvconnect.copy.base import MAX_DESCRIPTORS  # noqa: E402
from kvconnect.copy.calibration import PAGES, Calibration, CopyThreshold  # noqa: E402
from kvconnect.copy.cuda import CudaCopier  # noqa: E402
from kvconnect.copy.driver import SHORT_CALL, CudaDriver  # noqa: E402
from kvconnect.copy.kernel_loading import source_digest  # noqa: E402
from kvconnect.copy.kernels import PIECE_BYTES  # noqa: E402
from kvconnect.copy.reference import ReferenceCopier  # noqa: E402
from kvconnect.copy.run_addresses import torch_run_addresses  # noqa: E402
from kvconnect.copy.wire_blocks import BlockCopier  # noqa: E402
from kvconnect.cuda import CudaContext  # noqa: E402
from kvconnect.errors import Incompatible, Misuse, TransferFailed  # noqa: E402
from tests.fakes import torch_streams  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402
from tests.fakes.stub_driver import BATCHES, StubDriver  # noqa: E402

BLOCKS, SLOTS = 7, 9
SEGMENTS = (ByteRun(3, 700, 700), ByteRun(5000, 401, 400), ByteRun(8000, 16, 16))
GEOMETRY = Geometry((GroupGeometry(SEGMENTS, BLOCKS), GroupGeometry((ByteRun(0, 64, 48),), 5)))
KERNEL, DMA = CopyThreshold(1 << 30, 1 << 30, fewest_rows=1), CopyThreshold(0, 0)
ways = pytest.mark.parametrize("choice", [KERNEL, DMA], ids=["kernel", "dma"])


def memories(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    area = torch.randint(0, 256, (9000,), dtype=torch.uint8, generator=generator)
    size = (SLOTS * GEOMETRY.slot_bytes,)
    return area, torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def made(
    choice: CopyThreshold, driver: FakeDriver | None = None
) -> tuple[CudaCopier, torch.Tensor]:
    area, arena = memories()
    return CudaCopier(area, arena, GEOMETRY, driver or FakeDriver(), choice), arena


@ways
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("extension", [True, False])
def test_it_matches_the_reference_byte_for_byte(
    choice: CopyThreshold, group: int, extension: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not extension:
        monkeypatch.setattr(cuda, "run_addresses", torch_run_addresses)
    results = []
    kinds: list[Callable[..., Any]]
    kinds = [partial(CudaCopier, driver=FakeDriver(), choice=choice), ReferenceCopier]
    for kind in kinds:
        area, arena = memories()
        copier = kind(area, arena, GEOMETRY)
        copier.store(group, [4, 0, 2], [8, 1, 3])
        stored = arena.clone()
        copier.load(group, range(3), [3, 8, 0])
        results.append((stored, arena, area))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    untouched = memories()
    assert not torch.equal(results[0][1], untouched[1])  # negative control: something moved
    assert not torch.equal(results[0][2], untouched[0])


@ways
def test_runs_are_loaded_one_after_the_other(choice: CopyThreshold) -> None:
    """Runs longer than a row of the kernel's table included, into blocks in any order."""
    lengths = (40, 3 * PIECE_BYTES + 5, 16)
    segments = tuple(ByteRun(n * 10 * PIECE_BYTES, 4 * PIECE_BYTES, lengths[n]) for n in range(3))
    geometry = Geometry((GroupGeometry(segments, 2),))
    area = torch.zeros(geometry.area_bytes, dtype=torch.uint8)
    arena = torch.randint(0, 256, (2 * geometry.slot_bytes,), dtype=torch.uint8)
    copier = CudaCopier(area, arena, geometry, FakeDriver(), choice)
    wanted = area.clone()
    for run, segment in enumerate(segments):
        place = sum(lengths[:run])
        for block, slot in ((1, 0), (0, 1)):
            held = arena[slot * geometry.slot_bytes + place :][: segment.length]
            wanted[segment.offset + block * segment.stride :][: segment.length] = held
        assert not torch.equal(area, wanted)  # negative control
        copier.enqueue_runs(0, [1, 0], [0, 1], (run, run + 1))
        assert torch.equal(area, wanted)


@ways
def test_starting_a_copy_waits_for_nothing(choice: CopyThreshold) -> None:
    driver = FakeDriver()
    copier, _ = made(choice, driver)
    driver.calls.clear()
    copier.enqueue_store(0, [1, 2], [0, 1])
    copier.enqueue_load(0, [1, 2], [0, 1])
    copier.enqueue_digests(0, [1, 2])
    assert "synchronize" not in driver.calls
    copier.store(0, [1], [0])
    assert driver.calls[-1] == "synchronize"  # negative control


def test_only_loads_may_read_their_source_early() -> None:
    driver = FakeDriver()
    copier, _ = made(DMA, driver)
    copier.enqueue_store(0, [1], [0])
    copier.enqueue_load(0, [1], [0])
    assert driver.batches == [False, True]


def test_the_way_depends_on_direction_and_page_size() -> None:
    copier, _ = made(CopyThreshold(store=48, load=400))
    assert [copier.method("store", g) for g in (0, 1)] == ["dma", "kernel"]
    assert [copier.method("load", g) for g in (0, 1)] == ["kernel", "kernel"]
    assert [copier.descriptors("store", g) for g in (0, 1)] == [3, 0]
    assert [copier.descriptors("load", g) for g in (0, 1)] == [0, 0]


def test_few_rows_are_copied_by_dma() -> None:
    driver = FakeDriver()
    copier, _ = made(CopyThreshold(1 << 30, 1 << 30, fewest_rows=6), driver)
    before = len(driver.calls)
    copier.enqueue_store(0, [1], [0])  # three rows
    copier.enqueue_store(0, [1, 2], [0, 1])
    copied = [call for call in driver.calls[before:] if call in ("copy_batch", "gather_pages")]
    assert copied == ["copy_batch", "gather_pages"]


@ways
@pytest.mark.parametrize(
    ("group", "blocks", "slots", "why"),
    [
        (2, [0], [0], "group 2"),
        (0, [0, 1], [0], "2 blocks but 1 slots"),
        (0, [BLOCKS], [0], f"block {BLOCKS}"),
        (0, [0], [-1], "slot -1"),
    ],
)
def test_misuse_is_named_before_a_call(
    choice: CopyThreshold, group: int, blocks: list[int], slots: list[int], why: str
) -> None:
    driver = FakeDriver()
    copier, _ = made(choice, driver)
    driver.calls.clear()
    for call in (copier.store, copier.load, copier.enqueue_store, copier.enqueue_load):
        with pytest.raises(Misuse, match=why):
            call(group, blocks, slots)
    assert driver.calls == []
    copier.enqueue_store(0, [], [])
    assert driver.calls == []  # no pairs, nothing to do


@ways
def test_every_call_that_fails_is_a_failed_transfer(choice: CopyThreshold) -> None:
    """Whatever the driver refuses, and whichever call it is; afterwards it works again."""

    def work(driver: FakeDriver) -> None:
        copier, _ = made(choice, driver)
        copier.store(0, [1, 2], [0, 1])
        copier.load(0, [1, 2], [0, 1])
        copier.enqueue_runs(0, [1, 2], [0, 1], (0, 2))
        copier.enqueue_runs(0, [1, 2], [0, 1], (2, 3))
        copier.enqueue_digests(0, [1])

    healthy = FakeDriver()
    work(healthy)
    assert len(healthy.calls) >= 8
    for number in range(len(healthy.calls)):
        for lost in (False, True):
            with pytest.raises(TransferFailed, match=f"call {number} "):
                work(FakeDriver(number, lost))
    copier, arena = made(choice, driver := FakeDriver())
    driver.fail_at = len(driver.calls)
    with pytest.raises(TransferFailed):
        copier.store(0, [1], [0])
    copier.store(0, [1], [0])
    assert torch.equal(arena[:700], memories()[0][703:1403])


def test_digests_are_those_of_the_slots() -> None:
    copier, arena = made(KERNEL)
    copier.store(0, [5, 1], [2, 0])
    digests = copier.enqueue_digests(0, [5, 1])
    size = GEOMETRY.groups[0].block_bytes
    slots = [arena[s * GEOMETRY.slot_bytes :][:size] for s in (2, 0)]
    hashes = [xxhash.xxh3_64_intdigest(slot.numpy().tobytes()) for slot in slots]
    assert digests().tolist() == hashes
    assert hashes[0] != hashes[1]  # negative control
    assert copier.enqueue_digests(0, [])().tolist() == []


@pytest.mark.parametrize(("scratch", "launches"), [(1 << 20, 1), (256, 3), (1, 5)])
def test_the_sums_of_digests_take_limited_memory(
    monkeypatch: pytest.MonkeyPatch, scratch: int, launches: int
) -> None:
    """Five blocks of two steps, whose sums take 128 bytes; at least one block is summed at once."""
    monkeypatch.setattr(cuda, "_SUMS_BYTES", scratch)
    driver, sizes = FakeDriver(), list[int]()
    copier, arena = made(KERNEL, driver)
    allocate = driver.device_memory
    monkeypatch.setattr(driver, "device_memory", lambda n: sizes.append(n) or allocate(n))
    copier.store(0, range(5), range(5))
    digests = copier.enqueue_digests(0, [4, 1, 0, 3, 2])
    size = GEOMETRY.groups[0].block_bytes
    slots = [arena[s * GEOMETRY.slot_bytes :][:size].numpy().tobytes() for s in (4, 1, 0, 3, 2)]
    assert digests().tolist() == [xxhash.xxh3_64_intdigest(slot) for slot in slots]
    assert driver.calls.count("hash_blocks") == launches
    assert cuda.digest_launches(size, 5) == launches
    assert sizes == [8 * 8, 128 * max(1, min(8, scratch // 128))]  # for eight blocks
    sizes.clear()
    assert copier.enqueue_digests(0, [1])().tolist() == [xxhash.xxh3_64_intdigest(slots[1])]
    assert sizes == []  # the memory was used again
    read = copier.enqueue_digests(0, [1])
    copier.enqueue_digests(0, [2])
    assert len(sizes) == 2  # but not while it is in use
    assert read() == read()  # and it goes back once
    first, second = copier.enqueue_digests(0, [1]), copier.enqueue_digests(0, [2])
    found = [take().tolist() for take in (first, second)]
    assert found == [[xxhash.xxh3_64_intdigest(slots[n])] for n in (1, 4)]


def test_blocks_that_cannot_be_hashed_there_are_refused() -> None:
    copier, _ = made(KERNEL)
    assert copier.hashes(0) and not copier.hashes(1)  # of 48 bytes: XXH3 has another formula
    with pytest.raises(Misuse, match="of 48 bytes"):
        copier.enqueue_digests(1, [0])
    reference = ReferenceCopier(*memories(), GEOMETRY)
    assert not reference.hashes(0)
    with pytest.raises(Misuse, match=r"blocks \[1\] of group 0"):
        reference.enqueue_digests(0, [1])


def test_memory_with_gaps_is_refused() -> None:
    area, arena = memories()
    wide = torch.zeros(2 * len(area), dtype=torch.uint8)[::2]
    with pytest.raises(Misuse, match="contiguous"):
        CudaCopier(wide, arena, GEOMETRY, FakeDriver(), DMA)


# Choosing a copier ------------------------------------------------------------------------------


class OnDevice:
    """A CPU tensor that says it lies on a CUDA device, page-locked where asked."""

    device = torch.device("cuda:0")
    is_cuda = False

    def __init__(self, tensor: torch.Tensor, pinned: bool = True) -> None:
        self.tensor = tensor
        self.pinned = pinned

    def is_pinned(self) -> bool:
        return self.pinned

    def __getattr__(self, name: str) -> object:
        return getattr(self.tensor, name)


@pytest.fixture
def make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[copy.Copier, FakeDriver]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy._warn_once.cache_clear()
    for name, number in {"REPEATS": 1, "ROUNDS": 1, "SMALLEST_SEGMENT": 1 << 16}.items():
        monkeypatch.setattr(calibration, name, number)
    for module in ("calibration", "cuda"):
        monkeypatch.setattr(f"kvconnect.copy.{module}.SAMPLE_BYTES", 4 * PAGES[-1])

    def make(opened: Callable[[object], FakeDriver], pinned: bool = True) -> copy.Copier:
        monkeypatch.setattr(copy, "open_driver", opened)
        area, arena = memories()
        return copy.make_copier(OnDevice(area), OnDevice(arena, pinned), GEOMETRY)

    return make


def test_a_cuda_area_gets_the_cuda_copier(make: Callable[..., copy.Copier]) -> None:
    driver = FakeDriver()
    driver.speed = lambda calls: 1.0 if {*calls} == {"copy_batch"} else 2.0
    copier = make(lambda device: driver)
    assert isinstance(copier, CudaCopier)
    assert copier.method("load", 1) == "dma"  # as measured
    assert copier.stage("load", 1, [0], [0], hashed=False) is None


def test_what_is_measured_may_be_staging(make: Callable[..., copy.Copier]) -> None:
    driver = FakeDriver()
    driver.speed = lambda calls: 1.0 if "copy_batch" in calls else 2.0
    copier = make(lambda device: driver)
    assert isinstance(copier, CudaCopier)
    assert copier.method("load", 0) == "staged"
    assert copier.stage("load", 0, [0], [0], hashed=False) is not None


NO_CUPY = "CuPy is not installed; install kvconnect[cuda12]"


STORE = "store by DMA (3.0 GB/s in runs of 4 KiB, 24.0 GB/s in runs of 256 KiB); "
RATES = "(20.1 GB/s in runs of 4 KiB, 25.0 GB/s in runs of 256 KiB)"


@pytest.mark.parametrize(
    ("reason", "limit", "wanted"),
    [
        (None, PAGES[1], f"{STORE}load by kernel up to 16 KiB, DMA above {RATES}"),
        (NO_CUPY, 0, f"{STORE}load by DMA {RATES}. Without kernels, short runs are"),
    ],
)
def test_one_line_says_how_each_direction_is_copied(
    make: Callable[..., copy.Copier],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str | None,
    limit: int,
    wanted: str,
) -> None:
    rates = {"store": [3.0, 6.0, 12.0, 18.0, 24.0], "load": [20.1, 21.0, 22.0, 24.0, 25.0]}
    measured = Calibration(CopyThreshold(0, limit), rates)
    monkeypatch.setattr(calibration, "calibrated", lambda driver, make_move: measured)
    driver = FakeDriver()
    driver.kernels_unavailable_reason = reason
    caplog.set_level("INFO", logger="kvconnect.copy")
    copier = make(lambda device: driver)
    (line,) = caplog.records
    assert line.levelname == ("WARNING" if reason else "INFO")
    assert line.getMessage().startswith(f"copying blocks with CUDA: {wanted}")
    assert line.getMessage().endswith(reason or RATES)
    assert copier.hashes(0) is (reason is None)


def missing(device: object) -> FakeDriver:
    raise Incompatible("the CUDA driver does not load")


@pytest.mark.parametrize(
    ("opened", "why"),
    [
        (missing, "the CUDA driver does not load"),
        (lambda device: FakeDriver(0, lost=True), "call"),
    ],
)
def test_without_a_driver_torch_copies_and_it_is_said_once(
    make: Callable[..., copy.Copier],
    caplog: pytest.LogCaptureFixture,
    opened: Callable[[object], FakeDriver],
    why: str,
) -> None:
    for _ in range(2):
        assert isinstance(make(opened), ReferenceCopier)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    warnings = [text for text in warnings if "page by page" in text]
    assert len({*warnings}) == len(warnings) and why in warnings[0]


def test_whichever_call_fails_at_the_start_there_is_a_copier(
    make: Callable[..., copy.Copier], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A measurement that fails costs the choice, tables that fail the kernels."""
    monkeypatch.setattr("tests.fakes.cuda_driver.launch_on_host", lambda *_: None)
    made, number, driver = set(), 0, FakeDriver()
    while len(driver.calls) >= number:  # until none was left to fail
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        driver = FakeDriver(number, lost=number % 2 == 1)
        made.add(type(make(partial(_same, driver))))
        number += 1
    assert number > 100 and made == {CudaCopier, ReferenceCopier}


def _same(driver: FakeDriver, device: object) -> FakeDriver:
    return driver


def test_pageable_memory_is_left_to_torch(
    make: Callable[..., copy.Copier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvconnect.copy")
    assert isinstance(make(lambda device: FakeDriver(), pinned=False), ReferenceCopier)
    assert "not page-locked" in caplog.text


# The real driver, as far as a machine without a device shows it --------------------------------


class Library:
    """libcuda with some of its functions."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, lambda *arguments: 0)


@pytest.mark.parametrize(
    ("names", "there", "index"),
    [
        ((), False, False),
        (("cuMemcpyBatchAsync",), True, True),
        (("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"), True, False),
    ],
)
def test_the_batched_copy_is_found_in_either_form(
    names: tuple[str, ...], there: bool, index: bool
) -> None:
    function, has_index = cuda_driver._find_batch(Library(*names))  # type: ignore[arg-type]
    assert (function is not None, has_index) == (there, index)
    if function is not None:
        assert len(function.argtypes) == (9 if index else 8)  # type: ignore[attr-defined]


def test_attributes_are_laid_out_as_the_driver_wants_them() -> None:
    assert ctypes.sizeof(cuda_driver._CopyAttributes) == 24
    assert cuda_driver._CopyAttributes.flags.offset == 20


NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
LOST = 719  # CUDA_ERROR_LAUNCH_FAILED, which every call answers from then on


class HostCudaDriver(CudaDriver):
    """The real driver, but for what torch does, which is done in the host's memory."""

    def __init__(self, device: torch.device, stub: StubDriver) -> None:
        super().__init__(device)
        self.made: list[torch.Tensor] = []
        self.stub = stub

    def device_memory(self, nbytes: int) -> torch.Tensor:
        self.made.append(torch.zeros(nbytes, dtype=torch.uint8))
        self.stub.add_device_memory(self.made[-1].data_ptr(), nbytes)
        return self.made[-1]

    host_memory = device_memory

    def upload(self, numbers: array[int]) -> torch.Tensor:
        return torch.tensor(numbers)

    def synchronize(self) -> None: ...


class OnStub:
    """The real driver and a copier over the stub, with memory that the stub knows."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        batch: str | None,
        choice: CopyThreshold,
        null: bool = False,
        kernels_load: bool = True,
    ) -> None:
        self.stub = StubDriver(monkeypatch, batch)
        self.stub.run_kernels(list(kernels.KERNELS))
        properties = SimpleNamespace(name="H100", pci_domain_id=0, pci_bus_id=0x1A)

        def load(index: int) -> dict[str, int]:
            if not kernels_load:
                raise Incompatible("no kernels here")
            return self.stub.kernels

        monkeypatch.setattr(cuda_driver, "load_kernels", load)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        self.stream = 0 if null else CudaContext(0).stream()
        current = SimpleNamespace(cuda_stream=self.stream)
        torch_streams.stand_in(monkeypatch, lambda: current)
        self.driver = HostCudaDriver(torch.device("cuda"), self.stub)
        self.area, self.arena = memories()
        self.stub.add_device_memory(self.area.data_ptr(), self.area.nbytes)
        CudaContext(0).lock(self.arena.data_ptr(), self.arena.nbytes)
        self.copier = CudaCopier(self.area, self.arena, GEOMETRY, self.driver, choice)

    def copies(self) -> dict[str, int]:
        names = "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuLaunchKernel"
        return {name: self.stub.calls(name) for name in names if self.stub.calls(name)}


@ways
@pytest.mark.parametrize("batch", BATCHES)
def test_the_real_driver_is_taken_at_its_word(
    monkeypatch: pytest.MonkeyPatch, choice: CopyThreshold, batch: str | None
) -> None:
    real = OnStub(monkeypatch, batch, choice)
    assert real.driver.has_batch is (batch is not None)
    assert real.driver.name.endswith(f" H100 0000:1a 13000 {source_digest('pages')}")
    wanted_area, wanted_arena = memories()
    reference = ReferenceCopier(wanted_area, wanted_arena, GEOMETRY)
    orders = []
    for each in (real.copier, reference):
        each.store(0, [5, 2], [0, 3])
        orders.append(real.stub.library.stub_last_order())
        each.load(0, [1, 2], [0, 3])
    assert torch.equal(real.area, wanted_area) and torch.equal(real.arena, wanted_arena)
    assert not torch.equal(real.area, memories()[0])  # negative control: something moved
    if choice is KERNEL:
        assert real.stub.launches == ["gather_pages", "scatter_pages"]
    else:
        assert real.copies() == ({batch: 2} if batch else {"cuMemcpyAsync": 12})
    if choice is DMA and batch:  # stores read in stream order, loads early
        assert (orders[0], real.stub.library.stub_last_order()) == (1, 3)


def test_memory_is_lent_again_once_the_device_has_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OnStub(monkeypatch, "cuMemcpyBatchAsync_v2", KERNEL)
    for numbers in (array("q", [3, 4]), array("q", range(4096))):
        with real.driver.lend(numbers) as address:
            assert array("q", ctypes.string_at(address, 8 * len(numbers))) == numbers
    assert len(real.driver.made) == 2  # one on either side
    with real.driver.lend(array("q", [1])) as one, real.driver.lend(array("q", [2])) as other:
        assert one != other
    assert len(real.driver.made) == 4
    real.stub.refuse("cuEventQuery", 600)  # the device has not passed the one that ended first
    with real.driver.lend(array("q", [3])) as address:
        assert address == one
    assert len(real.driver.made) == 4
    with real.driver.lend(array("q", range(5000))):
        assert len(real.driver.made) == 6  # larger than what there was
    real.copier.load(0, [1, 2], [0, 3])
    assert len(real.driver.made) == 6  # launches borrow it
    real.stub.refuse("cuEventQuery", 700)
    with pytest.raises(TransferFailed, match="cuEventQuery failed with CUDA error 700"):
        real.copier.load(0, [1, 2], [0, 3])


@pytest.mark.parametrize("batch", BATCHES)
def test_without_kernels_dma_copies_everything(
    monkeypatch: pytest.MonkeyPatch, batch: str | None
) -> None:
    real = OnStub(monkeypatch, batch, KERNEL, kernels_load=False)
    wanted_area, wanted_arena = memories()
    for each in (real.copier, ReferenceCopier(wanted_area, wanted_arena, GEOMETRY)):
        each.store(0, [5, 2], [0, 3])
        each.load(0, [1, 2], [0, 3])
    assert torch.equal(real.area, wanted_area) and torch.equal(real.arena, wanted_arena)
    assert not torch.equal(real.area, memories()[0])  # negative control: something moved
    assert real.copies() == ({batch: 2} if batch else {"cuMemcpyAsync": 12})
    assert real.driver.name.endswith(" H100 0000:1a 13000 DMA")  # measured apart from kernels
    assert real.driver.kernels_unavailable_reason == "no kernels here"
    assert not real.copier.hashes(0)  # the host does
    with pytest.raises(Misuse, match="cannot be hashed on the device"):
        real.copier.enqueue_digests(0, [1])
    with pytest.raises(Incompatible, match="no kernels here"):
        BlockCopier(real.area, real.driver)


@ways
@pytest.mark.parametrize("batch", BATCHES)
def test_short_calls_keep_the_gil_and_others_release_it(
    monkeypatch: pytest.MonkeyPatch, choice: CopyThreshold, batch: str | None
) -> None:
    real = OnStub(monkeypatch, batch, choice)
    CudaContext(0).unlock(real.arena.data_ptr())
    CudaContext(0).lock(real.arena.data_ptr(), real.arena.nbytes)
    real.copier.store(0, [1], [1])
    held = {name: (real.stub.held(name), real.stub.calls(name)) for name in LONG}
    assert all(number == 0 < calls for number, calls in held.values())
    for name in ("cuCtxSetCurrent", *real.copies()):
        assert real.stub.held(name) == real.stub.calls(name) > 0


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_is_cut_and_keeps_the_gil_only_while_it_is_short(
    monkeypatch: pytest.MonkeyPatch, batch: str | None
) -> None:
    """A copy of a batch takes half a microsecond, so no call holds the GIL for a millisecond."""
    real = OnStub(monkeypatch, batch, DMA)
    area, arena = real.area.data_ptr(), real.arena.data_ptr()
    counts = (1, SHORT_CALL, SHORT_CALL + 1, 2 * MAX_DESCRIPTORS + 1)
    for count in counts:
        real.arena.zero_()
        addresses = array("q", range(area, area + count)), array("q", range(arena, arena + count))
        real.driver.copy_batch(addresses[1], addresses[0], array("q", [1]) * count, early=False)
        assert torch.equal(real.arena[:count], real.area[:count])
    if batch is not None:
        assert real.copies() == {batch: len(counts) + 1, "cuMemcpyAsync": 1}  # one alone
        assert real.stub.most_copies(held=True) == SHORT_CALL
        assert real.stub.most_copies(held=False) == MAX_DESCRIPTORS


LONG = (
    *("cuDevicePrimaryCtxRetain", "cuStreamCreateWithPriority"),
    *("cuMemHostRegister", "cuMemHostUnregister"),
)


def test_the_default_stream_takes_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OnStub(monkeypatch, "cuMemcpyBatchAsync_v2", DMA, null=True)
    real.copier.store(0, [5], [0])
    assert real.copies() == {"cuMemcpyAsync": 3}


@ways
@pytest.mark.parametrize("batch", [None, "cuMemcpyBatchAsync_v2"])
def test_what_the_driver_answers_is_an_error(
    monkeypatch: pytest.MonkeyPatch, choice: CopyThreshold, batch: str | None
) -> None:
    real = OnStub(monkeypatch, batch, choice)
    real.stub.lose_device(LOST)
    for _ in range(2):  # a lost device stays lost
        with pytest.raises(TransferFailed, match=f"CUDA error {LOST}"):
            real.copier.store(0, [1], [1])
    real.stub.lose_device(0)
    real.copier.store(0, [1], [1])


def test_memory_that_the_device_cannot_reach_is_a_failed_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = OnStub(monkeypatch, "cuMemcpyBatchAsync_v2", DMA)
    CudaContext(0).unlock(real.arena.data_ptr())
    with pytest.raises(TransferFailed, match="CUDA error 1"):
        real.copier.store(0, [1], [1])


@ways
@pytest.mark.parametrize("batch", [None, "cuMemcpyBatchAsync_v2"])
def test_a_thread_without_a_context_is_given_one(
    monkeypatch: pytest.MonkeyPatch, choice: CopyThreshold, batch: str | None
) -> None:
    real = OnStub(monkeypatch, batch, choice)
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(real.copier.store, 0, [1], [1]).result()
    monkeypatch.setattr(CudaContext, "enter", lambda self: None)
    with ThreadPoolExecutor(1) as fresh, pytest.raises(TransferFailed, match=str(NO_CONTEXT)):
        fresh.submit(real.copier.store, 0, [1], [1]).result()  # negative control


GOOD: dict[str, Any] = {"order": 1, "first": 0, "number": 1, "copies": 1, "flags": 1, "index": True}


@pytest.mark.parametrize("batch", ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"])
@pytest.mark.parametrize(
    "bad",
    [
        {},
        *({"order": 0}, {"order": 4}, {"first": 1}, {"number": 2}),
        *({"number": 0}, {"copies": 0}, {"flags": 2}, {"index": False}),
    ],
    ids=str,
)
def test_the_stub_refuses_what_the_driver_refuses(
    monkeypatch: pytest.MonkeyPatch, batch: str, bad: dict[str, Any]
) -> None:
    """Negative control of the tests above: a batch with one thing wrong is not taken."""
    real = OnStub(monkeypatch, batch, DMA)
    given = {**GOOD, **bad}
    function, has_index = cuda_driver._find_batch(real.stub.library)
    assert function is not None
    targets, sources, sizes = (array("q", [n]) for n in (real.area.data_ptr(), 0, 8))
    sources[0] = real.arena.data_ptr()
    hint = (ctypes.c_int * 2)(0, 0)
    attributes = (cuda_driver._CopyAttributes * 2)(
        cuda_driver._CopyAttributes(given["order"], hint, hint, given["flags"])
    )
    firsts, index = (ctypes.c_size_t * 2)(given["first"], 1), ctypes.c_size_t(0)
    more = [ctypes.byref(index) if given["index"] else None] if has_index else []
    CudaContext(0).enter()
    status = function(
        *(numbers.buffer_info()[0] for numbers in (targets, sources, sizes)),
        *(given["copies"], attributes, firsts, given["number"], *more, real.stream),
    )
    # The second form takes no index.
    assert (status != 0) is bool(bad and (has_index or "index" not in bad))


# Timing -----------------------------------------------------------------------------------------


class SlowStream:
    """A stream that needs a second until it has ended its work, on a clock of its own."""

    def __init__(self, clock: list[float], running: list[str]) -> None:
        self.clock, self.running = clock, running

    def synchronize(self) -> None:
        self.clock[0] += 1.0
        self.running.append("wait")


def test_the_time_to_submit_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = OnStub(monkeypatch, None, DMA).driver
    clock, running = [0.0], list[str]()
    monkeypatch.setattr(cuda_driver, "own_stream", lambda device: SlowStream(clock, running))
    monkeypatch.setattr(cuda_driver, "use_stream", lambda _: nullcontext())
    monkeypatch.setattr(cuda_driver.time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += 5.0
        running.append("work")

    assert driver.seconds([work]) == (5.0, 6.0)
    running.clear()
    assert driver.seconds([work] * 3) == (15.0, 18.0)
    assert running == ["work"] * 3 + ["wait"] * 3  # beside one another


def test_addresses_of_runs_are_the_same_with_and_without_the_extension() -> None:
    native = pytest.importorskip("kvconnect._native")
    starts, strides = array("q", [1 << 40, 7, 0]), array("q", [4096, 0, 3])
    ids = array("q", [5, 0, 999, 5])
    wanted = [start + i * step for i in ids for start, step in zip(starts, strides, strict=True)]
    for addresses in (native.run_addresses, torch_run_addresses):
        assert array("q", addresses(starts, strides, ids, 1000)).tolist() == wanted
        for wrong in (array("q", [0, 1000]), array("q", [-1])):
            with pytest.raises(IndexError):
                addresses(starts, strides, wrong, 1000)
