"""What users set to choose this backend. Imports nothing of SGLang: it is read before its start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvconnect import memory
from kvconnect.config import (
    Config,
    check_fits,
    config_from_environment,
    parse_config,
    share_of_host_bytes,
)
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


# What the offload parts are set to, and how much host memory one worker takes.


def own_config(extra: Mapping[str, Any]) -> Config:
    """Return the settings of a part that has a JSON object of its own; what that does not say is
    taken from ``KVCONNECT_CONFIG``.

    Raises:
        ConfigError: as :func:`~kvconnect.config.parse_config`.
    """
    own = parse_config(extra)
    shared = config_from_environment(os.environ)
    return msgspec.structs.replace(shared, **{key: getattr(own, key) for key in extra})


def worker_share(config: Config) -> int:
    """Return this worker's part of the engine's host memory in bytes.

    Raises:
        ConfigError: there is none, or the engines here together want more than the machine has.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    engines: int = parallel.dp_size
    there = memory.total_bytes()
    total = share_of_host_bytes(config, memory_bytes=there, engines=engines)
    if not total:
        raise ConfigError("host_bytes", "off", "there is no other tier yet; give it a size")
    check_fits(total * engines, memory_bytes=there, what=f"in this machine for {engines} engines")
    # A node's workers share what the engine has on that node.
    workers: int = max(1, parallel.tp_size * parallel.pp_size // parallel.nnodes)
    return total // workers
