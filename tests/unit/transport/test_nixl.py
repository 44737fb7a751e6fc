"""What can go wrong with NIXL: one clear error each, and no byte where it must not be."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import signal
import threading
import time
import types
from array import array
from dataclasses import replace
from typing import Any

import pytest

if not importlib.util.find_spec("nixl_cu12"):
    pytest.skip("nixl-cu12 is not installed", allow_module_level=True)

import msgspec
import numpy as np

from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.protocol import nixl_messages
from kvconnect.testing.page_memory import PageMemory, plain_unit, split_unit
from kvconnect.testing.transport import ConnectedPair, Side, kinds
from kvconnect.transport import Security, make_transport
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    IncomingPages,
    MemoryRegion,
    OutgoingPages,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerUp,
)
from kvconnect.transport.nixl import agent as agents
from kvconnect.transport.nixl import send
from kvconnect.transport.nixl.agent import NixlAgent, WriteDevices, find_package
from kvconnect.transport.nixl.descriptors import PairedRuns
from kvconnect.transport.nixl.transport import NixlPath
from kvconnect.transport.nixl.worker import NixlWorker
from tests.fakes.nixl_source import BLOCK
from tests.links import NIXL_QUICK, OPEN, tcp, threads, threads_after_close
from tests.nixl_sides import UNIT, Passing, begin, moves, pair, poll_until, process, side


def test_pages_move_and_threads_end() -> None:
    with pair() as link:
        up = link.reader.of(PeerUp)[0]
        assert (up.paths, up.path_error) == (("tcp", "nixl"), "")
        moves(link)
        names = {f"kvconnect-nixl-{name}" for name in ("agent", "work")}
        assert names <= threads()
    assert threads_after_close() == set()


def test_both_paths_serve_one_peer() -> None:
    with pair() as link:
        moves(link)
        link.path = "tcp"
        moves(link, read_id=2)


@pytest.mark.parametrize(("digest", "bad"), [("full", (0, 99)), ("off", ())])
def test_swapped_pages_are_found_by_their_digests(
    digest: str, bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    paired = send.paired

    def swapped(*runs: send.LocatedUnit) -> PairedRuns:
        ours, theirs, _ = (
            array("q", (v + i * 4096 for v in part for i in range(100)))[:100]
            for part in paired(*runs)  # one run of all pages: cut it into pages again
        )
        ours[0], ours[-1] = ours[-1], ours[0]
        return PairedRuns(ours, theirs, array("q", [4096] * 100))

    monkeypatch.setattr(send, "paired", swapped)
    with pair(digest=digest) as link:
        link.expect(1, [UNIT], [range(100)])
        link.send(1, 0, UNIT, range(100))
        link.until(lambda: link.arrived(1) == 100, "pages")
        assert [event.bad for event in link.reader.of(PagesReceived)] == [bad]
        first = link.reader.memory.read(UNIT, [0])
        assert first == link.source.memory.read(UNIT, [99])


def test_places_that_take_many_notes_or_too_many_of_them() -> None:
    """Several units that do not fit into one message, and one that does not alone: over TCP."""
    with pair() as link:
        several = [split_unit(8, 15_000, 2, offset) for offset in range(0, 720_000, 240_000)]
        link.expect(1, several, [[0, 1]] * len(several))
        one = split_unit(2, 45_000, 2, 800_000)
        link.expect(2, [one], [[0, 1]])
        for number, unit in enumerate(several):
            link.send(1, number, unit, [1, 0])
        link.send(2, 0, one, [1, 0])
        link.until(lambda: link.arrived(1) == 2 * len(several) and link.arrived(2) == 2, "pages")
        for unit in (*several, one):
            found = link.reader.memory.read(unit, [0, 1])
            assert found == link.source.memory.read(unit, [1, 0])
        assert not link.reader.of(PeerDown)


def test_a_want_that_is_cancelled_before_its_place_is_known_is_thrown_away() -> None:
    passed = threading.Event()
    with pair() as link:
        link.expect(1, [UNIT], [range(10)], fence=Passing(passed))
        link.send(1, 0, UNIT, range(10))
        link.reader.transport.cancel(link.of_reader, 1)
        passed.set()
        link.until(lambda: Drained in kinds(link.reader, link.of_reader), "the reader's Quiet")
        link.until(lambda: PagesSent in kinds(link.source, link.of_source), "the source's Sent")
        moves(link, read_id=2)
        assert not any(event.read_id == 1 for event in link.reader.of(PagesReceived))


def test_a_cancel_does_not_wait_for_all_that_was_queued() -> None:
    nbytes = 512 << 20
    unit, ids = plain_unit(BLOCK), range(nbytes // BLOCK)
    with side(nbytes) as reader, side(nbytes) as source:
        link = ConnectedPair(reader, source, "nixl")
        link.expect(1, [unit], [ids])
        link.send(1, 0, unit, ids)
        link.until(lambda: link.arrived(1), "the first pages")
        reader.transport.cancel(link.of_reader, 1)
        link.until(lambda: Drained in kinds(reader, link.of_reader), "the reader's Quiet")
        link.until(lambda: source.of(PagesSent), "the source's Sent")
        assert 0 < source.of(PagesSent)[0].nbytes < nbytes
        assert not reader.of(PeerDown)


def test_a_source_that_answers_no_cancel_is_given_up_by_the_clock_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines reuse the pages by that clock, and the source may still write to them."""
    monkeypatch.setattr(send.OutboundWrites, "on_stop", lambda *_: None)
    with pair() as link:
        peer = link.reader.transport._tcp._peers[link.of_reader]  # type: ignore[attr-defined]
        watch = peer.send_queue.watch
        watch._now = lambda: math.inf  # the loop's clock never gets to a deadline
        link.expect(1, [UNIT], [range(10)])
        read = peer.page_path._inbound._reads[1]
        link.until(lambda: read.placed, "the place of a read")
        link.reader.transport.cancel(link.of_reader, 1)
        assert not watch.overdue(time.monotonic())
        watch._monotonic = lambda: time.monotonic() + NIXL_QUICK.stall_s
        link.until(lambda: link.reader.of(PeerDown), "the end of the peer")
        assert "the end of a cancelled one" in link.reader.of(PeerDown)[0].reason


