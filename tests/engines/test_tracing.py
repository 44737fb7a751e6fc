"""One request through the router, a prefill and a decode engine is one trace: who is whose child,
what lies in whose time, and that the spans say what was counted elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

from kvconnect.types import PromptSource
from tests.engines.models import BLOCK_SIZE
from tests.engines.pd import (
    BLOCKS_EACH,
    HANDED_OFF,
    LIMITS,
    assert_quiet,
    decode_config,
    one_clean_error,
    pair,
    prefill,
    prefill_config,
    pull,
    push_params,
    received_bytes,
    sent_bytes,
    side_by_side,
    standing_ticket,
)
from tests.engines.scenario import FULL, NEW, PROMPT, block_bytes, expected, prompts
from tests.engines.server import Client, Router, Server
from tests.fakes.trace_collector import Collector, Seen, collecting, text_of

ROOT = "POST /v1/completions"
STEP = 256  # tokens of a step, as the servers are started
STEP_BLOCKS = STEP // BLOCK_SIZE
CHUNKS = -(-PROMPT // STEP)
NBYTES = BLOCKS_EACH * block_bytes("llama")
OUR_ENGINES = ("prefill", "decode")


class Fleet(NamedTuple):
    """``traced`` and ``pulling`` are routers that trace, ``silent`` is one that does not."""

    prefill: Server
    decode: Server
    collector: Collector
    traced: Router
    pulling: Router
    silent: Router


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    expected("llama")  # before the machine is busy with other engines
    disk = {"path": str(tmp_path_factory.mktemp("disk")), "capacity": "64MiB", "min_free": 0}
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        env = collector.environment
        args = ("--otlp-traces-endpoint", collector.endpoint)
        # The host tier holds less than all prompts, so that some are on disk alone.
        sending = prefill_config(host_bytes="4MiB", disk=disk, load_when="always", **LIMITS)
        p = Server("llama", sending, args=args, env={**env, "OTEL_SERVICE_NAME": "prefill"})
        receiving = decode_config(host_bytes="64MiB", sync_load_bytes=0, **LIMITS)
        d = Server("llama", receiving, args=args, env={**env, "OTEL_SERVICE_NAME": "decode"})
        stack.enter_context(side_by_side(p, d))
        routers = [
            stack.enter_context(Router([p], [d], args=more, env=environment))
            for more, environment in (((), env), (("--pull",), env), ((), {}))
        ]
        yield Fleet(p, d, collector, *routers)


@contextmanager
def traced(*clients: Client, sampled: bool = True) -> Iterator[tuple[str, str]]:
    """Have clients ask within a trace; yield its id and the id of the clients' own span."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    for client in clients:
        client.headers["traceparent"] = f"00-{trace}-{span}-0{sampled:d}"
    try:
        yield trace, span
    finally:
        for client in clients:
            del client.headers["traceparent"]


def ask(client: Client, number: int, sampled: bool = True) -> tuple[str, str]:
    """Ask for a prompt within a trace of its own; return what :func:`traced` yields."""
    with traced(client, sampled=sampled) as ids:
        assert client.complete(prompts()[number], NEW).tokens == expected("llama").fresh[number]
    return ids


def forget(fleet: Fleet) -> None:
    """Have prompts computed anew, and handed off anew."""
    for server in (fleet.prefill, fleet.decode):
        assert_quiet(server)
        server.post("/reset_prefix_cache?reset_external=true")


def has(*wanted: str) -> Callable[[list[Seen]], bool]:
    """Say whether there are spans of these names, or of these programs and names: all that a test
    looks at, since they come in several batches."""

    def enough(spans: list[Seen]) -> bool:
        names = [name for s in spans for name in (s.name, f"{s.service}/{s.name}")]
        return all(names.count(name) >= wanted.count(name) for name in wanted)

    return enough


def one(spans: list[Seen], name: str, service: str = "") -> Seen:
    """Return the only span of that name (of that program)."""
    found = [s for s in spans if s.name == name and service in ("", s.service)]
    assert len(found) == 1, f"{len(found)} x {name}\n{text_of(spans)}"
    return found[0]


def children(spans: list[Seen], parent: Seen) -> list[Seen]:
    return [span for span in spans if span.parent == parent.id]


HANDED_OVER = has(
    *(ROOT, "queue", "choose", "prefill", "decode", "decode/llm_request"),
    *("kvconnect.queue", "kvconnect.queue", "kvconnect.prefill", "kvconnect.prefill"),
    *("kvconnect.hold", "kvconnect.receive", "kvconnect.store", "kvconnect.store"),
    *("kvconnect.wait", "kvconnect.wire", "kvconnect.send"),
)


