"""vLLM for a GPU machine that has torch: its wheel for one architecture, and what it depends on."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu import fat_binaries
from scripts.gpu.wheels import PLATFORMS, PYTHON, download, members

VLLM = "vllm==0.33.0"
SERVER = "vllm/vllm-rs"
"""A program in the wheel that an engine in a Python process does not use."""

FLASH_ATTENTION_2 = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
"""Larger than a piece. vLLM does without it where it has version 3, on compute capability 9."""

NOT_CARRIED = (
    *("torch", "torchaudio", "torchvision", "torchcodec", "triton", "flashinfer-python"),
    *("fastsafetensors", "humming-kernels", "instanttensor", "opencv-python-headless"),
    *("pynvvideocodec", "quack-kernels", "tilelang", "tokenspeed-mla"),
)
"""The machine's own torch, and large packages that a dense text model runs without. The same holds
for everything that begins with "nvidia-" or "cuda-"."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Return the normalized name of a requirement or of a line of ``pip freeze``."""
    found = re.match(r"[A-Za-z0-9][\w.-]*", requirement.strip())
    return normal(found[0]) if found else ""


def is_carried(requirement: str, have: set[str]) -> bool:
    name = name_of(requirement)
    return not (name in have or name in NOT_CARRIED or name.startswith(("nvidia-", "cuda-")))


def requires(wheel: Path) -> list[str]:
    """Return what a wheel depends on, without its extras."""
    with zipfile.ZipFile(wheel) as content:
        (metadata,) = (n for n in content.namelist() if n.endswith(".dist-info/METADATA"))
        lines = content.read(metadata).decode().splitlines()
    begin = "Requires-Dist: "
    return [
        line.removeprefix(begin)
        for line in lines
        if line.startswith(begin) and "extra ==" not in line
    ]


def resolve(wanted: list[str]) -> list[str]:
    """Return all packages with their versions for the GPU machine's Python.

    A requirement that no version in the registry meets is taken without its limits: what the
    registry has is more than nothing, and the steps say what does not load with it.
    """
    try:
        return compiled(wanted)
    except subprocess.CalledProcessError as error:
        named = [text for text in wanted if name_of(text) in error.stderr]
        unmet = {text for text in named if not is_met(text)}
        return compiled([name_of(text) if text in unmet else text for text in wanted])


def is_met(requirement: str) -> bool:
    try:
        return bool(compiled([requirement]))
    except subprocess.CalledProcessError:
        return False


def compiled(wanted: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "in.txt")
        path.write_text("\n".join(wanted))
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
        target = [f"--python-version={PYTHON}", f"--python-platform=x86_64-{PLATFORMS[0]}"]
        made = subprocess.run(
            [*command, "--no-annotate", *target, str(path)],
            check=True,
            capture_output=True,
            text=True,
        )
    return made.stdout.split()


def fetch(folder: Path, wheel: Path | None, have: set[str]) -> tuple[Path | None, list[str]]:
    """Download vLLM (unless its wheel is given) and what it needs into ``folder``.

    Returns:
        vLLM's wheel, None if there is none; and what could not be had, with the reason.
    """
    try:
        if wheel is None:
            download([VLLM], folder / "vllm", alone=True)
            (wheel,) = (folder / "vllm").glob("*.whl")
        wanted = [text for text in requires(wheel) if is_carried(text, have)]
        named = [text for text in resolve(wanted) if is_carried(text, have)] if wanted else []
    except (subprocess.CalledProcessError, ValueError) as error:
        return wheel, [f"{wheel or VLLM} or what it needs: {error}"]
    return wheel, download_each(named, folder / "needed")


def download_each(named: list[str], folder: Path) -> list[str]:
    """Download packages; return those that have no wheel. One call is faster than many, but names
    nothing when it fails."""
    try:
        if named:
            download(named, folder, alone=True)
    except subprocess.CalledProcessError:
        if len(named) == 1:
            return [f"{named[0]}: pip finds no wheel for Python {PYTHON}"]
        return [text for name in named for text in download_each([name], folder)]
    return []


def engine_members(wheel: Path, architecture: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of vLLM's wheel, with code for one architecture."""
    left_out = {SERVER, FLASH_ATTENTION_2} if architecture // 10 == 9 else {SERVER}
    for path, content in members(wheel):
        if path not in left_out:
            is_library = path.endswith(".so")
            yield path, fat_binaries.strip(content, architecture) if is_library else content
