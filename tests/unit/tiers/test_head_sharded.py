"""Records of units: what one number of ranks writes, another reads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvconnect.cache.head_shards import HeadUnit
from kvconnect.errors import Misuse
from kvconnect.offload.host_arena import HostArena
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.testing.buffers import payload_of
from kvconnect.testing.store import check_store
from kvconnect.tiers.backends.base import MAX_KEY_BYTES, BlockOutcome, Store, Usage, check_buffers
from kvconnect.tiers.backends.head_sharded import HeadShardedStore
from kvconnect.tiers.backends.memory import MemoryStore
from kvconnect.tiers.messages import SECONDARY_TIERS
from kvconnect.tiers.tiered_store import BlockBatch, TieredStore
from kvconnect.types import Tier
from tests.unit.cache.sharded_caches import LAYOUTS, MODELS, Layout, Model, Rank, can_share, ranks

MIB = 1 << 20
MODEL = Model(layers=2, heads=4, tokens=4, width=3)
MIXED = Layout("BNLH", joined=True)
WHOLE = [HeadUnit(0, ((0, 100),))]
FIRST, SECOND, THIRD = KEYS = [b"first", b"second", b"third"]


def sliced(inner: Store, *layouts: Sequence[HeadUnit]) -> HeadShardedStore:
    """A store in which the last byte of a key is its group, if there are several."""
    return HeadShardedStore(inner, layouts, lambda key: key[-1] if len(layouts) > 1 else 0)


def put(store: Store, blocks: dict[bytes, bytes]) -> list[BlockOutcome]:
    return store.put(list(blocks), [memoryview(bytearray(block)) for block in blocks.values()])


def get(store: Store, keys: Sequence[bytes], nbytes: int) -> list[bytes | BlockOutcome]:
    buffers = [bytearray(nbytes) for _ in keys]
    outcomes = store.get(keys, [memoryview(buffer) for buffer in buffers])
    return [
        bytes(buffer) if outcome is BlockOutcome.OK else outcome
        for buffer, outcome in zip(buffers, outcomes, strict=True)
    ]


class Filled:
    """Three blocks of one rank with all heads of ``MODEL``, in a sliced store."""

    def __init__(self, inner: MemoryStore | None = None) -> None:
        self.inner = inner or MemoryStore(MIB)
        rank = Rank(MODEL, MIXED, (0, 4))
        self.units = rank.units()
        self.store = sliced(self.inner, self.units)
        self.blocks = {key: rank.slot(MODEL.block(n)) for n, key in enumerate(KEYS)}
        self.nbytes = len(self.blocks[FIRST])
        assert put(self.store, self.blocks) == [BlockOutcome.OK] * 3

    def get(self) -> list[bytes | BlockOutcome]:
        return get(self.store, KEYS, self.nbytes)


def record(key: bytes, number: int) -> bytes:
    return key + number.to_bytes(2, "big")


# Any number of ranks ----------------------------------------------------------------------------


@given(MODELS, st.tuples(LAYOUTS, LAYOUTS), *[st.sampled_from([1, 2, 4, 8])] * 2)
def test_what_some_ranks_write_others_read(
    model: Model, layouts: tuple[Layout, Layout], writers: int, readers: int
) -> None:
    assume(can_share(model, writers) and can_share(model, readers))
    inner = MemoryStore(MIB)
    blocks = {key: model.block(n) for n, key in enumerate(KEYS)}
    for rank in ranks(model, layouts[0], writers):
        slots = {key: rank.slot(whole) for key, whole in blocks.items()}
        assert put(sliced(inner, rank.units()), slots) == [BlockOutcome.OK] * 3
    for rank in ranks(model, layouts[1], readers):
        store, nbytes = sliced(inner, rank.units()), rank.group().block_bytes
        assert store.exists(KEYS) == [nbytes] * 3
        assert get(store, KEYS, nbytes) == [rank.slot(whole) for whole in blocks.values()]


@given(MODELS, LAYOUTS)
def test_all_write_the_same_records(model: Model, layout: Layout) -> None:
    kept = []
    for tp in (1, 2, 4):
        assume(can_share(model, tp))
        inner = MemoryStore(MIB)
        for rank in ranks(model, layout, tp):
            put(sliced(inner, rank.units()), {FIRST: rank.slot(model.block(1))})
        kept.append(dict(inner._blocks))
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == (8 if model.heads == 16 else model.heads)


def test_the_comparison_sees_swapped_units() -> None:
    """Negative control: two units change places, in the records or in the layout."""
    filled = Filled()
    expected = list(filled.blocks.values())
    assert filled.get() == expected
    numbers = [1, 0, 2, 3]
    swapped = [HeadUnit(n, unit.runs) for n, unit in zip(numbers, filled.units, strict=True)]
    found = get(sliced(filled.inner, swapped), KEYS, filled.nbytes)
    assert [block == right for block, right in zip(found, expected, strict=True)] == [False] * 3
    kept = filled.inner._blocks
    a, b = record(SECOND, 2), record(SECOND, 3)
    kept[a], kept[b] = kept[b], kept[a]
    assert [block == right for block, right in zip(filled.get(), expected, strict=True)] == [
        True,
        False,
        True,
    ]


# The seam ---------------------------------------------------------------------------------------

ROOM = MIB + 4
STRIPES = [
    HeadUnit(0, tuple((start, 4096) for start in range(4, MIB, 8192))),
    HeadUnit(1, ((MIB, 4), *((start, 4096) for start in range(4100, MIB - 4096, 8192)))),
    HeadUnit(2, ((0, 4), (MIB - 4092, 4092))),
]


class AnyLength(Store):
    """Blocks of any length up to 1 MiB in the one length that a layout has: with their own length
    in front, and what is left at the end."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, payloads, writable=False)
        blocks = []
        for payload in payloads:
            block = payload.nbytes.to_bytes(4, "big") + bytes(payload)
            blocks.append(memoryview(bytearray(block + bytes(ROOM - len(block)))))
        return self._inner.put(keys, blocks)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        outcomes, blocks = self._get(keys)
        for number, (block, buffer) in enumerate(zip(blocks, buffers, strict=True)):
            if outcomes[number] is BlockOutcome.OK:
                length = int.from_bytes(block[:4], "big")
                if length == buffer.nbytes:
                    buffer[:] = block[4 : 4 + length]
                else:
                    outcomes[number] = BlockOutcome.SIZE
        return outcomes

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        lengths = self._inner.exists(keys)
        assert set(lengths) <= {0, ROOM}
        _, blocks = self._get(keys)
        found = zip(lengths, blocks, strict=True)
        return [int.from_bytes(block[:4], "big") if length else 0 for length, block in found]

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        return self._inner.remove(keys)

    def usage(self) -> Usage:
        return self._inner.usage()

    def take_stats(self) -> OffloadingConnectorStats | None:
        return self._inner.take_stats()

    def close(self) -> None:
        self._inner.close()

    def _get(self, keys: Sequence[bytes]) -> tuple[list[BlockOutcome], list[bytearray]]:
        blocks = [bytearray(ROOM) for _ in keys]
        return self._inner.get(keys, [memoryview(block) for block in blocks]), blocks


