"""What fingerprints mean in words: a small file per format, beside a worker's segments.

People and filters go by it, nothing else: whoever can write the folder can write anything here.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping

import msgspec

from kvconnect.store.disk.files import Directory

logger = logging.getLogger(__name__)

MODEL = "model"
"""The word under which the model's name stands."""

MOST_ABOUT = 16 << 10
"""Bytes of such a file at most."""

_FOLDER = "formats"


def pack_about(about: Mapping[str, str]) -> bytes:
    """Return the content of the file."""
    return json.dumps(dict(about), indent=1).encode() + b"\n"


def remember(folder: Directory, fingerprint: bytes, about: Mapping[str, str]) -> None:
    """Write down what a fingerprint means, in place of what was said before.

    Nothing depends on it, so a disk that is full is only logged.
    """
    if not about:
        return  # what is known stays known
    try:
        with contextlib.closing(folder.folder(_FOLDER, make=True)) as formats:
            formats.put(_name(fingerprint), pack_about(about))
    except OSError as error:
        logger.warning("disk tier: %s of %s cannot be written: %s", _FOLDER, folder.path, error)


def recall(folder: Directory, fingerprint: bytes) -> dict[str, str]:
    """Return what a fingerprint means; nothing if that is not known, or not readable."""
    try:
        with contextlib.closing(folder.folder(_FOLDER)) as formats:
            data = formats.read(_name(fingerprint), MOST_ABOUT)
        if data is not None:
            return msgspec.json.decode(data, type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # what msgspec raises is a ValueError
        logger.debug("disk tier: %s: %s", _name(fingerprint), error)
    name = _name(fingerprint)
    logger.warning("disk tier: %s in %s is damaged and is not used", name, folder.path)
    return {}


def _name(fingerprint: bytes) -> str:
    return f"{fingerprint.hex()}.json"
