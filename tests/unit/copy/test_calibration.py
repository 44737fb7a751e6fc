"""Kernel, staging or DMA: the choice from measurements, and the file that keeps it."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvconnect.copy import calibration  # noqa: E402
from kvconnect.copy.calibration import (  # noqa: E402
    DEFAULT,
    DMA_ONLY,
    GRID_SHARE,
    PAGES,
    REPEATS,
    SAMPLE_BYTES,
    Calibration,
    CopyThreshold,
    calibrated,
    choose,
    measure,
    scattered,
)
from kvconnect.copy.cuda import sample_move  # noqa: E402
from kvconnect.copy.driver import Taken  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402

SMALL, MIDDLE, LARGE = PAGES[0], PAGES[2], PAGES[-1]

KERNELS = CopyThreshold(LARGE, LARGE, grid=2)  # where all grids are as fast


def times(kernel: float, dma_by_page: dict[int, float]) -> dict[tuple[str, str, int], Taken]:
    return {
        (direction, way, page): Taken(0.0, kernel if way == "kernel" else dma_by_page[page])
        for direction in ("store", "load")
        for way in ("kernel", "dma")
        for page in PAGES
    }


@pytest.mark.parametrize(
    ("dma", "store", "load"),
    [
        ([4.0, 3.0, 2.0, 1.0, 0.5], PAGES[2], PAGES[2]),
        ([1.49, 1.4, 1.31, 1.29, 9.0], 0, PAGES[2]),  # stores want a larger margin
        ([1.0, 9.0, 9.0, 9.0, 9.0], 0, 0),  # a late win is noise
        ([9.0] * 5, LARGE, LARGE),
    ],
)
def test_the_kernel_is_chosen_while_it_wins(dma: list[float], store: int, load: int) -> None:
    found = choose(times(1.0, dict(zip(PAGES, dma, strict=True))))
    assert found == CopyThreshold(store=store, load=load)


@pytest.mark.parametrize(
    ("kernel", "staged", "limit"),
    [
        (9.0, [0.9, 1.0, 1.0, 1.0, 0.8], LARGE),
        (9.0, [1.0, 1.0, 1.01, 1.0, 1.0], PAGES[1]),  # a late win is noise
        (9.0, [1.01, 1.0, 1.0, 1.0, 1.0], 0),
        (0.76, [0.98, 0.98, 0.98, 0.99, 0.98], PAGES[2]),  # the kernel is faster, by too little
    ],
)
def test_staging_is_chosen_where_nothing_is_faster(
    kernel: float, staged: list[float], limit: int
) -> None:
    seconds = times(kernel, dict.fromkeys(PAGES, 1.0))
    for page, taken in zip(PAGES, staged, strict=True):
        seconds["load", "staged", page] = Taken(0.0, taken)
    found = choose(seconds)
    assert found.staged_store == 0  # it was not measured
    assert found.staged_load == limit
    for page in PAGES:
        direct = "kernel" if page <= found.load else "dma"  # where staging is not possible
        assert found.direct("load", page) == direct
        assert found.method("load", page) == ("staged" if page <= limit else direct)


def test_the_time_to_submit_counts_once_more() -> None:
    seconds = times(9.0, dict.fromkeys(PAGES, 1.0))
    for page in PAGES:
        seconds["load", "staged", page] = Taken(0.1, 1.0)
        seconds["load", "dma", page] = Taken(0.2 if page < LARGE else 0.05, 1.0)
    assert choose(seconds).staged_load == PAGES[-2]


def driver_where_kernels_win() -> FakeDriver:
    driver = FakeDriver()
    driver.speed = lambda calls: 2.0 if "copy_batch" in calls else 1.0
    return driver


class Counted:
    """A copy that only says which way it went, and how often."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.moves = 0

    def make(self) -> Counted:
        return self

    def __call__(self, direction: str, way: str, page: int) -> None:
        self.moves += 1
        self.driver.note(way if way.startswith("kernel") else "copy_batch")


@pytest.mark.parametrize("grid", [2, 4, 8, 16])
def test_the_kernel_takes_no_more_multiprocessors_than_it_needs(grid: int) -> None:
    driver = driver_where_kernels_win()

    def speed(calls: list[str]) -> float:
        if "copy_batch" in calls:
            return 2.0
        _, _, blocks = calls[0].partition("/")
        return GRID_SHARE + (0.01 if blocks and int(blocks) < grid else -0.01) if blocks else 1.0

    driver.speed = speed
    found = measure(driver, Counted(driver))
    assert found.threshold == CopyThreshold(LARGE, LARGE, grid=grid)
    driver.calls.clear()
    driver.speed = lambda calls: 1.0  # control: no kernel is chosen, so none is measured again
    assert measure(driver, Counted(driver)).threshold.grid == 16
    assert not any(call.startswith("kernel/") for call in driver.calls)


