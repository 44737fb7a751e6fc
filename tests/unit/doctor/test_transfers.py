"""``kvconnect doctor transport``: real bytes on loopback, and everything that can go wrong."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from kvconnect.doctor import Finding, FindingsReport, peer_main, peers, transfers
from kvconnect.doctor.buffers import (
    HostBuffer,
    cuda_unavailable_reason,
    differing,
    make_buffer,
    pattern,
)
from kvconnect.doctor.exchange import (
    CpuRequest,
    CpuSeconds,
    DoctorHello,
    TransferRequest,
    decode,
    encode,
)
from kvconnect.doctor.peer_process import PeerProcess, last_error
from kvconnect.doctor.peer_task import Result, SourceReady, Task
from kvconnect.doctor.peers import DoctorReader, DoctorSource, Sizes
from kvconnect.errors import ConfigError, ProtocolError, Refused, TransferFailed
from kvconnect.protocol.hello import Reject
from kvconnect.testing.inproc import InprocTransport
from kvconnect.testing.proxy import FaultProxy
from kvconnect.transport import ConnectionOptions, Security, make_transport
from kvconnect.transport.base import (
    Event,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PageChunk,
    PageUser,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
    Unit,
)

SMALL = Sizes(
    buffer_bytes=4 << 20,
    page_bytes=64 << 10,
    round_bytes=1 << 20,
    rounds=2,
    trips=10,
    patience_s=10,
)
LOOP = "127.0.0.1"

KEY = secrets.token_hex(16).encode()


def task(port: int = 0, sizes: Sizes = SMALL, **rest: object) -> Task:
    return msgspec.structs.replace(Task("reader", LOOP, port, "tcp", sizes=sizes), **rest)


def one(report: FindingsReport, name: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.name == name]
    return finding


@dataclass
class Served:
    """A source on a thread of this process. ``area`` is its memory."""

    port: int
    area: HostBuffer


@contextmanager
def served(
    security: Security | None = None, memory: Callable[[HostBuffer], HostBuffer] | None = None
) -> Iterator[Served]:
    area = HostBuffer(SMALL.buffer_bytes)
    area = memory(area) if memory else area
    link = make_transport("tcp", security or Security(), ConnectionOptions())
    link.register(area.memory)
    port = link.listen(LOOP, 0)[1]
    source, ended = DoctorSource(link, area, LOOP), threading.Event()
    thread = threading.Thread(target=source.serve, args=(ended.is_set,))
    thread.start()
    try:
        yield Served(port, area)
    finally:
        ended.set()
        thread.join()
        source.close()
        link.close()


@contextmanager
def reading(port: int, sizes: Sizes = SMALL) -> Iterator[DoctorReader]:
    area = HostBuffer(sizes.buffer_bytes)
    link = make_transport("tcp", Security(), ConnectionOptions())
    link.register(area.memory)
    try:
        reader = DoctorReader(link, area, sizes)
        reader.connect(LOOP, port)
        yield reader
    finally:
        link.close()


# What works --------------------------------------------------------------------------------------


def test_two_peer_of_our_own_move_real_pages() -> None:
    report = transfers.examine(task())
    assert report.ok
    finding = one(report, "tcp")
    # Three rounds of 16 pages, and ten single ones.
    assert "58 pages verified; loopback, no TLS" in finding.value
    assert one(report, "link").status == "ok"
    measured = report.measured["tcp"]
    assert isinstance(measured, dict)
    assert measured["verified"] == 58
    assert measured["wrong"] == measured["bad"] == 0
    assert min(measured[name] for name in ("bytes_per_s", "page_s", "cpu_s_per_gb")) > 0
    assert float(str(report.measured["link_bytes_per_s"])) > 0


def test_somebody_elses_peer_serves_one_reader_after_the_other(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    with served(Security(KEY)) as source:
        for _ in range(2):
            report = transfers.examine(task(source.port, key_file=str(key)))
            assert report.ok, report.text()


def test_who_comes_while_another_is_served_is_turned_away() -> None:
    with served() as source, reading(source.port) as first:
        with pytest.raises(TransferFailed, match="busy with another reader"), reading(source.port):
            raise AssertionError("two readers at a time")
        assert not first.measure("tcp").failed


class Scripted(InprocTransport):
    """Gives out the events that it is given, and keeps what it is told."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.script = events
        self.said: dict[int, list[type]] = {}

    def poll(self, timeout: float) -> list[Event]:
        return self.script

    def submit(self, order: object) -> None:
        if isinstance(order, PeerMessage):
            self.said.setdefault(order.peer, []).append(type(decode(order.payload)))


