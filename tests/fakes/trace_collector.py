"""A fake OpenTelemetry collector: accepts OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Seen:
    """A received span. Times are nanoseconds since the epoch."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, Any]
    failed: bool
    events: tuple[str, ...]

    def holds(self, other: Seen) -> bool:
        """Whether the other one lies within this one's time."""
        return self.began <= other.began <= other.ended <= self.ended


class Collector:
    """Spans received so far; thread-safe."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests = 0
        self._spans: list[Seen] = []
        self._lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """Return environment variables that make a program export its spans here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def take(self, body: bytes) -> None:
        found = list(_decoded(body))
        with self._lock:
            self.requests += 1
            self._spans += found

    def spans(self, trace: str) -> list[Seen]:
        """Return the spans of a trace, in the order in which they began."""
        with self._lock:
            found = [span for span in self._spans if span.trace == trace]
        return sorted(found, key=lambda span: (span.began, -span.ended))

    def wait(self, trace: str, enough: Callable[[list[Seen]], bool]) -> list[Seen]:
        """Return the spans of a trace once there are enough."""
        deadline = time.monotonic() + PATIENCE_S
        while not enough(self.spans(trace)) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = self.spans(trace)
        assert enough(found), "\n" + text_of(found)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def text_of(spans: list[Seen]) -> str:
    """Return a trace as text: what began when, after the first, and how long it took."""
    ids = {span.id: span for span in spans}
    depth: dict[str, int] = {}
    lines = []
    for span in spans:
        depth[span.id] = depth.get(span.parent, -1) + 1 if span.parent in ids else 0
        start, took = (span.began - spans[0].began) / 1e6, (span.ended - span.began) / 1e6
        name = "  " * depth[span.id] + span.name
        lines.append(f"{start:9.2f} {took:9.2f} ms  {name:<32} {span.service} {span.attributes}")
    return "\n".join(lines)


def _decoded(body: bytes) -> Iterator[Seen]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    for resource in request.resource_spans:
        about = {pair.key: _value(pair.value) for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    name=span.name,
                    service=str(about.get("service.name", "")),
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes={pair.key: _value(pair.value) for pair in span.attributes},
                    failed=span.status.code == Status.STATUS_CODE_ERROR,
                    events=tuple(event.name for event in span.events),
                )


def _value(value: AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value"))
