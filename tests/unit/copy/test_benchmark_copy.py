"""The benchmark of copies on a GPU, run small over host memory: all its figures, and its checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from benchmarks import copy_cuda  # noqa: E402
from kvconnect.cache.layout import Geometry  # noqa: E402
from kvconnect.copy.calibration import CopyThreshold  # noqa: E402
from kvconnect.copy.cuda import CudaCopier  # noqa: E402
from kvconnect.offload.host_arena import HostArena  # noqa: E402
from kvconnect.offload.streams import HostStreams  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402

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
        slots = copy_cuda.AREA_BYTES // copy_cuda.PAGES["4m"]
        self.store = HostArena(slots, copy_cuda.PAGES["4m"], "off")
        self.arena = self.store.tensor()
        self.streams = HostStreams()

    def indexed(self, page: int, nbytes: int) -> dict[str, Callable[[], None]]:
        return self.large(nbytes)


class Swapped(FakeDriver):
    """Copies to the wrong places."""

    def copy_batch(self, targets, sources, sizes, early) -> None:  # type: ignore[no-untyped-def]
        super().copy_batch(targets[::-1], sources, sizes, early)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[FakeDriver]], dict[str, object]]:
    for name, value in {
        "SAMPLE_BYTES": 4 * MIB,
        "SIZES": dict.fromkeys(copy_cuda.SIZES, 8 * MIB),
        "AREA_BYTES": 16 * MIB,
        "MATRIX": 8,
        "PRODUCTS": 1,
        "CudaBench": HostBench,
    }.items():
        monkeypatch.setattr(copy_cuda, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def run(driver: type[FakeDriver]) -> dict[str, object]:
        def made(area: torch.Tensor, arena: torch.Tensor, geometry: Geometry) -> CudaCopier:
            return CudaCopier(area, arena, geometry, driver(), CopyThreshold(0, 0))

        monkeypatch.setattr(copy_cuda, "make_copier", made)
        monkeypatch.setattr(copy_cuda, "open_driver", lambda device: driver())
        return copy_cuda.measure_all(seed=0, rounds=1)

    return run


def test_all_figures_are_there(run: Callable[[type[FakeDriver]], dict[str, object]]) -> None:
    figures = run(FakeDriver)
    wanted = {
        f"ratio_{against}_{direction}_{page}"
        for against in ("limit", "batch")
        for direction in ("store", "load", "both")
        for page in copy_cuda.PAGES
    } | {"interference", "launch_us_1000"}
    assert wanted <= figures.keys()
    assert figures["interference"] == 0.0
    assert all(figures[name] > 0 for name in wanted - {"interference"})  # type: ignore[operator]


def test_wrong_bytes_are_not_timed(run: Callable[[type[FakeDriver]], dict[str, object]]) -> None:
    with pytest.raises(SystemExit, match="wrong bytes with pages of 4096"):
        run(Swapped)
