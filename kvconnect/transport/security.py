"""Keys and certificates, which come from files and never from settings."""

from __future__ import annotations

from pathlib import Path

from kvconnect.errors import ConfigError

_SHORTEST_KEY = 16  # bytes
_TLS_FILES = ("tls.crt", "tls.key", "ca.crt")  # as Kubernetes mounts them


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