def test_two_connections_of_one_reader_do_not_hurt_each_other() -> None:
    with pair() as link:
        moves(link)
        first = link.of_reader
        link.of_reader, link.of_source = link.connect()
        moves(link, read_id=2)
        link.reader.transport.submit(Disconnect(first, "enough"))
        link.until(lambda: PeerDown in kinds(link.reader, first), "the first one's PeerDown")
        link.until(lambda: link.source.of(PeerDown), "the same at the source")
        moves(link, read_id=3)


def test_peers_that_are_lost_together_cost_one_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    with side() as reader, side(seed=1) as source:
        link = ConnectedPair(reader, source, "nixl")
        peers = [link.of_reader, *(link.connect()[0] for _ in range(3))]
        for peer in peers:  # exposed: told where to write
            order = IncomingPages(peer, 1, [UNIT], [(0, array("q", range(10)))], None, "nixl")
            reader.transport.submit(order)
        worker: NixlWorker = reader.transport._receiving  # type: ignore[attr-defined]
        make, made = worker._start, []

        def start() -> NixlAgent:
            made.append(make())
            return made[-1]

        monkeypatch.setattr(worker, "_start", start)
        link.of_reader, link.of_source = link.connect()
        moves(link, read_id=2)  # by now all places have been told
        reader.transport.submit(Disconnect(peers[0], "enough"))
        link.until(lambda: {e.peer for e in reader.of(PeerDown)} >= set(peers), "all PeerDown")
        link.until(lambda: len(source.of(PeerDown)) == len(peers) + 1, "the same at the source")
        assert len(made) == 1
        link.of_reader, link.of_source = link.connect()
        moves(link, read_id=3)


def test_an_agent_that_does_not_start_is_not_started_for_each_lost_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with side() as reader, side(seed=1) as source:
        link = ConnectedPair(reader, source, "nixl")
        peers = [link.of_reader, *(link.connect()[0] for _ in range(3))]
        for peer in peers:
            order = IncomingPages(peer, 1, [UNIT], [(0, array("q", range(10)))], None, "nixl")
            reader.transport.submit(order)
        worker: NixlWorker = reader.transport._receiving  # type: ignore[attr-defined]
        started = list[str]()

        def start() -> NixlAgent:
            started.append("again")
            raise ConfigError("transport", "nixl", "no memory can be locked")

        monkeypatch.setattr(worker, "_start", start)
        link.of_reader, link.of_source = link.connect()
        moves(link, read_id=2)  # by now all places have been told
        reader.transport.submit(Disconnect(peers[0], "enough"))
        link.until(lambda: {e.peer for e in reader.of(PeerDown)} >= set(peers), "all PeerDown")
        assert started == ["again"]


