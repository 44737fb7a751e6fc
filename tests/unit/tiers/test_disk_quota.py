"""The share of the disk tier that one tenant may have, and what the tier knows of its formats."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.keys import block_key, tenant_of
from kvconnect.errors import ConfigError
from kvconnect.tiers.backends import BlockOutcome, make_store
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore, files, formats
from kvconnect.tiers.backends.disk.files import Directory
from kvconnect.tiers.backends.disk.formats import read_format
from kvconnect.tiers.backends.disk.segment import Segment
from kvconnect.tiers.backends.disk.table import TenantQuota, record_bytes
from tests import stores
from tests.stores import Clock, Open, opening

MIB = 1 << 20
OK, ABSENT, LIMITED = BlockOutcome.OK, BlockOutcome.ABSENT, BlockOutcome.LIMITED
BLOCK = 100_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Open]:
    with opening(tmp_path, clock) as make:
        yield make


def keys_of(salt: str, count: int, first: int = 0) -> list[bytes]:
    prefix = tenant_of(salt) + bytes(8)
    return [block_key(prefix, 0, b"%d" % number) for number in range(first, first + count)]


def put(store: DiskStore, keys: Sequence[bytes], nbytes: int = BLOCK) -> list[BlockOutcome]:
    return stores.put(store, keys, nbytes)


def get(store: DiskStore, keys: Sequence[bytes], nbytes: int = BLOCK) -> list[BlockOutcome]:
    return stores.get(store, keys, nbytes)


def abandon(store: DiskStore) -> None:
    """Let go of a folder as a process does that is killed."""
    for segment in store._table.segments.values():
        segment.file.close()
    store._folder.close()
    store._in_flight.close()


def counted(store: DiskStore) -> dict[bytes, int]:
    """What the store believes that tenants hold; nothing may be on its way."""
    quota = store._table._quota
    assert quota is not None
    assert quota._reserved == {}, "something is still on its way"
    return quota.held


def found(store: DiskStore) -> dict[bytes, int]:
    """What tenants hold, block by block."""
    held: dict[bytes, int] = {}
    for segment in store._table.segments.values():
        for row in store._table.live(segment):
            key, length = segment.rows.keys[row], segment.rows.lengths[row]
            held[key[:8]] = held.get(key[:8], 0) + record_bytes(length)
    return held


# What a tenant may store ------------------------------------------------------------------------


def test_a_tenant_stores_up_to_its_share(opened: Open) -> None:
    store = opened(tenant_share=0.25)
    fits = 4 * MIB // record_bytes(BLOCK)
    outcomes = put(store, keys_of("greedy", 60))
    assert outcomes == [OK] * fits + [LIMITED] * (60 - fits)
    assert put(store, keys_of("", 30)) == [OK] * 30  # no tenant is one like the others
    assert put(store, keys_of("modest", 30)) == [OK] * 30
    assert put(store, keys_of("greedy", 1, 100)) == [LIMITED]
    assert get(store, keys_of("greedy", 60)) == [OK] * fits + [ABSENT] * (60 - fits)
    stats = store.take_stats()
    assert stats is not None
    assert stats.reduce()["store_failed_blocks_limited"] == 60 - fits + 1
    assert counted(store) == found(store)
    assert max(counted(store).values()) <= 4 * MIB


def test_without_a_share_nothing_is_bound_or_counted(opened: Open) -> None:
    store = opened()
    assert put(store, keys_of("greedy", 120)) == [OK] * 120
    assert store._table._quota is None


def test_a_tenant_that_is_bound_still_has_its_blocks_replaced(opened: Open) -> None:
    store = opened(tenant_share=0.25)
    outcomes = put(store, keys_of("t", 60))
    full = outcomes.count(OK)
    assert put(store, keys_of("t", full)) == [OK] * full
    longer = put(store, keys_of("t", 1), BLOCK + 20 * 4096)
    assert longer == [LIMITED]
    assert get(store, keys_of("t", 1)) == [OK]  # the old one is still there
    assert counted(store) == found(store)
    one = keys_of("t", 1)
    assert store.remove(one) == [OK]
    assert put(store, one * 2) == [OK, LIMITED]  # the second may not count on the first
    assert get(store, one) == [OK]
    assert counted(store) == found(store)


def test_removed_and_evicted_blocks_make_room(opened: Open) -> None:
    store = opened(tenant_share=0.25)
    full = put(store, keys_of("t", 60)).count(OK)
    assert store.remove(keys_of("t", 10)) == [OK] * 10
    assert store.remove(keys_of("t", 10)) == [ABSENT] * 10
    assert put(store, keys_of("t", 60, 100)).count(OK) == 10
    for round_ in range(4):  # others push the tenant's segments out
        put(store, keys_of(f"other {round_}", 38))
    assert 0 in store.exists(keys_of("t", full))
    assert counted(store) == found(store)
    assert OK in put(store, keys_of("t", 20, 200))


def test_blocks_that_were_not_written_take_no_share(
    opened: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tenant_share=0.25)
    assert put(store, keys_of("t", 1)) == [OK]

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwritev", broken)
        for _ in range(3):
            assert set(put(store, keys_of("t", 30, 1))) == {BlockOutcome.FAILED}
            clock.now += 100
    assert counted(store) == found(store) == {tenant_of("t"): record_bytes(BLOCK)}
    assert put(store, keys_of("t", 30, 1)) == [OK] * 30


def test_bound_blocks_are_no_news_of_the_disk(
    opened: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put of which nothing is tried neither closes a breaker nor takes its one probe."""
    store = opened(tenant_share=0.25)
    put(store, keys_of("t", 60))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwritev", broken)
        assert put(store, keys_of("other", 1)) == [BlockOutcome.FAILED]
    assert put(store, keys_of("t", 1, 100)) == [LIMITED]
    assert put(store, keys_of("other", 1)) == [BlockOutcome.UNAVAILABLE]
    clock.now += 2
    assert put(store, keys_of("t", 1, 100)) == [LIMITED]
    assert "open" in repr(store._guards.writes)
    assert put(store, keys_of("other", 1)) == [OK]
    assert "closed" in repr(store._guards.writes)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_tenant_that_is_alone_gets_its_share_back_with_age(
    opened: Open, clock: Clock, share: float
) -> None:
    """Whether its blocks fill a part of one segment or several."""
    store = opened(tenant_share=share, ttl_s=100)
    full = put(store, keys_of("t", 140)).count(OK)
    assert 0 < full < 140
    clock.now += 99
    assert put(store, keys_of("t", 1, 200)) == [LIMITED]
    clock.now += 2
    assert put(store, keys_of("t", 1, 200)) == [LIMITED]  # which makes room
    assert put(store, keys_of("t", full, 200)) == [OK] * full
    assert counted(store) == found(store)


