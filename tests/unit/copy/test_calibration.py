"""Kernel or DMA: the choice from measurements, and the file that keeps it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvconnect.copy import calibration  # noqa: E402
from kvconnect.copy.calibration import (  # noqa: E402
    DEFAULT,
    PAGES,
    CopyThreshold,
    cache_folder,
    calibrated,
    choose,
    scattered,
)
from kvconnect.copy.cuda import sample_move  # noqa: E402
from tests.fakes.cuda_driver import FakeDriver  # noqa: E402

SMALL, MIDDLE, LARGE = PAGES[0], PAGES[2], PAGES[-1]


def times(kernel: float, dma_by_page: dict[int, float]) -> dict[tuple[str, str, int], float]:
    return {
        (direction, way, page): kernel if way == "kernel" else dma_by_page[page]
        for direction in ("store", "load")
        for way in ("kernel", "dma")
        for page in PAGES
    }


@pytest.mark.parametrize(
    ("dma", "store", "load"),
    [
        ([4.0, 3.0, 2.0, 1.0, 0.5], PAGES[2], PAGES[2]),
        ([1.4, 1.2, 1.06, 1.0, 1.0], 0, PAGES[2]),  # stores want a large margin
        ([1.0, 9.0, 9.0, 9.0, 9.0], 0, 0),  # a late win is noise
        ([9.0] * 5, LARGE, LARGE),
    ],
)
def test_the_kernel_is_chosen_while_it_wins(dma: list[float], store: int, load: int) -> None:
    found = choose(times(1.0, dict(zip(PAGES, dma, strict=True))))
    assert found == CopyThreshold(store=store, load=load)


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
        self.driver.note("copy_batch" if way == "dma" else "kernel")


def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    driver = driver_where_kernels_win()
    first, second = Counted(driver), Counted(driver)
    choice = calibrated(driver, first.make, tmp_path)
    assert choice == CopyThreshold(LARGE, LARGE) and first.moves > 0
    assert calibrated(driver, second.make, tmp_path) == choice
    assert second.moves == 0
    driver.machine = "another"  # negative control: its file is its own
    calibrated(driver, second.make, tmp_path)
    assert second.moves == first.moves
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"machine": "fake", "store": 1, "load": 0}',
        '{"machine": "fake", "store": [], "load": 0}',
        '{"machine": "other", "store": 0, "load": 0}',
    ],
)
def test_a_broken_file_is_measured_again_and_replaced(tmp_path: Path, content: str) -> None:
    driver = driver_where_kernels_win()
    calibrated(driver, Counted(driver).make, tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    path.write_text(content)
    again = Counted(driver)
    assert calibrated(driver, again.make, tmp_path) == CopyThreshold(LARGE, LARGE)
    assert again.moves > 0
    assert json.loads(path.read_text()) == json.loads(good)
    assert list(tmp_path.iterdir()) == [path]  # no temporary file is left


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    driver = driver_where_kernels_win()
    choice = calibrated(driver, Counted(driver).make, tmp_path / "file" / "folder")
    assert choice == CopyThreshold(LARGE, LARGE)


def test_a_measurement_that_fails_anywhere_means_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = FakeDriver()
    calibrated(healthy, Counted(healthy).make, tmp_path / "healthy")
    for number in range(len(healthy.calls)):
        driver = FakeDriver(number)
        assert calibrated(driver, Counted(driver).make, tmp_path / "failing") == DEFAULT
    assert not (tmp_path / "failing").exists()  # a failure is not kept
    assert "using defaults: call 0" in caplog.text


def test_a_sample_is_copied_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for number in (0, 1):  # no memory on the device, or on the host
        make = partial(sample_move, FakeDriver(number))
        assert calibrated(FakeDriver(), make, Path("/nowhere")) == DEFAULT


def test_pages_of_a_sample_are_each_taken_once() -> None:
    for count in (1, 64, 4096, 7919, 2 * 7919):
        assert sorted(scattered(count)) == list(range(count))
    assert list(scattered(64)) != list(range(64))


def test_the_cache_is_where_the_system_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvconnect"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "kvconnect"


def test_a_user_without_a_home_measures_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None
    driver = driver_where_kernels_win()
    for _ in range(2):
        moves = Counted(driver)
        assert calibrated(driver, moves.make) == CopyThreshold(LARGE, LARGE)
        assert moves.moves > 0
