"""Keys and certificates, which come from files and never from settings."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from kvconnect.config import NetworkConfig
from kvconnect.errors import ConfigError

_SHORTEST_KEY = 16  # bytes
_TLS_FILES = ("tls.crt", "tls.key", "ca.crt")  # as Kubernetes mounts them


def read_key(config: NetworkConfig) -> bytes:
    """Return the key that all engines share: that of ``key_file``, or this user's own on this
    machine. Where networks are let in without a key, there is none.

    Raises:
        ConfigError: the file cannot be read or holds too little, or is missing beside ``tls_dir``:
            certificates do not sign tickets.
    """
    if config.tls_dir and not config.key_file:
        raise ConfigError("key_file", "", "set it beside tls_dir: tickets are signed with it")
    if not config.key_file:
        return b"" if config.peers else _local_key()
    return read_key_file(config.key_file)


def _local_key() -> bytes:
    """Return this user's key on this machine, made at first use. It keeps others on the machine,
    and clients that invent tickets, from pointing engines at each other."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache", "kvconnect")
    path = folder / "handoff.key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            handle, fresh = tempfile.mkstemp(dir=folder)  # readable by its owner alone
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):  # another worker was first
                os.link(fresh, path)
            os.unlink(fresh)
        return path.read_bytes()
    except OSError as error:
        fix = f"set it: this user's own key cannot be kept in {path} ({error})"
        raise ConfigError("key_file", "", fix) from error


def read_key_file(path: str) -> bytes:
    """Return the key in a file, without white space around it.

    Raises:
        ConfigError: it cannot be read, or holds too little.
    """
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError("key_file", path, f"make it readable ({error})") from error
    if len(key) < _SHORTEST_KEY:
        fix = f"put at least {_SHORTEST_KEY} random bytes in it: openssl rand -hex 32"
        raise ConfigError("key_file", path, fix)
    return key


def tls_files(folder: str) -> tuple[str, str, str]:
    """Return the paths of the certificate, its key and the authority; all "" without a folder.

    Raises:
        ConfigError: one is missing.
    """
    if not folder:
        return "", "", ""
    paths = [Path(folder, name) for name in _TLS_FILES]
    for path in paths:
        if not path.is_file():
            raise ConfigError("tls_dir", folder, f"{path.name} is missing in it")
    certificate, key, authority = map(str, paths)
    return certificate, key, authority
