"""Every kernel compiles for every named target with nvcc, warnings as errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvconnect import kernels
from scripts import build_kernels

NVCC = build_kernels.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def test_every_family_has_a_source_and_every_kernel_is_in_it() -> None:
    sources = {path.stem: path.read_text() for path in build_kernels.SOURCES.glob("*.cu")}
    assert sources.keys() == set(kernels.SOURCES)
    for kernel, family in kernels.KERNELS.items():
        assert f" {kernel}(" in sources[family]


@needs_nvcc
@pytest.mark.parametrize("family", kernels.SOURCES)
def test_it_compiles_for_all_targets(family: str, tmp_path: Path) -> None:
    assert NVCC is not None
    architectures = build_kernels.known_architectures(NVCC)
    source, target = build_kernels.SOURCES / f"{family}.cu", tmp_path / f"{family}.fatbin"
    subprocess.run(build_kernels.command(NVCC, architectures, source, target), check=True)
    assert target.read_bytes().startswith(bytes.fromhex("50ed55ba"))  # a fat binary


@needs_nvcc
def test_a_warning_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NVCC is not None
    monkeypatch.setattr(build_kernels, "SOURCES", tmp_path)
    monkeypatch.setattr(build_kernels, "ARCHITECTURES", (90,))
    source = tmp_path / "bad.cu"
    for body, fails in (("int unused;", True), ("", False)):
        source.write_text(f'extern "C" __global__ void bad() {{ {body} }}\n')
        if fails:
            with pytest.raises(build_kernels.BuildFailed, match="unused"):
                build_kernels.build(tmp_path, NVCC)
            assert not list(tmp_path.glob("*.fatbin"))
        else:
            made = build_kernels.build(tmp_path, NVCC)
            assert made == list(tmp_path.glob("bad-*.fatbin")) and len(made) == 1
            assert build_kernels.build(tmp_path, NVCC) == made  # nothing to do
            source.write_text(source.read_text() + "\n")
            again = build_kernels.build(tmp_path, NVCC)  # the one of the old source is gone
            assert again == list(tmp_path.glob("*.fatbin")) and again != made


def test_an_nvcc_for_none_of_the_targets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_kernels, "known_architectures", lambda nvcc: ())
    with pytest.raises(build_kernels.BuildFailed, match="compiles for none of"):
        build_kernels.build(Path("."), "old-nvcc")