def test_a_cancel_comes_before_or_after_the_orders_of_an_answer() -> None:
    """Between them, pages would be sent that the engine has freed."""
    calls, cancels = list[str](), list[threading.Thread]()

    def submit(_: object) -> None:
        cancels.append(threading.Thread(target=lambda: writes.cancel(7)))
        cancels[0].start()
        cancels[0].join(0.2)  # it would have ended
        calls.append("submit")

    path = types.SimpleNamespace(submit=submit, cancel=lambda _: calls.append("cancel"))
    waits = types.SimpleNamespace(over=lambda *_: contextlib.nullcontext())
    context: Any = types.SimpleNamespace(tcp=path, watch=waits, peer=1)
    writes = send.OutboundWrites(context, worker=None)  # type: ignore[arg-type]
    peer: Any = 1
    writes.send(OutgoingPages(peer, 7, 0, UNIT, 0, array("q", [1])))
    writes.on_use_tcp(7)
    cancels[0].join()
    assert calls == ["submit", "cancel"]


class _Recorded:
    """NIXL's agent, and the names of its methods that were called."""

    def __init__(self, agent: object) -> None:
        self.agent = agent
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.calls.append(name)
        return getattr(self.agent, name)


def test_an_agent_ends_after_its_writes_and_its_peers() -> None:
    """In another order UCX is closed with requests under way, and may abort the process."""
    memories = [np.zeros(4 * BLOCK, np.uint8) for _ in range(2)]
    areas = [MemoryRegion(each.ctypes.data, each.nbytes) for each in memories]
    for ended_before in (False, True):  # what was ended before is not ended again
        source, reader = (NixlAgent("UCX", [area], local=True) for area in areas)
        peer = source.add_peer(reader.offer)
        here, there = (np.array([area.address], np.int64) for area in areas)
        pieces = PairedRuns(here, there, np.array([4 * BLOCK], np.int64))
        handles = [source.write(peer, pieces, WriteDevices(-1, -1), b"") for _ in range(3)]
        if ended_before:
            for handle in handles:
                source.release(handle)
            source.remove_peer(peer)
        source._agent = recorded = _Recorded(source._agent)
        source.close()
        for handle in handles:
            source.release(handle)  # as of a connection that ends later
        source.remove_peer(peer)
        expected = [] if ended_before else [*["releaseXferReq"] * 3, "invalidateRemoteMD"]
        assert recorded.calls == expected
        reader.close()


def test_a_step_that_raises_ends_the_path_but_no_wait() -> None:
    with side() as reader:
        worker: NixlWorker = reader.transport._receiving  # type: ignore[attr-defined]
        done, lost = threading.Event(), threading.Event()
        worker.join(lambda _: lost.set())

        def broken(_: NixlAgent) -> None:
            raise RuntimeError("injected")

        worker.call(broken, done.set)
        assert done.wait(30)
        assert lost.wait(30)
        assert worker.offer is None


# What a peer can reach ---------------------------------------------------------------------------


def overwrite(offer: nixl_messages.NixlOffer, address: int) -> None:
    """Write one page of zeros to an address, with what an offer says and no leave."""
    own = PageMemory(4096)
    agent = NixlAgent("UCX", own.regions(), local=True)
    ours, theirs, lengths = (np.array([n]) for n in (own.address, address, 4096))
    handle = agent.write(
        agent.add_peer(offer), PairedRuns(ours, theirs, lengths), WriteDevices(-1, -1), b""
    )
    deadline = time.monotonic() + 60
    while agent.seconds(handle) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    agent.release(handle)
    agent.close()


