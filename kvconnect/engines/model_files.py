"""A model's files on this machine, by the name that an engine was given."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from huggingface_hub import snapshot_download

from kvconnect.errors import Incompatible
from kvconnect.weights import weights_digest

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
