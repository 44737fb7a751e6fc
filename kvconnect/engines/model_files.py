"""A model's files on this machine, by the name that an engine was given."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download

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


def weights_name(model: str, revision: str | None, dummy: bool) -> str:
    """Return what tells a model's weights from others: a digest of their bytes. Where no files are
    here, or the weights are ``dummy`` ones that come from none, it is the model's name."""
    folder = None if dummy else model_folder(model, revision)
    weights = weights_digest(folder) if folder else ""
    if not weights:
        logger.warning("no weight files of %s are here: stored blocks go by its name", model)
    return weights or f"{model}@{revision}"
