"""Spans by OpenTelemetry's API, with times of our own: most are known when they are over."""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context as Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvconnect import versions
from kvconnect.errors import ConfigError

Attributes = Mapping[str, str | int | float | bool]

INTERNAL, SERVER, CLIENT = SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_W3C = TraceContextTextMapPropagator()


class Tracer:
    """Makes spans, by the process's own provider or by the given one. Any thread may call it.

    Times are nanoseconds since the epoch. Sampling is decided where a trace begins and obeyed here.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        version = versions.installed("kvconnect")
        self._tracer = trace.get_tracer("kvconnect", version, tracer_provider=provider)

    def parent(self, headers: Mapping[str, str] | None) -> Context | None:
        """Return the context that headers carry; None if there is none, or it is not sampled."""
        context = _W3C.extract(headers or {})
        found = trace.get_current_span(context).get_span_context()
        return context if found.is_valid and found.trace_flags.sampled else None

    def continued(self, headers: Mapping[str, str]) -> Context:
        """Return the context that headers carry, sampled or not; an empty one begins a trace."""
        return _W3C.extract(headers)

    def start(
        self, name: str, parent: Context, kind: SpanKind, began: int | None, attributes: Attributes
    ) -> Span:
        """Return a span that its caller ends; None: it begins now."""
        return self._tracer.start_span(name, parent, kind, attributes, start_time=began)

    def record(
        self,
        name: str,
        parent: Context,
        times: tuple[int, int],
        attributes: Attributes,
        error: str = "",
    ) -> Context:
        """Make a span that is over; return the context for spans under it."""
        span = self.start(name, parent, INTERNAL, times[0], attributes)
        if error:
            fail(span, error)
        span.end(times[1])
        return within(span)

    def close(self) -> None:
        """Send what has not been sent; may take seconds. For a provider that was given."""
        if self._provider is not None:
            self._provider.shutdown()


def within(span: Span) -> Context:
    """Return the context for spans under ``span``."""
    return trace.set_span_in_context(span, Context())


def fail(span: Span, why: str) -> None:
    """Mark a span as failed."""
    span.set_status(StatusCode.ERROR, why)


def headers_of(span: Span) -> dict[str, str]:
    """Return the headers that make ``span`` the parent of what another process does."""
    headers: dict[str, str] = {}
    _W3C.inject(headers, within(span))
    return headers


def exporting(service: str) -> Tracer:
    """Return a tracer whose spans are sent by OTLP, as the ``OTEL_*`` variables say."""
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
