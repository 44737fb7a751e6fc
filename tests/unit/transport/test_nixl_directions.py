"""NIXL has an agent that others write to and one that writes: what the end of the first ends."""

from __future__ import annotations

import importlib.util
import threading
from array import array
from typing import Any

import pytest

if not importlib.util.find_spec("nixl_cu12"):
    pytest.skip("nixl-cu12 is not installed", allow_module_level=True)

from kvconnect.testing.transport import ConnectedPair, kinds
from kvconnect.transport.base import (
    Disconnect,
    IncomingPages,
    OutgoingPages,
    PagesReceived,
    PeerDown,
    PeerUp,
)
from kvconnect.transport.nixl import worker as nixl_worker
from kvconnect.transport.nixl.agent import NixlAgent
from kvconnect.transport.nixl.transport import NixlPath, NixlTransport
from kvconnect.transport.nixl.worker import NixlWorker
from kvconnect.transport.tcp.page_path import ConnectionContext
from tests.nixl_sides import UNIT, Passing, begin, moves, process, side

BYTES = 512 << 20  # more than is moved before a process can be killed


def receiving(transport: object) -> NixlWorker:
    assert isinstance(transport, NixlTransport)
    assert transport._receiving is not None
    return transport._receiving


def test_what_others_read_here_goes_on_when_a_source_is_lost() -> None:
    passed = threading.Event()
    with process(BYTES) as (source, port), side(BYTES) as middle, side() as reader:
        link = ConnectedPair(reader, middle, "nixl")
        link.expect(1, [UNIT], [range(100)])
        link.send(1, 0, UNIT, range(50))
        link.until(lambda: link.arrived(1) == 50, "half")
        link.send(1, 0, UNIT, range(50, 100), first=50, fence=Passing(passed))
        lost = begin(middle, port, BYTES)
        source.kill()
        link.until(lambda: PeerDown in kinds(middle, lost), "its PeerDown")
        passed.set()
        link.until(lambda: link.arrived(1) == 100, "the rest")
        assert not reader.of(PeerDown)
        assert {event.peer for event in middle.of(PeerDown)} == {lost}
        moves(link, read_id=2)


def test_with_one_agent_for_both_directions_it_would_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def path(self: NixlTransport, context: ConnectionContext) -> NixlPath:
        return NixlPath(receiving(self), context)

    monkeypatch.setattr(NixlTransport, "_path", path)
    with process(BYTES) as (source, port), side(BYTES) as middle, side() as reader:
        link = ConnectedPair(reader, middle, "nixl")
        link.expect(1, [UNIT], [range(100)])
        link.send(1, 0, UNIT, range(50))
        link.until(lambda: link.arrived(1) == 50, "half")
        begin(middle, port, BYTES)
        source.kill()
        link.until(lambda: reader.of(PeerDown), "the reader's PeerDown")


@pytest.mark.parametrize(
    ("roles", "agents"), [({}, 2), ({"serves": False}, 1), ({"reads": False}, 1)]
)
def test_only_directions_that_are_used_have_an_agent(
    roles: dict[str, bool], agents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NixlAgent] = []

    def make(*args: Any, **options: Any) -> NixlAgent:
        made.append(NixlAgent(*args, **options))
        return made[-1]

    monkeypatch.setattr(nixl_worker, "NixlAgent", make)
    with side(**roles):
        assert len(made) == agents


def test_who_only_reads_reads_from_who_only_serves() -> None:
    with side(serves=False) as reader, side(seed=1, reads=False) as source:
        moves(ConnectedPair(reader, source, "nixl"))
        ConnectedPair(source, reader)  # the wrong way round
        assert source.of(PeerUp)[-1].paths == reader.of(PeerUp)[-1].paths == ("tcp",)


def test_reads_over_tcp_go_on_when_another_source_is_lost() -> None:
    passed = threading.Event()
    with side() as reader, side(seed=1) as source:
        link = ConnectedPair(reader, source, "tcp")
        link.expect(1, [UNIT], [range(100)], fence=Passing(passed))
        link.send(1, 0, UNIT, range(100, 200))
        other, there = link.connect()
        order = IncomingPages(other, 2, [UNIT], [(0, array("q", range(10)))], None, "nixl")
        reader.transport.submit(order)
        source.transport.submit(OutgoingPages(there, 2, 0, UNIT, 0, array("q", range(5))))
        link.until(lambda: PagesReceived in kinds(reader, other), "pages over NIXL")
        reader.transport.submit(Disconnect(other, "enough"))
        link.until(lambda: PeerDown in kinds(reader, other), "its PeerDown")
        passed.set()
        link.until(lambda: link.arrived(1) == 100, "pages over TCP")
        assert {event.peer for event in reader.of(PeerDown)} == {other}
        link.path = "nixl"
        link.expect(3, [UNIT], [range(10)])
        link.until(lambda: PeerDown in kinds(reader, link.of_reader), "the other PeerDown")
        assert "its NIXL agent was replaced" in reader.of(PeerDown)[-1].reason
        link.of_reader, link.of_source = link.connect()
        moves(link, read_id=4)


def test_closing_starts_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    with side() as reader, side(seed=1) as source:
        link = ConnectedPair(reader, source, "nixl")
        link.expect(1, [UNIT], [range(100)])
        link.send(1, 0, UNIT, range(50))
        link.until(lambda: link.arrived(1) == 50, "half")  # the source may write the rest
        worker = receiving(reader.transport)
        start = worker._start
        started: list[NixlAgent] = []

        def noted() -> NixlAgent:
            started.append(start())
            return started[-1]

        monkeypatch.setattr(worker, "_start", noted)
        reader.transport.close()
        assert not started
        assert PeerDown in {type(event) for event in reader.transport.poll(0.0)}
