"""Which weights a model has, told by their bytes: a name says nothing after a fine-tuning."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from huggingface_hub import snapshot_download

from kvconnect.errors import Incompatible

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


# A model's files on this machine, by the name that an engine was given.


logger = logging.getLogger(__name__)


def model_folder(model: str, revision: str | None) -> Path | None:
    """Return where a model's files are on this machine, None if they are nowhere."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (ValueError, OSError):  # no such model here, or no name of one
        return None


def model_name(
    model: str,
    revision: str | None,
    overrides: Mapping[str, object],
    configuration: str = "config.json",
) -> str:
    """Return what tells a model from others whichever engine has loaded it: a digest of its
    weights' bytes, of its configuration and of what the engine was told to change in that.

    Raises:
        Incompatible: no files of it are here.
        OSError: they cannot be read.
    """
    folder = model_folder(model, revision)
    weights = weights_digest(folder) if folder else ""
    if not folder or not weights:
        raise Incompatible(f"no weight files of {model} are here")
    path = folder / configuration
    known = path.read_bytes() if path.is_file() else b""
    changes = json.dumps(overrides, sort_keys=True, default=str).encode()
    digest = blake2b(changes, digest_size=16, person=b"kvconnect.model1")
    digest.update(b"\0" + known)
    return f"{weights} {digest.hexdigest()}"


def weights_name(model: str, revision: str | None, dummy: bool) -> str:
    """Return what tells a model's weights from others: a digest of their bytes. Where no files are
    here, or the weights are ``dummy`` ones that come from none, it is the model's name."""
    folder = None if dummy else model_folder(model, revision)
    weights = weights_digest(folder) if folder else ""
    if not weights:
        logger.warning("no weight files of %s are here: stored blocks go by its name", model)
    return weights or f"{model}@{revision}"
