"""Settings that choose this backend, and hooks that notice weight updates.

Importing this module imports neither SGLang nor torch: SGLang loads it before its own start.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from kvconnect.errors import ConfigError

logger = logging.getLogger(__name__)

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
    takes_over()
    is_layerwise()
    count = server_args.tokenizer_worker_num
    if count > 1 and server_args.disaggregation_transfer_backend == NAME:
        fix = f"use 1, or --disaggregation-transfer-backend nixl with {TAKEOVER}=nixl"
        raise ConfigError("--tokenizer-worker-num", count, fix)


# Weight updates. SGLang flushes its own caches after one and tells no storage backend. So this
# plugin hooks the functions of a scheduler process that all updates call.


_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = f"{_SCHEDULER}_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATED = (f"{_UPDATER}.flush_cache_after_weight_update", f"{_UPDATER}.end_weight_update")
_FLUSHED = f"{_SCHEDULER}.Scheduler.flush_cache"

_generation = b""
_watching = False


def watch() -> None:
    """Register the hooks if this is a scheduler's process. The plugin calls this when loaded."""
    global _watching
    if _SCHEDULER not in sys.modules:
        return  # other processes have no weights, and should not have to import a scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in _UPDATED:
        HookRegistry.register(target, _after_update, HookType.AFTER)
    HookRegistry.register(_FLUSHED, _after_flush, HookType.AFTER)
    _watching = True


def generation() -> bytes:
    """Return the part of page names that identifies the present weights: empty for those that the
    process started with, otherwise bytes that only this process knows."""
    return _generation


def check_watched() -> None:
    """Log a warning if weight updates would go unnoticed."""
    if not _watching:
        logger.warning(
            "SGLang has not loaded KVConnect's plugin (is SGLANG_PLUGINS set?): restart the server "
            "after an update of weights, or it uses stored pages of the old ones"
        )


def _after_update(_result: Any, *_: Any, **__: Any) -> None:
    global _generation
    _generation = os.urandom(16)


def _after_flush(_result: Any, *_: Any, **__: Any) -> None:
    """Start a new generation again: the update's own flush may have been refused until this one, so
    that pages of the old weights were written in between."""
    if _generation:
        _after_update(_result)