def spoil_unit(inner: MemoryStore, name: bytes) -> None:
    kept = inner._blocks[name]
    changed = bytes([kept.payload[0] ^ 1]) + kept.payload[1:]
    inner._blocks[name] = kept._replace(payload=changed)


@pytest.mark.parametrize("layout", [STRIPES, [HeadUnit(0, ((0, ROOM),))]])
def test_the_contract_of_stores(layout: list[HeadUnit], tmp_path: Path) -> None:
    inner: list[MemoryStore] = []

    def make(_: Path) -> Store:
        inner.append(MemoryStore(256 * MIB))
        return AnyLength(sliced(inner[-1], layout))

    def spoil(_: Store, key: bytes) -> None:
        spoil_unit(inner[-1], record(key, layout[-1].number))

    check_store(make, tmp_path, spoil=spoil)


def test_a_layout_that_takes_bytes_twice_fails_the_contract(tmp_path: Path) -> None:
    """Negative control of the test above: other bytes, which nobody takes, are lost."""
    twice = HeadUnit(0, (STRIPES[1].runs[1], *STRIPES[0].runs[1:]))
    store = MemoryStore(256 * MIB)
    with pytest.raises(AssertionError, match="check_round_trip: other bytes"):
        check_store(lambda _: AnyLength(sliced(store, [twice, *STRIPES[1:]])), tmp_path)


