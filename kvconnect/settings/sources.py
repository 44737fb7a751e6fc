"""Where settings come from: the engine's flag, then the environment, then a file.

The setting with the highest precedence counts as a whole: a ``disk`` in the flag replaces the
``disk`` of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.settings.fields import Settings
from kvconnect.settings.validation import check_settings

VARIABLE = "KVCONNECT_CONFIG"
"""Environment variable with settings: a JSON object, or ``@`` and the path of a file."""

_FILE = "config_file"
_MOST_BYTES = 1 << 20

# YAML's loader raises any of these for tags whose values do not fit, such as ``!!bool x``.
_DECODING = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)


class FoundSettings(NamedTuple):
    """Checked settings, and where each that was given comes from; the others are defaults."""

    settings: Settings
    origins: dict[str, str]


def find_settings(flag: Mapping[str, Any], environ: Mapping[str, str]) -> FoundSettings:
    """Return the settings of an engine: those of ``flag``, the others of ``KVCONNECT_CONFIG``, the
    others of the file that ``config_file`` names in either.

    Raises:
        ConfigError: as of :func:`~kvconnect.settings.validation.check_settings`, or the variable or
            the file cannot be read.
    """
    variable = _of_variable(environ)
    path = flag.get(_FILE, variable.get(_FILE, ""))
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if isinstance(path, str) and path:
        file = read_object(_FILE, path)
        if _FILE in file:
            raise ConfigError(_FILE, file[_FILE], f"leave it out of {path}: one file is read")
        given, origins = dict(file), dict.fromkeys(file, path)
    given |= variable
    origins |= dict.fromkeys(variable, VARIABLE)
    given |= flag
    in_flag = dict.fromkeys(flag, "the engine's flag")
    elsewhere = {key: origin for key, origin in origins.items() if key not in flag}
    return FoundSettings(check_settings(given, elsewhere), origins | in_flag)


def read_object(field: str, path: str) -> dict[str, Any]:
    """Return the object in a JSON file, or in a YAML file (``.yaml``, ``.yml``).

    Raises:
        ConfigError: it cannot be read, is too large, or holds something else.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
        decoder = msgspec.yaml if path.endswith((".yaml", ".yml")) else msgspec.json
        found: dict[str, Any] | None = decoder.decode(text, type=dict[str, Any] | None)
    except ImportError as error:
        raise ConfigError(field, path, "install PyYAML, or write the file as JSON") from error
    except (OSError, *_DECODING) as error:
        fix = f"name a file with an object: {_why(error)}"
        raise ConfigError(field, path, fix) from error
    return found or {}


def _of_variable(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(VARIABLE, "{}")
    if text.startswith("@"):
        return {_FILE: text[1:]}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        fix = f'use a JSON object such as {{"transport": "tcp"}}, or @FILE: {_why(error)}'
        raise ConfigError(VARIABLE, "...", fix) from error  # secrets may stand in it


def _why(error: Exception) -> str:
    """Return the reason in one line; lines of a YAML error may hold secrets."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).partition("\n")[0]
