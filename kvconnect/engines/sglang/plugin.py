"""Settings that choose this backend.

Importing this module imports neither SGLang nor torch: SGLang loads it before its own start.
"""

from __future__ import annotations

import os
from typing import Any

from kvconnect.engines.sglang.settings_flags import check_settings_at_start
from kvconnect.errors import ConfigError

NAME = "kvconnect"
"""Name of the transfer backend."""

TAKEOVER = "KVCONNECT_TAKEOVER"
LAYERWISE = "KVCONNECT_LAYERWISE"


def takes_over() -> bool:
    """Whether this backend replaces SGLang's ``nixl``.

    Raises:
        ConfigError: the setting names another backend.
    """
    value = os.environ.get(TAKEOVER, "")
    if value not in ("", "nixl"):
        raise ConfigError(TAKEOVER, value, 'use "nixl", or unset it')
    return value == "nixl"


def is_layerwise() -> bool:
    """Whether layers are sent while a chunk computes.

    Raises:
        ConfigError: the setting is neither "0" nor "1".
    """
    value = os.environ.get(LAYERWISE, "0")
    if value not in ("0", "1"):
        raise ConfigError(LAYERWISE, value, "use 1 or 0")
    return value == "1"


def check(server_args: Any) -> None:
    """Refuse invalid settings, and several tokenizer workers: they load no plugins, so they do not
    know this backend's name.

    Raises:
        ConfigError: the message names the setting, its value and the fix.
    """
    replaces = takes_over()
    is_layerwise()
    backend = server_args.disaggregation_transfer_backend
    own = backend == NAME or (backend == "nixl" and replaces)
    check_settings_at_start(server_args, own and server_args.disaggregation_mode != "null")
    count = server_args.tokenizer_worker_num
    if count > 1 and backend == NAME:
        fix = f"use 1, or --disaggregation-transfer-backend nixl with {TAKEOVER}=nixl"
        raise ConfigError("--tokenizer-worker-num", count, fix)
