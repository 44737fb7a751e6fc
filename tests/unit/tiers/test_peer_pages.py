"""Engines with other block sizes, which share pages: real agents on loopback, byte by byte."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.head_shards import page_units, units
from kvconnect.cache.keys import block_key
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.cache.record_format import page_names
from kvconnect.errors import ConfigError, ProtocolError
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.protocol.cache_messages import CacheHello, Fetch, FetchOutcome, Sent, decode, encode
from kvconnect.settings import check_struct
from kvconnect.settings.sharing import PeerSettings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import SHARED, LookupRequest, PrefetchDecision, TierLimits, TierPlan
from kvconnect.tiers.backends.base import StoreMeter
from kvconnect.tiers.messages import LookupBlocks, PrefetchBlocks, TierAnswer, TierInstructions
from kvconnect.tiers.offers import Offers
from kvconnect.tiers.peers.fetching import Reads, Wanted
from kvconnect.tiers.peers.pages import PageKeys, pages_per_block
from kvconnect.tiers.peers.served import ServedBlock, ServedBlocks
from kvconnect.tiers.peers.serving import GroupUnits, SendLimit, Serving
from kvconnect.tiers.peers.sources import CacheSources
from kvconnect.tiers.worker import TierWorker
from kvconnect.transport.base import (
    IncomingPages,
    OutgoingPages,
    PagesSent,
    PeerId,
    PeerMessage,
    Unit,
)
from kvconnect.types import JobId
from tests.unit.cache.sharded_caches import Layout, Model, Rank
from tests.unit.tiers.peer_engines import SLOTS, WAIT_S, Engine, engines, until

TOKENS = 256  # of the prompt
PAGE = 16
MODEL = Model(layers=2, heads=8, tokens=TOKENS, width=2)
WHOLE = MODEL.block(7)
"""K and V of the prompt: [layers, K or V, heads, tokens, width]."""
PROMPT = [number * 7 % 1000 for number in range(TOKENS)]
ROWS, TURNED = Layout("LBHN", joined=True), Layout("BNLH", joined=False)
"""Two engines' layouts of a KV cache."""
PEER = PeerId(1)