def files(folder: Path) -> list[Path]:
    return list(folder.glob("*.json"))


def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    driver = driver_where_kernels_win()
    first, second = Counted(driver), Counted(driver)
    choice = calibrated(driver, first.make, tmp_path)
    assert choice.threshold == KERNELS and first.moves > 0
    rate = round(SAMPLE_BYTES * REPEATS / 1e9, 2)
    assert choice.gbps == {"store": [rate] * len(PAGES), "load": [rate] * len(PAGES)}
    assert calibrated(driver, second.make, tmp_path) == choice
    assert second.moves == 0
    driver.machine = "another"  # negative control: its file is its own
    calibrated(driver, second.make, tmp_path)
    assert second.moves == first.moves
    assert len(files(tmp_path)) == 2


RATES = {"store": [1.0] * len(PAGES), "load": [1.0] * len(PAGES)}
LIMITS = {"store": 0, "load": 0, "staged_store": 0, "staged_load": 0, "grid": 4}
GOOD = {"machine": "fake", **LIMITS, "gbps": RATES}


def test_a_good_file_is_taken(tmp_path: Path) -> None:
    """Negative control of the next test."""
    driver = driver_where_kernels_win()
    calibrated(driver, Counted(driver).make, tmp_path)
    (path,) = files(tmp_path)
    path.write_text(json.dumps(GOOD))
    again = Counted(driver)
    assert calibrated(driver, again.make, tmp_path).threshold == replace(DMA_ONLY, grid=4)
    assert again.moves == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        *(json.dumps({name: GOOD[name] for name in GOOD if name != lacks}) for lacks in GOOD),
        json.dumps(GOOD | {"machine": "other"}),
        json.dumps(GOOD | {"store": 1}),
        json.dumps(GOOD | {"store": []}),
        json.dumps(GOOD | {"staged_load": 1}),
        json.dumps(GOOD | {"grid": 3}),
        json.dumps(GOOD | {"gbps": {"store": [], "load": []}}),
        json.dumps(GOOD | {"gbps": RATES | {"load": "fast"}}),
    ],
)
def test_a_broken_file_is_measured_again_and_replaced(tmp_path: Path, content: str) -> None:
    driver = driver_where_kernels_win()
    calibrated(driver, Counted(driver).make, tmp_path)
    (path,) = files(tmp_path)
    good = path.read_text()
    path.write_text(content)
    again = Counted(driver)
    assert calibrated(driver, again.make, tmp_path).threshold == KERNELS
    assert again.moves > 0
    assert json.loads(path.read_text()) == json.loads(good)
    names = {"copy.lock", path.name}
    assert {file.name for file in tmp_path.iterdir()} == names  # no temporary file is left


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    driver = driver_where_kernels_win()
    choice = calibrated(driver, Counted(driver).make, tmp_path / "file" / "folder")
    assert choice.threshold == KERNELS


def test_a_full_disk_keeps_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    driver = driver_where_kernels_win()
    assert calibrated(driver, Counted(driver).make, tmp_path).threshold == KERNELS
    assert {file.name for file in tmp_path.iterdir()} == {"copy.lock"}


def test_without_kernels_dma_alone_is_measured(tmp_path: Path) -> None:
    driver = driver_where_kernels_win()
    driver.kernels_unavailable_reason = "CuPy is not installed"
    choice = calibrated(driver, Counted(driver).make, tmp_path)
    assert choice.threshold == DMA_ONLY and "kernel" not in driver.calls
    rate = round(SAMPLE_BYTES * REPEATS / 2e9, 2)
    assert choice.gbps == {"store": [rate] * len(PAGES), "load": [rate] * len(PAGES)}
    driver = FakeDriver(0)
    driver.kernels_unavailable_reason = "CuPy is not installed"
    failed = calibrated(driver, Counted(driver).make, tmp_path / "failing")
    assert failed == Calibration(DMA_ONLY, {})
    assert failed.describe() == "store by DMA (not measured); load by DMA (not measured)"


