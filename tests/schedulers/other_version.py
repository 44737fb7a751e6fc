"""vLLM's next version on a machine without GPUs: its Python, out of its wheel.

The wheel is of the build with CUDA, and its compiled parts are left out: ``vllm._C`` and the other
extensions cannot be imported, so no attention, no kernel and no engine of it runs. The schedulers,
the KV-cache managers, the configuration and the connector's interfaces are Python and do. vLLM
takes the platform from the version's suffix.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.33.0"
_INFO = f"vllm-{VERSION}.dist-info"


def fetched() -> Path:
    """Return the folder of the version's Python. The first call fetches and unpacks it.

    Raises:
        subprocess.CalledProcessError: the wheel cannot be fetched.
    """
    folder = ROOT / "build" / f"vllm-{VERSION}"
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as there:
        wheel = next(folder.parent.glob(f"vllm-{VERSION}-*.whl"), None) or _download(Path(there))
        unpacked = Path(there) / "unpacked"
        _unpack(wheel, unpacked)
        unpacked.rename(folder)
    return folder


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", f"--dest={folder}"]
    subprocess.run([*pip, f"vllm=={VERSION}"], check=True)
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as found:
        for name in found.namelist():
            if not name.endswith((".py", ".json", ".txt", "METADATA")):
                continue
            content = found.read(name)
            if name == f"{_INFO}/METADATA":
                versions = (f"\nVersion: {VERSION}{suffix}\n".encode() for suffix in ("", "+cpu"))
                content = content.replace(*versions)
            path = folder / name.replace(_INFO, f"vllm-{VERSION}+cpu.dist-info")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


_CODE = """
import sys
from tests.schedulers.fuzz import main

for line in sys.argv[1:]:
    print("status", main(line.split()))
"""


def run(*lines: str) -> str:
    """Run ``tests.schedulers.fuzz`` with this version, once for each line of arguments; return what
    it prints. All in one process: its imports take longer than some runs."""
    paths = os.pathsep.join([str(fetched()), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *lines],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout
