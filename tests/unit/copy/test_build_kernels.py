"""Kernels are compiled with nvcc, warnings as errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnect.copy import kernels
from scripts import build_kernels

NVCC = build_kernels.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def test_every_family_has_a_source_and_every_kernel_is_in_it() -> None:
    sources = {path.stem: path.read_text() for path in build_kernels.SOURCES.glob("*.cu")}
    assert sources.keys() == set(kernels.SOURCES)
    for kernel, family in kernels.KERNELS.items():
        assert f" {kernel}(" in sources[family]


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


# The switch of setup.py ---------------------------------------------------------------------------

LISTS = '#!/bin/sh\n[ "$1" = --list-gpu-arch ] && echo compute_90 && exit\n'
WORKS = LISTS + 'for last; do :; done\necho compiled > "$last"\n'
BROKEN = LISTS + "echo no GPU here >&2; exit 1\n"


@pytest.mark.parametrize(
    ("switch", "nvcc", "packed", "said"),
    [
        ("", "", False, ""),
        ("", WORKS, True, ""),
        ("", BROKEN, False, "no kernels ahead of time"),
        ("1", WORKS, True, ""),
        ("1", "", None, "there is no nvcc"),
        ("1", BROKEN, None, "no GPU here"),
        ("0", WORKS, False, ""),
        ("yes", WORKS, None, "leave it unset, or set it to 0 or 1"),
    ],
)
def test_the_switch_of_setup(
    tmp_path: Path, switch: str, nvcc: str, packed: bool | None, said: str
) -> None:
    """``packed``: whether a wheel would have fat binaries; None if the build is to fail. What is
    left from an earlier build is not packed when it was switched off."""
    root, tree = build_kernels.SOURCES.parent, tmp_path / "tree"
    shutil.copytree(root / "scripts", tree / "scripts")
    shutil.copytree(root / "kernels", tree / "kernels")
    (tree / "kvconnect").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "kvconnect/__init__.py"):
        shutil.copy(root / name, tree / name)
    for left in (tree / "kernels").glob("*.fatbin"):
        left.unlink()
    if switch == "0":
        (tree / "kernels/old.fatbin").write_text("stale")
    tools = tmp_path / "cuda/bin"
    tools.mkdir(parents=True)
    if nvcc:
        (tools / "nvcc").write_text(nvcc)
        (tools / "nvcc").chmod(0o755)
    environment = {
        "PATH": str(tmp_path),
        "CUDA_HOME": str(tools.parent),
        "KVCONNECT_BUILD_NATIVE": "0",
        "KVCONNECT_BUILD_KERNELS": switch,
    }
    ran = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "out"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode != 0) == (packed is None), ran.stderr
    assert said in ran.stderr
    if packed is not None:
        families = {path.name.split("-")[0] for path in tree.glob("out/**/*.fatbin")}
        assert families == (set(kernels.SOURCES) if packed else set())
