"""TCP: who gets in, how peers come and go, and that nothing is left behind."""

from __future__ import annotations

import gc
import logging
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvconnect.errors import ConfigError, Misuse, TransferFailed
from kvconnect.testing.page_memory import plain_unit
from kvconnect.testing.transport import ConnectedPair, Side, kinds
from kvconnect.transport import ConnectionOptions, Security, page_io
from kvconnect.transport.access_policy import AccessPolicy
from kvconnect.transport.base import (
    MAX_MESSAGE_BYTES,
    UNAUTHENTICATED,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PagesReceived,
    PeerDown,
    PeerId,
    PeerMessage,
    PeerUp,
)
from kvconnect.transport.tcp.event_loop import EventLoop
from tests.links import (
    OPEN,
    make_certificates,
    open_files,
    outcome,
    side,
    tcp,
    threads_after_close,
)

KEY = Security(key=b"k" * 32)


class SlowFence:
    def __init__(self) -> None:
        self.asked = threading.Event()
        self.passed = threading.Event()

    def wait(self) -> None:
        self.asked.set()
        self.passed.wait(30)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return make_certificates(tmp_path_factory.mktemp("tls"))


# Who gets in --------------------------------------------------------------------------------------


def test_both_sides_are_told_who_is_there() -> None:
    with side(KEY) as reader, side(KEY) as source:
        pair = ConnectedPair(reader, source)
        (up,) = reader.of(PeerUp)
        host, port = pair.address
        assert up == PeerUp(pair.of_reader, False, f"{host}:{port}", ends=up.ends)
        (there,) = source.of(PeerUp)
        assert up.ends is not None and there.ends == up.ends[::-1]
        assert up.ends[1] == pair.address
        (up,) = source.of(PeerUp)
        assert up.inbound
        assert up.address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(KEY, OPEN), (OPEN, KEY), (KEY, Security(key=b"K" * 32))],
    ids=["they have none", "we have none", "another"],
)
def test_a_wrong_key_is_refused_on_both_sides(
    ours: Security, theirs: Security, caplog: pytest.LogCaptureFixture
) -> None:
    with side(ours) as reader, side(theirs) as source:
        down = outcome(reader, source.transport.listen("127.0.0.1", 0))
        assert down.refused == "auth"
        assert "key_file" in down.reason
        source.poll()
        turned = {(event.peer, event.refused) for event in source.of(PeerDown)}
        assert turned == {(UNAUTHENTICATED, "auth")}  # for each of its connections
        assert len(source.seen) == len(source.of(PeerDown))
    assert "127.0.0.1: rejected: a peer with another key" in caplog.text
    assert "kkkk" not in caplog.text


def test_a_peer_beyond_loopback_is_not_called_without_proof() -> None:
    with side() as reader:
        down = outcome(reader, ("10.1.2.3", 1))
        assert down.refused == "address"
        assert "neither loopback nor in peers" in down.reason


def test_a_peer_from_an_untrusted_address_is_turned_away_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with side() as reader, side() as source:
        address = source.transport.listen("127.0.0.1", 0)
        guard: AccessPolicy = source.transport._access  # type: ignore[attr-defined]
        monkeypatch.setattr(guard, "admits", lambda _: False)
        for _ in range(2):
            assert outcome(reader, address).reason.startswith("cannot connect")
    assert caplog.text.count("rejected: its address is neither loopback nor in peers") == 1


def test_a_name_is_not_an_address() -> None:
    with side(KEY) as reader:
        assert outcome(reader, ("localhost", 1)).refused == "address"


def test_mutual_tls_lets_its_own_in(certificates: Security) -> None:
    with side(certificates) as reader, side(replace(certificates, key=b"k")) as source:
        assert outcome(reader, source.transport.listen("127.0.0.1", 0)).refused == "auth"
    with side(certificates) as reader, side(certificates) as source:
        ConnectedPair(reader, source).check_works(1)


@pytest.mark.parametrize("who", ["another authority", "plain"])
def test_mutual_tls_keeps_others_out(certificates: Security, who: str, tmp_path: Path) -> None:
    other = make_certificates(tmp_path) if who == "another authority" else OPEN
    for ours, theirs in ((other, certificates), (certificates, other)):
        with side(ours) as reader, side(theirs) as source:
            down = outcome(reader, source.transport.listen("127.0.0.1", 0))
            assert down.refused == "tls" or who == "plain"
            # Nobody was up; a certificate that is not trusted counts, a broken connection need not.
            assert all(
                isinstance(e, PeerDown) and (e.peer, e.refused) == (UNAUTHENTICATED, "tls")
                for e in source.transport.poll(0.2)
            )


