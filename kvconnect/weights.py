"""Which weights a model has, told by their bytes: a name says nothing after a fine-tuning."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

_KINDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 4096
_SAMPLES = 4096  # over all files: 16 MiB to read, and a change of 1 % of the weights is seen


def weights_digest(folder: Path) -> str:
    """Return a digest of a model's weight files; "" if there are none.

    It covers their names, sizes, and pages of bytes spread evenly over them; small models are read
    as a whole. Blocks the calling thread for tens of milliseconds on a local disk.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in _KINDS and path.is_file())
    if not files:
        return ""
    whole = sum(path.stat().st_size for path in files)
    step = max(_SAMPLE_BYTES, whole // _SAMPLES)
    found = blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as weights:
            for offset in range(0, size, step):
                found.update(os.pread(weights.fileno(), _SAMPLE_BYTES, offset))
    return found.hexdigest()