class Paged(Engine):
    """A worker with blocks of ``size`` tokens that shares pages of ``page`` tokens, and has heads
    ``heads`` of the model."""

    def __init__(
        self,
        ask: Sequence[str] = (),
        size: int = PAGE,
        page: int = PAGE,
        rank: tuple[Layout, tuple[int, int]] = (ROWS, (0, 8)),
        turned: bool = False,
        transport: str = "tcp",
    ) -> None:
        self.size = size
        self.pages = pages_per_block(page, size)
        layout, heads = rank
        self.rank = Rank(replace(MODEL, tokens=size), layout, heads)
        rows = self.rank.rows()
        block = units(self.rank.group(), rows, heads, MODEL.heads)
        pages = list(page_units(block, [size * MODEL.width] * len(rows), self.pages))
        if turned:
            pages.reverse()
        super().__init__(ask, [pages], b"pages of %d" % page, transport)
        nbytes = sum(unit.nbytes for unit in block)
        geometry = Geometry((GroupGeometry((ByteRun(0, nbytes, nbytes),), SLOTS),))
        self.worker = TierWorker({}, self.host, geometry, wait_s=WAIT_S, peers=self.store)
        self.request = self.named(PROMPT)
        self.jobs = 0

    def close(self) -> None:
        self.worker.close()  # and the store

    def named(self, tokens: Sequence[int]) -> LookupRequest:
        """A request's blocks, whose hashes are their numbers."""
        names = page_names(tokens, self.size)
        pages = page_names(tokens, self.size // self.pages)
        hashes = [b"%d" % number for number in range(len(names))]
        by_block = [pages[n * self.pages : (n + 1) * self.pages] for n in range(len(names))]
        return LookupRequest(
            [hashes],
            0,
            len(tokens),
            block_names=dict(zip(hashes, names, strict=True)),
            page_names=dict(zip(hashes, by_block, strict=True)) if self.pages > 1 else {},
        )

    def expected(self, block: int) -> bytes:
        """What a slot has of a block, by way of a KV cache."""
        return self.rank.slot(WHOLE[:, :, :, block * self.size : (block + 1) * self.size])

    def keep_all(self, *blocks: int) -> None:
        """Store blocks in slots and offer them; block n is in slot n % SLOTS."""
        step = self.step(blocks)
        for block in blocks:
            slot, data = block % SLOTS, self.expected(block)
            self.host.view(slot, len(data))[:] = data
            self.host.seal(slot, len(data))
            step.served.append((self.key(block), slot))
        self.worker.serve(step, [])

    def step(self, blocks: Sequence[int]) -> TierInstructions:
        pages = self.request.page_keys((0, b"%d" % block) for block in blocks)
        return TierInstructions(pages=dict(pages))

    def key(self, block: int) -> bytes:
        return self.request.key(0, b"%d" % block)

    def run(self, kind: Any, blocks: Sequence[int], *more: Any) -> list[bool]:
        """Run a job, and return which blocks it found."""
        self.jobs += 1
        self.worker.serve(self.step(blocks), [])
        job = kind(JobId(self.jobs), tuple(self.key(block) for block in blocks), *more)
        self.worker.submit([job])
        answers: list[Any] = []
        until(lambda: bool(answers.extend(self.worker.poll()) or answers))
        return [bool(tier) for tier in answers[0].found]

    def there(self, *blocks: int) -> list[bool]:
        return self.run(LookupBlocks, blocks)

    def read(self, *blocks: int) -> list[bool]:
        """Read blocks into slots: block n into slot n % SLOTS."""
        slots = array("q", [block % SLOTS for block in blocks])
        return self.run(PrefetchBlocks, blocks, slots, WAIT_S)

    def right(self, *blocks: int) -> list[bool]:
        """Whether the slots of blocks have what they should."""
        wanted = [(block % SLOTS, self.expected(block)) for block in blocks]
        return [bytes(self.host.view(slot, len(data))) == data for slot, data in wanted]


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
@pytest.mark.parametrize("sizes", [(64, 32, 32), (32, 64, 32), (64, 16, 16), (16, 64, 16)])
def test_blocks_of_other_sizes(sizes: tuple[int, int, int], transport: str) -> None:
    """There and back. A block of 64 tokens has several blocks of the other engine."""
    if transport == "nixl":
        pytest.importorskip("nixl_cu12")
    theirs, mine, page = sizes
    with engines(lambda: Paged((), theirs, page, transport=transport)) as [source]:
        source.keep_all(*range(128 // theirs))
        turned = (TURNED, (0, 8))
        make = partial(Paged, [source.where], mine, page, turned, transport=transport)
        with engines(make) as [reader]:
            reader.sources(1)
            blocks = range(128 // mine)
            assert not any(reader.right(*blocks))
            assert reader.there(*blocks, 192 // mine) == [True] * len(blocks) + [False]
            assert all(reader.read(*blocks))
            assert all(reader.right(*blocks))
            sent, taken = source.store.take_stats(), reader.store.take_stats()
            half = WHOLE[:, :, :, :128].nbytes
            assert moved(sent, "CPU_to_PEER") == moved(taken, "PEER_to_CPU") == half


def moved(stats: OffloadingConnectorStats | None, kind: str) -> float:
    assert stats is not None
    return float(stats.data["histograms"]["transfer_size_bytes"][kind][0])


def test_equal_blocks_that_are_shared_by_pages() -> None:
    """Engines alike send one another whole pages as their slots have them."""
    with engines(lambda: Paged(size=64, page=32)) as [source]:
        source.keep_all(0, 1)
        with engines(lambda: Paged([source.where], 64, 32)) as [reader]:
            reader.sources(1)
            assert all(reader.read(0, 1)) and all(reader.right(0, 1))


def test_other_block_sizes_and_other_ranks_at_once() -> None:
    """Each of two ranks with blocks of 32 has half of the heads; the reader has all, of 64."""
    halves = [(TURNED, (0, 4)), (TURNED, (4, 8))]
    with engines(
        lambda: Paged(size=32, page=16, rank=halves[0]),
        lambda: Paged(size=32, page=16, rank=halves[1]),
    ) as sources:
        for source in sources:
            source.keep_all(0, 1, 2, 3)
        ask = [source.where for source in sources]
        with engines(lambda: Paged(ask, 64, 16)) as [reader]:
            reader.sources(2)
            assert reader.read(0, 1) == reader.right(0, 1) == [True, True]
            reader.keep_all(0, 1)
            with engines(lambda: Paged([reader.where], 16, 16, halves[1])) as [small]:
                small.sources(1)
                assert all(small.read(*range(8))) and all(small.right(*range(8)))
            # Control: half of the heads of one page is missing.
            sources[1].agent.served.withdraw([1])
            assert reader.there(0, 1) == [False, True]


def test_half_a_block_is_a_miss() -> None:
    """Pages of one block may be at several engines; all of them must be somewhere."""
    with engines(lambda: Paged(size=32, page=32), lambda: Paged(size=32, page=32)) as sources:
        first, second = sources
        first.keep_all(0, 1, 2)
        ask = [source.where for source in sources]
        with engines(lambda: Paged(ask, 64, 32)) as [reader]:
            reader.sources(2)
            assert reader.there(0, 1) == [True, False]
            assert reader.read(0, 1) == [True, False]
            second.keep_all(3)
            assert reader.read(0, 1) == reader.right(0, 1) == [True, True]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_page_that_goes_between_the_lookup_and_the_read(lost: int) -> None:
    with engines(lambda: Paged(size=32, page=32)) as [source]:
        source.keep_all(0, 1, 2, 3)
        with engines(lambda: Paged([source.where], 64, 32)) as [reader]:
            reader.sources(1)
            assert reader.there(0, 1) == [True, True]
            source.worker.serve(TierInstructions(), [lost])
            assert reader.read(0, 1) == [False, True]
            assert reader.right(1) == [True]


def test_a_block_goes_with_all_of_its_pages() -> None:
    with engines(lambda: Paged(size=64, page=16)) as [source]:
        source.keep_all(0, 1)
        with engines(lambda: Paged([source.where], 16, 16)) as [reader]:
            reader.sources(1)
            assert reader.there(*range(8)) == [True] * 8
            source.worker.serve(TierInstructions(dropped=[source.key(0)]), [])
            assert reader.there(*range(8)) == [False] * 4 + [True] * 4
            source.worker.serve(TierInstructions(), [1])  # overwritten
            assert reader.there(*range(8)) == [False] * 8
            source.keep_all(2)
            source.host.view(2)[0] ^= 1
            assert reader.read(*range(8, 12)) == [False] * 4


def test_swapped_pages_are_seen() -> None:
    """Negative control of these tests: a source that mistakes its pages for one another."""
    with engines(lambda: Paged(size=64, page=32, turned=True)) as [source]:
        source.keep_all(0)
        with engines(lambda: Paged([source.where], 32, 32)) as [reader]:
            reader.sources(1)
            assert reader.read(0, 1) == [True, True]
            assert reader.right(0, 1) == [False, False]


def test_engines_with_other_pages_share_nothing() -> None:
    with engines(lambda: Paged(size=64, page=32)) as [source]:
        source.keep_all(0)
        with engines(
            lambda: Paged([source.where], 64, 64),
            lambda: Paged([source.where], 32, 16),
            lambda: Paged([source.where], 32, 32),
        ) as [*others, same]:
            same.sources(1)
            assert same.there(0) == [True]
            for other in others:
                assert other.there(0) == [False]


def test_a_page_overwritten_while_it_is_sent() -> None:
    """All pages of the slot are called overwritten; what is the same page goes in one piece."""
    orders: list[Any] = []
    verified: list[int] = []

    class Network:
        submit = staticmethod(orders.append)

    class Host:
        @staticmethod
        def verify(slot: int, nbytes: int) -> None:
            assert nbytes == 200
            verified.append(slot)

    served, network, host = ServedBlocks(4), Network(), Host()
    page = [Unit(array("q", [n * 100, 200, 100]), 1, 100) for n in range(2)]
    group = [GroupUnits({0: unit}, unit) for unit in page]
    limit = SendLimit(0, lambda: 0.0)
    side = Serving(network, served, host, [group], limit, StoreMeter())  # type: ignore[arg-type]
    side.on_up(PEER, "10.0.0.1")
    names = [block_key(SHARED, 0, b"%d" % number) for number in range(6)]
    served.offer_pages([((names[0], names[1]), 3), ((names[2], names[3]), 1)])
    fetched = [names[0], names[2], names[4], names[1], names[3]]
    side.on_message(PEER, Fetch(1, 0, [0], fetched))
    assert verified == [3, 1]  # once each
    sent = [order for order in orders if isinstance(order, OutgoingPages)]
    assert [(order.first, order.unit, list(order.ids)) for order in sent] == [
        (0, page[0], [3, 1]),
        (3, page[1], [3, 1]),
    ]
    served.withdraw([1])
    for _ in sent:
        side.on_sent(PagesSent(PEER, 1, 200, 0.0))
    right, lost = FetchOutcome.SENT, FetchOutcome.OVERWRITTEN
    states = bytes([right, lost, FetchOutcome.ABSENT, right, lost])
    assert orders[-1].payload == encode(Sent(1, states))


@pytest.mark.parametrize(
    ("mine", "theirs", "order"),
    [
        (1, 1, [0, 1, 2, 3, 4, 5]),
        (1, 2, [0, 2, 4, 1, 3, 5]),  # pages 0 of its blocks, then pages 1
        (2, 2, [0, 1, 2, 3, 4, 5]),  # a read of one page of each block: all are the same there
        (2, 4, [0, 2, 4, 1, 3, 5]),
        (4, 2, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_source_is_asked_for_the_same_page_of_its_blocks_in_a_row(
    mine: int, theirs: int, order: list[int]
) -> None:
    orders: list[Any] = []

    class Network:
        submit = staticmethod(orders.append)

        def cancel(self, *_: object) -> None: ...

    unit = Unit(array("q", [0, 100, 100]), 1, 100)
    network: Any = Network()
    sources = CacheSources(network, [[GroupUnits({0: unit}, unit)] * mine])
    hello = CacheHello(
        engine=bytes(16), format=b"f", layout=b"l", groups=[{0: 100}], pages=[theirs]
    )
    sources.add(PEER, "there", "tcp", hello, same_layout=False)
    sources.close()  # nobody answers
    names = [block_key(SHARED, 0, b"%d" % number) for number in range(6 * mine)]
    holders = frozenset({PEER})
    wanted = [
        Wanted(name, number // mine, holders, number % mine) for number, name in enumerate(names)
    ]
    Reads(sources, WAIT_S, lambda: 0.0).read(0, wanted)
    messages = [decode(it.payload) for it in orders if isinstance(it, PeerMessage)]
    fetches = [message for message in messages if isinstance(message, Fetch)]
    for page, fetch in enumerate(fetches):
        assert fetch.keys == [names[number * mine + page] for number in order]
    slots = [list(it.spans[0][1]) for it in orders if isinstance(it, IncomingPages)]
    assert slots == [order] * mine and len(fetches) == mine


def test_pages_of_a_group_that_is_not_there() -> None:
    hello = CacheHello(engine=bytes(16), format=b"f", layout=b"l", groups=[{0: 100}], pages=[1, 2])
    unit = Unit(array("q", [0, 100, 100]), 1, 100)
    network: Any = None
    with pytest.raises(ProtocolError, match="groups"):
        CacheSources(network, [[GroupUnits({}, unit)]]).add(PEER, "there", "tcp", hello, False)
    with pytest.raises(ProtocolError):
        decode(encode(msgspec.structs.replace(hello, pages=[0])))


def test_slots_are_served_page_by_page() -> None:
    """A slot's pages come and go together, and a page that moves takes its block along."""
    served = ServedBlocks(4)
    a, b, c, d = names = [block_key(SHARED, 0, b"%d" % number) for number in range(4)]
    served.offer_pages([((a, b), 0), ((c, d), 1)])
    found = [served.find(name) for name in names]
    assert [it and (it.slot, it.page) for it in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    served.offer_pages([((a, b), 2)])
    served.withdraw([0])  # what was there is in slot 2 now
    assert served.find(b) == ServedBlock(2, 0, 1)
    served.drop([a])
    assert served.find(a) is served.find(b) is None and served.find(c) == found[2]
    assert len(served) == 2
    served.offer([(a, 1)])
    assert served.find(c) is served.find(d) is None and served.find(a) == ServedBlock(1, 0)
    served.clear()
    assert not len(served)


# Settings and names -------------------------------------------------------------------------------


def test_page_sizes_that_cannot_be_used() -> None:
    assert [pages_per_block(page, 64) for page in (0, 64, 32, 16, 1)] == [1, 1, 2, 4, 64]
    for page in (48, 128):
        with pytest.raises(ConfigError, match=f"page_tokens={page} .*divides the block size, 64"):
            pages_per_block(page, 64)
    with pytest.raises(ConfigError, match="page_tokens=-1 "):
        check_struct(PeerSettings, {"ask": ["10.0.0.1:1"], "page_tokens": -1})


def test_page_keys() -> None:
    whole, block = (block_key(SHARED, group, b"name") for group in (0, 1))
    pages = (block_key(SHARED, 1, b"a"), block_key(SHARED, 1, b"b"))
    keys = PageKeys([1, 2])
    assert keys.of(whole) == (whole,)
    assert keys.of(block) == ()
    keys.learn({block: pages})
    assert keys.of(block) == pages
    keys.learn({block: pages[:1]})
    assert keys.of(block) == (), "another number of pages"


def test_the_workers_are_told_of_pages() -> None:
    """With a lookup and with a prefetch, and before a block is offered or dropped."""
    page, other = b"page", b"other"
    named = LookupRequest([[b"h"]], 0, 4, page_names={b"h": (page, other)})
    key = named.key(0, b"h")
    pages = (block_key(SHARED, 0, page), block_key(SHARED, 0, other))
    for request, wanted in ((named, {key: pages}), (named._replace(page_names={}), {})):
        index = HostIndex(4, 1, make_policy("lru", 4))
        limits = TierLimits(1, 9.0, 9.0, 4, reused=False)
        stats = OffloadingConnectorStats()
        plan = TierPlan(
            index,
            (CacheGroup(4),),
            stats,
            limits,
            lambda offer: PrefetchDecision(len(offer.tiers)),
            lambda *_: None,
        )
        assert plan.lookup("r", request, 0.0)
        work = plan.take(0.0)
        assert work.pages == wanted and len(work.lookups) == 1
        plan.on_answer(TierAnswer(work.lookups[0].job, bytes([2])), 0.0)
        work = plan.take(0.0)
        assert work.pages == wanted and len(work.prefetches) == 1
        for serves in (True, False):
            offers, step = Offers(index, serves), TierInstructions()
            offers.name(request.page_keys([(0, b"h"), (0, b"unknown")]))
            offers.take(step)
            assert step.pages == (wanted if serves else {})
            offers.take(step := TierInstructions())
            assert step.pages == {}
