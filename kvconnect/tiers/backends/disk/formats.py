"""Descriptions of block formats: a small file per fingerprint beside a worker's segments.

Only people and filters of commands read them, so a wrong description cannot make a block be used.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.tiers.backends.disk.files import Directory

logger = logging.getLogger(__name__)

MODEL = "model"
"""Key of the model's name."""

MAX_FORMAT_BYTES = 16 << 10
"""Maximum bytes of a description."""

_FOLDER = "formats"


def pack_format(about: Mapping[str, str]) -> bytes:
    """Return a description as JSON."""
    return json.dumps(dict(about), indent=1).encode() + b"\n"


def check_format(about: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` for a description that is too long."""
    if (nbytes := len(pack_format(about))) > MAX_FORMAT_BYTES:
        raise ConfigError("about", f"{nbytes} bytes", f"use {MAX_FORMAT_BYTES} of JSON at most")


def write_format(folder: Directory, fingerprint: bytes, about: Mapping[str, str]) -> None:
    """Write the description of a fingerprint, replacing an older one. An error is only logged."""
    if not about:
        return  # keep an older description
    try:
        with contextlib.closing(folder.folder(_FOLDER, make=True)) as formats:
            formats.put(_name(fingerprint), pack_format(about))
    except OSError as error:
        logger.warning("disk tier: %s of %s cannot be written: %s", _FOLDER, folder.path, error)


def read_format(folder: Directory, fingerprint: bytes) -> dict[str, str]:
    """Return the description of a fingerprint, an empty one if it is missing or not readable."""
    try:
        with contextlib.closing(folder.folder(_FOLDER)) as formats:
            data = formats.read(_name(fingerprint), MAX_FORMAT_BYTES)
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
