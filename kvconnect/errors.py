"""The exception tree, named by what the caller does next.

Everything the library raises on purpose derives from :class:`KVConnectError`, so a caller can
tell "KVConnect refused" from a bug. Foreign exceptions are translated where foreign code is
called and keep their cause.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECRET = re.compile(
    r"(?i)(^|[_-])(pass|passwd|password|secret|token|credentials?|key)($|[_-](?!file))"
)
_IN_URL = re.compile(r"(?<=:)[^:/@\s]+(?=@)")


class KVConnectError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(KVConnectError, ValueError):
    """A setting is wrong. The message names the field, the value and the fix.

    A value that may be a secret is not shown: engines log the message.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.value = _shown(str(field), value)
        super().__init__(f"kvconnect: {field}={self.value!r} is not usable: {fix}")
        self.field = field
        self.fix = fix


class Incompatible(KVConnectError):
    """Two sides, or this library and an engine, do not fit. The message names what differs;
    ``fix`` says what to do about it, where there is something better than to do without."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """End an engine's start with one line where :class:`Incompatible` is raised inside: prefix,
    ``what`` does not fit (a model, for instance), the cause and the fix."""
    try:
        yield
    except Incompatible as error:
        fix = error.fix or "run it without KVConnect"
        raise Incompatible(f"kvconnect: {what} is not usable: {error}: {fix}", fix) from None


class Corrupt(KVConnectError):
    """Bytes are not what was stored. The copy must be quarantined, never used."""


class Misuse(KVConnectError):
    """The library was called against its contract: a bug on this side of the seam."""


class TransferFailed(KVConnectError):
    """A copy could not be completed. The blocks' contents are unknown; recompute them."""


class ProtocolError(KVConnectError):
    """A peer sent what the protocol does not allow. Its connection is closed, nothing else."""


class Refused(KVConnectError):
    """A peer, a ticket or a request was turned away.

    ``field`` names what did not fit, from a small fixed set of words: it is a metric label.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _shown(field: str, value: object) -> object:
    """Return a setting's value without what its name, or its place in a URL, says is a secret."""
    if isinstance(value, dict):
        return {key: _shown(str(key), each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(field, each) for each in value]
    if value and _SECRET.search(field):
        return "***"
    return _IN_URL.sub("***", value) if isinstance(value, str) else value


@contextlib.contextmanager
def contained(ended: Callable[[Exception], None]) -> Iterator[None]:
    """Do what one peer is the cause of, on a thread that works for others too. Whatever it raises
    goes to ``ended``, which ends that peer's connection and nothing else."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 # boundary: one peer's words end no other's work
        ended(error)