def assert_tree(spans: list[Seen], client_span: str) -> None:
    """What holds of any hand-off."""
    text = text_of(spans)
    ids = {span.id for span in spans}
    root = one(spans, ROOT)
    assert root.parent == client_span
    assert all(span.parent in ids for span in spans if span is not root), text
    for role in OUR_ENGINES:
        span = one(spans, role, "kvconnect-router")
        assert span.parent == root.id and root.began <= span.began
        # A prefill request may end after the client has its answer: nobody waits for its response.
        assert role == "prefill" or root.holds(span), text
        inside = children(spans, span)
        assert {s.service for s in inside} == {role}, text
        for name in ("kvconnect.queue", "kvconnect.prefill"):
            assert span.holds(one(inside, name)), text
        queue, prefill = one(inside, "kvconnect.queue"), one(inside, "kvconnect.prefill")
        assert queue.ended <= prefill.began, text
    # Prefill's llm_request may be missing: its answer is not waited for once decode has answered.
    receive = one(spans, "kvconnect.receive", "decode")
    assert one(spans, "decode", "kvconnect-router").holds(receive)
    assert receive.ended <= one(spans, "kvconnect.prefill", "decode").began
    # Nobody is told twice what the request waited for: these follow one another in its time.
    wait, wire = (one(spans, f"kvconnect.{name}") for name in ("wait", "wire"))
    assert wait.parent == wire.parent == receive.id
    assert receive.holds(wait) and receive.holds(wire) and wait.ended == wire.began, text
    for exposed in (span for span in spans if span.name == "kvconnect.exposed"):
        assert receive.holds(exposed) and exposed.ended == wire.ended, text
    hold = one(spans, "kvconnect.hold", "prefill")
    send = one(spans, "kvconnect.send", "prefill")
    assert send.parent == hold.id and hold.holds(send) and hold.attributes["kvconnect.served"]
    chunks = children(spans, send)
    assert all(send.holds(chunk) for chunk in chunks), text
    assert wire.attributes["kvconnect.bytes"] == send.attributes["kvconnect.bytes"] == NBYTES
    assert sum(chunk.attributes["kvconnect.bytes"] for chunk in chunks) == NBYTES
    assert sum(chunk.attributes["kvconnect.blocks"] for chunk in chunks) == BLOCKS_EACH
    assert not any(span.failed for span in spans), text


def sums(spans: list[Seen], service: str) -> dict[str, int]:
    """Return the sums of a receipt that are not 0, of an engine's prefill span."""
    found = one(spans, "kvconnect.prefill", service).attributes
    names = [source.value for source in PromptSource]
    told = {name: found[f"kvconnect.{name}_tokens"] for name in names}
    assert sum(told.values()) == found["kvconnect.prompt_tokens"] == PROMPT
    return {name: tokens for name, tokens in told.items() if tokens}


def test_push(fleet: Fleet) -> None:
    forget(fleet)
    fleet.traced.complete(prompts()[1], NEW)  # a standing ticket is held, the engines have met
    moved = received_bytes(fleet.decode), sent_bytes(fleet.prefill)
    trace, client_span = ask(fleet.traced, 0)
    # Decode is told when the last page is computed, and waits for that.
    told = has("kvconnect.exposed")
    spans = fleet.collector.wait(trace, lambda found: told(found) and HANDED_OVER(found))
    assert_tree(spans, client_span)
    for name in ("wire", "wait", "send", "hold"):  # control: each of them is looked at
        with pytest.raises(AssertionError):
            assert_tree([s for s in spans if s.name != f"kvconnect.{name}"], client_span)
    assert one(spans, "kvconnect.exposed").service == "decode"
    assert one(spans, "choose").attributes["kvconnect.mode"] == "push"
    assert one(spans, "kvconnect.prefill", "prefill").events == ("step",) * CHUNKS
    assert sums(spans, "prefill") == {"computed": PROMPT}
    assert sums(spans, "decode") == {"handoff": HANDED_OFF, "computed": PROMPT - HANDED_OFF}
    assert_quiet(fleet.prefill, fleet.decode)
    assert received_bytes(fleet.decode) - moved[0] == NBYTES
    assert sent_bytes(fleet.prefill) - moved[1] == NBYTES


def test_chunks_leave_while_the_prompt_is_computed(fleet: Fleet) -> None:
    forget(fleet)
    offer = standing_ticket(fleet.prefill)
    # Until the decode engine was the first to ask. Other tests need prompts that no disk has.
    for number in (7, 6, 5, 4, 1):
        prompt, transfer = prompts()[number], secrets.token_hex(16)
        told = {"kv_transfer_params": push_params(transfer, offer)}
        both = traced(fleet.prefill, fleet.decode)
        with ThreadPoolExecutor(1) as pool, both as (trace, _):
            answer = pool.submit(fleet.decode.complete, prompt, NEW, **told)
            time.sleep(0.5)
            prefill(fleet.prefill, prompt, transfer)
            assert answer.result().tokens == expected("llama").fresh[number]
        whole = has("llm_request", "llm_request", "kvconnect.hold", "prefill/kvconnect.prefill")
        spans = fleet.collector.wait(trace, whole)
        chunks = [span for span in spans if span.name == "kvconnect.send.chunk"]
        if len(chunks) == CHUNKS:
            break
    computing = one(spans, "kvconnect.prefill", "prefill")
    assert [chunk.attributes["kvconnect.first_block"] for chunk in chunks] == [0, STEP_BLOCKS]
    assert computing.began < chunks[0].began < computing.ended
    assert chunks[0].began < chunks[1].began


