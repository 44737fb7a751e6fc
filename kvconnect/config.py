"""Configuration: parsed once, strictly, into a frozen struct.

Settings arrive through the engine's own flag (``kv_connector_extra_config`` in vLLM). An unknown
or unusable setting is one :class:`~kvconnect.errors.ConfigError` that names the field, the value
and the fix; nothing is allocated before that.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, get_args

import msgspec

from kvconnect.errors import ConfigError

DigestMode = Literal["off", "sampled", "full"]
PolicyName = Literal["lru", "s3fifo"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LONGEST_S = 86_400  # no wait is endless
AUTO_HOST_SHARE = 0.25  # leaves room for weights being loaded, page cache and the engine itself


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the host tier.

    Attributes:
        host_bytes: host memory of one engine, shared by its workers on this machine; 0 means
            ``auto``: a quarter of the machine's (or container's) memory.
        policy: which block leaves a full tier first. ``lru`` suits conversations; ``s3fifo``
            keeps a working set through long scans of one-off prompts.
        digest: which blocks get a checksum when stored that is verified when loaded.
        deadline_s: seconds after which what is left of a transfer counts as failed.
        sync_load_bytes: loads up to this many bytes (all ranks' slots counted once) run inside
            the step that needs them instead of parking the request. 0 turns that off.
    """

    host_bytes: int = 0
    policy: PolicyName = "lru"
    digest: DigestMode = "sampled"
    deadline_s: float = 30.0
    sync_load_bytes: int = 0


def parse_bytes(field: str, value: object) -> int:
    """Return ``value`` in bytes: an int, or a string such as ``"4GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: not a size, unknown unit, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(field, value, "use a size of 0 bytes or more")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(field, value, 'write a size such as "4GiB", or a number of bytes')
    number, unit = match.groups()
    if unit not in _UNITS:
        by_lower = {name.lower(): name for name in _UNITS if name}
        near = by_lower[difflib.get_close_matches(unit.lower(), by_lower, n=1, cutoff=0.0)[0]]
        raise ConfigError(field, value, f"unknown unit {unit!r}, did you mean {near!r}?")
    return int(Fraction(number) * _UNITS[unit])


def parse_config(extra: Mapping[str, Any]) -> OffloadConfig:
    """Parse an engine's extra configuration.

    Raises:
        ConfigError: unknown key (names the nearest one), wrong type or value out of range.
    """
    known = OffloadConfig.__struct_fields__
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            fix = f"unknown setting, did you mean {near[0]!r}? Known: {', '.join(known)}"
            raise ConfigError(key, extra[key], fix)
    values = dict(extra)
    if values.get("host_bytes") == "auto":
        values["host_bytes"] = 0
    elif "host_bytes" in values:
        values["host_bytes"] = parse_bytes("host_bytes", values["host_bytes"])
        if values["host_bytes"] == 0:
            raise ConfigError("host_bytes", extra["host_bytes"], 'use a size, or "auto"')
    if "sync_load_bytes" in values:
        values["sync_load_bytes"] = parse_bytes("sync_load_bytes", values["sync_load_bytes"])
    _check_choice(values, "policy", get_args(PolicyName))
    _check_choice(values, "digest", get_args(DigestMode))
    deadline = values.get("deadline_s", _LONGEST_S)
    if type(deadline) not in (int, float) or not 0 < deadline <= _LONGEST_S:
        raise ConfigError(
            "deadline_s", deadline, f"use seconds, more than 0 and at most {_LONGEST_S}"
        )
    return msgspec.convert(values, OffloadConfig)


def _check_choice(values: Mapping[str, Any], field: str, choices: tuple[str, ...]) -> None:
    value = values.get(field, choices[0])
    if value not in choices:
        raise ConfigError(field, value, f"use one of {', '.join(choices)}")


def share_of_host_bytes(config: OffloadConfig, *, memory_bytes: int | None, engines: int) -> int:
    """Return one engine's host tier in bytes.

    Args:
        memory_bytes: memory of the machine or container; None if the system does not say.
        engines: data-parallel engines on this machine, among which ``auto`` is divided.

    Raises:
        ConfigError: ``auto`` on a system that does not say how much memory it has.
    """
    if config.host_bytes:
        return config.host_bytes
    if memory_bytes is None:
        raise ConfigError("host_bytes", "auto", "the memory size is unknown here; set a size")
    return int(memory_bytes * AUTO_HOST_SHARE) // max(engines, 1)


def check_fits(host_bytes: int, *, memory_bytes: int | None, what: str) -> None:
    """Refuse a host tier that the memory cannot hold, before it is allocated.

    Args:
        what: which memory that is, for the message: ``"in this machine"``.

    Raises:
        ConfigError: more bytes than there are.
    """
    if memory_bytes is not None and host_bytes > memory_bytes:
        gib = f"{memory_bytes / 2**30:.1f} GiB"
        raise ConfigError("host_bytes", host_bytes, f"there are only {gib} {what}; use less")