def test_a_plain_reader_of_a_tls_source_gives_up_in_time(certificates: Security) -> None:
    with side() as reader, side(certificates) as source:
        assert outcome(reader, source.transport.listen("127.0.0.1", 0)).reason


# Coming and going ---------------------------------------------------------------------------------


def test_orders_before_a_peer_is_up_wait_for_it() -> None:
    with side() as reader, side() as source:
        address = source.transport.listen("127.0.0.1", 0)
        number = reader.transport.connect(*address)
        for text in (b"1", b"2"):
            reader.transport.submit(PeerMessage(number, text))
        for _ in range(500):
            reader.poll()
            source.poll()
            if len(source.of(MessageReceived)) == 2:
                break
        assert [e.payload for e in source.of(MessageReceived)] == [b"1", b"2"]


def test_pages_before_a_peer_is_up_wait_for_it() -> None:
    unit, fence = plain_unit(64), SlowFence()
    with side() as source, side() as reader:
        number = source.transport.connect(*reader.transport.listen("127.0.0.1", 0))
        ids = array("q", [0])
        source.transport.submit(OutgoingPages(number, 1, 0, unit, 0, ids, fence))
        assert fence.asked.wait(30)
        for _ in range(500):
            reader.poll()
            if reader.of(PeerUp):
                break
        peer = reader.of(PeerUp)[0].peer
        reader.transport.submit(IncomingPages(peer, 1, [unit], [(0, ids)]))
        fence.passed.set()
        for _ in range(500):
            reader.poll()
            if reader.of(PagesReceived):
                break
        assert [event.bad for event in reader.of(PagesReceived)] == [()]


def test_a_restart_on_the_same_port_is_a_new_peer() -> None:
    with side() as reader:
        with side() as source:
            pair = ConnectedPair(reader, source)
            pair.check_works(1)
        for _ in range(500):
            reader.poll()
            if reader.of(PeerDown):
                break
        assert kinds(reader, pair.of_reader)[-1] is PeerDown
        with side() as source:
            assert source.transport.listen(*pair.address) == pair.address
            source.transport.listen = lambda *_: pair.address  # type: ignore[method-assign]
            again = ConnectedPair(reader, source)
            assert again.of_reader != pair.of_reader
            again.check_works(1)


def test_a_port_in_use_is_a_config_error() -> None:
    with side() as one, side() as two:
        host, port = one.transport.listen("127.0.0.1", 0)
        with pytest.raises(ConfigError, match=rf"listen='127\.0\.0\.1:{port}'.*free port"):
            two.transport.listen(host, port)


def test_fifty_peers_at_once() -> None:
    patient = {"dead_after_s": 30.0, "silent_s": 30.0, "heartbeat_s": 1.0}
    with side(**patient) as source, side(**patient) as reader:
        address = source.transport.listen("127.0.0.1", 0)
        numbers = {reader.transport.connect(*address) for _ in range(50)}
        for _ in range(1000):
            reader.poll()
            source.poll()
            if len(source.of(PeerUp)) == len(reader.of(PeerUp)) == 50:
                break
        assert {event.peer for event in reader.of(PeerUp)} == numbers
        assert len(source.of(PeerUp)) == 50
        assert not reader.of(PeerDown)


def test_nothing_is_left_after_close() -> None:
    def use() -> None:
        with side(KEY) as reader, side(KEY) as source:
            pair = ConnectedPair(reader, source)
            pair.check_works(1)
            pair.connect()
            assert outcome(reader, ("127.0.0.1", 1)).reason  # nobody is there

    use()
    gc.collect()
    assert threads_after_close() == set()
    before = open_files()
    for _ in range(5):
        use()
    gc.collect()
    assert threads_after_close() == set()
    assert open_files() <= before


def test_closing_while_connecting_leaves_nothing() -> None:
    gc.collect()
    before = open_files()
    with side() as source:
        address = source.transport.listen("127.0.0.1", 0)
        for _ in range(10):
            reader = tcp()
            reader.connect(*address)
            reader.close()
    gc.collect()
    assert threads_after_close() == set()
    assert open_files() <= before


