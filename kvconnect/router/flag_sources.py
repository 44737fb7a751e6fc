"""The router's flags in the environment and in a YAML or JSON file.

A flag on the command line takes precedence over ``KVCONNECT_ROUTER_<FLAG>``, and that over the file
of ``--config``. Every place is checked as the command line is.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from kvconnect.errors import ConfigError
from kvconnect.settings.sources import read_object

PREFIX = "KVCONNECT_ROUTER_"

_GIVEN = "given_flags"
_EITHER = {"pull": "unified", "unified": "pull"}  # one rules out the other
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
_OF_SERVICE = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")
_LINK = re.compile(r"(tcp|udp|sctp)://")


class _Store(argparse.Action):
    """Stores a flag's value, and that the flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, _GIVEN, {*getattr(namespace, _GIVEN, ()), self.dest})


class _StoreTrue(_Store):
    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **more)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, True, option_string)


def remember_given(parser: argparse.ArgumentParser) -> None:
    """Make ``parser``, which has no flags yet, remember which of its flags are given."""
    for name, action in ((None, _Store), ("store", _Store), ("store_true", _StoreTrue)):
        parser.register("action", name, action)


class _Checker(argparse.ArgumentParser):
    """Parses the flags of one place; a wrong one is an error with the parser's reason."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"^argument [^:]*: ", "", message))


def add_elsewhere(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    add_flags: Callable[[argparse.ArgumentParser], None],
) -> dict[str, str]:
    """Set the flags that the command line lacks, from the environment and the file.

    Returns where each of them comes from, by its name.

    Raises:
        ConfigError: an unknown flag (names the nearest one), or a value that it cannot have.
    """
    checker = _Checker(add_help=False)
    add_flags(checker)
    known = vars(checker.parse_args([]))
    known.pop(_GIVEN, None)
    given: set[str] = set(getattr(arguments, _GIVEN, ()))
    origins: dict[str, str] = {}

    def take(values: Mapping[str, Any], origin: str) -> None:
        before = {*given, *(other for name, other in _EITHER.items() if getattr(arguments, name))}
        for name, value in values.items():
            if name not in before:
                place = f"{PREFIX}{name.upper()}" if origin == PREFIX else origin
                setattr(arguments, name, _value(checker, name, value, place))
                given.add(name)
                origins[name] = place
        if arguments.pull and arguments.unified:
            raise ConfigError("unified", True, f"leave it or pull out (set in {origins['pull']})")

    take(_of_environment(environ, known), PREFIX)
    if path := arguments.config:
        take(_of_file(path, known), path)
    return origins


def _of_environment(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX)
        # Kubernetes sets such variables for services whose names begin with kvconnect-router.
        foreign = _OF_SERVICE.search(name) or (name.endswith("PORT") and _LINK.match(text))
        if name != variable and not foreign:
            found[_known(name.lower(), text, known, variable)] = text
    return found


def _of_file(path: str, known: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in read_object("config", path).items():
        name = _known(key.replace("-", "_"), value, known, key)
        if name == "config":
            raise ConfigError("config", value, f"leave it out of {path}: one file is read")
        found[name] = value
    return found


def _known(name: str, value: object, known: Mapping[str, Any], shown: str) -> str:
    """Return ``name``; raise :class:`ConfigError` unless it is that of a flag."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        flag = near.replace("_", "-")
        as_written = PREFIX + near.upper() if shown.startswith(PREFIX) else flag
        fix = f"unknown flag of the router, did you mean {as_written!r}?"
        raise ConfigError(shown, value, fix)
    return name


def _value(checker: _Checker, name: str, value: object, origin: str) -> Any:
    """Return a flag's value, as it would be parsed from the command line."""
    flag = name.replace("_", "-")
    default = vars(checker.parse_args([]))[name]
    try:
        if isinstance(default, bool):
            return _switch(value)
        words = _words(value, several=isinstance(default, list))
        return getattr(checker.parse_args(_command_line(flag, words)), name)
    except ValueError as error:
        raise ConfigError(flag, value, f"{error} (set in {origin})") from error


def _command_line(flag: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command line that gives ``flag`` these values."""
    return [f"--{flag}={words[0]}"] if len(words) == 1 else [f"--{flag}", *words]


def _switch(value: object) -> bool:
    found = value if isinstance(value, bool) else _SWITCH.get(str(value).lower())
    if found is None:
        raise ValueError("use true or false")
    return found


def _words(value: object, several: bool) -> list[str]:
    """Return a value as words. ``several``: the flag takes more than one."""
    if several and isinstance(value, str):
        return value.split() or [""]
    values = value if several and isinstance(value, list) else [value]
    if not values or not all(type(each) in (str, int, float) for each in values):
        raise ValueError("use text or a number" + (", or a list of them" if several else ""))
    return [str(each) for each in values]
