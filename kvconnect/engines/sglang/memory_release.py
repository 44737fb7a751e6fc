"""SGLang's memory saver takes the KV pages' memory away: whoever copies pages ends that before.

SGLang sees to it that no request runs, but does not know of copies that outlive their request. All
of this runs on the scheduler's thread. Importing it imports neither SGLang nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvconnect.errors import ConfigError

_SCHEDULER = "sglang.srt.managers.scheduler"
RELEASE = (
    f"{_SCHEDULER}_components.weight_updater.SchedulerWeightUpdaterManager"
    ".release_memory_occupation"
)

_drains: list[Callable[[], None]] = []
_watching = False


def watch() -> None:
    """Register the hook if this is a scheduler's process. The plugin calls this when loaded."""
    global _watching
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RELEASE, before_release, HookType.BEFORE)
    _watching = True


def check(server_args: Any) -> None:
    """Refuse a memory saver of whose releases nothing here is told.

    Raises:
        ConfigError: the memory saver is on, and SGLang has not loaded the plugin.
    """
    if not _watching and getattr(server_args, "enable_memory_saver", False):
        fix = "leave it out, or have SGLang load KVConnect's plugin (SGLANG_PLUGINS must list it)"
        raise ConfigError("--enable-memory-saver", True, fix)


def drain_first(drain: Callable[[], None]) -> None:
    """Have ``drain`` called before the pages' memory is released. It must block until no copy
    runs."""
    _drains.append(drain)


def forget(drain: Callable[[], None]) -> None:
    """Call ``drain`` no more. Idempotent."""
    if drain in _drains:
        _drains.remove(drain)


def before_release(_updater: Any, request: Any, *_: Any, **__: Any) -> None:
    """Hook before ``release_memory_occupation``; without tags, it releases everything."""
    if not request.tags or "kv_cache" in request.tags:
        for drain in tuple(_drains):
            drain()
