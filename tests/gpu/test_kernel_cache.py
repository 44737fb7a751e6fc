"""Kernels load from their fat binary where it was built, and compile where it was not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvconnect.copy import kernel_loading, kernels  # noqa: E402
from kvconnect.copy.kernel_loading import load_kernels  # noqa: E402
from scripts import build_kernels  # noqa: E402


@pytest.mark.parametrize("built", [False, True])
def test_every_kernel_loads(
    built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for source in build_kernels.SOURCES.glob("*.cu*"):
        shutil.copy(source, tmp_path)
    if not built:
        pytest.importorskip("cupy")
    else:
        nvcc = build_kernels.find_nvcc()
        if nvcc is None:
            pytest.skip("no nvcc")
        build_kernels.build(tmp_path, nvcc)
    monkeypatch.setattr(kernels, "folder", lambda: tmp_path)
    compiled: list[str] = []
    from_source = kernel_loading._from_source

    def follow(index: int, family: str) -> Callable[[str], int]:
        compiled.append(family)
        return from_source(index, family)

    monkeypatch.setattr(kernel_loading, "_from_source", follow)
    load_kernels.cache_clear()
    caplog.set_level("INFO", logger="kvconnect.copy")
    loaded = load_kernels(torch.cuda.current_device())
    load_kernels.cache_clear()
    assert loaded.keys() == kernels.KERNELS.keys()
    assert compiled == ([] if built else list(kernels.SOURCES))
    assert "does not load" not in caplog.text
