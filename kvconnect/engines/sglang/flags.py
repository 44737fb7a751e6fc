"""What users set to choose this backend. Imports nothing of SGLang: it is read before its start."""

from __future__ import annotations

import os
from typing import Any

from kvconnect.errors import ConfigError

NAME = "kvconnect"
"""Of the transfer backend."""

TAKEOVER = "KVCONNECT_TAKEOVER"
LAYERWISE = "KVCONNECT_LAYERWISE"


def takes_over() -> bool:
    """Whether this backend stands in for SGLang's ``nixl``.

    Raises:
        ConfigError: another name is to be taken over.
    """
    value = os.environ.get(TAKEOVER, "")
    if value not in ("", "nixl"):
        raise ConfigError(TAKEOVER, value, 'use "nixl", or unset it')
    return value == "nixl"


def is_layerwise() -> bool:
    """Whether layers are pushed while a chunk computes.

    Raises:
        ConfigError: neither on nor off.
    """
    value = os.environ.get(LAYERWISE, "0")
    if value not in ("0", "1"):
        raise ConfigError(LAYERWISE, value, "use 1 or 0")
    return value == "1"


def check(server_args: Any) -> None:
    """Refuse settings that cannot be what was meant, and several tokenizer workers, which do not
    load plugins and so do not know our name.

    Raises:
        ConfigError: naming the setting, its value and the fix.
    """
    takes_over()
    is_layerwise()
    count = server_args.tokenizer_worker_num
    if count > 1 and server_args.disaggregation_transfer_backend == NAME:
        fix = f"use 1, or --disaggregation-transfer-backend nixl with {TAKEOVER}=nixl"
        raise ConfigError("--tokenizer-worker-num", count, fix)
