"""Packages for a machine without a registry, in pieces: zip files and an index with their digests.

    scripts/gpu_run pack DIR                    # downloads and packs
    python -m scripts.gpu.pieces DIR SITE       # unpacks what is in DIR; SITE goes into PYTHONPATH

Each piece can be unpacked by itself. The index says what belongs together, so a piece that was
not carried is named, and so is one that was damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu import engine
from scripts.gpu.wheels import PYTHON, download, members

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("hypothesis", "msgspec", "prometheus-client", "pytest", "pytest-timeout", "xxhash")
"""What the tests and benchmarks import besides torch and CuPy."""

PIECE_BYTES = 60 << 20
INDEX = "index.json"


def requirements(names: tuple[str, ...]) -> list[str]:
    """Return names with the versions that pyproject.toml asks for."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    by_name = {text.partition(">")[0].partition("=")[0]: text for text in wanted}
    return [by_name.get(name, name) for name in names]


def build_extension(folder: Path) -> str:
    """Build the C extension, which any Python loads, into ``folder``; return what became of it."""
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}"]
    with tempfile.TemporaryDirectory() as scratch:
        download(["setuptools"], Path(scratch))
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as content:
                content.extractall(scratch)
        made = subprocess.run(
            [*command, f"--build-temp={scratch}/temp"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": scratch},
            capture_output=True,
            text=True,
        )
    if any(folder.rglob("*.so")):
        return "built"
    return f"not built: {(made.stderr or made.stdout).strip()[-400:]}"


def write_pieces(files: Iterator[tuple[str, bytes]], folder: Path, limit: int) -> dict[str, object]:
    """Write files into pieces of at most ``limit`` bytes; return the digests by piece.

    Raises:
        ValueError: one file alone is larger than a piece.
    """
    digests: dict[str, object] = {}
    piece: zipfile.ZipFile | None = None
    used = 0
    for path, content in files:
        size = len(zlib.compress(content, 1)) + 2 * len(path) + 256  # at least what it will take
        if size > limit:
            raise ValueError(f"{path} takes {size} bytes, more than a piece has ({limit})")
        if piece is None or used + size > limit:
            if piece is not None:
                piece.close()
            name = f"piece-{len(digests)}.zip"
            piece = zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
            digests[name] = None
            used = 0
        piece.writestr(path, content)
        used += size
    if piece is not None:
        piece.close()
    return {name: _digest(folder / name) for name in digests}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Contents:
    """What to pack. ``have``: packages that the GPU machine has. ``wheel``: of vLLM, instead of
    downloading it."""

    with_engine: bool = False
    architecture: int = 90
    have: frozenset[str] = frozenset()
    wheel: Path | None = None


def without_repeats(paths: list[Path]) -> list[Path]:
    """Return the first wheel of each package, by name."""
    first: dict[str, Path] = {}
    for path in paths:
        first.setdefault(engine.name_of(path.name.partition("-")[0]), path)
    return [first[name] for name in sorted(first)]


def pack(folder: Path, contents: Contents) -> int:
    """Download what a GPU machine lacks and write it to ``folder`` as pieces; return 1 if
    something of it could not be had."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("piece-*.zip"):
        old.unlink()
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        wheels, built, more = (Path(scratch, name) for name in ("wheels", "built", "more"))
        built.mkdir()
        download(requirements(NAMES), wheels)
        extension = build_extension(built)
        vllm = None
        if contents.with_engine:
            vllm, missing = engine.fetch(more, contents.wheel, set(contents.have))
        chosen = without_repeats([*wheels.glob("*.whl"), *(more / "needed").glob("*.whl")])

        def files() -> Iterator[tuple[str, bytes]]:
            for library in built.rglob("*.so"):
                yield f"native/{library.name}", library.read_bytes()
            for path in chosen:
                yield from members(path)
            if vllm is not None:
                yield from engine.engine_members(vllm, contents.architecture)

        digests = write_pieces(files(), folder, PIECE_BYTES)
    index = {
        "python": PYTHON,
        "extension": extension,
        "wheels": sorted(path.name for path in [*chosen, *([vllm] if vllm else [])]),
        "missing": missing,
        "pieces": digests,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    sizes = (f"{folder / name}: {(folder / name).stat().st_size} bytes" for name in digests)
    print(*sizes, f"C extension: {extension}", *(f"missing: {text}" for text in missing), sep="\n")
    return int(bool(missing))


def unpack(folder: Path, site: Path, package: Path) -> dict[str, object]:
    """Unpack the pieces that are in ``folder`` into ``site``, and the C extension into
    ``package``; return what was done. Pieces that were unpacked before count as done.

    Raises:
        ValueError: a piece is damaged; nothing of it was unpacked.
    """
    index = json.loads((folder / INDEX).read_text())
    site.mkdir(parents=True, exist_ok=True)
    record = site / INDEX
    done = json.loads(record.read_text()) if record.exists() else {}
    for name, digest in index["pieces"].items():
        if done.get(name) == digest or not (folder / name).exists():
            continue
        if _digest(folder / name) != digest:
            raise ValueError(f"{folder / name} is damaged: its SHA-256 is not that of the index")
        with zipfile.ZipFile(folder / name) as piece:
            piece.extractall(site)
        done[name] = digest
        record.write_text(json.dumps(done))
    for library in (site / "native").glob("*.so"):
        (package / library.name).write_bytes(library.read_bytes())
    missing = [name for name, digest in index["pieces"].items() if done.get(name) != digest]
    return {"unpacked": sorted(done), "missing_pieces": missing, "wheels": index["wheels"]}


def main() -> int:
    folder, site = map(Path, sys.argv[1:3])
    figures = unpack(folder, site, ROOT / "kvconnect")
    print(json.dumps(figures), flush=True)
    return int(bool(figures["missing_pieces"]))


if __name__ == "__main__":
    sys.exit(main())