def test_closing_waits_for_a_page_that_is_being_sent() -> None:
    """After ``close`` returned, no thread is in the memory any more."""
    fence = SlowFence()
    with side() as reader, side() as source:
        pair = ConnectedPair(reader, source)
        unit = plain_unit(64)
        pair.expect(1, [unit], [[0]])
        pair.send(1, 0, unit, [1], fence=fence)
        assert fence.asked.wait(30)
        threading.Timer(0.2, fence.passed.set).start()
        source.transport.close()
        assert fence.passed.is_set()
        assert PeerDown in [type(event) for event in source.transport.poll(0)]


# Held up, or out of threads -----------------------------------------------------------------------


def hold(loop: EventLoop, seconds: float) -> None:
    """Keep a loop from whatever else it should do."""
    loop.call(lambda: (threading.Event().wait(seconds), None)[1])


def test_a_loop_that_was_held_up_does_not_blame_a_peer_that_is_being_set_up() -> None:
    with side(dead_after_s=0.5) as reader, side(silent_s=30.0) as source:
        address = source.transport.listen("127.0.0.1", 0)
        number = reader.transport.connect(*address)
        hold(reader.transport._shared.loop, 1.5)  # type: ignore[attr-defined]
        for _ in range(500):
            reader.poll()
            if kinds(reader, number):
                break
        assert kinds(reader, number) == [PeerUp]


def test_the_loops_clock_stands_still_while_it_is_held_up_and_runs_otherwise() -> None:
    seen: list[float] = []
    loop = EventLoop(seen.append, 0.01, lambda: None)
    loop.start()
    hold(loop, 1.0)
    begun = loop.now()
    ended = threading.Event()
    loop.call(ended.set)
    assert ended.wait(30)
    assert loop.now() - begun < 0.5
    seen.clear()
    while not seen or seen[-1] - seen[0] < 0.05:  # it does run
        assert loop.alive
        threading.Event().wait(0.01)
    loop.call(loop.stop)
    assert loop.join(30)