def test_who_reads_is_told_nothing_that_opens_the_sources_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle, greetings = NixlPath.settle, {}

    def settled(path: NixlPath, theirs: bytes, period: int) -> None:
        greetings[path._context.inbound] = nixl_messages.decode_offer(theirs)
        settle(path, theirs, period)

    monkeypatch.setattr(NixlPath, "settle", settled)
    with pair() as link:
        moves(link)
        memory = link.source.memory
        before = bytes(memory.data)
        with pytest.raises(TransferFailed, match="cannot read the other side's metadata"):
            overwrite(greetings[False], memory.address)
        assert memory.data == before
        # With what the source's agent says of itself it could; its reader has to say it.
        sending: NixlWorker = link.source.transport._sending  # type: ignore[attr-defined]
        assert sending.offer is not None
        overwrite(sending.offer, memory.address)
        assert memory.data[:4096] == bytes(4096)
        overwrite(greetings[True], link.reader.memory.address)
        assert link.reader.memory.data[:4096] == bytes(4096)


def test_pages_for_who_was_asked_to_connect_go_over_tcp_alone() -> None:
    with pair() as link:
        order = IncomingPages(link.of_source, 1, [UNIT], [(0, array("q", [0]))], None, "nixl")
        link.source.transport.submit(order)
        link.until_down()
        assert "nixl is no path to this peer: it connected" in link.source.of(PeerDown)[0].reason


def test_metadata_of_registered_memory_opens_all_memory() -> None:
    """So it is where UCX has no RDMA device that checks keys: to register less, such as a ring,
    would keep nobody out. docs/security.md says so."""
    registered, other = PageMemory(1 << 16), PageMemory(1 << 16, seed=1)
    agent = NixlAgent("UCX", registered.regions(), local=True)
    with pytest.raises(TransferFailed, match="NIXL refuses"):
        overwrite(agent.offer, other.address)  # the one who writes is who refuses
    places = [page.address.to_bytes(8, "little") for page in (registered, other)]
    assert agent.offer.metadata.count(places[0]) == 1
    forged = agent.offer.metadata.replace(*places)
    overwrite(msgspec.structs.replace(agent.offer, metadata=forged), other.address)
    assert other.data[:4096] == bytes(4096)
    agent.close()


# The other side is gone --------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_lands_after_a_peer_is_down(how: signal.Signals) -> None:
    nbytes = 512 << 20
    with process(nbytes) as (source, port), side(nbytes) as reader:
        peer = begin(reader, port, nbytes)
        source.send_signal(how)
        poll_until(reader, lambda: PeerDown in kinds(reader, peer))
        assert sum(event.count for event in reader.of(PagesReceived)) < nbytes // BLOCK
        reader.memory.data[:] = bytes(nbytes)  # as if the pages were somebody else's now
        source.send_signal(signal.SIGCONT)
        with process(1 << 20) as (_, other):  # which takes a while, and works
            begin(reader, other, 1 << 20)
        reader.memory.data[: 1 << 20] = bytes(1 << 20)
        assert not np.frombuffer(reader.memory.data, np.uint64).any()


def test_without_a_new_agent_something_would_land(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlWorker, "renew", lambda _self, _offer, _reason, done: done())
    nbytes = 512 << 20
    with process(nbytes) as (source, port), side(nbytes) as reader:
        peer = begin(reader, port, nbytes)
        source.send_signal(signal.SIGSTOP)
        poll_until(reader, lambda: PeerDown in kinds(reader, peer))
        reader.memory.data[:] = bytes(nbytes)
        source.send_signal(signal.SIGCONT)
        poll_until(reader, lambda: np.frombuffer(reader.memory.data, np.uint64).any())


def test_who_comes_back_has_another_name() -> None:
    with side() as reader:
        names = []
        for seed in (1, 2):
            with side(seed=seed) as source:
                link = ConnectedPair(reader, source, "nixl")
                moves(link, read_id=seed)
                worker = source.transport._sending  # type: ignore[attr-defined]
                names.append(worker.offer.agent)
        assert names[0] != names[1]


# The other side does not fit ---------------------------------------------------------------------


