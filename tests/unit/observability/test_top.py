"""``kvconnect top``: two scrapes become rates, endpoints may be down, a terminal shows it all."""

from __future__ import annotations

import http.server
import io
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvconnect import cli
from kvconnect.errors import ConfigError
from kvconnect.observability.metrics import rates
from kvconnect.observability.metrics.catalog import CATALOG
from kvconnect.observability.metrics.rates import EndpointFrame, Phase, Scrape, Snapshot
from kvconnect.observability.metrics.router_catalog import ROUTER_CATALOG
from kvconnect.observability.top import app, scrape, screen
from tests.links import make_certificates

BEFORE = """\
# HELP vllm:kvconnect_transfer_bytes_total Bytes moved, all ranks together.
# TYPE vllm:kvconnect_transfer_bytes_total counter
vllm:kvconnect_transfer_bytes_total{engine="0",transfer_type="GPU_to_CPU"} 1e6
vllm:kvconnect_transfer_bytes_total{engine="1",transfer_type="GPU_to_CPU"} 2e6
vllm:kvconnect_transfer_seconds_total{engine="0",transfer_type="GPU_to_CPU"} 1.0
vllm:kvconnect_transfer_operations_total{engine="0",transfer_type="GPU_to_CPU"} 10
vllm:kvconnect_query_tokens_total{engine="0"} 100
vllm:kvconnect_hit_tokens_total{engine="0",tier="host"} 50
vllm:kvconnect_hit_tokens_total{engine="0",tier="disk"} 0
vllm:kvconnect_handoff_wait_seconds_bucket{engine="0",le="0.1"} 5
vllm:kvconnect_handoff_wait_seconds_bucket{engine="0",le="1.0"} 5
vllm:kvconnect_handoff_wait_seconds_bucket{engine="0",le="+Inf"} 5
vllm:kvconnect_handoff_wait_seconds_count{engine="0"} 5
vllm:kvconnect_handoff_wait_seconds_sum{engine="0"} 0.2
vllm:num_requests_running{engine="0"} 3
"""
AFTER = """\
vllm:kvconnect_transfer_bytes_total{engine="0",transfer_type="GPU_to_CPU"} 5e6
vllm:kvconnect_transfer_bytes_total{engine="1",transfer_type="GPU_to_CPU"} 5e5
vllm:kvconnect_transfer_seconds_total{engine="0",transfer_type="GPU_to_CPU"} 1.5
vllm:kvconnect_transfer_operations_total{engine="0",transfer_type="GPU_to_CPU"} 20
vllm:kvconnect_query_tokens_total{engine="0"} 300
vllm:kvconnect_hit_tokens_total{engine="0",tier="host"} 110
vllm:kvconnect_hit_tokens_total{engine="0",tier="disk"} 40
vllm:kvconnect_evicted_blocks_total{engine="0",tier="host"} 4
vllm:kvconnect_host_bytes_used{engine="0"} 3e9
vllm:kvconnect_host_bytes_capacity{engine="0"} 4e9
vllm:kvconnect_tier_available{engine="0",tier="disk"} 1
vllm:kvconnect_tier_available{engine="1",tier="disk"} 0
vllm:kvconnect_ledger_held_blocks{engine="0",owner="store"} 7
vllm:kvconnect_ledger_oldest_hold_seconds{engine="0"} 1.5
vllm:kvconnect_ledger_oldest_hold_seconds{engine="1"} 0.5
vllm:kvconnect_jobs_in_flight{engine="0",transfer_type="SEND"} 2
vllm:kvconnect_handoff_wait_seconds_bucket{engine="0",le="0.1"} 6
vllm:kvconnect_handoff_wait_seconds_bucket{engine="0",le="1.0"} 9
vllm:kvconnect_handoff_wait_seconds_bucket{engine="0",le="+Inf"} 9
vllm:kvconnect_handoff_wait_seconds_count{engine="0"} 9
vllm:kvconnect_handoff_wait_seconds_sum{engine="0"} 2.2
vllm:kvconnect_handoff_peer_bytes_total{engine="0",peer="10.0.0.1:7"} 6e6
vllm:kvconnect_handoff_peer_seconds_total{engine="0",peer="10.0.0.1:7"} 0.5
vllm:kvconnect_handoff_peer_failures_total{engine="0",peer="10.0.0.1:7"} 3
vllm:kvconnect_failed_blocks_total{engine="0",cause="digest"} 2
vllm:kvconnect_failed_blocks_total{engine="0",cause="copy"} 0
"""
ROUTER = """\
kvconnect_router_requests_total{mode="push",reason="default",outcome="ok"} %d
kvconnect_router_queue 3
kvconnect_router_imbalance{role="prefill"} 1.25
kvconnect_router_upstream_up{role="prefill",upstream="http://a:1"} 1
kvconnect_router_upstream_up{role="decode",upstream="http://b:2"} 0
kvconnect_router_in_flight{role="prefill",upstream="http://a:1"} 4
kvconnect_router_tokens_in_flight{role="prefill",upstream="http://a:1",rank="0"} 100
kvconnect_router_tokens_in_flight{role="prefill",upstream="http://a:1",rank="1"} 50
"""