def test_a_measurement_that_fails_anywhere_means_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = FakeDriver()
    calibrated(healthy, Counted(healthy).make, tmp_path / "healthy")
    for number in range(len(healthy.calls)):
        driver = FakeDriver(number)
        choice = calibrated(driver, Counted(driver).make, tmp_path / "failing")
        assert choice == Calibration(DEFAULT, {})
    assert not files(tmp_path / "failing")  # a failure is not kept
    assert "using defaults: call 0" in caplog.text


def test_a_sample_is_copied_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibration, "SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr("kvconnect.copy.cuda.SAMPLE_BYTES", 1 << 20)
    driver = FakeDriver()
    move = sample_move(driver)
    driver.calls.clear()
    for direction, kernel in (("store", "gather_pages"), ("load", "scatter_pages")):
        move(direction, "kernel", MIDDLE)
        move(direction, "dma", MIDDLE)
        assert driver.calls == ["upload", kernel, "copy_batch"]
        driver.calls.clear()
        move(direction, "staged", MIDDLE)
        copies = ["copy_batch", f"{kernel[:-6]}_staged"]  # the first takes the ids there
        moved = ["copy_batch"]  # one copy a block
        assert driver.calls == (copies + moved if direction == "store" else moved + copies)
        for page in PAGES:
            move(direction, "staged", page)
        driver.calls.clear()
    for number in (0, 1):  # no memory on the device, or on the host
        make = partial(sample_move, FakeDriver(number))
        assert calibrated(FakeDriver(), make, tmp_path).threshold == DEFAULT


def test_pages_of_a_sample_are_each_taken_once() -> None:
    for count in (1, 64, 4096, 7919, 2 * 7919):
        assert sorted(scattered(count)) == list(range(count))
    assert list(scattered(64)) != list(range(64))


def test_a_user_without_a_home_measures_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "cache_folder", lambda: None)
    driver = driver_where_kernels_win()
    for _ in range(2):
        moves = Counted(driver)
        assert calibrated(driver, moves.make).threshold == KERNELS
        assert moves.moves > 0


# Several workers on one machine ------------------------------------------------------------------


def measure_in_a_process(folder: Path, machine: str, notes: Path, ready: Barrier) -> None:
    driver = driver_where_kernels_win()
    driver.machine = machine
    handle = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def speed(calls: list[str]) -> float:
        os.write(handle, machine.encode())
        time.sleep(0.002)
        return 1.0

    driver.speed = speed
    ready.wait(60)
    calibrated(driver, Counted(driver).make, folder)


def noted(tmp_path: Path, *machines: str) -> str:
    """Return the letter of who measured, for each measurement in its order."""
    forked = multiprocessing.get_context("fork")
    ready, notes = forked.Barrier(len(machines)), tmp_path / "notes"
    workers = [
        forked.Process(target=measure_in_a_process, args=(tmp_path, machine, notes, ready))
        for machine in machines
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    return notes.read_text()


def changes(text: str) -> int:
    return sum(a != b for a, b in pairwise(text))


def test_workers_measure_one_after_the_other(tmp_path: Path) -> None:
    text = noted(tmp_path, "a", "b")  # of different devices, so that both must measure
    assert text.count("a") == text.count("b") > 0
    assert changes(text) == 1


def test_without_the_lock_they_would_measure_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(calibration, "_turn", lambda folder: nullcontext())
    assert changes(noted(tmp_path, "a", "b")) > 1


def test_whoever_waited_reads_what_the_other_measured(tmp_path: Path) -> None:
    text = noted(tmp_path, "a", "a")
    (tmp_path / "alone").mkdir()
    assert text == noted(tmp_path / "alone", "a")


def test_a_lock_that_is_not_given_back_only_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "LOCK_TIMEOUT_S", 0.1)
    caplog.set_level("INFO", logger="kvconnect.copy")
    driver = driver_where_kernels_win()
    with (tmp_path / "copy.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        choice = calibrated(driver, Counted(driver).make, tmp_path)
    assert choice.threshold == KERNELS
    assert "without a lock" in caplog.text


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A fork while the lock is held shares it, until the parent unlocks."""
    forked = multiprocessing.get_context("fork")
    over = forked.Event()
    with calibration._turn(tmp_path):
        child = forked.Process(target=over.wait, args=(60,))
        child.start()
    with (tmp_path / "copy.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    over.set()
    child.join(60)
    assert child.exitcode == 0
