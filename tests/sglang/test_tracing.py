"""A hand-off's spans are below SGLang's own spans of the request, in the client's trace."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.fakes.trace_collector import Collector, Seen, collecting, text_of
from tests.sglang.pd import ask, decode_server, prefill_server, side_by_side
from tests.sglang.scenario import prompts
from tests.sglang.server import CHUNK, PAGE, SglangServer

NEW = 4


class Traced(NamedTuple):
    prefill: SglangServer
    decode: SglangServer
    collector: Collector


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with collecting() as collector:
        args = ("--enable-trace", "--otlp-traces-endpoint", collector.endpoint)
        p = prefill_server(args=args, env={**collector.environment, "OTEL_SERVICE_NAME": "prefill"})
        d = decode_server(args=args, env={**collector.environment, "OTEL_SERVICE_NAME": "decode"})
        with side_by_side(p, d):
            yield Traced(p, d, collector)


def one(spans: list[Seen], name: str) -> Seen:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, f"{len(found)} x {name}\n{text_of(spans)}"
    return found[0]


def test_one_trace(traced: Traced) -> None:
    prompt = max(prompts(), key=len)
    pages = -(-len(prompt) // PAGE)
    trace, client_span = secrets.token_hex(16), secrets.token_hex(8)
    parent = {"traceparent": f"00-{trace}-{client_span}-01"}
    for server in (traced.prefill, traced.decode):
        server.headers.update(parent)
    ask(traced.prefill, traced.decode, prompt, NEW)
    for server in (traced.prefill, traced.decode):
        server.headers.clear()
    spans = traced.collector.wait(
        trace,
        lambda spans: (
            {"kvconnect.hold", "kvconnect.receive"} <= {span.name for span in spans}
            and sum(span.parent == client_span for span in spans) == 2
        ),
    )
    ids = {span.id: span for span in spans}
    for name, engine in (("kvconnect.hold", "prefill"), ("kvconnect.receive", "decode")):
        span = one(spans, name)
        own = ids[span.parent]  # SGLang's, of the request
        assert (own.parent, own.service) == (client_span, span.service), engine
        assert not span.failed
    hold, receive = one(spans, "kvconnect.hold"), one(spans, "kvconnect.receive")
    assert hold.attributes["kvconnect.room"] == receive.attributes["kvconnect.room"]
    assert receive.attributes["kvconnect.blocks"] == pages
    send, wire = one(spans, "kvconnect.send"), one(spans, "kvconnect.wire")
    assert hold.holds(send) and receive.holds(wire), text_of(spans)
    assert send.attributes["kvconnect.bytes"] == wire.attributes["kvconnect.bytes"] > 0
    chunks = [span for span in spans if span.parent == send.id]
    assert all(send.holds(chunk) for chunk in chunks)
    assert (
        sum(chunk.attributes["kvconnect.bytes"] for chunk in chunks)
        == (send.attributes["kvconnect.bytes"])
    )
    assert len(chunks) >= len(prompt) // CHUNK