def looked_at(text: str, at: float) -> Scrape:
    return Scrape("http://a/metrics", at, scrape.parse(text))


def of(one: EndpointFrame, part: str, **which: str) -> Any:
    """The row of a part whose first field is as named."""
    ((name, value),) = which.items()
    (found,) = [row for row in getattr(one, part) if getattr(row, name) == value]
    return found


@pytest.fixture(scope="module")
def engine() -> EndpointFrame:
    return rates.endpoint(looked_at(BEFORE, 10.0), looked_at(AFTER, 12.0))


class TestRates:
    def test_a_transfer_type(self, engine: EndpointFrame) -> None:
        row = of(engine, "transfers", transfer_type="GPU_to_CPU")
        assert row.bytes_total == 5.5e6
        # Engine 0 moved 4e6. Engine 1 shows less than before: it started again, and moved 5e5.
        assert row.bytes_per_s == 4.5e6 / 2
        assert row.operations_per_s == 5
        assert row.seconds_per_operation == 0.05
        assert row.copy_bytes_per_s == 4.5e6 / 0.5
        idle = of(engine, "transfers", transfer_type="SEND")
        assert (idle.bytes_per_s, idle.seconds_per_operation) == (0, None)

    def test_lookups_and_tiers(self, engine: EndpointFrame) -> None:
        assert engine.lookups.query_tokens_per_s == 100
        assert engine.lookups.hit_share == 0.5
        host = of(engine, "tiers", tier="host")
        assert (host.hit_tokens_per_s, host.evicted_blocks_per_s) == (30, 2)
        assert (host.used_bytes, host.capacity_bytes) == (3e9, 4e9)
        assert of(engine, "tiers", tier="disk").available is False  # one of two engines lost it

    def test_peers_ledger_and_failures(self, engine: EndpointFrame) -> None:
        (peer,) = engine.peers
        assert (peer.peer, peer.bytes_per_s, peer.copy_bytes_per_s) == ("10.0.0.1:7", 3e6, 1.2e7)
        assert peer.failures_total == 3
        assert engine.ledger.held_blocks == {"store": 7}
        assert engine.ledger.jobs_in_flight == {"SEND": 2}
        assert engine.ledger.oldest_hold_s == 1.5
        assert [(f.name, f.label, f.total) for f in engine.failures] == [
            ("failed_blocks", "digest", 2)
        ]

    def test_phases(self, engine: EndpointFrame) -> None:
        assert engine.phases == (Phase(name="handoff_wait", per_s=2, mean_s=0.5, p99_s=1.0),)

    def test_the_slowest_phase_comes_first(self) -> None:
        def both(wait: float, wire: float) -> str:
            return "".join(
                f"vllm:kvconnect_{name}_count {count}\nvllm:kvconnect_{name}_sum {seconds}\n"
                for name, count, seconds in (
                    ("handoff_wait_seconds", 1 if wait else 0, wait),
                    ("handoff_latency_seconds", 1 if wire else 0, wire),
                )
            )

        def order(wait: float, wire: float) -> list[str]:
            seen = rates.endpoint(looked_at(both(0, 0), 1), looked_at(both(wait, wire), 2))
            return [phase.name for phase in seen.phases]

        assert order(1.0, 2.0) == ["handoff_latency", "handoff_wait"]
        assert order(2.0, 1.0) == ["handoff_wait", "handoff_latency"]

    def test_one_scrape_has_no_rates(self) -> None:
        for before in (None, Scrape("http://a/metrics", 1.0, {}, "refused")):
            one = rates.endpoint(before, looked_at(AFTER, 12.0))
            assert one.seconds is None
            row = of(one, "transfers", transfer_type="GPU_to_CPU")
            assert (row.bytes_total, row.bytes_per_s) == (5.5e6, None)
            assert one.phases == ()

    def test_sglang_has_the_same_under_its_name(self, engine: EndpointFrame) -> None:
        texts = [text.replace("vllm:", "sglang:") for text in (BEFORE, AFTER)]
        one = rates.endpoint(looked_at(texts[0], 10.0), looked_at(texts[1], 12.0))
        assert one.kind == "sglang"
        assert msgspec.structs.replace(one, kind="vllm") == engine

    def test_what_each_pipeline_stage_counts_alike_is_counted_once(self) -> None:
        def both(tokens: int, nbytes: int) -> str:
            return "".join(
                f'sglang:kvconnect_hit_tokens_total{{pp_rank="{pp}",tier="host"}} {tokens}\n'
                f'sglang:kvconnect_transfer_bytes_total{{pp_rank="{pp}",transfer_type="SEND"}} '
                f"{nbytes}\n"
                for pp in range(2)
            )

        one = rates.endpoint(looked_at(both(0, 0), 1), looked_at(both(100, 7), 2))
        host, sent = of(one, "tiers", tier="host"), of(one, "transfers", transfer_type="SEND")
        assert (host.hit_tokens_total, host.hit_tokens_per_s) == (100, 100)
        assert (sent.bytes_total, sent.bytes_per_s) == (14, 14)  # each has its own layers

    def test_a_router(self) -> None:
        one = rates.endpoint(looked_at(ROUTER % 10, 1.0), looked_at(ROUTER % 40, 4.0))
        assert one.kind == "router"
        assert one.router.requests_per_s == {"ok": 10}
        assert (one.router.queue, one.router.imbalance) == (3, {"prefill": 1.25})
        a, b = one.router.upstreams
        assert (a.up, a.in_flight, a.tokens) == (True, 4, 150)
        assert not b.up

    def test_another_program_is_named_as_such(self) -> None:
        one = rates.endpoint(None, looked_at("vllm:num_requests_running 1\n", 1.0))
        assert not one.up
        assert "no metrics of KVConnect" in one.error

    def test_every_metric_looked_at_exists(self) -> None:
        """A renamed metric would otherwise just read 0 for ever."""
        source = Path(rates.__file__).read_text()
        named = set(re.findall(r'(?:read\.\w+|over)\(\s*f?"(\w+)"', source)) | set(rates.FAILURES)
        rows = {row.name for row in CATALOG} | {row.name for row in ROUTER_CATALOG}
        plain = {name.removesuffix("_total") for name in named}
        assert len(plain) > 20
        assert plain <= rows
        labels = {row.name: row.label.name if row.label else "" for row in CATALOG}
        assert {name: labels[name] for name in rates.FAILURES} == rates.FAILURES