def test_long_keys_have_records_of_their_own() -> None:
    store = sliced(MemoryStore(MIB), WHOLE)
    keys = [b"k" * length for length in range(MAX_KEY_BYTES - 4, MAX_KEY_BYTES + 1)]
    keys += [key[:-1] + b"l" for key in keys] + [key + record(b"", 0) for key in keys[:2]]
    # What stands for a long key in the names of its records is a key, too.
    keys += [name[:-2] for key in keys if len(key) > 253 for name in store._layouts[0].names(key)]
    blocks = {key: payload_of(key, 100) for key in keys}
    assert put(store, blocks) == [BlockOutcome.OK] * len(keys)
    assert get(store, keys, 100) == list(blocks.values())


# One unit of several ----------------------------------------------------------------------------


def test_a_flipped_byte_spoils_its_block_only() -> None:
    filled = Filled()
    first, _, third = filled.blocks.values()
    spoil_unit(filled.inner, record(SECOND, 3))
    assert filled.get() == [first, BlockOutcome.CORRUPT, third]
    assert filled.get() == [first, BlockOutcome.ABSENT, third]
    assert put(filled.store, filled.blocks) == [BlockOutcome.OK] * 3
    assert filled.get() == list(filled.blocks.values())


@pytest.mark.parametrize("number", range(4))
def test_a_unit_is_missing(number: int) -> None:
    filled = Filled()
    first, _, third = filled.blocks.values()
    filled.inner.remove([record(SECOND, number)])
    spoil_unit(filled.inner, record(SECOND, (number + 1) % 4))
    assert filled.store.exists(KEYS) == [filled.nbytes, 0, filled.nbytes]
    assert filled.get() == [first, BlockOutcome.ABSENT, third]
    assert filled.store.remove(KEYS) == [BlockOutcome.OK, BlockOutcome.ABSENT, BlockOutcome.OK]
    assert filled.inner.usage().blocks == 0


def test_a_unit_of_another_length() -> None:
    filled = Filled()
    put(filled.inner, {record(THIRD, 1): b"short"})
    assert filled.store.exists(KEYS) == [filled.nbytes, filled.nbytes, 0]
    assert filled.get() == [*list(filled.blocks.values())[:2], BlockOutcome.SIZE]


class OneByOne(MemoryStore):
    """Counts the names that it is asked for."""

    asks_one_by_one = True
    asked = 0

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        self.asked += len(keys)
        return super().exists(keys)


def test_where_each_question_costs_a_request_one_unit_stands_for_its_block() -> None:
    filled, inner = Filled(), OneByOne(MIB)
    inner._blocks = filled.inner._blocks
    store = sliced(inner, filled.units)
    assert store.asks_one_by_one and not filled.store.asks_one_by_one
    inner.remove([record(SECOND, filled.units[0].number), record(THIRD, filled.units[1].number)])
    assert store.exists(KEYS) == [filled.nbytes, 0, filled.nbytes]
    assert inner.asked == len(KEYS)
    first = filled.blocks[FIRST]
    assert get(store, KEYS, filled.nbytes) == [first, BlockOutcome.ABSENT, BlockOutcome.ABSENT]