def test_pull(fleet: Fleet) -> None:
    forget(fleet)
    trace, client_span = ask(fleet.pulling, 2)
    spans = fleet.collector.wait(trace, HANDED_OVER)
    assert_tree(spans, client_span)
    assert one(spans, "choose").attributes["kvconnect.mode"] == "pull"
    first, second = (one(spans, role, "kvconnect-router") for role in OUR_ENGINES)
    send = one(spans, "kvconnect.send")
    assert first.ended <= second.began <= send.began


def test_loads_from_host_and_disk(fleet: Fleet) -> None:
    forget(fleet)
    d, p = fleet.decode, fleet.prefill
    ask(fleet.pulling, 3)
    assert_quiet(p, d)
    d.post("/reset_prefix_cache")  # the device's, not ours
    trace, _ = ask(d, 3)
    whole = has("llm_request", "kvconnect.lookup", "kvconnect.load", "kvconnect.prefill")
    spans = fleet.collector.wait(trace, whole)
    lookup, load = one(spans, "kvconnect.lookup"), one(spans, "kvconnect.load")
    assert lookup.attributes["kvconnect.found_tokens"] == FULL
    assert sums(spans, "decode") == {"host": FULL, "computed": PROMPT - FULL}
    assert lookup.ended <= load.began and load.ended <= one(spans, "kvconnect.prefill").began
    assert "kvconnect.fetch" not in [span.name for span in spans]

    for number in range(8):  # with more than the host tier holds after it, the first is on disk
        ask(p, number)
        p.settle()
    deadline = time.monotonic() + 30
    while p.metric("vllm:kvconnect_tier_jobs_in_flight") and time.monotonic() < deadline:
        time.sleep(0.05)
    p.post("/reset_prefix_cache")
    trace, _ = ask(p, 0)
    whole = has("llm_request", "kvconnect.fetch", "kvconnect.load", "kvconnect.queue")
    spans = fleet.collector.wait(trace, whole)
    fetch, load = one(spans, "kvconnect.fetch"), one(spans, "kvconnect.load")
    assert fetch.attributes["kvconnect.disk_tokens"] == FULL
    assert one(spans, "kvconnect.queue").holds(fetch) and fetch.ended <= load.began


def test_a_refused_hand_off_shows(fleet: Fleet) -> None:
    """A receive that fails has no wire, and says why."""
    forget(fleet)
    unknown = push_params(secrets.token_hex(16), standing_ticket(fleet.prefill) + "x")
    with traced(fleet.decode) as (trace, _), one_clean_error():
        fleet.decode.complete(prompts()[4], NEW, kv_transfer_params=unknown)
    spans = fleet.collector.wait(trace, has("kvconnect.receive"))
    assert one(spans, "kvconnect.receive").failed
    assert not {"kvconnect.wire", "kvconnect.wait"} & {span.name for span in spans}
    assert_quiet(fleet.prefill, fleet.decode)


def test_what_is_not_sampled_or_not_traced_leaves_no_span(fleet: Fleet) -> None:
    forget(fleet)
    unsampled, _ = ask(fleet.traced, 5, sampled=False)
    passed_on, client_span = ask(fleet.silent, 6)
    # The silent router passes the client's headers on, so the engines' spans are the client's.
    found = fleet.collector.wait(
        passed_on, has("llm_request", "kvconnect.receive", "kvconnect.hold")
    )
    assert {span.service for span in found} == set(OUR_ENGINES)
    assert {span.parent for span in found if span.name == "llm_request"} == {client_span}
    assert_quiet(fleet.prefill, fleet.decode)
    time.sleep(0.5)  # longer than an exporter waits
    assert not [s for s in fleet.collector.spans(unsampled) if s.name.startswith("kvconnect.")]


def test_each_worker_of_a_tensor_parallel_engine_tells_its_part() -> None:
    with collecting() as collector:
        args, env = ("--otlp-traces-endpoint", collector.endpoint), collector.environment
        with pair(tp=2, args=args, env=env) as (p, d), traced(p, d) as (trace, _):
            assert pull(p, d, prompts()[0], NEW).tokens == expected("llama").fresh[0]
            twice = [f"kvconnect.{name}" for name in ("wait", "wire", "send")] * 2
            spans = collector.wait(trace, has(*twice, "kvconnect.receive", "kvconnect.hold"))
            assert_quiet(p, d)
    receive, hold = one(spans, "kvconnect.receive"), one(spans, "kvconnect.hold")
    for name, parent in (("wait", receive), ("wire", receive), ("send", hold)):
        parts = [span for span in spans if span.name == f"kvconnect.{name}"]
        assert {part.attributes["kvconnect.worker"] for part in parts} == {0, 1}
        assert all(part.parent == parent.id and parent.holds(part) for part in parts)
        if name != "wait":
            assert [part.attributes["kvconnect.bytes"] for part in parts] == [NBYTES // 2] * 2