def test_keys_that_are_shorter_are_tenants_of_their_own(opened: Open) -> None:
    store = opened(tenant_share=0.25)
    assert put(store, [b"short", b"x"], 3 * MIB) == [OK, OK]
    assert put(store, [b"12345678-a", b"12345678-b"], 3 * MIB) == [OK, LIMITED]
    assert store.remove([b"short"]) == [OK]
    assert counted(store) == found(store)


# The count --------------------------------------------------------------------------------------


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_the_count_outlives_restarts(
    opened: Open, tmp_path: Path, crashed: bool, indexed: bool
) -> None:
    store = opened(tenant_share=0.5)
    for turn in range(3):  # blocks that replace others, in the same segment and in another
        put(store, keys_of("a", 30) + keys_of("b", 10) + keys_of("a", 1), BLOCK + turn)
    store.remove(keys_of("a", 5))
    before = dict(counted(store))
    assert (
        before
        == found(store)
        == {
            tenant_of("a"): 25 * record_bytes(BLOCK + 2),
            tenant_of("b"): 10 * record_bytes(BLOCK + 2),
        }
    )
    abandon(store) if crashed else store.close()
    if not indexed:
        for path in tmp_path.rglob("*.idx"):
            path.unlink()
    store = opened(tenant_share=0.5)
    assert counted(store) == found(store) == before
    store.close()
    store = opened(b"another", tenant_share=0.5)
    assert counted(store) == found(store) == {}