def test_a_write_back_writes_a_block_that_lacks_any_unit(stack: ExitStack) -> None:
    """Mooncake evicts units one by one. A lookup finds such a block, which must not stay so."""
    filled = Filled(inner := OneByOne(MIB))
    host = HostArena(1, MIB, "full")
    stack.callback(host.close)
    tiers = TieredStore({Tier.REMOTE: filled.store}, host, 5.0)
    stack.callback(tiers.close)
    host.view(0, filled.nbytes)[:] = filled.blocks[SECOND]
    host.seal(0, filled.nbytes)
    inner.remove([record(SECOND, filled.units[-1].number)])
    assert filled.store.exists([SECOND]) == [filled.nbytes]
    assert filled.get()[1] is BlockOutcome.ABSENT
    done: SimpleQueue[bytes] = SimpleQueue()
    tiers.write_back(BlockBatch([SECOND], [filled.nbytes], math.inf, done.put, [0]))
    assert done.get(timeout=60.0) == bytes([SECONDARY_TIERS.index(Tier.REMOTE)])
    assert filled.get() == list(filled.blocks.values())


class Moody(MemoryStore):
    """Says no to some records, whether it has kept them or not."""

    answers: dict[bytes, BlockOutcome]

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        refused = self.__dict__.get("answers", {})
        taken = [n for n, key in enumerate(keys) if refused.get(key) is not BlockOutcome.FULL]
        super().put([keys[n] for n in taken], [payloads[n] for n in taken])
        return [refused.get(key, BlockOutcome.OK) for key in keys]


@pytest.mark.parametrize("outcome", [BlockOutcome.FULL, BlockOutcome.FAILED])
def test_a_put_that_fails_half_way_leaves_no_mixture(outcome: BlockOutcome) -> None:
    inner = Moody(MIB)
    filled = Filled(inner)
    old = filled.blocks
    new = {key: bytes(byte ^ 0xFF for byte in block) for key, block in old.items()}
    inner.answers = {record(SECOND, 1): outcome}
    if outcome is BlockOutcome.FAILED:  # of a whole block: who knows what the server did
        inner.answers = {record(SECOND, number): outcome for number in range(4)}
    assert put(filled.store, new) == [BlockOutcome.OK, outcome, BlockOutcome.OK]
    assert filled.get() == [new[FIRST], BlockOutcome.ABSENT, new[THIRD]]
    inner.answers = {record(THIRD, number): BlockOutcome.FULL for number in range(4)}
    assert put(filled.store, old) == [BlockOutcome.OK, BlockOutcome.OK, BlockOutcome.FULL]
    assert filled.get() == [old[FIRST], old[SECOND], new[THIRD]]


# Calls ------------------------------------------------------------------------------------------


def test_buffers_of_another_length_than_the_layout() -> None:
    filled = Filled()
    key, block = next(iter(filled.blocks.items()))
    for length in (1, filled.nbytes - 1, filled.nbytes + 1):
        assert (
            put(filled.store, {key: bytes(length), b"new": bytes(length)})
            == [BlockOutcome.SIZE] * 2
        )
        assert get(filled.store, [key], length) == [BlockOutcome.SIZE]
    assert get(filled.store, [key], filled.nbytes) == [block]


def test_groups_have_layouts_of_their_own() -> None:
    layouts = [Rank(MODEL, MIXED, (0, 4)).units(), WHOLE, STRIPES]
    sizes = [sum(unit.nbytes for unit in layout) for layout in layouts]
    inner = MemoryStore(64 * MIB)
    store = sliced(inner, *layouts)
    keys = [b"%d-%c" % (n, n % 3) for n in range(9)]
    blocks = {key: payload_of(key, sizes[key[-1]]) for key in keys}
    assert put(store, blocks) == [BlockOutcome.OK] * 9
    assert store.exists([*keys, b"?\x01"]) == [*(len(block) for block in blocks.values()), 0]
    for shift in range(3):
        order = [*keys[shift:], *keys[:shift]]
        buffers = [bytearray(sizes[key[-1]]) for key in order]
        assert store.get(order, [memoryview(b) for b in buffers]) == [BlockOutcome.OK] * 9
        assert buffers == [blocks[key] for key in order]
    with pytest.raises(Misuse, match="a key of group 3, there are 3"):
        store.exists([b"\x00", b"\x03"])
    assert inner.usage().blocks == 3 * (4 + 1 + 3)


