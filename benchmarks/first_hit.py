"""How long it takes a newcomer: from a wheel to the first hit, and through the demo.

    python -m benchmarks.first_hit

A wheel is built, and installed in a fresh environment that sees the engine of ``.venv``, as on a
machine that has an engine already. An engine with a small model is started from there, and
``kvconnect try`` asks it. Then the demo runs, where ``.venv-demo`` is there (``scripts/setup
demo``). It needs the package index for what the wheel asks for.

``wheel_kib``: size of the wheel. ``install_s``: ``pip install`` of it. ``first_hit_s``: from its
begin to ``kvconnect try`` saying that it gains, start of the engine included.
``demo_s``: both parts of ``make demo``, without its set-up. ``demo_installed_bytes``: what that
set-up installs. ``commands_in_docs``: commands of the README, quick starts and examples;
``commands_run``: how many of them tests run. The others have a reason in ``tests/pasted.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import emit, progress
from tests.engines.server import Server, kv_transfer
from tests.pasted import counts

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600
MAX_LEN = 2560
INSTALL = ("--quiet",)
DEMO = ROOT / ".venv-demo"


class FirstHitFailed(Exception):
    """A step did not work; the message has what it said."""


@dataclass
class Installed(Server):
    """An engine that runs from an environment of its own, without this checkout."""

    python: str = sys.executable

    def command(self) -> list[str]:
        return [self.python, *super().command()[1:]]

    def environment(self) -> dict[str, str]:
        return {
            name: value for name, value in super().environment().items() if name != "PYTHONPATH"
        }


def run(words: Sequence[str | Path], *, folder: Path = ROOT, path: str = "") -> str:
    """Run a command; return what it printed.

    Raises:
        FirstHitFailed: it ended with an error.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**environment, **({"PYTHONPATH": path} if path else {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise FirstHitFailed(f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run([*pip, "--wheel-dir", folder, ROOT])
    (wheel,) = folder.glob("*.whl")
    return wheel


def first_hit(wheel: Path, folder: Path) -> dict[str, float]:
    """Install the wheel beside the engine, start it and try it."""
    python = folder / "venv" / "bin" / "python"
    run([sys.executable, "-m", "venv", folder / "venv"])
    began = time.monotonic()
    run([python, "-m", "pip", "install", *INSTALL, wheel], folder=folder)
    installed = time.monotonic()
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # The engine that was there before, seen from now on; what the wheel brought stands in front.
    (Path(site) / "engine.pth").write_text(sysconfig.get_path("purelib") + "\n")
    engine = Installed("bench", kv_transfer(), blocks=88, max_len=MAX_LEN, python=str(python))
    with engine:
        printed = run([python, "-m", "kvconnect.cli", "try", engine.url], folder=folder)
    if " ok:" not in printed:
        raise FirstHitFailed(printed)
    return {"install_s": installed - began, "first_hit_s": time.monotonic() - began}


def demo(environment: Path) -> dict[str, float]:
    """Run both parts of the demo in its environment; "{}" if there is none."""
    python = environment / "bin" / "python"
    if not python.exists():
        progress(f"{environment.name} is not there (scripts/setup demo): the demo is left out")
        return {}
    began = time.monotonic()
    for part in ("demo.demo", "demo.handoff"):
        run([python, "-m", part], path=str(ROOT))
    return {"demo_s": time.monotonic() - began, "demo_installed_bytes": size_of(environment)}


def size_of(folder: Path) -> int:
    """Return how many bytes the files of a folder have."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvconnect-first-hit-") as scratch:
        folder = Path(scratch)
        wheel = build_wheel(folder)
        figures: dict[str, float] = {"wheel_kib": wheel.stat().st_size / 1024}
        figures |= first_hit(wheel, folder)
    figures |= demo(DEMO)
    emit("first_hit", figures | counts())


if __name__ == "__main__":
    main()
