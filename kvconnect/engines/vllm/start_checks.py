"""Refuses an engine in the process that the user started, before weights are loaded.

vLLM shows a connector the model only in the engine's own processes. An error there is followed by
the tracebacks of all of them, and ends with a line of vLLM. So the plugin wraps the method with
which the server and ``LLM`` make the engine's configuration, and asks the connector right after it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from kvconnect.errors import KVConnectError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import KVTransferConfig, VllmConfig

_MODULE = "vllm.engine.arg_utils"  # loads the plugins, so it is there where engines are configured
_MARK = "_kvconnect_checks"


def check_engines_at_start() -> None:
    """Make vLLM check KVConnect's settings, the engine and the model when it configures an engine.

    Without effect in processes that configure none, and if called again.
    """
    arguments = getattr(sys.modules.get(_MODULE), "EngineArgs", None)
    if arguments is None or hasattr(arguments.create_engine_config, _MARK):
        return
    original = arguments.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> VllmConfig:
        with _short_traceback():
            _check_settings(getattr(self, "kv_transfer_config", None))
        config: VllmConfig = original(self, *args, **kwargs)
        with _short_traceback():
            check_start(config)
        return config

    setattr(create_engine_config, _MARK, True)
    arguments.create_engine_config = create_engine_config


@contextlib.contextmanager
def _short_traceback() -> Iterator[None]:
    """Leave out where in KVConnect a refusal was raised: its line says all."""
    try:
        yield
    except KVConnectError as error:
        raise error.with_traceback(None) from None


def check_start(config: VllmConfig) -> None:
    """Ask KVConnect's class, if it is used directly or in MultiConnector, whether it can serve.

    Raises:
        ConfigError: a setting of KVConnect or vLLM cannot be used.
        Incompatible: the model or engine is not supported.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    if _uses_kvconnect(config.kv_transfer_config):
        get_kv_connector_cache_layout(config)  # a hook that every connector answers with checks


def _check_settings(transfer: KVTransferConfig | None) -> None:
    """Check KVConnect's own settings: vLLM may ask for them inside of a validation, whose errors
    take several lines."""
    from kvconnect.settings import find_settings

    if getattr(transfer, "kv_connector", None) == "KVConnect":
        find_settings(getattr(transfer, "kv_connector_extra_config", None) or {}, os.environ)


def _uses_kvconnect(transfer: KVTransferConfig | None) -> bool:
    if transfer is None or not transfer.kv_connector:
        return False
    if transfer.has_connector("KVConnect"):
        return True
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not transfer.kv_connector_module_path:
        return False
    from kvconnect.engines.vllm.connector import KVConnect

    return issubclass(KVConnectorFactory.get_connector_class(transfer), KVConnect)
