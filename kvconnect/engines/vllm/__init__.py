"""KVConnect for vLLM, switched on by ``--kv-transfer-config``; see the README."""

from __future__ import annotations

import logging

_NAME = "KVConnect"


def register() -> None:
    """Make the connector known to vLLM; the ``vllm.general_plugins`` entry point.

    vLLM calls it in every process it starts, and possibly again; only the first call counts.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvconnect.engines.vllm.connector", _NAME)
        _log_where_vllm_logs()


def _log_where_vllm_logs() -> None:
    """Show this library's log lines with the engine's, unless the user configured them."""
    ours, engine = logging.getLogger("kvconnect"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET:
        ours.parent = engine
