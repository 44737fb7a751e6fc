"""The benchmark of copies on a GPU, small and over host memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import copy_beside, copy_cuda, copy_executor
from kvconnect.cache.layout import Geometry
from kvconnect.copy import calibration, cuda
from kvconnect.copy.calibration import CopyThreshold
from kvconnect.copy.cuda import CudaCopier
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.streams import HostStreams
from tests.fakes.cuda_driver import FakeDriver

MIB = copy_cuda.MIB


class Event:
    """A device's event, of which all take as long."""

    def __init__(self, **_: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class HostBench(copy_cuda.CudaBench):
    """Device memory is the host's, and torch does not index (it would page-lock memory)."""

    def __init__(self, seed: int) -> None:
        self.random = copy_cuda.random.Random(seed)
        self.device = torch.device("cpu")
        self.area = torch.empty(copy_cuda.AREA_BYTES, dtype=torch.uint8).random_()
        slots = copy_cuda.AREA_BYTES // copy_cuda.BLOCK_BYTES
        self.store = self.make_arena(slots, copy_cuda.BLOCK_BYTES)
        self.arena = self.store.tensor()
        self.streams = HostStreams()

    def make_arena(self, num_slots: int, slot_bytes: int) -> HostArena:
        return HostArena(num_slots, slot_bytes, "off")

    def indexed(self, page: int, nbytes: int) -> dict[str, Callable[[], None]]:
        return self.large(nbytes)


def use_host(monkeypatch: pytest.MonkeyPatch, driver: type[FakeDriver]) -> None:
    """Make the benchmark run over host memory, with few bytes."""

    def made(area: torch.Tensor, arena: torch.Tensor, geometry: Geometry) -> CudaCopier:
        return CudaCopier(area, arena, geometry, driver(), CopyThreshold(0, 0))

    for name, value in {
        "SAMPLE_BYTES": 4 * MIB,
        "DIGESTED_BYTES": 4 * MIB,
        "SIZES": dict.fromkeys(copy_cuda.SIZES, 8 * MIB),
        "AREA_BYTES": 16 * MIB,
        "MATRIX": 8,
        "PRODUCTS": 1,
        "CudaBench": HostBench,
        "make_copier": made,
        "open_driver": lambda device: driver(),
    }.items():
        monkeypatch.setattr(copy_cuda, name, value)
    for module in (calibration, cuda):
        monkeypatch.setattr(module, "SAMPLE_BYTES", MIB)
    for name, number in {"BLOCK_BYTES": 8192, "JOB_BYTES": 8 * 8192, "HOG_US": 10}.items():
        monkeypatch.setattr(copy_executor, name, number)
    monkeypatch.setattr(copy_beside, "JOB_BLOCKS", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(torch.cuda, "Event", Event)