@pytest.mark.parametrize("thrown_out", [True, False])
def test_who_is_being_thrown_out_keeps_nobody_out(thrown_out: bool) -> None:
    first, second = PeerId(1), PeerId(2)
    hello = encode(DoctorHello(area_bytes=4096, device="cpu"))
    link = Scripted(
        [
            PeerUp(first, True, "10.0.0.1:1"),
            MessageReceived(first, b"engine" if thrown_out else hello),
            PeerUp(second, True, "10.0.0.1:2"),
            MessageReceived(second, hello),
            PeerDown(first, "gone"),
        ][: None if thrown_out else 3]
    )
    DoctorSource(link, HostBuffer(SMALL.buffer_bytes), LOOP).step(0.0)
    answers = [Reject, DoctorHello] if thrown_out else [DoctorHello, Reject]
    assert link.said == {1: answers[:1], 2: answers[1:]}


def test_listening_says_where_and_ends_when_told() -> None:
    said: list[str] = []
    transfers.listen(task(role="source"), said.append, lambda: True)
    assert said[0].startswith("listening on 127.0.0.1:")
    assert "(tcp)" in said[0]


def test_a_transport_that_is_not_there_is_a_warning_with_its_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, made = peer_main.make_transport, []

    def make(name: str, *rest: object) -> object:
        made.append(name)
        if name == "nixl":
            raise ConfigError("transport", "nixl", "pip install nixl-cu12")
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(peer_main, "make_transport", make)
    with served() as source:
        result = peer_main.read(task(source.port, path="all"))
    assert made == ["nixl", "tcp"]
    assert [measured.path for measured in result.measured] == ["tcp"]
    assert result.nixl_problem.reason == "not usable: transport='nixl'"
    assert result.nixl_problem.fix == "pip install nixl-cu12"


needs_nixl = pytest.mark.skipif(
    not importlib.util.find_spec("nixl_cu12"), reason="nixl-cu12 is not installed"
)


@needs_nixl
@pytest.mark.parametrize(("tls", "route"), [("tcp", "tcp/lo ("), ("tcp,cma", "cma/memory (")])
def test_nixl_is_measured_and_says_which_way_it_goes(
    monkeypatch: pytest.MonkeyPatch, tls: str, route: str
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    report = transfers.examine(task(path="nixl"))
    finding = one(report, "nixl")
    assert report.ok, report.text()
    assert f"58 pages verified; {route}" in finding.value
    assert [each for each in report.measured if each in ("tcp", "nixl")] == ["nixl"]


# What fails --------------------------------------------------------------------------------------


def test_a_rate_above_what_is_possible_fails_with_the_cause() -> None:
    report = transfers.examine(task(), min_rate=10**15)
    finding = one(report, "tcp")
    assert not report.ok
    assert "under 1000000.00 GB/s, plain sockets reach" in finding.value
    assert finding.fix


def test_a_peer_that_is_not_there() -> None:
    with served() as source:
        port = source.port
    report = transfers.examine(task(port))
    finding = one(report, "peer")
    assert not report.ok
    assert "refused" in finding.value
    assert "--listen" in finding.fix


def test_a_peer_with_another_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(16))
    with served(Security(b"other" * 8)) as source:
        report = transfers.examine(task(source.port, key_file=str(key)))
    finding = one(report, "peer")
    assert finding.status == "fail"
    assert finding.fix == "give both sides the same --key-file"


