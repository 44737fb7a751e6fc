"""Spans by OpenTelemetry's API, with explicit times: most spans are recorded after they end."""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvconnect import engine_versions
from kvconnect.errors import ConfigError

Attributes = Mapping[str, str | int | float | bool]

INTERNAL, SERVER, CLIENT = SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_W3C = TraceContextTextMapPropagator()


class Tracer:
    """Makes spans with ``provider``, or with the process's own. Thread-safe.

    Times are nanoseconds since the epoch. The service that begins a trace decides on sampling.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        version = engine_versions.installed("kvconnect")
        self._tracer = trace.get_tracer("kvconnect", version, tracer_provider=provider)

    def parent(self, headers: Mapping[str, str] | None) -> Context | None:
        """Return the trace context in ``headers``; None if absent or not sampled."""
        context = _W3C.extract(headers or {})
        found = trace.get_current_span(context).get_span_context()
        return context if found.is_valid and found.trace_flags.sampled else None

    def continued(self, headers: Mapping[str, str]) -> Context:
        """Return the trace context in ``headers``, sampled or not; an empty one begins a trace."""
        return _W3C.extract(headers)

    def start(
        self, name: str, parent: Context, kind: SpanKind, began: int | None, attributes: Attributes
    ) -> Span:
        """Return a span that the caller must end. ``began`` None means now."""
        return self._tracer.start_span(name, parent, kind, attributes, start_time=began)

    def record(
        self,
        name: str,
        parent: Context,
        times: tuple[int, int],
        attributes: Attributes,
        error: str = "",
    ) -> Context:
        """Record a finished span; return the context for its children."""
        span = self.start(name, parent, INTERNAL, times[0], attributes)
        if error:
            fail(span, error)
        span.end(times[1])
        return within(span)

    def close(self) -> None:
        """Flush and shut down the given provider; may take seconds. Does nothing without one."""
        if self._provider is not None:
            self._provider.shutdown()


def within(span: Span) -> Context:
    """Return the context for children of ``span``."""
    return trace.set_span_in_context(span, Context())


def fail(span: Span, why: str) -> None:
    """Mark a span as failed."""
    span.set_status(StatusCode.ERROR, why)


def headers_of(span: Span) -> dict[str, str]:
    """Return HTTP headers that make ``span`` the parent in another process."""
    headers: dict[str, str] = {}
    _W3C.inject(headers, within(span))
    return headers


def exporting(service: str) -> Tracer:
    """Return a tracer that exports by OTLP, configured by the ``OTEL_*`` variables."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return Tracer(provider)


def _exporter() -> SpanExporter:
    name, protocol = next(
        ((name, found) for name in _PROTOCOLS if (found := os.environ.get(name))),
        (_PROTOCOLS[0], "grpc"),  # as in both engines
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter()
    raise ConfigError(name, protocol, "use grpc or http/protobuf")
