"""Turns plain values into settings, or names everything that is wrong with them."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.settings.fields import Settings
from kvconnect.settings.quantities import Rule, parse_bytes
from kvconnect.settings.stores import ENTRY_POINTS, REMOTE_KINDS, Conflict, OtherSettings

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)

RETIRED = {"disk.policy": "the segment that was used least recently is evicted"}
"""Settings that older versions had -> what holds now. They have no effect and are warned about;
the next version refuses them."""

_OBJECT = 'use an object such as {"path": "/nvme/kv"}'
_WRONG = object()


def check_settings(given: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in ``given``.

    Args:
        origins: for errors, where a setting of another place than the engine's flag was found.

    Raises:
        ConfigError: names every unknown key with the nearest one, every wrong type, every value out
            of range and every conflict, each with its fix.
    """
    return check_struct(Settings, given, origins)


def check_struct(
    kind: type[S], given: Mapping[str, Any], origins: Mapping[str, str] | None = None
) -> S:
    """Return ``given`` as a struct of settings.

    Raises:
        ConfigError: as of :func:`check_settings`.
    """
    check = _Check(origins or {})
    made = check.struct(kind, given, "")
    if check.faults:
        raise ConfigError.of_all(check.faults)
    assert isinstance(made, kind)
    return made


class _Check:
    """One pass over some settings, which collects what is wrong with them."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        self.faults: list[ConfigError] = []
        self._origins = origins

    def struct(self, kind: type[msgspec.Struct], given: object, path: str) -> object:
        """Return a struct of ``given``, or ``_WRONG`` after noting why it cannot be made."""
        if not _is_object(given):
            return self._fault(path, given, _OBJECT)
        before = len(self.faults)
        hints = types_of(kind)
        values = {}
        for key, value in given.items():
            if key in hints:
                values[key] = self._value(hints[key], value, _below(path, key))
            elif (name := _below(path, key)) in RETIRED:
                logger.warning("the setting %s has no effect any more: %s", name, RETIRED[name])
            else:
                self._fault(name, value, f"unknown setting{_nearest(kind, key, path)}")
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in given:
                self._fault(_below(path, field.name), None, "it is missing: set it")
        if len(self.faults) > before:
            return _WRONG
        made = kind(**values)
        find: Callable[[], Iterable[Conflict]] = getattr(made, "conflicts", tuple)
        for name, value, fix in find():
            self._fault(_below(path, name), value, fix)
        return made

    def _value(self, hint: Any, value: Any, path: str) -> object:
        structs = [kind for kind in _members(hint) if _is_struct(kind)]
        if structs and (value is None or value == {}):
            return None
        if len(structs) == 1:
            return self.struct(structs[0], value, path)
        if structs:
            return self._remote(value, path)
        rule = _rule_of(hint)
        try:
            sized = rule.size and value not in _words(hint)
            number = parse_bytes(path, value) if sized else value
            found: object = msgspec.convert(number, hint)
            if rule.check is not None:
                rule.check(found)
        except ConfigError as error:
            return self._fault(path, error.value, error.fix)
        except ValueError:  # msgspec's, and those of checks
            return self._fault(path, value, _fix(rule, hint, value))
        return found

    def _remote(self, value: object, path: str) -> object:
        if not _is_object(value):
            return self._fault(path, value, _OBJECT)
        kind = value.get("kind")
        rest = {key: each for key, each in value.items() if key != "kind"}
        if not isinstance(kind, str):
            return self._fault(path, value, 'name its kind, such as "valkey" or "object"')
        if kind in REMOTE_KINDS:
            return self.struct(REMOTE_KINDS[kind], rest, path)
        if kind == "disk":
            return self._fault(path, value, "the disk tier has a setting of its own: disk")
        others = sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})
        if kind not in others:
            known = [*REMOTE_KINDS, *others]
            near = difflib.get_close_matches(kind, known, n=1, cutoff=0.0)[0]
            fix = f"did you mean {near!r}? Known: {', '.join(known)}"
            return self._fault(_below(path, "kind"), kind, fix)
        return OtherSettings(name=kind, options=rest)

    def _fault(self, path: str, value: object, fix: str) -> object:
        origin = self._origins.get(path.partition(".")[0])
        self.faults.append(ConfigError(path, value, f"{fix} (set in {origin})" if origin else fix))
        return _WRONG


@functools.cache
def types_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the type of each field of ``kind``, with its limits."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def is_size(hint: Any) -> bool:
    """Whether values of a field's type may be written with a unit of bytes."""
    return any(isinstance(each, Rule) and each.size for each in get_args(hint))


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, without limits around it; any other type alone."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _rule_of(hint: Any) -> Rule:
    if get_origin(hint) is Annotated:
        return next(each for each in get_args(hint) if isinstance(each, Rule))
    return Rule(f"use one of {', '.join(get_args(hint))}")  # of a Literal


def _words(hint: Any) -> tuple[object, ...]:
    """Return the words that may stand instead of a size."""
    return tuple(
        word
        for member in _members(hint)
        if get_origin(member) is Literal
        for word in get_args(member)
    )


def _fix(rule: Rule, hint: Any, value: object) -> str:
    """Return what to do instead of ``value``, which may be a number in quotes."""
    number = not rule.size and get_args(hint)[0] in (int, float)
    return f"{rule.fix}, as a number, not text" if number and isinstance(value, str) else rule.fix


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _nearest(kind: type[msgspec.Struct], key: str, path: str) -> str:
    """Return the question for the known setting that ``key`` may stand for: one of the same object,
    or one with exactly this name in another."""
    if not path:
        for section in ("disk", "cache_peers"):
            members = _members(types_of(Settings)[section]) if kind is Settings else ()
            inner = next((each for each in members if _is_struct(each)), None)
            if inner is not None and key in inner.__struct_fields__:
                return f", did you mean '{section}.{key}'?"
    names = list(kind.__struct_fields__)
    if not names:
        return ": remove it"
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
    return f", did you mean {_below(path, near)!r}?"
