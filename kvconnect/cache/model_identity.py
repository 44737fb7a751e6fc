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
"""Kinds of weight files; engines load the first kind that a folder has."""
_CONSOLIDATED = "consolidated*.safetensors"  # the same weights again, in Mistral's form
_INDEX = {
    False: ("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    True: ("consolidated.safetensors.index.json",),
}
_OF_TRAINERS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_SAMPLE_BYTES = 4096
_SAMPLES = 4096  # over all files: reads 16 MiB and detects a change of 1 % of the weights

logger = logging.getLogger(__name__)


def weight_files(folder: Path, consolidated: bool = False) -> list[Path]:
    """Return the files that an engine loads from a model's folder, sorted; or the file itself.

    These are the files of the first kind that is there, and where an index names files, those.
    ``consolidated``: the engine prefers Mistral's files, as vLLM does.

    Raises:
        OSError: the folder or the index cannot be read.
    """
    if folder.is_file():
        return [folder]
    mistral = set(folder.glob(_CONSOLIDATED))
    for kind in _KINDS:
        found = {path for path in folder.glob(f"*{kind}") if path.is_file()}
        found = {path for path in found if not path.name.endswith(_OF_TRAINERS)}
        if kind == ".safetensors" and mistral:
            consolidated = consolidated or not found - mistral
            found = mistral if consolidated else found - mistral
        else:
            consolidated = False
        if found:
            return sorted(_indexed(folder, found, consolidated=consolidated))
    return []


def _indexed(folder: Path, found: set[Path], *, consolidated: bool) -> set[Path]:
    """Return those of a folder's files that an index names; all of them if there is none."""
    for name in _INDEX[consolidated]:
        if (folder / name).is_file():
            try:
                named = set(json.loads((folder / name).read_bytes())["weight_map"].values())
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise OSError(f"{folder / name} is not an index of weights: {error!r}") from error
            if indexed := {path for path in found if path.name in named}:
                return indexed
    return found


def weights_digest(folder: Path, consolidated: bool = False) -> str:
    """Return a digest of a model's weight files; "" if there are none.

    The digest covers names, sizes, and evenly spaced samples of :func:`weight_files`; small models
    are read whole. Blocks for tens of milliseconds on a local disk.

    Raises:
        OSError: a file cannot be read.
    """
    files = weight_files(folder, consolidated)
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


def model_folder(model: str, revision: str | None, cache: str | None = None) -> Path | None:
    """Return the local folder of a model's files, or its one file; None if they are not on this
    machine. ``cache``: where the engine keeps downloaded models, if not at the usual place."""
    try:
        if Path(model).exists():
            return Path(model)
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (ValueError, OSError):  # not downloaded, not a valid name, or its disk does not answer
        return None


def model_name(
    model: str,
    revision: str | None,
    overrides: Mapping[str, object],
    configuration: str = "config.json",
    *,
    cache: str | None = None,
    consolidated: bool = False,
) -> str:
    """Return a name for a model that is the same in all engines.

    The name has digests of the weights, and of the configuration with the engine's ``overrides``.
    ``cache`` and ``consolidated``: see :func:`model_folder` and :func:`weight_files`.

    Raises:
        Incompatible: no weight files are on this machine.
        OSError: the files cannot be read.
    """
    folder = model_folder(model, revision, cache)
    weights = weights_digest(folder, consolidated) if folder else ""
    if not folder or not weights:
        raise Incompatible(f"no weight files of {model} are here")
    # Engines download only weights to a place of their own.
    usual = model_folder(model, revision) if cache else folder
    path = (usual or folder) / configuration
    known = path.read_bytes() if path.is_file() else b""
    if cache and not known:
        raise Incompatible(f"no {configuration} of {model} is here")
    changes = json.dumps(overrides, sort_keys=True, default=str).encode()
    digest = blake2b(changes, digest_size=16, person=b"kvconnect.model1")
    digest.update(b"\0" + known)
    return f"{weights} {digest.hexdigest()}"


def adapter_name(path: str) -> str:
    """Return a name for a LoRA adapter that is the same in all engines; "" if its files cannot be
    read."""
    try:
        return model_name(path, None, {}, "adapter_config.json")
    except (Incompatible, OSError) as error:
        logger.warning("the weights of adapter %s are not known: %s", path, error)
        return ""


def loaded_files(
    model: str, revision: str | None, cache: str | None = None, consolidated: bool = False
) -> str:
    """Return the digest of the weight files that an engine loads; "" if none can be read here."""
    folder = model_folder(model, revision, cache)
    try:
        return weights_digest(folder, consolidated) if folder else ""
    except OSError as error:
        logger.warning("the weight files of %s cannot be read: %s", model, error)
        return ""


def weights_name(
    model: str,
    revision: str | None,
    dummy: bool,
    *,
    cache: str | None = None,
    consolidated: bool = False,
) -> str:
    """Return the digest of a model's weights. Without weight files on this machine, or with
    ``dummy`` weights (not read from files), return the model's name and revision. ``cache`` and
    ``consolidated``: see :func:`model_folder` and :func:`weight_files`."""
    weights = "" if dummy else loaded_files(model, revision, cache, consolidated)
    if not weights:
        logger.warning("no weight files of %s are here: stored blocks go by its name", model)
    return weights or f"{model}@{revision}"