def test_read_only_payloads_and_keys_that_occur_twice() -> None:
    filled = Filled()
    old, new = filled.blocks[FIRST], filled.blocks[SECOND]
    assert (
        filled.store.put([THIRD, THIRD], [memoryview(old), memoryview(new)])
        == [BlockOutcome.OK] * 2
    )
    assert get(filled.store, [THIRD, FIRST, THIRD], filled.nbytes) == [new, old, new]


class Watched(MemoryStore):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(256 * MIB)
        self.views: list[list[memoryview]] = []
        self.puts = self.gets = 0
        self.during_put: Callable[[], None] = lambda: None

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        self.puts += 1
        self.views.append(list(payloads))
        self.during_put()
        return super().put(keys, payloads)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        self.gets += 1
        self.views.append(list(buffers))
        return super().get(keys, buffers)


def test_a_call_is_cut_where_it_grows_large() -> None:
    inner = Watched()
    store = sliced(inner, STRIPES)
    blocks = {b"%d" % n: payload_of(b"%d" % n, ROOM) for n in range(40)}
    assert put(store, blocks) == [BlockOutcome.OK] * 40
    assert get(store, list(blocks), ROOM) == list(blocks.values())
    # Of each block the memory has three places that are as large as the largest unit.
    assert inner.puts == inner.gets == 4
    assert max(sum(view.nbytes for view in views) for views in inner.views) <= 16 * MIB


def test_a_unit_in_one_piece_is_not_copied() -> None:
    inner = Watched()
    store = sliced(
        inner,
        [HeadUnit(0, ((40, 60),)), HeadUnit(1, ((0, 20), (30, 10))), HeadUnit(2, ((20, 10),))],
    )
    block = bytearray(payload_of(b"key", 100))
    assert store.put([b"key"], [memoryview(block)]) == [BlockOutcome.OK]
    assert [view.obj is block for view in inner.views[0]] == [True, False, True]
    assert bytes(inner.views[0][1][:20]) == block[:20]
    assert get(store, [b"key"], 100) == [bytes(block)]


def test_a_get_waits_for_a_put_of_its_key_and_for_no_other() -> None:
    filled = Filled(inner := Watched())
    old, new = filled.blocks[FIRST], filled.blocks[SECOND]
    found: list[list[bytes | BlockOutcome]] = []
    readers: list[threading.Thread] = []

    def look() -> None:
        for keys in ([THIRD], [SECOND, FIRST]):
            thread = threading.Thread(
                target=lambda keys=keys: found.append(get(filled.store, keys, filled.nbytes)),
                daemon=True,
            )
            thread.start()
            thread.join(60.0 if keys == [THIRD] else 0.1)
            readers.append(thread)
        assert [thread.is_alive() for thread in readers] == [False, True]

    inner.during_put = look
    assert put(filled.store, {FIRST: new}) == [BlockOutcome.OK]
    readers[1].join(60.0)
    assert found == [[filled.blocks[THIRD]], [new, new]]
    assert old != new


def test_what_the_inner_store_says_of_itself() -> None:
    filled = Filled()
    assert filled.store.usage() == Usage(-1, 0, 0, True)
    spoil_unit(filled.inner, record(FIRST, 0))
    filled.get()
    stats = filled.store.take_stats()
    assert stats is not None
    assert filled.inner.take_stats() is None
    filled.store.close()
    assert not filled.inner.usage().available
    assert filled.store.usage() == Usage(-1, 0, 0, False)
    assert filled.get() == [BlockOutcome.UNAVAILABLE] * 3


@pytest.mark.parametrize(
    "layout",
    [
        [],
        [*WHOLE, *WHOLE],
        [HeadUnit(0, ((1, 10),))],
        [HeadUnit(0, ((0, 4),)), HeadUnit(1, ((5, 4),))],
    ],
)
def test_layouts_that_no_block_has(layout: list[HeadUnit]) -> None:
    with pytest.raises(Misuse, match="a layout of"):
        sliced(MemoryStore(MIB), layout)
