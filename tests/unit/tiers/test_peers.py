"""Blocks in the host memory of other engines: real agents on loopback, and each side alone."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.head_shards import HeadUnit
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.errors import ConfigError, Misuse, ProtocolError
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.index import HostIndex
from kvconnect.peers import dialling
from kvconnect.protocol import cache_messages
from kvconnect.protocol.addresses import Addresses
from kvconnect.protocol.cache_messages import (
    MAX_ASKED,
    Ask,
    CacheHello,
    CacheMessage,
    Fetch,
    FetchOutcome,
    Found,
    Sent,
    decode,
    encode,
)
from kvconnect.protocol.reads import Cancel
from kvconnect.settings import check_struct
from kvconnect.settings.sharing import PeerSettings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import Promoted
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.backends.base import StoreMeter
from kvconnect.tiers.messages import (
    SECONDARY_TIERS,
    LookupBlocks,
    PrefetchBlocks,
    TierAnswer,
    TierInstructions,
)
from kvconnect.tiers.offers import Offers
from kvconnect.tiers.peers.arena_memory import ArenaMemory
from kvconnect.tiers.peers.asking import Questions
from kvconnect.tiers.peers.fetching import Reads, Wanted
from kvconnect.tiers.peers.served import ServedBlock, ServedBlocks
from kvconnect.tiers.peers.serving import (
    FETCH_S,
    MIN_BYTES_PER_S,
    MOST_BYTES,
    GroupUnits,
    SendLimit,
    Serving,
)
from kvconnect.tiers.peers.sources import LATE_ANSWERS, CacheSources
from kvconnect.tiers.worker import TierWorker
from kvconnect.transport import ConnectionOptions, Security, make_transport
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PagesReceived,
    PagesSent,
    PeerDown,
    PeerId,
    PeerMessage,
    Unit,
)
from kvconnect.types import JobId, Tier
from tests.servers import free_port
from tests.unit.tiers.peer_engines import (
    BLOCK,
    FORMAT,
    HALF,
    LEFT,
    RIGHT,
    SLOTS,
    SWAPPED,
    WAIT_S,
    WHOLE,
    Engine,
    content,
    engines,
    key,
    until,
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not decide whether a named source is connected to in time."""
    monkeypatch.setattr(dialling, "GREET_S", WAIT_S)


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_blocks_come_from_another_engine(transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12")
    with engines(lambda: Engine(transport=transport)) as [source]:
        source.keep(1, slot=3)
        source.keep(2, slot=0)
        with engines(lambda: Engine([source.where], transport=transport)) as [reader]:
            reader.sources(1)
            keys = [key(n) for n in (1, 9, 2)]
            assert reader.store.exists(keys) == [BLOCK, 0, BLOCK]
            ok, absent = BlockOutcome.OK, BlockOutcome.ABSENT
            assert reader.get([1, 9, 2], first_slot=4) == [ok, absent, ok]
            assert bytes(reader.host.view(4)) == content(1)
            assert bytes(reader.host.view(6)) == content(2)
            assert bytes(reader.host.view(5)) == bytes(BLOCK)  # nothing was written there
            # A reader serves too, but only what it offers.
            assert source.store.exists([key(1)]) == [0]
            sent = source.store.take_stats()
            taken = reader.store.take_stats()
    assert sent is not None
    assert taken is not None
    assert moved(sent, "CPU_to_PEER") == moved(taken, "PEER_to_CPU") == 2 * BLOCK


def moved(stats: OffloadingConnectorStats, kind: str) -> float:
    """Return the bytes of one type of transfer."""
    return float(stats.data["histograms"]["transfer_size_bytes"][kind][0])


def test_ranks_read_one_another_s_heads() -> None:
    """One rank with both heads, two ranks with one head each, and one with another slot layout."""
    with engines(Engine, lambda: Engine(layouts=SWAPPED)) as [source, swapped]:
        source.keep(1, slot=0)
        asked = [source.where]
        with engines(
            lambda: Engine(asked, LEFT),
            lambda: Engine(asked, RIGHT),
            lambda: Engine(asked, SWAPPED),
        ) as [left, right, other]:
            for engine in (left, right, other):
                assert engine.sources(1).get([1]) == [BlockOutcome.OK]
            assert bytes(left.host.view(0, HALF)) == content(1)[:HALF]
            assert bytes(right.host.view(0, HALF)) == content(1)[HALF:]
            assert bytes(other.host.view(0)) == content(1)[HALF:] + content(1)[:HALF]
            # Back: a rank with both heads reads them from two ranks.
            for half, slot in ((left, 5), (right, 6)):
                data = content(2)[:HALF] if half is left else content(2)[HALF:]
                half.keep(2, slot, data)
            with engines(lambda: Engine([left.where, right.where])) as [both]:
                assert both.sources(2).get([2]) == [BlockOutcome.OK]
                assert bytes(both.host.view(0)) == content(2)
                # Control: one half is not a block.
                right.agent.served.withdraw([6])
                assert both.store.exists([key(2)]) == [0]
                assert both.get([2]) == [BlockOutcome.ABSENT]
    assert swapped.agent.address is not None


def test_engines_with_other_blocks_share_nothing() -> None:
    """Another model, another size of a unit, another number of groups."""
    large = [[[HeadUnit(0, ((0, BLOCK),)), HeadUnit(1, ((BLOCK, HALF),))]]]
    with engines(Engine) as [source]:
        source.keep(1, slot=0)
        with engines(
            lambda: Engine([source.where], name=b"another"),
            lambda: Engine([source.where], layouts=large),
            lambda: Engine([source.where], layouts=[*WHOLE, *WHOLE]),
            lambda: Engine([source.where]),
        ) as [*others, same]:
            same.sources(1)
            assert same.store.exists([key(1)]) == [BLOCK]  # control
            for other in others:
                assert other.store.exists([key(1)]) == [0]
                assert not other.store.usage().available


def test_an_engine_does_not_ask_itself() -> None:
    port = free_port()
    addresses = [f"127.0.0.1:{port}"]
    with engines(lambda: Engine(addresses, listen=addresses[0])) as [engine]:
        engine.keep(1, slot=0)
        until(lambda: "of 0 sources" in repr(engine.agent))
        assert engine.store.exists([key(1)]) == [0]


def test_a_damaged_block_is_not_served() -> None:
    with engines(Engine) as [source]:
        source.keep(1, slot=0)
        source.keep(2, slot=1)
        source.host.view(0)[100] ^= 1
        with engines(lambda: Engine([source.where])) as [reader]:
            reader.sources(1)
            assert reader.get([1, 2]) == [BlockOutcome.ABSENT, BlockOutcome.OK]
            assert bytes(reader.host.view(1)) == content(2)
            assert reader.store.exists([key(1)]) == [0]  # it was withdrawn


def test_a_source_that_dies_and_comes_back() -> None:
    port = free_port()
    where = f"127.0.0.1:{port}"
    with engines(lambda: Engine([where])) as [reader]:
        for number in range(2):
            with engines(lambda: Engine(listen=where)) as [source]:
                source.keep(1, slot=0)
                reader.sources(1)
                assert reader.get([1], first_slot=number) == [BlockOutcome.OK]
            reader.sources(0)
            assert reader.get([1]) == [BlockOutcome.ABSENT]
            assert not reader.store.usage().available


# Sources that requests name -----------------------------------------------------------------------


def addresses(*engines: Engine) -> Addresses:
    return tuple(each.agent.address for each in engines if each.agent.address is not None)


def test_a_named_source_is_dialled_and_only_it_is_asked() -> None:
    with (
        engines(Engine, Engine) as [configured, named],
        engines(lambda: Engine([configured.where])) as [reader],
    ):
        reader.sources(1)
        configured.keep(1, slot=0)
        named.keep(2, slot=0)
        asked = [key(1), key(2)]
        assert reader.store.exists(asked) == [BLOCK, 0]
        assert reader.store.exists_at(asked, addresses(named)) == [0, BLOCK]
        assert reader.get([2]) == [BlockOutcome.OK]
        assert bytes(reader.host.view(0)) == content(2)
        reader.sources(2)  # the connection stays
        assert reader.store.exists(asked) == [BLOCK, 0], "others are not asked without a name"
        assert reader.get([2], first_slot=1) == [BlockOutcome.ABSENT]
        assert reader.store.exists_at(asked, addresses(named)) == [0, BLOCK]
        assert reader.store.exists_at(asked, addresses(configured)) == [BLOCK, 0]


def test_a_named_source_with_two_ranks() -> None:
    with engines(lambda: Engine(layouts=LEFT), lambda: Engine(layouts=RIGHT)) as [left, right]:
        left.keep(1, 5, content(1)[:HALF])
        right.keep(1, 6, content(1)[HALF:])
        with engines(Engine) as [reader]:
            assert reader.store.exists_at([key(1)], addresses(left, right)) == [BLOCK]
            assert reader.get([1]) == [BlockOutcome.OK]
            assert bytes(reader.host.view(0)) == content(1)
            # Control: one half is not a block.
            assert reader.store.exists_at([key(1)], addresses(left)) == [0]


def test_a_named_source_that_is_not_there_dies_or_comes_back() -> None:
    port = free_port()
    named = (("127.0.0.1", port),)
    with engines(Engine) as [reader]:
        assert reader.store.usage().available, "no engine is configured that could be missing"
        assert reader.store.exists_at([key(1)], named) == [0]
        for number in range(2):
            with engines(lambda: Engine(listen=f"127.0.0.1:{port}")) as [source]:
                source.keep(1, slot=0)
                until(lambda: reader.store.exists_at([key(1)], named) == [BLOCK])
                assert reader.get([1], first_slot=number) == [BlockOutcome.OK]
                assert reader.store.exists_at([key(1)], named) == [BLOCK]
            reader.sources(0)
            assert reader.get([1]) == [BlockOutcome.ABSENT]


def test_a_named_source_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One accepts connections and says nothing; another one does not answer questions."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        engines(Engine) as [source],
        engines(lambda: Engine(ask_s=0.01)) as [reader],
    ):
        with monkeypatch.context() as hurried:
            hurried.setattr(dialling, "GREET_S", 0.05)
            for _ in range(2):
                assert reader.store.exists_at([key(1)], (silent.getsockname(),)) == [0]
        source.keep(1, slot=0)
        until(lambda: reader.store.exists_at([key(1)], addresses(source)) == [BLOCK])
        monkeypatch.setattr(source.agent._serving, "on_message", lambda *_: None)
        for _ in range(LATE_ANSWERS):
            assert reader.store.exists_at([key(1)], addresses(source)) == [0]
        peers = reader.agent._dialler.peers(addresses(source))
        (known,) = reader.agent.reader.sources.of(peers)
        assert not known.breaker.closed, "it is not asked for a while"


