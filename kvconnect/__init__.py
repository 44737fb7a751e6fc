"""KVConnect: one KV-cache connector for vLLM and SGLang.

Importing the package loads neither torch nor an engine: names are resolved when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconnect.errors import (
        ConfigError,
        Corrupt,
        Incompatible,
        KVConnectError,
        Misuse,
        TransferFailed,
    )
    from kvconnect.stats import OffloadingConnectorStats

    __version__: str

__all__ = [
    "ConfigError",
    "Corrupt",
    "Incompatible",
    "KVConnectError",
    "Misuse",
    "OffloadingConnectorStats",
    "TransferFailed",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        return version("kvconnect")
    home = "kvconnect.stats" if name == "OffloadingConnectorStats" else "kvconnect.errors"
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