@pytest.mark.parametrize(
    ("content", "fix"),
    [(None, "name a file that can be read"), ("short", "put at least 16 random bytes")],
)
def test_a_key_file_that_cannot_be_used(tmp_path: Path, content: str | None, fix: str) -> None:
    key = tmp_path / "key"
    if content:
        key.write_text(content)
    report = transfers.examine(task(key_file=str(key)))
    finding = one(report, "peer")
    assert str(key) in finding.value
    assert fix in finding.fix


def test_a_connection_that_is_cut_in_the_middle_ends_with_a_finding() -> None:
    with served() as source, FaultProxy(LOOP, source.port) as proxy:
        proxy.truncate(offset=1 << 20)
        report = transfers.examine(task(proxy.address[1]))
    finding = one(report, "tcp")
    assert finding.status == "fail"
    assert "the connection is gone" in finding.value


KILLED = """
import os, sys
from kvconnect.doctor import peer_main, peers

asked = []

def die(self, peer, ask):
    asked.append(ask)
    if len(asked) == 2:
        os._exit(9)
    send(self, peer, ask)

send, peers.DoctorSource._send = peers.DoctorSource._send, die
peer_main.main()
"""


def test_a_peer_that_is_killed_in_the_middle_ends_with_a_finding() -> None:
    command = (sys.executable, "-c", KILLED)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(msgspec.json.encode(task(role="source")) + b"\n")
        process.stdin.flush()
        ready = msgspec.json.decode(process.stdout.readline(), type=SourceReady)
        report = transfers.examine(task(ready.port))
        assert process.wait() == 9
    finding = one(report, "tcp")
    assert finding.status == "fail"
    assert "the connection is gone" in finding.value


def test_a_peer_that_falls_silent_ends_with_a_finding() -> None:
    with (
        served() as source,
        FaultProxy(LOOP, source.port) as proxy,
        reading(proxy.address[1]) as reader,
    ):
        reader._sizes = msgspec.structs.replace(SMALL, patience_s=0.3)
        proxy.stall()
        measured = reader.measure("tcp")
    assert measured.failed == "the source sent nothing for 0.3 s"


def test_a_peer_whose_process_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LOG_ENV", {"PYTHONHOME": os.devnull})
    report = transfers.examine(task(path="all"))
    finding = one(report, "peer process")
    assert finding.status == "fail"
    assert "the source's process died with 1" in finding.value


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("[1.2] [vm:1 :0]  parser.c:2587 UCX  INFO  UCX_* env variables: UCX_TLS=tcp\n", ""),
        (
            "WARNING it broke\n[1.2] [vm:1 :0]   | 0..inf | zero-copy | tcp/lo |\n=====\n",
            "it broke",
        ),
        ("first\nlast\n[1.2] [vm:1 :0]   +-----+----+\n", "last"),
    ],
)
def test_last_words_are_not_talk_of_ucx(log: str, words: str) -> None:
    assert last_error(log).removeprefix("WARNING ") == words


def test_a_peer_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    process = PeerProcess(task(), {})
    with process:  # it was never told what to do
        with pytest.raises(TransferFailed, match=r"the reader wrote nothing for 0\.01 s"):
            process.read_line(Result, 0.01)
        assert os.path.exists(f"/proc/{process.pid}")
    assert not os.path.exists(f"/proc/{process.pid}")


def test_cuda_without_a_device_is_refused() -> None:
    if not cuda_unavailable_reason():
        pytest.skip("needs a machine without CUDA")
    with pytest.raises(ConfigError, match="use --device cpu"):
        make_buffer("cuda", 4096)
    assert make_buffer("cpu", 4096).snapshot() == bytes(4096)


# Pages that are not what they should be ----------------------------------------------------------


