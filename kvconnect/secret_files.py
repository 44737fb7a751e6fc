"""Files with secrets: nobody else may change them, and who may read them is looked at."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from kvconnect.errors import ConfigError

logger = logging.getLogger(__name__)

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read_secret(field: str, path: str) -> bytes:
    """Return the bytes of a file; warn if everyone on this machine can read it.

    Raises:
        ConfigError: names ``field``: the file cannot be read, or other users may change it.
    """
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            secret = file.read()
    except OSError as error:
        raise ConfigError(field, path, f"name a file that can be read ({error})") from error
    check_owner(field, path, found)
    if found.st_mode & stat.S_IROTH:
        logger.warning("%s: everyone on this machine can read this secret: chmod o-r", path)
    return secret


def read_secret_text(field: str, path: str) -> str:
    """Return the text of a file, without surrounding white space; otherwise :func:`read_secret`.

    Raises:
        ConfigError: as :func:`read_secret`, or the file is not UTF-8.
    """
    try:
        return read_secret(field, path).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(field, path, "write it as UTF-8 text") from error


def check_owner(field: str, path: str, found: os.stat_result) -> None:
    """Check that only this user and root can change a file.

    Raises:
        ConfigError: others can.
    """
    if found.st_mode & OTHERS_WRITE:
        raise ConfigError(field, path, "others may write it: chmod go-w")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(field, path, "it belongs to another user: chown it")
