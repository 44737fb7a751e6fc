"""KVConnect for vLLM, enabled by ``--kv-transfer-config``; see the README."""

from __future__ import annotations

import logging

from kvconnect.engines.vllm import start_checks

_NAME = "KVConnect"


def register() -> None:
    """Register the connector with vLLM; the ``vllm.general_plugins`` entry point.

    vLLM calls it once or several times in every process; later calls do nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvconnect.engines.vllm.connector", _NAME)
        _log_where_vllm_logs()
    start_checks.check_engines_at_start()


def _log_where_vllm_logs() -> None:
    """Log where vLLM logs, unless the user has configured this library's logger."""
    ours, engine = logging.getLogger("kvconnect"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET:
        ours.parent = engine
