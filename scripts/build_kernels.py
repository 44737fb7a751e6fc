"""Compile the CUDA kernels to fat binaries: python scripts/build_kernels.py [FOLDER]

Machine code for every named architecture and PTX of the newest, for what comes after it. Needs
nvcc (in PATH, or of CUDA_HOME) and nothing else; setup.py calls it. Warnings are errors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "kernels"
ARCHITECTURES = (80, 86, 89, 90, 100)
"""Compute capabilities, times ten: A100, A10, L4 and L40, H100 and H200, B200."""


class BuildFailed(Exception):
    """A kernel did not compile. The message is what the compiler said."""


def find_nvcc() -> str | None:
    """Return the path of nvcc, None if there is none."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home, "bin")))


def known_architectures(nvcc: str) -> tuple[int, ...]:
    """Return those of ``ARCHITECTURES`` that this nvcc can compile for."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True)
    names = set(listed.stdout.split())
    return tuple(number for number in ARCHITECTURES if f"compute_{number}" in names)


def binary_name(source: Path) -> str:
    """Return what a family's fat binary is called: by its sources, so that none can be stale."""
    headers = sorted(source.parent.glob("*.cuh"))
    content = b"".join(path.read_bytes() for path in (*headers, source))
    return f"{source.stem}-{hashlib.sha256(content).hexdigest()[:12]}.fatbin"


def command(nvcc: str, architectures: tuple[int, ...], source: Path, target: Path) -> list[str]:
    """Return the call that compiles one family."""
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in architectures]
    newest = architectures[-1]
    return [
        nvcc,
        *("-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"),
        *codes,
        f"-gencode=arch=compute_{newest},code=compute_{newest}",
        *("--threads", "0", "-fatbin", str(source), "-o", str(target)),
    ]


def build(folder: Path, nvcc: str) -> list[Path]:
    """Compile what was not compiled yet into ``folder``; return all fat binaries.

    Raises:
        BuildFailed: a kernel did not compile, or nvcc knows none of the architectures.
    """
    architectures = known_architectures(nvcc)
    if not architectures:
        raise BuildFailed(f"{nvcc} compiles for none of {ARCHITECTURES}")
    targets = []
    for source in sorted(SOURCES.glob("*.cu")):
        target = folder / binary_name(source)
        targets.append(target)
        if target.exists():
            continue
        for old in folder.glob(f"{source.stem}-*.fatbin"):
            old.unlink()
        made = subprocess.run(
            command(nvcc, architectures, source, target), capture_output=True, text=True
        )
        if made.returncode:
            target.unlink(missing_ok=True)
            raise BuildFailed(f"{source.name}: {made.stderr}{made.stdout}")
    return targets


def main() -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("build_kernels: no nvcc in PATH or CUDA_HOME")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES
    try:
        targets = build(folder, nvcc)
    except BuildFailed as error:
        sys.exit(f"build_kernels: {error}")
    for target in targets:
        sys.stdout.write(f"{target} {target.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
