"""Kernels come from fat binaries through the driver; CuPy compiles only where none fits."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnect.copy import kernels
from kvconnect.copy.kernel_loading import binary_name, kernel_source, load_kernels
from kvconnect.errors import Incompatible
from scripts import build_kernels
from tests.fakes.stub_driver import StubDriver

FAT_BINARY = struct.pack("<I", 0xBA55ED50)


class CompileException(Exception):
    """What CuPy raises for a source; no RuntimeError."""


class FakeModule:
    """CuPy's RawModule."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def get_function(self, name: str) -> SimpleNamespace:
        if self.fails:
            raise CompileException("bad code")
        return SimpleNamespace(kernel=SimpleNamespace(ptr=1000 + [*kernels.KERNELS].index(name)))


class FakeCupy:
    def __init__(self, fails: bool = False) -> None:
        compiler = SimpleNamespace(CompileException=CompileException)
        self.cuda = SimpleNamespace(compiler=compiler, Device=lambda index: nullcontext())
        self.RawModule = lambda code, options: FakeModule(fails)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources, without a fat binary."""
    for path in build_kernels.SOURCES.glob("*.cu*"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(kernels, "folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    stub = StubDriver(monkeypatch)
    stub.run_kernels(list(kernels.KERNELS))
    return stub


def build(folder: Path, content: bytes = FAT_BINARY) -> None:
    for family in kernels.SOURCES:
        (folder / build_kernels.binary_name(folder / f"{family}.cu")).write_bytes(content)


def test_fat_binaries_need_no_cupy(
    folder: Path, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert load_kernels(0) == stub.kernels
    assert stub.calls("cuModuleLoadData") == len(kernels.SOURCES)
    load_kernels.cache_clear()
    next(folder.glob("pages-*.fatbin")).unlink()  # negative control
    with pytest.raises(Incompatible, match=r"CuPy is not installed .*kvconnect\[cuda12\]"):
        load_kernels(0)


@pytest.mark.parametrize("built", [True, False])
def test_a_source_serves_where_no_fat_binary_loads(
    folder: Path, stub: StubDriver, monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    if built:
        build(folder, b"for another device")
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())  # type: ignore[arg-type]
    wanted = {name: 1000 + number for number, name in enumerate(kernels.KERNELS)}
    assert load_kernels(0) == wanted
    assert stub.calls("cuModuleLoadData") == (len(kernels.SOURCES) if built else 0)


def test_a_source_that_does_not_compile_is_named(
    folder: Path, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(fails=True))  # type: ignore[arg-type]
    with pytest.raises(Incompatible, match=r"pages\.cu does not compile here: bad code"):
        load_kernels(0)


def test_a_cupy_that_does_not_fit_the_driver_is_named(
    folder: Path, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device(index: int) -> None:
        raise RuntimeError("cudaErrorInsufficientDriver")

    cupy = FakeCupy()
    cupy.cuda.Device = device
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    with pytest.raises(Incompatible, match="does not compile here: cudaErrorInsuff"):
        load_kernels(0)


def test_a_source_is_one_piece_without_headers() -> None:
    for family in kernels.SOURCES:
        text = kernel_source(family)
        assert "#include" not in text and "struct Run" in text and "#pragma once" not in text


def test_a_fat_binary_of_other_sources_is_not_found(folder: Path) -> None:
    names = set()
    for change in ("", "/* changed */"):
        (folder / "runs.cuh").write_text((folder / "runs.cuh").read_text() + change)
        for family in kernels.SOURCES:
            name = binary_name(family)
            assert name == build_kernels.binary_name(folder / f"{family}.cu")
            names.add(name)
    assert len(names) == 2 * len(kernels.SOURCES)
