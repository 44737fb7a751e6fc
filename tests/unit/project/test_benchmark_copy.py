"""The benchmark of copies on a GPU, run small over host memory: all its figures, and its checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from benchmarks import copy_beside, copy_cuda, copy_executor  # noqa: E402
from kvconnect.copy.calibration import DMA_ONLY, GRIDS  # noqa: E402
from kvconnect.offload import copy_schedule  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402
from tests.fakes.host_bench import MIB, use_host  # noqa: E402


class Swapped(FakeDriver):
    """Copies to the wrong places."""

    def copy_batch(self, targets, sources, sizes, early) -> None:  # type: ignore[no-untyped-def]
        super().copy_batch(targets[::-1], sources, sizes, early)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[FakeDriver]], dict[str, object]]:
    def run(driver: type[FakeDriver]) -> dict[str, object]:
        use_host(monkeypatch, driver)
        return copy_cuda.measure_all(seed=0, rounds=1)

    return run


@pytest.mark.smokes("copy_cuda", "copy_beside", "copy_executor", "copy_jobs")
def test_all_figures_are_there(run: Callable[[type[FakeDriver]], dict[str, object]]) -> None:
    figures = run(FakeDriver)
    wanted = {
        f"ratio_{against}_{direction}_{page}"
        for against in ("limit", "batch")
        for direction in ("store", "load", "both")
        for page in copy_cuda.PAGES
    }
    wanted |= {
        f"{figure}_{direction}_{page}"
        for figure in ("gbps", "cpu_ms_per_gib")
        for direction in ("store", "load", "both")
        for page in copy_cuda.PAGES
    }
    wanted |= {f"gbps_digest_{page}" for page in copy_cuda.PAGES}
    wanted |= {
        f"executor_ratio_{variant}{hog}"
        for digest in ("off", "sampled", "full")
        for variant in (digest, f"store_{digest}")
        for hog in ("", "_hog")
    }
    wanted |= {
        f"executor_ratio_{digest}_{settings}"
        for digest in ("off", "sampled", "full")
        for settings in ("8m_2", "time_8")
    }
    ways = {"dma", "staged", *(f"kernel_{grid}" for grid in GRIDS)}
    beside = {
        f"{figure}_{way}_{direction}_{page}"
        for figure in ("slowdown", "gbps_beside")
        for way in ways
        for direction in ("store", "load")
        for page in copy_beside.PAGES
    }
    assert wanted | beside <= figures.keys()
    assert all(figures[name] > 0 for name in wanted)  # type: ignore[operator]
    assert all(figures[name] == 0.0 for name in beside if name.startswith("slowdown"))


def test_wrong_bytes_are_not_timed(run: Callable[[type[FakeDriver]], dict[str, object]]) -> None:
    with pytest.raises(SystemExit, match="wrong bytes with pages of 4096"):
        run(Swapped)


class Counting(FakeDriver):
    """Notes the settings of the schedule at each copy. One of many blocks may go astray."""

    astray = False
    seen: ClassVar[set[tuple[int, int, float]]] = set()

    def copy_batch(self, targets, sources, sizes, early) -> None:  # type: ignore[no-untyped-def]
        chunk = copy_schedule.CHUNK_BYTES, copy_schedule.CHUNK_S
        self.seen.add((copy_schedule.MAX_IN_FLIGHT, *chunk))
        if self.astray and early:
            targets = targets[:-1] + targets[:1]
        super().copy_batch(targets, sources, sizes, early)


def sweep(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    use_host(monkeypatch, Counting)
    return copy_cuda.measure_executor(copy_cuda.CudaBench(seed=0), rounds=1)


def test_executors_run_with_the_settings_that_their_figures_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = copy_schedule.MAX_IN_FLIGHT, copy_schedule.CHUNK_BYTES, copy_schedule.CHUNK_S
    monkeypatch.setattr(Counting, "seen", set())
    assert len(sweep(monkeypatch)) == 3 * 3 * 3 + 3 * (1 + 2)  # with stores, and beside a hog
    chunks = {(8 * MIB, 0.0), (32 * MIB, 0.0), before[1:]}
    assert Counting.seen == {(flights, *chunk) for flights in (2, 4, 8) for chunk in chunks}
    after = copy_schedule.MAX_IN_FLIGHT, copy_schedule.CHUNK_BYTES, copy_schedule.CHUNK_S
    assert after == before


def test_failed_copies_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "astray", True)
    with pytest.raises(SystemExit, match=r"a copy failed: .*digest"):
        sweep(monkeypatch)


def test_copies_take_the_way_that_their_figures_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use_host(monkeypatch, FakeDriver)
    bench = copy_cuda.CudaBench(seed=0)
    page = copy_beside.PAGES["64k"]
    (copy,) = bench.pick("store", 2)
    for way, choice in copy_beside.ways(has_kernels=True).items():
        driver = FakeDriver()
        with closing(copy_beside.jobs_by(bench, driver, page, way, choice)) as jobs:
            driver.calls.clear()
            jobs.run([copy])
        kernels = {"dma": set(), "staged": {"gather_staged"}}.get(way, {"gather_pages"})
        assert set(driver.calls) - {"copy_batch", "upload"} == kernels
    assert list(copy_beside.ways(has_kernels=False)) == ["dma"]
    with pytest.raises(SystemExit, match="copied by dma, not by kernel_2"):  # negative control
        copy_beside.jobs_by(bench, FakeDriver(), page, "kernel_2", DMA_ONLY)


def test_copies_go_on_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    use_host(monkeypatch, FakeDriver)
    bench, driver = copy_cuda.CudaBench(seed=0), FakeDriver()
    (copy,) = bench.pick("load", 1)
    with closing(copy_beside.jobs_by(bench, driver, 64 << 10, "dma", DMA_ONLY)) as jobs:

        def work() -> float:
            goal = driver.calls.count("copy_batch") + 20  # more than are queued at once
            while driver.calls.count("copy_batch") < goal:
                time.sleep(0.001)
            return 7.0

        milliseconds, rate = copy_beside.beside(jobs, copy, work)
        assert milliseconds == 7.0 and rate > 0
        after = driver.calls.count("copy_batch")
        jobs.run([copy])  # the endless ones have ended
        assert driver.calls.count("copy_batch") == after + 1


def test_failed_copies_beside_work_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    use_host(monkeypatch, FakeDriver)
    bench, driver = copy_cuda.CudaBench(seed=0), FakeDriver()
    (copy,) = bench.pick("store", 1)
    with closing(copy_beside.jobs_by(bench, driver, 64 << 10, "dma", DMA_ONLY)) as jobs:
        driver.fail_at, driver.lost = len(driver.calls), True
        with pytest.raises(SystemExit, match="a copy failed"):
            copy_beside.beside(jobs, copy, lambda: 7.0)


def test_a_hog_holds_the_gil_only_beside_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_executor, "HOG_US", 20_000)
    hog = copy_executor.GilHog()
    pause = threading.Event()

    def wait() -> float:
        start = time.perf_counter()
        pause.wait(0.001)  # to get the GIL back takes as long as the hog holds it
        return time.perf_counter() - start

    alone = min(wait() for _ in range(5))
    beside: list[float] = []
    hog.beside(lambda: beside.extend(wait() for _ in range(5)))
    hog.close()
    assert max(beside) > 0.01 > alone