def test_a_block_that_is_there_twice_counts_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process was killed, or the disk failed, before the old record was marked as gone."""
    store = opened(tenant_share=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "mark_deleted", lambda self, rows: [])
        for turn in range(3):
            put(store, keys_of("a", 25), BLOCK + turn)
    assert len(store._table.segments) > 1
    abandon(store)
    store = opened(tenant_share=0.5)
    held = {tenant_of("a"): 25 * record_bytes(BLOCK + 2)}
    assert counted(store) == found(store) == held


def test_a_bound_that_is_new_counts_what_is_there(opened: Open) -> None:
    store = opened()
    put(store, keys_of("t", 100))
    store.close()
    store = opened(tenant_share=0.25)
    assert counted(store) == found(store)
    assert put(store, keys_of("t", 1, 200)) == [LIMITED]
    assert put(store, keys_of("u", 1)) == [OK]


def test_the_smaller_tier_after_a_restart_has_the_smaller_count(opened: Open) -> None:
    store = opened(capacity=64 * MIB, tenant_share=0.9)
    put(store, keys_of("t", 300))
    store.close()
    store = opened(tenant_share=0.9)
    assert counted(store) == found(store)
    assert 0 < counted(store)[tenant_of("t")] < 16 * MIB


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "remove", "restart", "kill"]), *[st.integers(0, 9)] * 2
    ),
    max_size=12,
)


def run_steps(open_store: Callable[[], DiskStore], steps: Sequence[Step]) -> None:
    """Do things to a store of 16 MiB with a share of 5; its count must be right after each."""
    store = open_store()
    try:
        for what, tenant, number in steps:
            keys = keys_of(f"{tenant % 3}", 12, 4 * number)
            if what == "put":
                put(store, keys, 100_000 + 4096 * (number % 3))
            elif what == "remove":
                store.remove(keys[:5])
            else:
                store.close() if what == "restart" else abandon(store)
                store = open_store()
            assert counted(store) == found(store)
            assert max(counted(store).values(), default=0) <= 5 * MIB
    finally:
        store.close()


def opener(folder: Path) -> Callable[[], DiskStore]:
    chosen = DiskOptions(path=str(folder), capacity=16 * MIB, min_free=0, tenant_share=5 / 16)
    return lambda: DiskStore(chosen, b"format")


@given(steps=STEPS)
@settings(max_examples=25, deadline=None)
def test_the_count_is_right_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    run_steps(opener(tmp_path_factory.mktemp("tier")), steps)


PLAIN: list[Step] = [("put", n % 3, n) for n in range(10)] + [("put", 0, 0), ("remove", 0, 0)] * 2
PLAIN += [("restart", 0, 0), ("put", 1, 1), ("kill", 0, 0)]


@pytest.mark.parametrize("fault", ["went", "came", "coming"])
def test_a_count_that_is_wrong_is_found(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_steps(opener(tmp_path / "good"), PLAIN)
    update = TenantQuota.update
    if fault == "went":
        monkeypatch.setattr(
            TenantQuota, "update", lambda self, added, gone: update(self, added, ())
        )
    elif fault == "came":
        monkeypatch.setattr(TenantQuota, "update", lambda self, added, gone: update(self, (), gone))
    else:
        monkeypatch.setattr(TenantQuota, "release", lambda self, reserved: None)
    with pytest.raises(AssertionError):
        run_steps(opener(tmp_path / "bad"), PLAIN)


def race(store: DiskStore) -> int:
    """Have four threads store more than a share at the same time; return what is held then."""
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait(30)
        rng = random.Random(seed)
        for turn in range(8):
            keys = keys_of("t", 5, 1000 * seed + 5 * turn)
            put(store, keys)
            if rng.random() < 0.3:
                store.remove(keys)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found(store)[tenant_of("t")]


def test_calls_at_the_same_time_do_not_pass_the_bound_together(opened: Open) -> None:
    store = opened(tenant_share=0.25)
    assert 3 * MIB < race(store) <= 4 * MIB
    assert counted(store) == found(store)


def test_what_is_on_its_way_counts() -> None:
    """Two calls of which the second begins before the first has ended."""
    key, other = keys_of("t", 2)
    size = record_bytes(BLOCK)
    quota = TenantQuota(size)
    admitted, reserved = quota.reserve([key], [BLOCK], {})
    assert (admitted, reserved) == ([0], {tenant_of("t"): size})
    assert quota.reserve([other], [BLOCK], {}) == ([], {})
    quota.release(reserved)  # it failed
    assert quota.reserve([other], [BLOCK], {})[0] == [0]


def test_a_block_is_replaced_once_however_often_a_call_has_it() -> None:
    [key] = keys_of("t", 1)
    long, short = 40_000, 5_000
    quota = TenantQuota(record_bytes(long))
    quota.update([(key, long)], ())
    admitted, reserved = quota.reserve([key, key], [short, long], {key: long})
    assert (admitted, reserved) == ([0], {tenant_of("t"): record_bytes(short)})
    quota.release(reserved)
    assert quota.reserve([key], [long], {key: long})[0] == [0]


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_a_share_is_a_part_of_all(tmp_path: Path, share: float) -> None:
    good = {"path": str(tmp_path), "capacity": "16MiB", "tenant_share": 1}
    make_store("disk", good, b"f").close()
    with pytest.raises(ConfigError, match=r"tenant_share=.*more than 0, up to 1"):
        make_store("disk", good | {"tenant_share": share}, b"f")


# What a fingerprint means -----------------------------------------------------------------------


def test_a_store_writes_down_what_its_fingerprint_means(opened: Open, tmp_path: Path) -> None:
    store = opened(b"\x0a", about={"model": "org/model", "dtype": "bfloat16"})
    store.close()
    folder = tmp_path / "0"
    assert read_format(Directory(str(folder)), b"\x0a") == {
        "model": "org/model",
        "dtype": "bfloat16",
    }
    assert [path.name for path in (folder / "formats").iterdir()] == ["0a.json"]
    assert read_format(Directory(str(folder)), b"\x0b") == {}
    opened(b"\x0a").close()  # says nothing, and takes nothing back
    assert read_format(Directory(str(folder)), b"\x0a")["model"] == "org/model"
    opened(b"\x0a", about={"model": "renamed"}).close()
    assert read_format(Directory(str(folder)), b"\x0a") == {"model": "renamed"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"model": 1}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model":' + b"[" * 10_000,
        b'{"model": "' + b"x" * formats.MAX_FORMAT_BYTES + b'"}',
    ],
)
def test_what_is_written_there_is_not_trusted(opened: Open, tmp_path: Path, text: bytes) -> None:
    opened(b"\x0a", about={"model": "m"}).close()
    path = tmp_path / "0" / "formats" / "0a.json"
    assert read_format(Directory(str(tmp_path / "0")), b"\x0a") == {"model": "m"}
    path.write_bytes(text)
    assert read_format(Directory(str(tmp_path / "0")), b"\x0a") == {}
    assert put(opened(b"\x0a"), [b"k"]) == [OK]  # blocks have nothing to do with it


def test_a_store_opens_where_that_cannot_be_written(opened: Open, tmp_path: Path) -> None:
    opened(b"\x0a").close()
    (tmp_path / "0" / "formats").write_bytes(b"in the way")
    store = opened(b"\x0a", about={"model": "m"})
    assert put(store, [b"k"]) == [OK]
    assert read_format(Directory(str(tmp_path / "0")), b"\x0a") == {}


def test_the_file_is_replaced_in_one_piece(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(b"\x0a", about={"model": "old"}).close()
    real = os.write

    def torn(handle: int, data: bytes) -> int:
        return real(handle, data[: len(data) // 2]) if b"new" in data else real(handle, data)

    monkeypatch.setattr(files.os, "write", torn)
    opened(b"\x0a", about={"model": "new"}).close()
    assert read_format(Directory(str(tmp_path / "0")), b"\x0a") == {"model": "old"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"model": 1}, "use an object of words"),
        ("model", "use an object of words"),
        ({"model": "x" * formats.MAX_FORMAT_BYTES}, "about='164.. bytes'.*use 16384"),
    ],
)
def test_what_it_means_is_words(tmp_path: Path, value: object, text: str) -> None:
    good: dict[str, object] = {"path": str(tmp_path), "capacity": "16MiB", "about": {"model": "m"}}
    make_store("disk", good, b"f").close()
    with pytest.raises(ConfigError, match=text):
        make_store("disk", good | {"about": value}, b"f")
