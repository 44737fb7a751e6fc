"""The exception tree; each class is named by what the caller does next.

Every error raised on purpose derives from :class:`KVConnectError`, so a caller can tell a refusal
from a bug. Exceptions of other libraries are translated where the library is called, and stay
attached as the cause.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

_SECRET = re.compile(
    r"(?i)(^|[._-])(pass|passwd|password|secret|token|credentials?|key)($|[_-](?!file))"
)
_DEEPEST = 8
_IN_URL = re.compile(r"(?<=:)[^:/@\s]+(?=@)")


class KVConnectError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(KVConnectError, ValueError):
    """A setting is wrong. The message names the field, the value and the fix.

    A value that may be a secret is not shown: engines log the message. ``others`` are further
    settings that are wrong; the message names them after this one.
    """

    def __init__(
        self, field: str, value: object, fix: str, others: Sequence[ConfigError] = ()
    ) -> None:
        self.field, self.fix = field, fix
        self.value = masked(str(field), value)
        self.others = tuple(others)
        super().__init__("kvconnect: " + "; ".join(each.line for each in (self, *self.others)))

    @classmethod
    def of_all(cls, faults: Sequence[ConfigError]) -> ConfigError:
        """Return one error that names all ``faults``, of which there is at least one."""
        first, *others = faults
        return cls(first.field, first.value, first.fix, others)

    @property
    def line(self) -> str:
        """The field, the value and the fix."""
        field = str(self.field)
        shown = field if field.isprintable() else repr(field)
        return f"{shown}={self.value!r} is not usable: {self.fix}"


class Incompatible(KVConnectError):
    """Two sides, or this library and an engine, do not match. The message names the difference;
    ``fix`` says what to do, or is empty if only running without KVConnect helps."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn :class:`Incompatible` raised inside into one line that ends an engine's start: it names
    ``what`` does not match (a model, for instance), the cause and the fix."""
    try:
        yield
    except Incompatible as error:
        fix = error.fix or "run it without KVConnect"
        raise Incompatible(f"kvconnect: {what} is not usable: {error}: {fix}", fix) from None


class Corrupt(KVConnectError):
    """Bytes differ from the bytes stored. The copy must be quarantined, never used."""


class Misuse(KVConnectError):
    """The library was called against its contract: a bug in the caller."""


class TransferFailed(KVConnectError):
    """A copy could not be completed. The blocks' contents are unknown; recompute them."""


class ProtocolError(KVConnectError):
    """A peer sent what the protocol does not allow. Its connection is closed, nothing else."""


class Refused(KVConnectError):
    """A peer, a ticket or a request was rejected.

    ``field`` names the mismatch, from a small fixed set: it is a metric label.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def masked(field: str, value: object, depth: int = 0) -> object:
    """Return a setting's value with secrets masked, by the setting's name or place in a URL. What
    lies deeper than settings do is left out."""
    if isinstance(value, dict | list) and depth > _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {key: masked(str(key), each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [masked(field, each, depth + 1) for each in value]
    if value and _SECRET.search(field):
        return "***"
    return _IN_URL.sub("***", value) if isinstance(value, str) else value


def contained(ended: Callable[[Exception], None]) -> AbstractContextManager[None, bool]:
    """Contain the errors of one peer, job or call on a thread or task that also works for others.

    Any :class:`Exception` inside is passed to ``ended``, which ends that peer, job or call alone.
    Every handler of unexpected errors in the package is this one.
    """
    # The cast tells the type checker that the code after the block is reached.
    return cast("AbstractContextManager[None, bool]", _contained(ended))


@contextlib.contextmanager
def _contained(ended: Callable[[Exception], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 # boundary: an error in one ends no other's work
        ended(error)
