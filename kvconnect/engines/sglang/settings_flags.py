"""KVConnect's settings in SGLang's flags, checked before SGLang loads a model.

Importing this module imports neither SGLang nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.settings import find_settings
from kvconnect.settings.sources import read_object

_STORAGE = "--hicache-storage-backend-extra-config"
_OWN_PACKAGE = "kvconnect."

_FRAMEWORK = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        *("hicache_storage_pass_prefix_keys", "file_storage_path"),
    }
)
"""SGLang's own keys in the JSON object that also has the storage backend's settings."""


def storage_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the JSON object of the storage backend."""
    return {key: value for key, value in given.items() if key not in _FRAMEWORK}


def check_settings_at_start(server_args: Any, hands_off: bool) -> None:
    """Check the settings of each part of KVConnect that a server uses.

    Args:
        hands_off: the server uses the transfer backend.

    Raises:
        ConfigError: names all that is wrong.
    """
    if hands_off:
        find_settings({}, os.environ)
    linker = server_args.unified_cache_external_linker_config
    if isinstance(linker, dict) and _is_own(linker.get("linker_module_path")):
        extra = linker.get("linker_extra_config", {})
        find_settings(extra if isinstance(extra, dict) else {}, os.environ)
    storage = _object_of(server_args.hicache_storage_backend_extra_config)
    if _is_own(storage.get("module_path")):
        _check_one_storage(server_args)
        find_settings(storage_settings(storage), os.environ)


def _check_one_storage(server_args: Any) -> None:
    """Refuse two storages in one process: each wants the folder on disk and all host memory."""
    offloads = server_args.disaggregation_decode_enable_offload_kvcache
    if offloads and server_args.enable_hierarchical_cache:
        fix = "use this or --enable-hierarchical-cache: both store the same pages"
        raise ConfigError("--disaggregation-decode-enable-offload-kvcache", True, fix)


def _is_own(module: object) -> bool:
    return isinstance(module, str) and module.startswith(_OWN_PACKAGE)


def _object_of(text: str | None) -> dict[str, Any]:
    """Return the object in a flag; an empty one for what only SGLang can read or refuse."""
    if text and text.startswith("@"):
        readable = text.endswith((".json", ".yaml", ".yml"))
        return read_object(_STORAGE, text[1:]) if readable else {}
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
