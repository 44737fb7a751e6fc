"""One port of a process: each connection reaches the transport of its service, whoever accepts."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.page_memory import plain_unit
from kvconnect.testing.proxy import FaultProxy
from kvconnect.testing.transport import ConnectedPair, Side
from kvconnect.transport.base import IncomingPages, OutgoingPages, PagesReceived, PeerDown, PeerUp
from kvconnect.transport.tcp.shared_port import SharedPort
from tests.links import result, side

SERVICES = ("handoff", "share")
UNIT = plain_unit(64 << 10)
NOT_SERVED = "nothing here serves the service 'share'; served is 'handoff'"


@contextmanager
def process() -> Iterator[tuple[Side, Side, tuple[str, int]]]:
    """The two transports of one process, which listen at one port."""
    port = SharedPort()
    with side(port=port) as handoff, side(port=port, service="share") as share:
        address = handoff.transport.listen("127.0.0.1", 0)
        assert share.transport.listen("127.0.0.1", 0) == address
        yield handoff, share, address


def pages_move(reader: Side, source: Side) -> None:
    ConnectedPair(reader, source).check_works(1)


def test_each_service_has_its_peers_and_pages_at_one_port() -> None:
    with process() as (handoff, share, _), side() as one, side(service="share") as other:
        pages_move(one, handoff)
        pages_move(other, share)
        assert len(handoff.of(PeerUp)) == len(share.of(PeerUp)) == 1


def test_without_the_hand_over_the_other_service_is_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(SharedPort, "find", lambda *_: None)
    with process() as (_, share, address), side(service="share") as reader:
        assert isinstance(result(reader, address), PeerDown)
        share.poll()
        assert not share.of(PeerUp)


def test_a_service_that_nobody_serves_is_refused_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with side() as source, side(service="share") as stranger, side() as reader:
        address = source.transport.listen("127.0.0.1", 0)
        down = result(stranger, address)
        assert isinstance(down, PeerDown) and down.refused == "other"
        assert down.reason == f"refused by the other side: {NOT_SERVED}"  # the dialler knows why
        pages_move(reader, source)  # the control: a service that is served
    assert any(
        record.name.endswith("rejection_log") and NOT_SERVED in record.message
        for record in caplog.records
    )


def test_the_port_outlives_the_transport_that_accepted() -> None:
    port = SharedPort()
    with side(port=port, service="share") as share:
        with side(port=port) as handoff:
            address = handoff.transport.listen("127.0.0.1", 0)
            share.transport.listen("127.0.0.1", 0)
        with side(service="share") as reader:
            pages_move(reader, share)  # accepted by what is left
        with side() as reader:
            assert isinstance(result(reader, address), PeerDown)
        with side(port=port) as handoff, side() as reader:
            assert handoff.transport.listen(*address) == address  # it listens where it did
            pages_move(reader, handoff)


def test_a_port_is_free_once_all_have_left() -> None:
    with process() as (_, _, address):
        pass
    with socket.create_server(address):
        pass


def test_a_process_listens_at_one_address() -> None:
    with process() as (handoff, share, (host, number)):
        for other in ((host, number + 1 if number < 65535 else 1), ("127.0.0.2", number)):
            with pytest.raises(ConfigError, match=f"use {host}:{number}, where this process"):
                share.transport.listen(*other)
        assert handoff.transport.listen(host, number) == (host, number)


def test_an_address_that_cannot_be_used_leaves_the_port_unused() -> None:
    port = SharedPort()
    with socket.create_server(("127.0.0.1", 0)) as taken, side(port=port) as source:
        with pytest.raises(ConfigError, match="a free port"):
            source.transport.listen(*taken.getsockname())
        assert source.transport.listen("127.0.0.1", 0)


def test_a_port_that_there_is_not_is_refused_as_a_setting() -> None:
    """As of the last of many ranks, which count from the port that the user chose."""
    with side(service="share") as source:
        with pytest.raises(ConfigError, match="ports end at 65535: use a lower one") as refused:
            source.transport.listen("127.0.0.1", 65536)
        assert (refused.value.field, refused.value.value) == ("listen", "127.0.0.1:65536")
        assert source.transport.listen("127.0.0.1", 0)


PATIENT = {"dead_after_s": 60.0, "silent_s": 60.0, "stall_s": 60.0, "digest": "off"}
PAGES = 512  # 32 MiB: more than sockets hold


@pytest.mark.parametrize("frozen", SERVICES)
def test_a_frozen_reader_of_one_service_does_not_stop_the_other(frozen: str) -> None:
    """Pages for it are stuck in the middle, and those for others go on."""
    port, nbytes = SharedPort(), PAGES * UNIT.block_bytes
    with ExitStack() as stack:
        sources = {
            service: stack.enter_context(side(nbytes=nbytes, port=port, service=service, **PATIENT))
            for service in SERVICES
        }
        for source in sources.values():
            address = source.transport.listen("127.0.0.1", 0)
        proxy = stack.enter_context(FaultProxy(*address))
        other = SERVICES[1 - SERVICES.index(frozen)]
        stuck = stack.enter_context(side(nbytes=nbytes, service=frozen, **PATIENT))
        live = stack.enter_context(side(service=other, **PATIENT))
        assert isinstance(result(stuck, proxy.address), PeerUp)
        while not sources[frozen].of(PeerUp):
            sources[frozen].poll()
        proxy.stall("down")
        (up,) = sources[frozen].of(PeerUp)
        ids = array("q", range(PAGES))
        stuck.transport.submit(IncomingPages(stuck.of(PeerUp)[0].peer, 1, [UNIT], [(0, ids)]))
        sources[frozen].transport.submit(OutgoingPages(up.peer, 1, 0, UNIT, 0, ids))
        pair = ConnectedPair(live, sources[other])
        for read_id in range(1, 11):
            pair.check_works(read_id)
        stuck.poll()
        assert not stuck.of(PagesReceived) and not stuck.of(PeerDown)  # it was frozen all the time
        proxy.clear()
        while sum(event.count for event in stuck.of(PagesReceived)) < PAGES:
            stuck.poll()


def test_each_service_has_places_of_its_own() -> None:
    port = SharedPort()
    with (
        side(port=port, max_peers=1) as handoff,
        side(port=port, service="share", max_peers=1) as share,
        side(service="share") as greedy,
        side() as reader,
    ):
        handoff.transport.listen("127.0.0.1", 0)
        pair = ConnectedPair(greedy, share)
        assert isinstance(result(greedy, pair.address), PeerDown)  # the second one
        pages_move(reader, handoff)