def test_a_source_that_stalls_in_mid_frame_is_disconnected_and_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()

    def outgoing(self: ArenaMemory, unit: Unit, ids: Any, *_: object) -> Any:
        yield from self.incoming(unit, ids[:1])
        goes_on.wait(WAIT_S)
        yield from self.incoming(unit, ids[1:])

    monkeypatch.setattr(ArenaMemory, "outgoing", outgoing)
    with engines(Engine) as [source], engines(lambda: Engine([source.where])) as [reader]:
        source.keep(1, slot=0)
        source.keep(2, slot=1)
        with monkeypatch.context() as hurried:
            hurried.setattr(reader.sources(1).agent.reader.reads, "_wait_s", 0.05)
            assert reader.get([1, 2]) == [BlockOutcome.FAILED] * 2
        assert "is down: a read took longer than 0.05 s" in caplog.text
        goes_on.set()
        until(lambda: reader.get([1, 2]) == [BlockOutcome.OK] * 2)
        assert bytes(reader.host.view(1)) == content(2)


def test_a_named_source_with_another_key_or_other_blocks(caplog: pytest.LogCaptureFixture) -> None:
    other = lambda: Engine(name=b"another")  # noqa: E731
    with engines(lambda: Engine(key=b"x" * 16), other, Engine) as [stranger, unlike, source]:
        for each in (stranger, unlike, source):
            each.keep(1, slot=0)
        with engines(Engine) as [reader]:
            assert reader.store.exists_at([key(1)], addresses(stranger)) == [0]
            until(lambda: f"nothing is shared with the engine at {stranger.where}" in caplog.text)
            assert reader.store.exists_at([key(1)], addresses(unlike)) == [0]
            assert reader.store.exists_at([key(1)], addresses(source)) == [BLOCK]  # control
            assert reader.store.exists_at([key(1)], addresses(stranger, source)) == [BLOCK]


