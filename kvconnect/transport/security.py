"""Where the keys and the certificates of transports come from: settings and files."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvconnect.changed_files import Reread
from kvconnect.errors import ConfigError
from kvconnect.secret_files import OTHERS_WRITE, check_owner, read_secret
from kvconnect.settings import Settings
from kvconnect.transport.base import Security
from kvconnect.user_folders import key_folder

ALSO = ".also"
"""Suffix of the file beside a key file with another accepted key, while keys are changed."""

_SHORTEST_KEY = 16  # bytes
_FEWEST_VALUES = 5  # distinct bytes in a key; 16 random hexadecimal digits have about ten
_TLS_FILES = ("tls.crt", "tls.key", "ca.crt")  # as Kubernetes mounts them


class NoLocalKey(ConfigError):
    """No ``key_file`` is set, and this user's own key cannot be kept on this machine. Whoever needs
    no other engines goes on without."""


class Keys:
    """This engine's own key and the other keys that it accepts. Thread-safe.

    A key file is read again when it changes. If it is invalid then, the old keys stay in use and
    the error is logged.

    Raises:
        ConfigError: as :func:`read_key_file`.
    """

    def __init__(self, key: bytes = b"", path: str = "") -> None:
        self._held: Reread[tuple[bytes, tuple[bytes, ...]]] = Reread(
            [path, path + ALSO] if path else [],
            lambda: _both(path) if path else (key, ()),
            "the keys stay as they were",
            f"the keys in {path} were read again",
        )

    def current(self) -> tuple[bytes, tuple[bytes, ...]]:
        """Return the own key and the other accepted keys."""
        return self._held.current()


def _both(path: str) -> tuple[bytes, tuple[bytes, ...]]:
    also = path + ALSO
    return read_key_file(path), (read_key_file(also),) if os.path.exists(also) else ()


def read_key(settings: Settings) -> bytes:
    """Return the key that all engines share: from ``key_file``, or this user's key on this machine.
    It is empty if ``peers`` admits networks without a key.

    Raises:
        NoLocalKey: this user's own key cannot be kept.
        ConfigError: the file cannot be read, its key is weak, others may change it, or ``tls_dir``
            is set without ``key_file``: certificates do not sign tickets.
    """
    if settings.tls_dir and not settings.key_file:
        raise ConfigError("key_file", "", "set it beside tls_dir: tickets are signed with it")
    if not settings.key_file:
        return b"" if settings.peers else _local_key()
    return read_key_file(settings.key_file)


def security_of(settings: Settings) -> Security:
    """Return who may connect, by an engine's settings.

    Raises:
        ConfigError: as of :func:`read_key` and :func:`tls_files`.
    """
    tls = tls_files(settings.tls_dir)
    return Security(
        key=read_key(settings),
        allowed=settings.peers,
        tls_cert=tls.certificate,
        tls_key=tls.private_key,
        tls_ca=tls.authority,
        key_file=settings.key_file,
    )


def record_keys(settings: Settings) -> Callable[[], tuple[bytes, tuple[bytes, ...]]] | None:
    """Return a function that returns the keys for records on shared servers, see
    :meth:`Keys.current`. None without a ``key_file``: other machines lack this user's own key.

    Raises:
        ConfigError: as :func:`read_key_file`.
    """
    return Keys(path=settings.key_file).current if settings.key_file else None


def _local_key() -> bytes:
    """Return this user's key on this machine; create it at first use. It keeps other users of the
    machine, and clients that forge tickets, from connecting engines to each other."""
    folder = key_folder()
    if folder is None:
        fix = "set it: this user has no home for a key of its own, and no XDG_CACHE_HOME"
        raise NoLocalKey("key_file", "", fix)
    path = folder / "handoff.key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
        if mode & OTHERS_WRITE:
            folder.chmod(stat.S_IMODE(mode) & ~OTHERS_WRITE)
        if not path.exists():
            handle, fresh = tempfile.mkstemp(dir=folder)  # readable by its owner only
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(secrets.token_bytes(32))
                with contextlib.suppress(FileExistsError):  # another worker created it first
                    os.link(fresh, path)
            finally:
                os.unlink(fresh)
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            key = file.read()
    except OSError as error:
        fix = f"set it: this user's own key cannot be kept in {path} ({error})"
        raise NoLocalKey("key_file", "", fix) from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or _is_weak(key):
        fix = "remove it, and a new one is made: it is no key that this user alone can read"
        raise ConfigError("key_file", str(path), fix)
    return key


def read_key_file(path: str) -> bytes:
    """Return the key in a file, without surrounding white space.

    Raises:
        ConfigError: the file cannot be read, its key is weak, or others may change it.
    """
    key = read_secret("key_file", path).strip()
    if _is_weak(key):
        fix = f"put at least {_SHORTEST_KEY} random bytes in it: openssl rand -hex 32"
        raise ConfigError("key_file", path, fix)
    return key


def _is_weak(key: bytes) -> bool:
    return len(key) < _SHORTEST_KEY or len(set(key)) < _FEWEST_VALUES


class TlsFiles(NamedTuple):
    """Paths of one side's certificate and private key, and of the authority; all "" without TLS."""

    certificate: str = ""
    private_key: str = ""
    authority: str = ""


def tls_files(folder: str) -> TlsFiles:
    """Return the paths in ``folder``; empty ones without a folder.

    Raises:
        ConfigError: a file is missing, or others may change the private key.
    """
    if not folder:
        return TlsFiles()
    paths = [Path(folder, name) for name in _TLS_FILES]
    for path in paths:
        if not path.is_file():
            raise ConfigError("tls_dir", folder, f"{path.name} is missing in it")
    certificate, key, authority = map(str, paths)
    check_owner("tls_dir", key, os.stat(key))
    return TlsFiles(certificate, key, authority)
