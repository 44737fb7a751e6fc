"""Identifies a model by the bytes of its weights, because a fine-tuned model may keep its name."""

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
_SAMPLES = 4096  # over all files: reads 16 MiB and detects a change of 1 % of the weights


def weights_digest(folder: Path) -> str:
    """Return a digest of a model's weight files; "" if there are none.

    The digest covers file names, sizes, and evenly spaced samples; small models are read whole.
    Blocks for tens of milliseconds on a local disk.

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


logger = logging.getLogger(__name__)


def model_folder(model: str, revision: str | None) -> Path | None:
    """Return the local folder of a model's files; None if they are not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (ValueError, OSError):  # not downloaded, or not a valid model name
        return None


def model_name(
    model: str,
    revision: str | None,
    overrides: Mapping[str, object],
    configuration: str = "config.json",
) -> str:
    """Return a name for a model that is the same in all engines.

    The name has digests of the weights, and of the configuration with the engine's ``overrides``.

    Raises:
        Incompatible: no weight files are on this machine.
        OSError: the files cannot be read.
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
    """Return the digest of a model's weights. Without weight files on this machine, or with
    ``dummy`` weights (not read from files), return the model's name and revision."""
    folder = None if dummy else model_folder(model, revision)
    weights = weights_digest(folder) if folder else ""
    if not weights:
        logger.warning("no weight files of %s are here: stored blocks go by its name", model)
    return weights or f"{model}@{revision}"