def test_an_engine_that_is_named_to_itself_does_not_ask_itself() -> None:
    with engines(Engine) as [engine]:
        engine.keep(1, slot=0)
        for _ in range(2):
            assert engine.store.exists_at([key(1)], addresses(engine)) == [0]
        until(lambda: "of 0 sources" in repr(engine.agent))
        assert engine.store.exists_at([key(1)], addresses(engine)) == [0]
        assert "of 0 sources" in repr(engine.agent)


def test_a_stranger_s_messages_end_its_connection_only() -> None:
    """Whatever a peer with the key sends, others go on."""
    hello = CacheHello(
        engine=bytes(16), format=FORMAT, layout=b"layout", groups=[{0: HALF, 1: HALF}]
    )
    bad: list[list[bytes]] = [
        [b"no message"],
        [encode(Ask(1, [key(1)]))],  # before a hello
        [encode(hello), encode(hello)],
        [encode(hello), encode(Fetch(1, 0, [7], [key(1)]))],
        [encode(hello), encode(Fetch(1, 9, [0], [key(1)]))],
        [encode(hello), encode(Found(1, b""))],
    ]
    with engines(Engine) as [source]:
        source.keep(1, slot=0)
        with engines(lambda: Engine([source.where])) as [reader]:
            reader.sources(1)
            for messages in bad:
                assert ended_with(source, messages)
                assert reader.get([1]) == [BlockOutcome.OK]
            # Control: a stranger that keeps to the protocol is not thrown out.
            assert ended_with(source, [encode(hello), encode(Ask(1, [key(1)]))]) == ""


def ended_with(source: Engine, messages: Sequence[bytes]) -> str:
    """Send messages as a peer would. Return why the connection ended; "" if a question was
    answered."""
    options = ConnectionOptions(dead_after_s=WAIT_S, service="share")
    stranger = make_transport("tcp", Security(b"k" * 16), options)
    assert source.agent.address is not None
    try:
        peer = stranger.connect(*source.agent.address)
        for message in messages:
            stranger.submit(PeerMessage(peer, message))
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for event in stranger.poll(1.0):
                if isinstance(event, PeerDown):
                    return event.reason or "it ended"
                if isinstance(event, MessageReceived) and isinstance(decode(event.payload), Found):
                    return ""
        raise AssertionError("neither an answer nor an end")
    finally:
        stranger.close()


# One side alone -----------------------------------------------------------------------------------


class Recorder:
    """Takes a transport's place: keeps what is submitted and cancelled."""

    def __init__(self) -> None:
        self.orders: list[object] = []
        self.pages: list[IncomingPages] = []  # that were expected
        self.cancelled: list[int] = []

    def submit(self, order: object) -> None:
        self.orders.append(order)
        if isinstance(order, IncomingPages):
            self.pages.append(order)

    def cancel(self, peer: PeerId, read_id: int) -> None:
        self.cancelled.append(read_id)

    def messages(self) -> list[CacheMessage]:
        orders, self.orders = self.orders, []
        return [decode(order.payload) for order in orders if isinstance(order, PeerMessage)]


PEER, OTHER_PEER = PeerId(1), PeerId(2)
UNITS = {number: Unit(array("q", [number * HALF, BLOCK, HALF]), 1, HALF) for number in (0, 1)}


GROUP = [GroupUnits(UNITS, Unit(array("q", [0, BLOCK, BLOCK]), 1, BLOCK))]