@pytest.mark.parametrize("verb", ["receive", "send"])
def test_a_thread_that_cannot_start_ends_its_peer_and_no_other(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    left = [1]  # threads that can be had

    def start_some(thread: threading.Thread) -> None:
        if thread.name == f"kvconnect-tcp-{verb}-2":  # the second link's, on either side
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    with side(connections=3) as reader, side(connections=3) as source:
        pair = ConnectedPair(reader, source)
        pair.check_works(1)
        monkeypatch.setattr(threading.Thread, "start", start_some)
        number = reader.transport.connect(*pair.address)
        if verb == "send":
            pair.until(lambda: len(source.of(PeerUp)) == 2, "the second PeerUp")
            order = OutgoingPages(
                source.of(PeerUp)[1].peer, 1, 0, plain_unit(64), 0, array("q", [0])
            )
            source.transport.submit(order)
        pair.until(lambda: PeerDown in kinds(reader, number), "the reader's PeerDown")
        pair.until(lambda: source.of(PeerDown), "the source's PeerDown")
        monkeypatch.undo()
        downs = reader.of(PeerDown) + source.of(PeerDown)
        assert any("can't start new thread" in event.reason for event in downs)
        pair.check_works(2)
    assert threads_after_close() == set()


# Digests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "hashed"),
    [
        ("off", "off", 0),
        ("off", "sampled", 1),
        ("full", "off", 16),
        ("sampled", "full", 16),
        ("sampled", "off", 1),
    ],
)
def test_both_sides_use_the_stricter_digest_of_the_two(
    ours: str, theirs: str, hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def flip(*arguments: object) -> tuple[bytes, int]:
        digests, landed = receive(*arguments)  # type: ignore[arg-type]
        found.append(len(digests) // 8)
        return bytes(byte ^ 1 for byte in digests), landed

    receive = page_io.recv_pages
    monkeypatch.setattr(page_io, "recv_pages", flip)
    with side(digest=ours) as reader, side(digest=theirs) as source:
        pair = ConnectedPair(reader, source)
        unit = plain_unit(64)
        pair.expect(1, [unit], [range(16)])
        pair.send(1, 0, unit, range(16))
        pair.until(lambda: pair.arrived(1) == 16, "the pages")
        (event,) = reader.of(PagesReceived)
        assert found == [hashed]
        assert len(event.bad) == hashed  # whatever was hashed was compared


def without_hashing(side: Side, number: PeerId) -> None:
    """As if there were neither the extension nor xxhash."""
    peer = side.transport._peers[number]  # type: ignore[attr-defined]
    for connection in peer._data.values():
        connection._can_digest = False


def test_a_reader_that_cannot_hash_takes_pages_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def receive(sock: Any, piece: Any, digest: tuple[int, int], *rest: Any) -> tuple[bytes, int]:
        asked.append(digest)
        return real(sock, piece, digest, *rest)

    real = page_io.recv_pages
    monkeypatch.setattr(page_io, "recv_pages", receive)
    with side(digest="off") as reader, side(digest="full") as source:
        pair = ConnectedPair(reader, source)
        pair.check_works(1)
        without_hashing(reader, pair.of_reader)
        pair.check_works(2)
        assert [period for period, _ in asked] == [1, 0]
        assert not any(event.bad for event in reader.of(PagesReceived))


def test_a_source_that_cannot_hash_says_what_to_do() -> None:
    with side(digest="full") as reader, side(digest="off") as source:
        pair = ConnectedPair(reader, source)
        without_hashing(source, pair.of_source)
        pair.expect(1, [plain_unit(64)], [[0]])
        pair.send(1, 0, plain_unit(64), [1])
        pair.until_down()
        assert "need xxhash here: install it, or set digest" in source.of(PeerDown)[0].reason


# Misuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, MAX_MESSAGE_BYTES + 1])
def test_a_note_of_a_wrong_size_is_a_mistake(size: int) -> None:
    with side() as reader, side() as source:
        pair = ConnectedPair(reader, source)
        with pytest.raises(Misuse, match="a message of"):
            reader.transport.submit(PeerMessage(pair.of_reader, bytes(size)))


def test_memory_is_registered_once_and_before_pages_move() -> None:
    with side() as reader, side() as source:
        pair = ConnectedPair(reader, source)
        with pytest.raises(Misuse, match="registered already"):
            reader.transport.register(reader.memory)
    transport = tcp()
    with side() as source:
        number = transport.connect(*source.transport.listen("127.0.0.1", 0))
        order = IncomingPages(number, 1, [plain_unit(64)], [(0, array("q", [0]))])
        with pytest.raises(Misuse, match="register the memory"):
            transport.submit(order)
        transport.close()
        with pytest.raises(Misuse, match="closed"):
            transport.connect(*pair.address)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"connections": 0}, "connections=0"),
        ({"connections": 17}, "use 1 to 16"),
        ({"digest": "some"}, "use one of off, sampled, full"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tcp(**options)


def test_orders_for_an_unknown_peer_are_dropped() -> None:
    with side() as reader:
        reader.transport.submit(PeerMessage(PeerId(99), b"x"))
        reader.transport.cancel(PeerId(99), 1)
        assert reader.transport.poll(0) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_loop_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = tcp()

    def die() -> None:
        raise SystemExit("not an error of a handler")

    transport._shared.loop.call(die)  # type: ignore[attr-defined]
    assert transport._shared.loop.join(10)  # type: ignore[attr-defined]
    with pytest.raises(TransferFailed, match="thread died"):
        transport.poll(0)
    transport.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_loop_leaves_its_peers_nothing_to_wait_for() -> None:
    def die() -> None:
        raise SystemExit("not an error of a handler")

    gc.collect()
    before = open_files()
    with side(silent_s=600.0) as reader, side() as source:
        pair = ConnectedPair(reader, source)
        pair.check_works(1)
        source.transport._shared.loop.call(die)  # type: ignore[attr-defined]
        for _ in range(500):
            reader.poll()
            if reader.of(PeerDown):
                break
        assert reader.of(PeerDown)
        assert source.transport._shared.loop.join(10)  # type: ignore[attr-defined]
        mail = source.transport._shared.events.drain(0)  # type: ignore[attr-defined]
        assert "thread died" in mail[-1].reason
        assert outcome(reader, pair.address).reason  # nobody listens any more
        reader.transport.close()
        # A receiving thread ends by itself, once its socket is closed.
        assert threads_after_close() == set()
        assert open_files() <= before


def test_digests_without_a_way_to_make_them_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(mode: str, tls: bool) -> None:
        raise ConfigError("digest", mode, "install xxhash")

    monkeypatch.setattr(page_io, "check_digests", refuse)
    with pytest.raises(ConfigError, match="xxhash"):
        tcp()


def test_the_default_options_make_a_transport(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tcp(**vars(ConnectionOptions())).close()
    assert caplog.text == ""
