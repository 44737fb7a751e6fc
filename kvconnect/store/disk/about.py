"""What fingerprints mean in words: a small file per format, beside a worker's segments.

People and filters go by it, nothing else: whoever can write the folder can write anything here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping

import msgspec

from kvconnect.store.disk.files import put_file

logger = logging.getLogger(__name__)

MODEL = "model"
"""The word under which the model's name stands."""

MOST_ABOUT = 16 << 10
"""Bytes of such a file at most."""

_FOLDER = "formats"


def pack_about(about: Mapping[str, str]) -> bytes:
    """Return the content of the file."""
    return json.dumps(dict(about), indent=1).encode() + b"\n"


def remember(folder: str, fingerprint: bytes, about: Mapping[str, str]) -> None:
    """Write down what a fingerprint means, in place of what was said before.

    Nothing depends on it, so a disk that is full is only logged.
    """
    if not about:
        return  # what is known stays known
    path = _path(folder, fingerprint)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        put_file(path, pack_about(about))
    except OSError as error:
        logger.warning("disk tier: %s cannot be written: %s", path, error)


def recall(folder: str, fingerprint: bytes) -> dict[str, str]:
    """Return what a fingerprint means; nothing if that is not known, or not readable."""
    path = _path(folder, fingerprint)
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_ABOUT + 1)
        if len(data) <= MOST_ABOUT:
            return msgspec.json.decode(data, type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # what msgspec raises is a ValueError
        logger.debug("disk tier: %s: %s", path, error)
    logger.warning("disk tier: %s is damaged and is not used", path)
    return {}


def _path(folder: str, fingerprint: bytes) -> str:
    return os.path.join(folder, _FOLDER, f"{fingerprint.hex()}.json")
