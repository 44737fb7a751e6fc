"""Whether this process still has the weights it started with: stored pages are of those.

SGLang flushes its own caches when weights are replaced, and tells no storage backend. So its plugin
watches the calls in a scheduler process that all such updates come through. Pages that are stored
before and after are kept apart by :func:`generation`, which is part of their names.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = f"{_SCHEDULER}_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATED = (f"{_UPDATER}.flush_cache_after_weight_update", f"{_UPDATER}.end_weight_update")
_FLUSHED = f"{_SCHEDULER}.Scheduler.flush_cache"

_now = b""
_watching = False


def watch() -> None:
    """Register the hooks, if this is a scheduler's process; part of loading the plugin."""
    global _watching
    if _SCHEDULER not in sys.modules:
        return  # other processes have no weights, and should not have to import a scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in _UPDATED:
        HookRegistry.register(target, _after_update, HookType.AFTER)
    HookRegistry.register(_FLUSHED, _after_flush, HookType.AFTER)
    _watching = True


def generation() -> bytes:
    """Return what the present weights are called: nothing for those of the start, otherwise bytes
    that only this process knows."""
    return _now


def check_watched() -> None:
    """Say in the log if nobody would notice new weights."""
    if not _watching:
        logger.warning(
            "SGLang has not loaded KVConnect's plugin (is SGLANG_PLUGINS set?): after an update of "
            "weights, restart the server, or stored pages are of the wrong ones"
        )


def _after_update(_result: Any, *_: Any, **__: Any) -> None:
    global _now
    _now = os.urandom(16)


def _after_flush(_result: Any, *_: Any, **__: Any) -> None:
    """An update's flush may have been refused, and put off until this one: pages of the old weights
    were written since."""
    if _now:
        _after_update(_result)
