"""Folders of this user's own files: measurements, and the key of engines on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder of measurements: in ``XDG_CACHE_HOME``, or else in the home. None for a
    user without a home."""
    named = _named("XDG_CACHE_HOME")
    try:
        return (named or Path.home() / ".cache") / "kvconnect"
    except RuntimeError:  # neither HOME nor an entry in passwd
        return None


def key_folder() -> Path | None:
    """Return the folder of this user's key: in ``XDG_RUNTIME_DIR``, or else as
    :func:`cache_folder`."""
    named = _named("XDG_RUNTIME_DIR")
    return named / "kvconnect" if named else cache_folder()


def _named(variable: str) -> Path | None:
    """Return the folder in a variable; None if it is not set, or relative, which its standard has
    ignored."""
    folder = Path(os.environ.get(variable, ""))
    return folder if folder.is_absolute() else None