class Source:
    """The serving side, without a network."""

    def __init__(self, rate: int = 0) -> None:
        self.now = 0.0
        self.host = HostArena(SLOTS, BLOCK, "full")
        self.served = ServedBlocks(SLOTS)
        self.network = Recorder()
        self.meter = StoreMeter()
        limit = SendLimit(rate, lambda: self.now)
        network: Any = self.network
        self.side = Serving(network, self.served, self.host, [GROUP], limit, self.meter)
        self.side.on_up(PEER, "10.0.0.1")
        for number in range(4):
            self.host.view(number)[:] = content(number)
            self.host.seal(number, BLOCK)
            self.served.offer([(key(number), number)])

    def fetch(self, fetch: int, numbers: Sequence[int], units: Sequence[int] = (0,)) -> None:
        wanted = [key(number) for number in numbers]
        self.side.on_message(PEER, Fetch(fetch, 0, list(units), wanted))

    def sent(self, fetch: int) -> list[CacheMessage]:
        """All pages of a fetch were handed to the network."""
        pages = [order for order in self.network.orders if isinstance(order, OutgoingPages)]
        self.network.orders = [o for o in self.network.orders if not isinstance(o, OutgoingPages)]
        for order in pages:
            self.side.on_sent(PagesSent(PEER, fetch, len(order.ids) * HALF, 0.0))
        return self.network.messages()


def test_a_block_that_is_overwritten_while_it_is_sent_is_said_to_be() -> None:
    source = Source()
    source.fetch(1, [0, 9, 2, 3])
    source.served.withdraw([2])  # a store is about to write there
    source.served.offer([(key(7), 2)])
    (answer,) = source.sent(1)
    assert isinstance(answer, Sent)
    states = FetchOutcome.SENT, FetchOutcome.ABSENT, FetchOutcome.OVERWRITTEN, FetchOutcome.SENT
    assert answer.outcomes == bytes(states)


def test_an_evicted_block_is_served_until_it_is_overwritten() -> None:
    source = Source()
    source.fetch(1, [0])
    (answer,) = source.sent(1)
    assert answer == Sent(1, bytes([FetchOutcome.SENT]))
    source.served.withdraw([0])
    source.fetch(2, [0])
    (answer,) = source.sent(2)
    assert answer == Sent(2, bytes([FetchOutcome.ABSENT]))


def test_a_source_sends_no_more_than_it_may() -> None:
    source = Source(rate=HALF)  # a unit per second
    source.fetch(1, [0, 1, 2])
    assert source.sent(1) == [Sent(1, bytes([FetchOutcome.SENT] * 3))]
    source.fetch(2, [3])
    assert source.sent(2) == [Sent(2, bytes([FetchOutcome.BUSY]))]
    counted = source.meter.take()
    assert counted is not None
    assert counted.data["counters"]["peer_refused_blocks"] == {"": 1}
    source.now = 2.5
    source.fetch(3, [3])
    assert source.sent(3) == [Sent(3, bytes([FetchOutcome.SENT]))]


ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


@given(
    st.lists(st.tuples(st.integers(1, MOST_BYTES + 5), st.sampled_from(ADDRESSES)), max_size=30),
    st.randoms(),
)
def test_the_bytes_being_sent_are_bounded(orders: list[tuple[int, str]], random: Any) -> None:
    limit = SendLimit(0, lambda: 0.0)
    going: list[tuple[int, str]] = []
    for order in orders:
        mine = [size for size, address in going if address == order[1]]
        if limit.admit(order[0], order[1]):
            going.append(order)
            assert not mine or sum(mine) + order[0] <= MOST_BYTES // 2
        else:
            assert going
        total = sum(size for size, _ in going)
        assert total == limit.nbytes
        assert total <= MOST_BYTES or len(going) == 1  # what is too large is sent alone
        while going and random.random() < 0.4:
            size, address = going.pop(random.randrange(len(going)))
            limit.ended(size, address)
    for size, address in going:
        limit.ended(size, address)
    assert not limit.nbytes and not limit._to


def test_one_address_leaves_room_for_others() -> None:
    limit = SendLimit(0, lambda: 0.0)
    size = MOST_BYTES // 8
    assert [limit.admit(size, "10.0.0.1") for _ in range(6)] == [True] * 4 + [False] * 2
    assert limit.admit(size, "10.0.0.2")
    limit.ended(size, "10.0.0.1")
    assert limit.admit(size, "10.0.0.1")


def test_a_reader_that_is_too_slow_over_a_whole_fetch_is_ended() -> None:
    source = Source()
    source.fetch(1, [0, 1])
    limit_s = FETCH_S + 2 * HALF / MIN_BYTES_PER_S
    source.side.tick(100.0)
    source.side.tick(100.0 + limit_s - 0.1)
    assert not any(isinstance(order, Disconnect) for order in source.network.orders)
    source.side.tick(100.0 + limit_s)
    (order,) = [each for each in source.network.orders if isinstance(each, Disconnect)]
    assert order.peer == PEER and "took longer than" in order.reason


def test_a_reader_that_is_fast_enough_is_not_ended() -> None:
    source = Source()
    for number in range(3):
        now = number * FETCH_S
        source.fetch(number, [0, 1])
        source.side.tick(now)
        source.sent(number)
        source.side.tick(now + FETCH_S - 0.1)
    assert not any(isinstance(order, Disconnect) for order in source.network.orders)


def test_a_fetch_that_names_a_block_or_a_unit_twice_is_refused() -> None:
    for units, keys in (([0], [key(1), key(2), key(1)]), ([1, 1], [key(1)])):
        with pytest.raises(ProtocolError, match="twice"):
            decode(encode(Fetch(1, 0, units, keys)))
    assert decode(encode(Fetch(1, 0, [0, 1], [key(1), key(2)])))  # the control


def test_a_block_that_is_wanted_in_two_slots_is_read_twice() -> None:
    reading = Reading()
    holders = frozenset({PEER})
    wanted = [Wanted(key(1), slot, holders) for slot in (0, 1)]
    thread, results = reading.start(lambda: reading.reads.read(0, wanted))
    fetches = reading.asked(Fetch, 2)
    assert [fetch.keys for fetch in fetches] == [[key(1)], [key(1)]]
    for fetch in fetches:
        reading.reads.on_sent(PEER, Sent(fetch.read_id, bytes([FetchOutcome.ABSENT])))
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.ABSENT] * 2]