def change_offers(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    offer = NixlPath.offer

    def changed(path: NixlPath) -> bytes:
        return nixl_messages.encode(
            msgspec.structs.replace(nixl_messages.decode_offer(offer(path)), **changes)
        )

    monkeypatch.setattr(NixlPath, "offer", changed)


def test_a_peer_without_nixl_gets_tcp() -> None:
    transport = tcp(OPEN)
    try:
        with side(seed=1) as source:
            link = ConnectedPair(Side(transport, PageMemory(1 << 20)), source)
            assert link.source.of(PeerUp)[0].paths == ("tcp",)
            assert link.source.of(PeerUp)[0].path_error == "the other side offers no NIXL"
            moves(link)
    finally:
        transport.close()


def test_metadata_of_another_version_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    change_offers(monkeypatch, version="1.3.2")
    monkeypatch.setattr(NixlAgent, "add_peer", None)
    with pair() as link:
        up = link.reader.of(PeerUp)[0]
        assert up.paths == ("tcp",)
        assert up.path_error.startswith("nixl 1.5.1 here, 1.3.2 there")
        link.path = "tcp"
        moves(link)


def test_an_engine_that_reads_from_itself_does_so_over_tcp() -> None:
    with side(seed=1) as both:
        ConnectedPair(both, both)
        assert {up.paths for up in both.of(PeerUp)} == {("tcp",)}
        assert "the same worker" in both.of(PeerUp)[0].path_error


@pytest.mark.parametrize(
    "metadata", [b"", b"\x00", b"nixlSerDes" + bytes(100), bytes(range(256)) * 9]
)
def test_metadata_that_nixl_cannot_read_ends_the_peer_alone(
    metadata: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_offers(monkeypatch, metadata=metadata)
    with pair() as link:
        link.expect(1, [UNIT], [range(10)])
        link.send(1, 0, UNIT, range(10))
        link.until_down()
        assert "NIXL cannot read the other side's metadata" in link.source.of(PeerDown)[0].reason
        monkeypatch.undo()
        link.of_reader, link.of_source = link.connect()
        moves(link, read_id=2)


def test_metadata_of_another_agent_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    change_offers(monkeypatch, agent="somebody else")
    with pair() as link:
        link.expect(1, [UNIT], [range(10)])
        link.send(1, 0, UNIT, range(10))
        link.until_down()
        assert "it is another's" in link.source.of(PeerDown)[0].reason


def test_an_offer_that_is_none_ends_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlPath, "offer", lambda _: b"\xc1")
    with side() as reader, side(seed=1) as source:
        address = source.transport.listen("127.0.0.1", 0)
        peer = reader.transport.connect(*address)
        poll_until(reader, lambda: PeerDown in kinds(reader, peer))
        assert "broke the protocol" in reader.of(PeerDown)[0].reason


def test_an_address_that_is_not_registered_ends_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as link:
        memory = link.reader.memory
        far = MemoryRegion(memory.address + (1 << 30), len(memory.data))
        monkeypatch.setattr(memory, "region_of", lambda _: far)
        link.expect(1, [UNIT], [range(10)])
        link.send(1, 0, UNIT, range(10))
        link.until_down()
        assert "NIXL refuses to write these pages" in link.source.of(PeerDown)[0].reason


# NIXL itself does not fit ------------------------------------------------------------------------


def torch_for(cuda: str | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(version=types.SimpleNamespace(cuda=cuda))


def test_the_build_for_the_cuda_version_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert find_package(torch_for("12.9"), on_device=True) == "nixl_cu12"
    assert find_package(torch_for("13.0"), on_device=True) == "nixl_cu13"
    assert find_package(torch_for(None), on_device=False) == "nixl_cu12"


def test_a_build_for_another_cuda_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "nixl_cu12" or None)
    assert find_package(torch_for("13.0"), on_device=False) == "nixl_cu12"
    with pytest.raises(ConfigError, match=r"built for CUDA 13\.0: pip install nixl-cu13"):
        find_package(torch_for("13.0"), on_device=True)


def test_nixl_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="not installed: pip install nixl-cu12"):
        find_package(None, on_device=False)


def test_nixl_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "find_package", lambda *_, **__: "kvconnect_no_such_package")
    with pytest.raises(ConfigError, match="does not load"):
        NixlAgent("UCX", (), local=True)


@pytest.mark.parametrize("backend", ["LIBFABRIC", "PIGEON"])
def test_a_backend_that_does_not_load_is_named(backend: str) -> None:
    transport = make_transport("nixl", Security(), replace(NIXL_QUICK, backend=backend))
    try:
        with pytest.raises(ConfigError, match=rf"nixl_backend='{backend}'.*UCX"):
            transport.register(PageMemory(4096))
    finally:
        transport.close()
