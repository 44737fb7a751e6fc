"""OpenTelemetry spans. Nothing of OpenTelemetry is imported until tracing is on.

An engine sets OpenTelemetry up in its own processes, and our spans go the way of its own
(``otel.Tracer``). The router is a program of its own and obeys the usual ``OTEL_*`` variables
(:func:`of_environment`).
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
    """Return what makes spans if the environment names an OTLP endpoint, else None. ``service`` is
    the name of this program unless the environment gives one. What is not installed is one line in
    the log: the variables are often set for a whole fleet.

    Raises:
        ConfigError: a protocol that is not known.
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