def test_a_stopped_fetch_ends_once_it_is_drained() -> None:
    source = Source()
    source.fetch(1, [0, 1])
    source.side.on_message(PEER, Cancel(1))
    source.side.on_message(PEER, Cancel(5))  # not known: its Sent is on the way
    assert source.network.cancelled == [1]
    source.side.on_drained(Drained(PEER, 1))
    assert source.sent(1) == []
    source.fetch(1, [0])  # the number is free again
    source.side.on_down(PEER)
    source.side.on_up(PEER, "10.0.0.1")
    source.fetch(1, [0])
    with pytest.raises(ProtocolError, match="twice"):
        source.fetch(1, [0])


class Reading:
    """The reading side, without a network: two sources, the second of which has one unit only."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.now = 0.0
        self.network = Recorder()
        network: Any = self.network
        self.sources = CacheSources(network, [GROUP])
        for peer, units in ((PEER, {0: HALF, 1: HALF}), (OTHER_PEER, {1: HALF})):
            engine = bytes([peer]) * 16
            hello = CacheHello(engine=engine, format=FORMAT, layout=b"layout", groups=[units])
            self.sources.add(peer, "there", "tcp", hello, same_layout=False)
        clock = lambda: self.now  # noqa: E731
        self.questions = Questions(self.sources, wait_s, clock)
        self.reads = Reads(self.sources, wait_s, clock)

    def start(self, work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
        """Run a blocking call on a thread; its result is in the list at the end."""
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
        thread.start()
        return thread, results

    def asked(self, kind: type, count: int = 1) -> list[Any]:
        """Wait for messages of one kind."""
        found: list[Any] = []

        def came() -> bool:
            found.extend(each for each in self.network.messages() if isinstance(each, kind))
            return len(found) >= count

        until(came)
        return found

    def find(self, keys: Sequence[bytes]) -> list[frozenset[PeerId]]:
        return self.questions.find(keys, [0] * len(keys), [PEER, OTHER_PEER])

    def read(self, holders: frozenset[PeerId] = frozenset({PEER})) -> Callable[[], object]:
        wanted = [Wanted(key(number), number, holders) for number in range(2)]
        return lambda: self.reads.read(0, wanted)


def arrived(read: int, unit: int, count: int = 2, bad: tuple[int, ...] = ()) -> PagesReceived:
    return PagesReceived(PEER, read, unit, 0, count, bad, count * HALF, 0.0)


def test_a_read_ends_when_all_that_was_sent_has_arrived() -> None:
    """Pages and the word that no more come arrive over different connections, in any order."""
    sent, absent = FetchOutcome.SENT, FetchOutcome.ABSENT
    for pages_first in (True, False):
        reading = Reading()
        thread, results = reading.start(reading.read())
        (fetch,) = reading.asked(Fetch)
        assert fetch.units == [0, 1]
        if pages_first:
            reading.reads.on_received(arrived(fetch.read_id, 0))
            reading.reads.on_received(arrived(fetch.read_id, 1, bad=(1,)))
            assert not results
            reading.reads.on_sent(PEER, Sent(fetch.read_id, bytes([sent, sent])))
        else:
            reading.reads.on_sent(PEER, Sent(fetch.read_id, bytes([sent, sent])))
            reading.reads.on_received(arrived(fetch.read_id, 0))
            assert not results
            reading.reads.on_received(arrived(fetch.read_id, 1, bad=(1,)))
        thread.join(WAIT_S)
        assert results == [[BlockOutcome.OK, BlockOutcome.CORRUPT]]
        assert reading.network.cancelled == [fetch.read_id]  # the transport may forget it
    reading = Reading()
    thread, results = reading.start(reading.read())
    (fetch,) = reading.asked(Fetch)
    reading.reads.on_sent(PEER, Sent(fetch.read_id, bytes([absent, FetchOutcome.BUSY])))
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.ABSENT, BlockOutcome.UNAVAILABLE]]


def test_pages_that_were_overwritten_are_not_used() -> None:
    reading = Reading()
    thread, results = reading.start(reading.read())
    (fetch,) = reading.asked(Fetch)
    outcomes = bytes([FetchOutcome.SENT, FetchOutcome.OVERWRITTEN])
    reading.reads.on_sent(PEER, Sent(fetch.read_id, outcomes))
    reading.reads.on_received(arrived(fetch.read_id, 0))
    assert not results  # pages of the other unit may still be written
    reading.reads.on_received(arrived(fetch.read_id, 1))
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.OK, BlockOutcome.ABSENT]]


def test_a_late_read_returns_when_nothing_writes_into_its_slots() -> None:
    reading = Reading(wait_s=0.01)
    thread, results = reading.start(reading.read())
    assert [cancel.read_id for cancel in reading.asked(Cancel)] == [1]
    until(lambda: reading.network.cancelled == [1])
    assert thread.is_alive()
    reading.reads.on_received(arrived(1, 0))  # too late to count
    assert not results
    reading.reads.on_drained(Drained(PEER, 1))
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.FAILED] * 2]


def test_a_source_that_dies_in_the_middle_of_a_read() -> None:
    reading = Reading()
    thread, results = reading.start(reading.read())
    (fetch,) = reading.asked(Fetch)
    reading.reads.on_received(arrived(fetch.read_id, 0))
    reading.sources.remove(PEER)
    reading.reads.on_down(PEER)
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.FAILED] * 2]
    assert reading.reads.read(0, [Wanted(key(1), 0, frozenset({PEER}))]) == [BlockOutcome.ABSENT]


def test_a_read_that_closing_cuts_short_has_failed() -> None:
    """The source has sent everything, and not all of it is here."""
    reading = Reading()
    thread, results = reading.start(reading.read())
    (fetch,) = reading.asked(Fetch)
    reading.reads.on_sent(PEER, Sent(fetch.read_id, bytes([FetchOutcome.SENT] * 2)))
    reading.reads.on_received(arrived(fetch.read_id, 0))
    reading.sources.close()
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.FAILED] * 2]


def test_the_least_busy_source_gives_a_unit() -> None:
    reading = Reading()
    (first,) = reading.sources.of([PEER])
    first.reading = 5
    thread, results = reading.start(reading.read(frozenset({PEER, OTHER_PEER})))
    reads = reading.asked(Fetch, 2)
    assert sorted(fetch.units for fetch in reads) == [[0], [1]]
    reading.sources.close()
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.FAILED] * 2]


def test_engines_alike_read_whole_blocks() -> None:
    reading = Reading()
    third = PeerId(3)
    hello = CacheHello(engine=bytes(16), format=FORMAT, layout=b"same", groups=[{0: HALF, 1: HALF}])
    reading.sources.add(third, "there", "tcp", hello, same_layout=True)
    thread, results = reading.start(reading.read(frozenset({PEER, third})))
    (fetch,) = reading.asked(Fetch)
    assert fetch.units == [cache_messages.WHOLE]
    (order,) = reading.network.pages
    assert (order.peer, [unit.block_bytes for unit in order.units]) == (third, [BLOCK])
    reading.reads.on_sent(third, Sent(fetch.read_id, bytes([FetchOutcome.SENT] * 2)))
    reading.reads.on_received(PagesReceived(third, fetch.read_id, 0, 0, 2, (), 2 * BLOCK, 0.0))
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.OK] * 2]


def test_a_question_waits_for_nobody_longer_than_it_may() -> None:
    reading = Reading(wait_s=0.01)
    for _ in range(LATE_ANSWERS):
        assert reading.find([key(1)]) == [frozenset()]
        assert len(reading.network.messages()) == 2
    assert reading.find([key(1)]) == [frozenset()]
    assert reading.network.messages() == []  # both were late too often
    reading.now = 60.0
    reading.find([key(1)])
    assert len(reading.network.messages()) == 2  # and are tried again


def test_a_long_question_that_is_late_counts_once() -> None:
    """It is asked in more messages than a source may be late in a row."""
    reading = Reading(wait_s=0.01)
    keys = [key(number) for number in range(LATE_ANSWERS * MAX_ASKED)]
    for _ in range(LATE_ANSWERS):
        reading.questions.find(keys, [0] * len(keys), [PEER, OTHER_PEER])
        assert len(reading.network.messages()) == 2 * LATE_ANSWERS
    reading.questions.find(keys, [0] * len(keys), [PEER, OTHER_PEER])
    assert reading.network.messages() == []  # control: now both were late too often


STALLED, GOOD = PeerId(3), PeerId(4)


class Stalling(Reading):
    """Two more sources, alike. Both answer questions; one sends only the pages that it must."""

    def __init__(self) -> None:
        super().__init__()
        self.hurried = Reads(self.sources, 0.01, lambda: self.now)
        self.connect(STALLED, b"stalled")
        self.connect(GOOD, b"good")

    def connect(self, peer: PeerId, engine: bytes) -> None:
        units = {0: HALF, 1: HALF}
        hello = CacheHello(engine=engine.ljust(16), format=FORMAT, layout=b"same", groups=[units])
        self.sources.add(peer, "there", "tcp", hello, same_layout=True)

    def wanted(self, *peers: PeerId) -> list[Wanted]:
        return [Wanted(key(0), 0, frozenset(peers))]

    def asked_of(self, *peers: PeerId) -> list[PeerId]:
        """Ask for a block that all have. Return who was asked."""
        thread, results = self.start(lambda: self.questions.find([key(0)], [0], peers))
        until(lambda: bool(self.questions._open))
        questions = dict(self.questions._open)
        for number, question in questions.items():
            self.questions.on_found(question.source.peer, Found(number, b"\1"))
        thread.join(WAIT_S)
        asked = [question.source.peer for question in questions.values()]
        assert results == [[frozenset(asked)]]
        return asked

    def good(self, *peers: PeerId) -> PeerId:
        """Read a block that some have. Return who gave it."""
        before = len(self.network.pages)
        thread, results = self.start(lambda: self.reads.read(0, self.wanted(*peers)))
        until(lambda: len(self.network.pages) > before)
        order = self.network.pages[-1]
        self.reads.on_sent(order.peer, Sent(order.read_id, bytes([FetchOutcome.SENT])))
        self.reads.on_received(PagesReceived(order.peer, order.read_id, 0, 0, 1, (), BLOCK, 0.0))
        thread.join(WAIT_S)
        assert results == [[BlockOutcome.OK]]
        return order.peer

    def refused(self, *peers: PeerId) -> bool:
        """Return whether a block that some have is not read."""
        thread, results = self.start(lambda: self.reads.read(0, self.wanted(*peers)))
        thread.join(WAIT_S)
        return results == [[BlockOutcome.UNAVAILABLE]]

    def late(self) -> None:
        """Two reads of one call are late, and stop."""
        before = len(self.network.cancelled)
        wanted = 2 * self.wanted(STALLED)
        thread, results = self.start(lambda: self.hurried.read(0, wanted))
        until(lambda: len(self.network.cancelled) == before + 2)
        for read_id in self.network.cancelled[before:]:
            self.hurried.on_drained(Drained(STALLED, read_id))
        thread.join(WAIT_S)
        assert results == [[BlockOutcome.FAILED] * 2]


def test_a_source_that_answers_and_sends_no_pages_is_left_alone() -> None:
    """Its answers do not end the pauses, which grow. The other source is used throughout."""
    reading = Stalling()
    assert reading.good(STALLED, GOOD) == STALLED
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert reading.asked_of(STALLED, GOOD) == [STALLED, GOOD]
        reading.late()
        for passed in (0.0, pause - 0.5):
            reading.now += passed
            assert reading.asked_of(STALLED, GOOD) == [GOOD]
            assert reading.refused(STALLED)
            assert reading.good(STALLED, GOOD) == GOOD
        reading.now += 0.5
    assert reading.good(STALLED) == STALLED
    reading.late()
    reading.now += 1.0  # the first pause again
    assert reading.asked_of(STALLED, GOOD) == [STALLED, GOOD]


def test_a_source_whose_read_was_late_is_tried_by_one_read_at_a_time() -> None:
    reading = Stalling()
    reading.late()
    reading.now += 1.0
    before, wanted = len(reading.network.pages), 2 * reading.wanted(STALLED)
    thread, results = reading.start(lambda: reading.reads.read(0, wanted))
    until(lambda: len(reading.network.pages) == before + 2)
    reading.now += 60.0
    assert reading.refused(STALLED)
    assert reading.asked_of(STALLED, GOOD) == [GOOD]
    for order in reading.network.pages[before:]:
        reading.reads.on_sent(STALLED, Sent(order.read_id, bytes([FetchOutcome.ABSENT])))
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.ABSENT] * 2]
    (source,) = reading.sources.of([STALLED])
    assert not source.read_breaker.closed, "no page has come"
    assert reading.asked_of(STALLED, GOOD) == [STALLED, GOOD]
    assert reading.good(STALLED) == STALLED
    assert source.read_breaker.closed


def test_a_source_whose_late_read_does_not_stop_is_disconnected() -> None:
    """It is known by its next connection; a restarted one is another."""
    reading = Stalling()
    orders = reading.network.orders
    thread, results = reading.start(lambda: reading.hurried.read(0, reading.wanted(STALLED)))
    until(lambda: any(isinstance(order, Disconnect) for order in orders))
    (order,) = [order for order in orders if isinstance(order, Disconnect)]
    assert order == Disconnect(STALLED, "a read took longer than 0.01 s, and does not stop")
    assert thread.is_alive(), "pages may still be written"
    reading.sources.remove(STALLED)
    reading.hurried.on_down(STALLED)
    thread.join(WAIT_S)
    assert results == [[BlockOutcome.FAILED]]
    again, restarted = PeerId(5), PeerId(6)
    reading.connect(again, b"stalled")
    reading.connect(restarted, b"restarted")
    assert reading.asked_of(again, restarted) == [restarted]
    reading.now += 1.0
    assert reading.asked_of(again, restarted) == [again, restarted]


def test_long_questions_go_in_several_messages() -> None:
    reading = Reading()
    keys = [key(number) for number in range(MAX_ASKED + 10)]
    thread, results = reading.start(lambda: reading.find(keys))
    asked = reading.asked(Ask, 4)
    assert sorted(len(ask.keys) for ask in asked) == [10, 10, MAX_ASKED, MAX_ASKED]
    for ask in asked:
        here = bytes(one == key(MAX_ASKED + 3) for one in ask.keys)
        for peer in (PEER, OTHER_PEER):
            if reading.questions._open[ask.ask].source.peer == peer:
                reading.questions.on_found(peer, Found(ask.ask, here))
    thread.join(WAIT_S)
    (holders,) = results
    assert [n for n, peers in enumerate(holders) if peers] == [MAX_ASKED + 3]  # type: ignore[var-annotated, arg-type]


def test_answers_that_nobody_asked_for() -> None:
    reading = Reading()
    reading.questions.on_found(PEER, Found(99, b""))  # too late: no error
    reading.reads.on_sent(PEER, Sent(99, b""))
    thread, _ = reading.start(reading.read())
    (fetch,) = reading.asked(Fetch)
    with pytest.raises(ProtocolError):
        reading.reads.on_sent(OTHER_PEER, Sent(fetch.read_id, b"11"))
    with pytest.raises(ProtocolError):
        reading.reads.on_sent(PEER, Sent(fetch.read_id, b"111"))
    reading.sources.close()
    thread.join(WAIT_S)


# What is served -----------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, 9), st.integers(0, SLOTS - 1)),
            st.tuples(st.just("clear"), st.just(0), st.just(0)),
        ),
        max_size=60,
    )
)
def test_a_found_block_is_the_one_that_its_slot_has(steps: list[tuple[str, int, int]]) -> None:
    """Slots are overwritten at random; a version that stayed is that of the same bytes."""
    served = ServedBlocks(SLOTS)
    slots: list[int | None] = [None] * SLOTS
    before: list[tuple[ServedBlock, int | None]] = []
    for what, number, slot in steps:
        if what == "clear":
            served.clear()
            continue
        served.withdraw([slot])
        slots[slot] = number
        served.offer([(key(number), slot)])
        found = served.find(key(number))
        assert found is not None
        assert slots[found.slot] == number
        before.append((found, number))
    for block, number in before:
        if served.is_current(block):
            assert slots[block.slot] == number
    for number in range(10):
        found = served.find(key(number))
        assert found is None or slots[found.slot] == number
    assert len(served) <= SLOTS


# Settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ask": ["somewhere:1"]}, "ask"),
        ({"ask": ["10.0.0.1"]}, "ask"),
        ({"ask": ["10.0.0.1:9-7"]}, "ask"),
        ({"ask": ["10.0.0.1:0"]}, "ask"),
        ({"ask": ["10.0.0.1:1-300"]}, "ask"),
        ({"ask": "10.0.0.1:1"}, "ask"),
        ({"listen": "0.0.0.0:1"}, "listen"),
        ({"listen": "off"}, "ask"),
        ({"ask": ["10.0.0.1:1"], "ask_s": 0}, "ask_s"),
        ({"ask": ["10.0.0.1:1"], "serve_rate": "1 GX"}, "serve_rate"),
        ({"asks": ["10.0.0.1:1"]}, "asks"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_struct(PeerSettings, settings)
    assert caught.value.field == field


def test_addresses_of_several_ranks() -> None:
    options = check_struct(PeerSettings, {"ask": ["10.0.0.1:7900-7902", "[::1]:80"]})
    ports = [("10.0.0.1", 7900), ("10.0.0.1", 7901), ("10.0.0.1", 7902), ("::1", 80)]
    assert options.addresses() == ports


def test_buffers_must_be_slots() -> None:
    with engines(Engine) as [engine], pytest.raises(Misuse, match="slot"):
        engine.store.get([key(1)], [memoryview(bytearray(BLOCK))])


# A worker and its scheduler -----------------------------------------------------------------------


def test_a_step_offers_blocks_before_it_overwrites_slots() -> None:
    """One step may name a block whose slot it also gives to another one."""
    with engines(Engine) as [engine]:
        geometry = Geometry((GroupGeometry((ByteRun(0, BLOCK, BLOCK),), 4),))
        worker = TierWorker({}, engine.host, geometry, peers=engine.store)
        served = engine.agent.served
        offered = [(key(number), number) for number in range(4)]
        worker.serve(TierInstructions(served=offered), overwritten=[1])
        worker.submit([PrefetchBlocks(JobId(1), (key(9),), array("q", [2]), WAIT_S)])
        assert [served.find(key(n)) is not None for n in range(4)] == [True, False, False, True]
        found = served.find(key(3))
        assert found is not None
        worker.serve(TierInstructions(dropped=[key(3), key(9)], served=[(key(7), 7)]), [])
        assert served.find(key(3)) is None and not served.is_current(found)
        assert served.find(key(0)) is not None and served.find(key(7)) is not None  # the control
        worker.serve(TierInstructions(withdraw=True, served=[(key(5), 5)]), overwritten=[])
        assert [served.find(key(n)) is not None for n in (0, 3, 5)] == [False, False, True]
        until(lambda: bool(worker.poll()))
        worker.close()


def test_a_lookup_s_source_reaches_the_store() -> None:
    geometry = Geometry((GroupGeometry((ByteRun(0, BLOCK, BLOCK),), 4),))
    with engines(Engine, Engine) as [source, reader]:
        source.keep(1, slot=0)
        worker = TierWorker({}, reader.host, geometry, peers=reader.store)
        assert worker.address == reader.agent.address
        keys, there = (key(1), key(2)), SECONDARY_TIERS.index(Tier.PEER)
        for named, found in (((), [0, 0]), (addresses(source), [there, 0])):
            worker.submit([LookupBlocks(JobId(1), keys, named)])
            answers: list[TierAnswer] = []
            until(lambda: bool(answers.extend(worker.poll()) or answers))  # noqa: B023
            assert [list(answer.found) for answer in answers] == [found]
        worker.close()


def test_a_block_that_has_left_its_slot_is_not_offered() -> None:
    """As one that a hint drops as soon as it is stored."""
    index = HostIndex(2, 1, make_policy("lru", 2))
    offers, names = Offers(index, serves=True), (b"kept", b"dropped")
    kept, dropped = (slot for name in names if (slot := index.reserve(0, name)) is not None)
    index.commit([kept, dropped])
    for number, name in enumerate(names):
        offers.stored(0, name, key(number))
    index.remove([dropped])
    assert index.reserve(0, b"another block") == dropped
    index.commit([dropped])
    offers.take(step := TierInstructions())
    assert step.served == [(key(0), kept)] and not offers.ready


def test_only_complete_blocks_are_offered() -> None:
    index = HostIndex(4, 1, make_policy("lru", 4))
    for serves in (True, False):
        offers = Offers(index, serves)
        slot = index.reserve(0, b"a%d" % serves)
        assert slot is not None
        offers.stored(0, b"a%d" % serves, key(1))  # it is still being stored
        assert not offers.ready
        index.commit([slot])
        offers.stored(0, b"a%d" % serves, key(1))
        came = Promoted("r", [(0, b"a%d" % serves), (0, b"dropped")], [(key(2), slot), (key(3), 2)])
        offers.promoted(came)
        assert offers.ready is serves
        step = TierInstructions()
        offers.take(step)
        assert step.served == ([(key(1), slot), (key(2), slot)] if serves else [])
        assert not offers.ready
        offers.promoted(came)
        offers.drop({key(2), key(4)})
        assert offers.ready is serves
        offers.stored(0, b"a%d" % serves, key(1))
        step = TierInstructions()
        offers.take(step)
        assert step.served == ([(key(1), slot)] if serves else [])
        assert sorted(step.dropped) == ([key(2), key(4)] if serves else [])
        assert not offers.ready
        offers.promoted(came)
        offers.withdraw()
        step = TierInstructions()
        offers.take(step)
        assert (step.served, step.withdraw) == ([], serves)