# Endpoints --------------------------------------------------------------------------------------


@contextmanager
def served(
    body: Callable[[int], bytes], context: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[str]]]:
    """An HTTP server whose nth answer is ``body(n)``; yields its address and the paths asked."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = body(len(paths))
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # a client that does not like the certificate hangs up

    with Quiet(("127.0.0.1", 0), Handler) as server:
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()
            thread.join()


def nobody() -> str:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{closed.getsockname()[1]}"


def top(*flags: str) -> app.TopOptions:
    return app.options_of(cli.make_parser().parse_args(["top", *flags]))


def test_urls() -> None:
    assert scrape.metrics_url("a:1") == "http://a:1/metrics"
    assert scrape.metrics_url("https://a/") == "https://a/metrics"
    assert scrape.metrics_url("http://a:1/x/metrics?y") == "http://a:1/x/metrics?y"
    for wrong in ("file:///etc/passwd", "ftp://a", "http://", "a b", "http://[1", "http://a:b"):
        with pytest.raises(ConfigError):
            scrape.metrics_url(wrong)


def test_once_as_json() -> None:
    def body(number: int) -> bytes:
        return (BEFORE, AFTER)[number].encode()

    out = io.StringIO()
    with served(body) as (address, paths):
        assert app.run(top(address, "--once", "--json", "--interval", "0.2"), out)
    assert paths == ["/metrics", "/metrics"]
    (line,) = out.getvalue().splitlines()
    frame = msgspec.json.decode(line, type=Snapshot)
    (one,) = frame.endpoints
    assert one.up
    assert one.seconds == pytest.approx(0.2, abs=0.19)
    row = of(one, "transfers", transfer_type="GPU_to_CPU")
    assert row.bytes_per_s == pytest.approx(4.5e6 / one.seconds)


@pytest.mark.parametrize("body", [b"\xff\xfe kvconnect_", b'vllm:kvconnect_a{b="\n', b""])
def test_whatever_an_endpoint_says_it_is_down_and_the_others_are_not(body: bytes) -> None:
    with served(lambda _: body) as (bad, _), served(lambda _: AFTER.encode()) as (good, _):
        found = scrape.scrape_all([scrape.metrics_url(url) for url in (bad, nobody(), good)])
    states = [rates.endpoint(None, one) for one in found]
    assert [state.up for state in states] == [False, False, True]
    assert all(len(state.error) > 5 for state in states[:2])


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_MOST_BYTES", 100)
    with served(lambda _: AFTER.encode()) as (address, _):
        assert "more than" in scrape.scrape(f"http://{address}/metrics").error


def test_certificates_are_checked(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.tls_cert, made.tls_key)
    with served(lambda _: AFTER.encode(), context) as (address, paths):
        assert "CERTIFICATE_VERIFY_FAILED" in scrape.scrape(f"https://{address}/metrics").error
    assert paths == []


def test_frames_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    with served(lambda _: AFTER.encode()) as (address, _):
        for _ in range(2):
            flags = (address, "--once", "--interval", "0.1", "--record", str(file))
            assert app.run(top(*flags), io.StringIO())
    frames = [msgspec.json.decode(line, type=Snapshot) for line in file.read_bytes().splitlines()]
    assert len(frames) == 2
    assert 0 < frames[1].at - frames[0].at < 60


@pytest.mark.parametrize(
    "flags",
    [
        ["ftp://a"],
        [],
        ["a:1", "--interval", "0"],
        ["a:1", "--interval", "x"],
        ["127.0.0.1:1", "--once", "--interval", "0.1", "--record", "/nowhere/file"],
    ],
)
def test_wrong_flags_are_one_error(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["top", *flags])
    assert stop.value.code == 2
    assert "kvconnect top: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "package"), [("top", "rich"), ("top", "prometheus_client"), ("report", "jinja2")]
)
def test_without_its_packages_a_command_says_what_to_install(command: str, package: str) -> None:
    hidden = f"import sys; sys.modules[{package!r}] = None; from kvconnect import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, command, "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert f"{package} is missing: pip install 'kvconnect[{command}]'" in error


def test_an_endpoint_that_is_down_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", nobody(), "--once", "--json", "--interval", "0.1"]) == 1
    assert "refused" in json.loads(capsys.readouterr().out)["endpoints"][0]["error"]


# The screen -------------------------------------------------------------------------------------


def drawn(*endpoints: EndpointFrame, width: int = 160) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True)
    console.print(screen.draw(Snapshot(at=0.0, endpoints=endpoints)))
    return out.getvalue()


def test_the_screen_says_what_the_frame_does(engine: EndpointFrame) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", drawn(engine))
    for wanted in ("2.25 MB/s", "50 ms", "9 MB/s", "50.0%", "10.0.0.1:7", "failed_blocks digest",
                   "handoff_wait", "<= 1 s", "all up"):  # fmt: skip
        assert wanted in text
    assert "SEND" not in text  # nothing was ever sent
    both = drawn(engine, EndpointFrame(url="http://z", error="refused"))
    assert 0 < both.index("DOWN") < both.index("transfers")


def test_names_cannot_command_the_terminal() -> None:
    text = AFTER.replace("10.0.0.1:7", "\x1b]0;owned\x07[red]")
    shown = drawn(rates.endpoint(None, looked_at(text, 1.0)))
    assert "\x1b]0" not in shown
    assert "?]0;owned?[red]" in shown


def test_numbers_for_people() -> None:
    assert [screen.size(n) for n in (None, 0, 999, 1000, 2.5e9)] == [
        "-", "0 B", "999 B", "1 kB", "2.5 GB"
    ]  # fmt: skip
    assert [screen.duration(s) for s in (None, 0, 2e-5, 0.02, 3)] == [
        "-", "0 s", "20 us", "20 ms", "3 s"
    ]  # fmt: skip
    assert [screen.count(n) for n in (None, 0, 1234)] == ["-", "0", "1.23k"]
