"""OpenTelemetry spans. OpenTelemetry is imported only when tracing is on.

In an engine, spans use the provider that the engine set up (``otel.Tracer``). The router sets up
its own from the usual ``OTEL_*`` variables (:func:`of_environment`).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvconnect.observability.tracing.otel import Tracer

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def of_environment(service: str) -> Tracer | None:
    """Return a tracer if the environment names an OTLP endpoint, else None.

    ``service`` is the service name unless the environment gives one. A missing package is logged
    and not raised, because the variables are often set for a whole fleet.

    Raises:
        ConfigError: unknown protocol.
    """
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "") in ("", "otlp")
    off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
    if not (endpoint and wanted) or off:
        return None
    try:
        from kvconnect.observability.tracing.otel import exporting
    except ImportError as error:
        logger.error("no tracing, %s is missing: pip install 'kvconnect[trace]'", error.name)
        return None
    logger.info("spans go to %s", endpoint)
    return exporting(service)