class Flipping(HostBuffer):
    """Gives one byte of what it sends another value, before any digest is taken."""

    def __init__(self, real: HostBuffer) -> None:
        super().__init__(real.nbytes)

    def outgoing(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        content = bytearray(self.snapshot())
        content[ids[0] * unit.block_bytes + 100] ^= 1
        self.fill(content)
        yield from super().outgoing(unit, ids)


def test_a_flipped_byte_is_a_failure() -> None:
    with served(memory=Flipping) as source:
        report = transfers.examine(task(source.port))
    finding = one(report, "tcp")
    assert not report.ok
    assert finding.status == "fail"
    assert "of 48 pages arrived changed" in finding.value
    assert "do not use this path" in finding.fix


def test_pages_that_never_came_are_seen() -> None:
    expected = pattern(1 << 20)
    pages = [(0, 3), (1, 2)]
    good = bytes(expected[3 * 4096 : 4 * 4096] + expected[2 * 4096 : 3 * 4096])
    assert differing(good, expected, 4096, pages) == 0
    assert differing(good[:4096] + bytes(4096), expected, 4096, pages) == 1
    assert differing(bytes(8192), expected, 4096, pages) == 2


def test_no_two_grains_of_the_pattern_are_alike() -> None:
    content = bytes(pattern(3 << 20))
    grains = {content[start : start + 4096] for start in range(0, len(content), 4096)}
    assert len(grains) == len(content) // 4096
    assert pattern(3 << 20) == content


# The exchange ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (
            encode(TransferRequest(1, 64 << 10, [64])),
            "page 64 does not exist; the test buffer has 64",
        ),
        (encode(CpuSeconds(1.0)), "unexpected message CpuSeconds"),
        (encode(DoctorHello(area_bytes=1, device="cpu")), "a second hello"),
        (b"engine", "cannot be read"),
    ],
)
def test_a_reader_that_breaks_the_rules_is_told_why(payload: bytes, reason: str) -> None:
    with served() as source:
        with reading(source.port) as reader:
            reader._transport.submit(PeerMessage(reader._peer, payload))
            with pytest.raises(TransferFailed, match=f"closed the connection: .*{reason}"):
                reader._cpu_s()
        with reading(source.port) as reader:  # the next one is served
            assert reader._cpu_s() > 0


class Answering:
    """A source that answers whatever it is told to."""

    def __init__(self, answer: bytes) -> None:
        self._link = make_transport("tcp", Security(), ConnectionOptions())
        self.port = self._link.listen(LOOP, 0)[1]
        self._answer = answer
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Answering:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._link.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            for event in self._link.poll(0.05):
                if not isinstance(event, PeerDown | IncomingPages | OutgoingPages):
                    self._link.submit(PeerMessage(event.peer, self._answer))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"an engine", "cannot be read"),
        (encode(CpuSeconds(1.0)), "message CpuSeconds instead of DoctorHello"),
    ],
)
def test_something_else_at_the_address_is_named(answer: bytes, reason: str) -> None:
    with (
        Answering(answer) as other,
        pytest.raises(ProtocolError, match=reason),
        reading(other.port),
    ):
        raise AssertionError("it was taken for a source")


OTHER_VERSION = encode(DoctorHello(protocol=(9, 9), area_bytes=4096, device="cpu"))


@pytest.mark.parametrize(
    ("first", "error", "why"),
    [
        (OTHER_VERSION, Refused, "9 to 9 there; upgrade"),
        (encode(CpuRequest()), TransferFailed, "CpuRequest before an agreement"),
    ],
    ids=["of another version", "no hello"],
)
def test_a_reader_without_an_agreement_is_told_why(
    first: bytes, error: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as source, monkeypatch.context() as patch:
        patch.setattr(peers, "encode", lambda _: first)  # what its reader says
        with pytest.raises(error, match=why), reading(source.port):
            raise AssertionError("it was served")


def test_a_source_of_another_version_is_refused() -> None:
    with (
        Answering(OTHER_VERSION) as other,
        pytest.raises(Refused, match="9 to 9 there; upgrade") as caught,
        reading(other.port),
    ):
        raise AssertionError("it was taken for a source")
    assert caught.value.field == "protocol"


def test_a_refused_reader_is_told_apart_from_a_broken_one() -> None:
    area = HostBuffer(SMALL.buffer_bytes)
    link = make_transport("tcp", Security(), ConnectionOptions())
    link.register(area.memory)
    try:
        with pytest.raises(Refused) as refusal:
            DoctorReader(link, area, SMALL).connect("192.0.2.1", 7000)
        assert refusal.value.field == "address"
    finally:
        link.close()
