"""The router's part of a trace, as a collector gets it: what is in it, and whose child it is."""

from __future__ import annotations

import asyncio
import builtins
import logging
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvconnect.errors import ConfigError
from kvconnect.observability import tracing
from kvconnect.router.options import Listening
from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.prompt_times import LinearTime, PromptTimer, PromptTimes
from tests.fakes.engine import ASK, FakeEngine, bench, decodes, on_loop, prefills, says, until
from tests.fakes.event_publisher import publisher
from tests.fakes.trace_collector import Collector, Seen, collecting

ROUTE = "POST /v1/completions"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def client_headers(flags: str = "01") -> tuple[str, dict[str, str]]:
    trace = secrets.token_hex(16)
    return trace, {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-{flags}"}


def by_name(spans: list[Seen]) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    return found


@on_loop
async def test_a_request_is_one_trace_from_the_client_to_both_engines(collector: Collector) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    trace, headers = client_headers()
    async with bench([p], [d], concurrent=1) as router:
        status, _, _ = await router.post(ASK | {"stream": True}, headers=headers)
        assert status == 200
    names = (ROUTE, "queue", "choose", "prefill", "decode")
    spans = by_name(collector.spans(trace))
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(names, 1)
    root, queue, chosen, first, second = (spans[name][0] for name in names)
    assert root.parent == headers["traceparent"].split("-")[2]
    assert root.service == "kvconnect-router" and root.events == ("first_byte",)
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["kvconnect.outcome"] == "ok"
    for span in (queue, chosen, first, second):
        assert span.parent == root.id and root.holds(span) and not span.failed
    assert queue.ended <= chosen.began <= chosen.ended <= min(first.began, second.began)
    assert chosen.attributes["kvconnect.mode"] == "push"
    assert chosen.attributes["kvconnect.reason"] == "default"
    assert chosen.attributes["kvconnect.prefill.expected_hit_tokens"] == 0
    for engine, role in ((p, first), (d, second)):
        assert engine.headers[0]["traceparent"] == f"00-{trace}-{role.id}-01"
        assert role.attributes["url.full"] == f"{engine.url}/v1/completions"
        assert role.attributes["kvconnect.why"] == "only"


@on_loop
async def test_a_failed_attempt_shows(collector: Collector) -> None:
    broken, p, d = FakeEngine(says(500, {})), FakeEngine(prefills), FakeEngine(decodes)
    trace, headers = client_headers()
    async with bench([broken, p], [d], handoff="pull") as router:
        assert (await router.post(ASK, headers=headers)).status == 200
    spans = by_name(collector.spans(trace))
    first, second = spans["prefill"]
    assert (first.failed, first.attributes["kvconnect.outcome"]) == (True, "error")
    assert (second.failed, second.attributes["kvconnect.outcome"]) == (False, "ok")
    assert [span.attributes["kvconnect.prefill.worker"] for span in spans["choose"]] == [0, 1]
    assert spans["choose"][1].began >= first.ended
    assert not spans[ROUTE][0].failed

    async with bench([broken], [d], handoff="pull") as router:
        trace, headers = client_headers()
        assert (await router.post(ASK, headers=headers)).status == 502
    spans = by_name(collector.spans(trace))
    assert spans[ROUTE][0].failed and spans["choose"][-1].failed
    assert spans[ROUTE][0].attributes["http.response.status_code"] == 502


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_where_a_prompt_s_tokens_came_from_stands_on_the_request(
    collector: Collector, stream: bool
) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    receipt = {"prompt": 9, "device": 4, "peer": 2, "computed": 3, "waited_s": 0.5, "new": "x"}

    async def tells(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        nonce = body["kv_transfer_params"]["kvconnect"]["receipt"]
        await events.publish({"type": "KVConnectReceipt", "nonce": nonce, "receipt": receipt})
        return await decodes(engine, request, body)

    async with publisher() as events:
        d.settings = f",events={events.port}"
        async with bench([p], [d], listening=Listening(receipts=True)) as router:

            async def heard() -> bool:
                await events.publish()
                labels = {"role": "decode", "upstream": d.url, "outcome": "ok"}
                return await router.metric("kv_events_total", **labels) > 0

            await until(heard)
            if stream:
                d.answer = tells
            else:
                d.answer = says(200, {"kv_transfer_params": {"kvconnect": {"receipt": receipt}}})
            trace, headers = client_headers()
            await router.post(ASK | {"stream": stream}, headers=headers)
            d.answer = says(200, {"kv_transfer_params": {"kvconnect": {"receipt": "none"}}})
            control, headers = client_headers()
            await router.post(ASK, headers=headers)
    found = by_name(collector.spans(trace))[ROUTE][0].attributes
    sums = {name: value for name, value in found.items() if name.endswith("_tokens")}
    wanted = {"prompt": 9, "device": 4, "peer": 2, "computed": 3}
    assert sums == {f"kvconnect.{name}_tokens": value for name, value in wanted.items()}
    found = by_name(collector.spans(control))[ROUTE][0].attributes
    assert not [name for name in found if name.endswith("_tokens")]


@on_loop
async def test_a_trace_begins_here_if_the_client_has_none(collector: Collector) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        await router.post(ASK)
    _, trace, parent, flags = p.headers[0]["traceparent"].split("-")
    assert d.headers[0]["traceparent"].split("-")[1] == trace
    assert int(flags, 16) & 1  # sampled
    spans = by_name(collector.spans(trace))
    assert spans[ROUTE][0].parent == "" and spans["prefill"][0].id == parent


@on_loop
async def test_what_the_client_does_not_sample_is_not_recorded(collector: Collector) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    trace, headers = client_headers("00")
    async with bench([p], [d]) as router:
        await router.post(ASK, headers=headers)
    assert p.headers[0]["traceparent"].startswith(f"00-{trace}-")
    assert p.headers[0]["traceparent"].endswith("-00")
    assert collector.spans(trace) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""),
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_TRACES_EXPORTER", "none"),
    ],
)
def test_off(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """The client's own headers are passed on as they came, and nobody hears of the request."""
    monkeypatch.setenv(variable, value)
    _, headers = client_headers()

    async def ask() -> None:
        p, d = FakeEngine(prefills), FakeEngine(decodes)
        async with bench([p], [d]) as router:
            await router.post(ASK, headers=headers)
        assert p.headers[0]["traceparent"] == d.headers[0]["traceparent"] == headers["traceparent"]

    asyncio.run(ask())
    assert collector.requests == 0


def test_off_imports_nothing() -> None:
    code = "import sys, kvconnect.router.app; sys.exit('opentelemetry' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_installed_is_one_line(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}", name=name)
        return real(name, *more)

    monkeypatch.delitem(sys.modules, "kvconnect.observability.tracing.otel", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with caplog.at_level(logging.INFO):
        assert tracing.of_environment("test") is None
    (line,) = caplog.messages
    assert "opentelemetry" in line and "pip install 'kvconnect[trace]'" in line


def test_a_protocol_that_is_not_known(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "json")
    with pytest.raises(ConfigError, match=r"TRACES_PROTOCOL='json'.*grpc or http/protobuf"):
        tracing.of_environment("test")


@on_loop
async def test_a_trace_tells_why_a_prompt_was_handed_off(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LinearTime(0.5, 0.0)
    known = PromptTimes(line, {"push": line, "pull": line})
    monkeypatch.setattr(PromptTimer, "at", lambda timer, now: known)
    seen = {}
    for rule in (Disaggregate.ALWAYS, Disaggregate.AUTO):
        trace, headers = client_headers()
        async with bench([FakeEngine(prefills)], [FakeEngine(decodes)], disaggregate=rule) as at:
            assert (await at.post(ASK, headers=headers)).status == 200
        (chosen,) = by_name(collector.spans(trace))["choose"]
        names = ("handoff.decision", "handoff.reason", "handoff.expected_ttft_s")
        found = (chosen.attributes.get(f"kvconnect.{name}") for name in names)
        seen[rule] = (*found, chosen.attributes.get("kvconnect.alone.expected_ttft_s"))
    assert seen[Disaggregate.ALWAYS] == ("handed_off", "rule", None, None)
    assert seen[Disaggregate.AUTO] == ("alone", "sooner", 1.0, 0.5)
