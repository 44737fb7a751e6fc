"""The disk tier on real files: what is kept, what is dropped, and what goes wrong with disks."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.buffers import payload_of, spoil_files
from kvconnect.tiers.backends import BlockOutcome, make_store
from kvconnect.tiers.backends.disk import DiskStore, files
from kvconnect.tiers.backends.disk.files import Directory, PageFile
from kvconnect.tiers.backends.disk.segment import Segment
from tests.fuzz.crash_disk import crash_loop
from tests.stores import Clock, Open, get, opening, put

MIB = 1 << 20
OK, ABSENT, CORRUPT = BlockOutcome.OK, BlockOutcome.ABSENT, BlockOutcome.CORRUPT


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Open]:
    with opening(tmp_path, clock) as make:
        yield make


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}-{number}".encode() for number in range(count)]


def segments(folder: Path, ending: str = ".seg") -> list[Path]:
    return sorted(folder.rglob(f"*{ending}"))


def counted(store: DiskStore) -> dict[str, float]:
    stats = store.take_stats()
    return {} if stats is None else stats.reduce()


# Restarts ---------------------------------------------------------------------------------------


def test_a_restart_reads_indexes_and_not_records(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = names("k", 2000)
    store = opened()
    put(store, keys)
    store.close()
    reads: list[int] = []
    real = PageFile.read

    def read(self: PageFile, views: Sequence[memoryview], offset: int) -> None:
        reads.append(offset)
        real(self, views, offset)

    monkeypatch.setattr(PageFile, "read", read)
    store = opened()
    found = store.usage().blocks
    assert found > 1000
    assert set(reads) == {0}  # the heads of the segments
    assert get(store, keys).count(OK) == found


def test_a_file_that_is_used_again_leaves_no_index(opened: Open, tmp_path: Path) -> None:
    """Also if it was of a format that this store does not read."""
    old = opened(b"of another model")
    put(old, names("old", 2500))
    old.close()
    stems = {index.with_suffix("") for index in segments(tmp_path, ".idx")}
    assert len(stems) >= 3
    store = opened()
    put(store, names("new", 2500))
    left = {segment.with_suffix("") for segment in segments(tmp_path)}
    assert stems - left, "no file was used again"
    assert {index.with_suffix("") for index in segments(tmp_path, ".idx")} <= left


@pytest.mark.parametrize("damage", ["removed", "flipped", "cut", "huge"])
def test_an_index_that_is_bad_is_made_anew(opened: Open, tmp_path: Path, damage: str) -> None:
    keys = names("k", 1500)
    store = opened()
    put(store, keys)
    before = get(store, keys)
    store.close()
    for index in segments(tmp_path, ".idx"):
        data = bytearray(index.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "removed":
            index.unlink()
        else:
            index.write_bytes({"flipped": data, "cut": data[:50], "huge": data * 200}[damage])
    store = opened()
    assert get(store, keys) == before
    assert before.count(OK) > 1000


def test_killed_processes_leave_what_they_acknowledged(tmp_path: Path) -> None:
    figures = crash_loop(tmp_path, runs=8, seed=1)
    assert figures.pop("read") > 100
    assert figures == {"runs": 8, "wrong": 0, "torn": 0, "lost": 0, "too_large": 0}


def abandon(store: DiskStore) -> None:
    """Let go of a folder as a process does that is killed."""
    for segment in store._table.segments.values():
        segment.file.close()
    store._folder.close()
    store._in_flight.close()


def test_a_torn_record_is_found_and_dropped(opened: Open, tmp_path: Path) -> None:
    keys = names("k", 6)
    store = opened()
    put(store, keys)
    abandon(store)
    [path] = segments(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.find(payload_of(keys[3], 5000))
    data[at + 4096 - at % 4096 : at + 8192] = bytes(at % 4096 + 4096)  # the last page is missing
    path.write_bytes(data)
    store = opened()
    assert store.exists(keys) == [5000, 5000, 5000, 0, 5000, 5000]
    assert get(store, keys) == [OK, OK, OK, ABSENT, OK, OK]
    assert put(store, [keys[3]]) == [OK]
    abandon(store)
    assert get(opened(), keys) == [OK] * 6


@pytest.mark.parametrize("cut", ["killed", "failed"])
def test_a_block_that_was_replaced_and_removed_does_not_come_back(
    opened: Open, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """Also if the process ended before its first record was marked, or the disk failed."""
    store, key = opened(), b"key"
    put(store, [key, *names("others", 500)])
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "mark_deleted", lambda _, rows: rows if cut == "failed" else [])
        assert put(store, [key]) == [OK]
        if cut == "failed":
            assert store.remove([key]) == [BlockOutcome.FAILED]
            assert put(store, [key]) == [OK]
    if cut == "killed":
        store.close()
        store = opened()
        assert get(store, [key]) == [OK]
    assert store.remove([key]) == [OK]
    store.close()
    store = opened()
    assert store.exists([key, b"others-0"]) == [0, 5000]


def test_a_record_that_cannot_be_marked_leaves_no_other_one(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = opened(), PageFile.write_page
    put(store, [b"bad", b"other", b"last"])

    def write_page(self: PageFile, data: bytes | bytearray, offset: int) -> None:
        if offset == 4096:  # the first record
            raise OSError(errno.EIO, "Input/output error")
        real(self, data, offset)

    monkeypatch.setattr(PageFile, "write_page", write_page)
    assert store.remove([b"bad", b"last"]) == [BlockOutcome.FAILED, OK]
    assert store.remove([b"other"]) == [OK]
    abandon(store)
    assert opened().exists([b"bad", b"other", b"last"]) == [5000, 0, 0]


def test_of_many_records_that_cannot_be_marked_a_few_are_tried_at_a_time(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tried = opened(), list[int]()
    many = names("k", 100)
    put(store, [*many, b"other"])

    def write_page(_: PageFile, data: bytes | bytearray, offset: int) -> None:
        tried.append(offset)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(PageFile, "write_page", write_page)
        assert set(store.remove(many)) == {BlockOutcome.FAILED}
        assert len(tried) == 100
        tried.clear()
        store.remove([b"other"])
        assert len(tried) == 1 + 16
    for _ in range(7):
        store.remove([b"none"])
    abandon(store)
    assert not any(opened().exists([*many, b"other"])), "all are tried in turn"


def test_a_system_without_files_costs_no_segment(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, store = names("k", 500), opened()
    put(store, keys)
    store.close()
    real, last = PageFile.__init__, segments(tmp_path)[-1].name

    def full(self: PageFile, folder: Directory, name: str, mode: int) -> None:
        if name == last:
            raise OSError(errno.EMFILE, "Too many open files")
        real(self, folder, name, mode)

    with monkeypatch.context() as patch:
        patch.setattr(PageFile, "__init__", full)
        store = opened()
        assert 0 < get(store, keys).count(OK) < len(keys)
        store.close()
    store = opened()
    assert get(store, keys) == [OK] * len(keys)


def test_a_bad_spot_costs_one_block_of_a_segment_without_an_index(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, store = names("k", 100), opened()
    put(store, keys)
    store.close()
    for index in segments(tmp_path, ".idx"):
        index.unlink()
    real, bad = PageFile.read, 4096 * (1 + 3 * 50)  # records have three pages

    def read(self: PageFile, views: Sequence[memoryview], offset: int) -> None:
        if offset <= bad < offset + sum(view.nbytes for view in views):
            raise OSError(errno.EIO, "Input/output error")
        real(self, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(PageFile, "read", read)
        store = opened()
    assert get(store, keys) == [OK] * 50 + [ABSENT] + [OK] * 49


def test_room_that_was_never_written_is_stepped_over(opened: Open, tmp_path: Path) -> None:
    keys = names("k", 6)
    store = opened()
    put(store, keys)
    abandon(store)
    [path] = segments(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.find(payload_of(keys[2], 5000)) - 4096
    data[at : at + 3 * 4096] = bytes(3 * 4096)  # given out, but its writer died before
    path.write_bytes(data)
    store = opened()
    assert get(store, keys) == [OK, OK, ABSENT, OK, OK, OK]
    assert put(store, names("new", 50)) == [OK] * 50
    abandon(store)
    assert get(opened(), [*keys[3:], *names("new", 50)]) == [OK] * 53


def test_files_that_are_no_segments_are_removed(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, names("k", 3))
    store.close()
    folder = tmp_path / "0"
    (folder / "00000090.seg").write_bytes(b"x" * 10_000)
    (folder / "00000091.seg").write_bytes(b"")
    (folder / "00000092.idx").write_bytes(b"x")
    (folder / "00000001.idx.new").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"mine")
    assert get(opened(), names("k", 3)) == [OK] * 3
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["00000001.seg", "LOCK", "notes.txt"]


def test_starts_do_not_leave_a_file_each(opened: Open, tmp_path: Path) -> None:
    for turn in range(6):
        store = opened()
        put(store, [b"turn-%d" % turn])
        store.close()
    assert len(segments(tmp_path)) == 1
    assert get(opened(), [b"turn-%d" % turn for turn in range(6)]) == [OK] * 6


def test_a_smaller_capacity_holds_from_the_start(opened: Open) -> None:
    store = opened(capacity=64 * MIB)
    put(store, names("k", 300), 100_000)
    assert store.usage().nbytes > 16 * MIB
    store.close()
    store = opened()
    assert 4 * MIB < store.usage().nbytes <= 16 * MIB
    assert get(store, names("k", 300), 100_000)[-20:] == [OK] * 20  # the newest are left


# Formats and owners -----------------------------------------------------------------------------


def test_blocks_of_another_format_do_not_exist(opened: Open) -> None:
    keys = names("k", 3)
    store = opened(b"one")
    put(store, keys)
    store.close()
    store = opened(b"two")
    assert store.exists(keys) == [0, 0, 0]
    assert get(store, keys) == [ABSENT] * 3
    assert store.usage().nbytes > 15_000  # but they take room
    store.put(keys, [memoryview(bytes(9))] * 3)
    store.close()
    assert get(opened(b"one"), keys) == [OK] * 3


def test_other_formats_leave_first(opened: Open) -> None:
    store = opened(b"one")
    put(store, names("old", 30), 100_000)
    store.close()
    store = opened(b"two")
    put(store, names("new", 140), 100_000)
    assert get(store, names("new", 140), 100_000).count(OK) >= 110
    store.close()
    assert opened(b"one").usage().blocks == 0


def test_a_folder_has_one_owner_at_a_time(opened: Open) -> None:
    store = opened()
    with pytest.raises(ConfigError, match=rf"path=.*in use by process {os.getpid()}:"):
        opened()
    store.close()
    opened().close()


def test_ranks_stand_side_by_side(opened: Open, tmp_path: Path) -> None:
    first, second = opened(owner="tp0"), opened(owner="tp1")
    put(first, [b"k"], 100)
    assert second.exists([b"k"]) == [0]
    put(second, [b"k"], 200)
    assert (first.exists([b"k"]), second.exists([b"k"])) == ([100], [200])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tp0", "tp1"]
    assert all(
        path.stat().st_mode & 0o77 == 0 for path in [*tmp_path.iterdir(), *segments(tmp_path)]
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"path": ""}, "path=''.*name a folder"),
        ({"capacity": "15MiB"}, "capacity='15MiB'.*16MiB.* or more"),
        ({"owner": "../x"}, "owner='../x'"),
        ({"owner": ".hidden"}, "owner='.hidden'"),
        ({"ttl_s": -1}, "ttl_s=-1"),
        ({"min_fre": 1}, "min_fre=1.*did you mean 'min_free'"),
        ({"path": "/proc/nothing"}, "path='/proc/nothing'.*name a folder that can be written"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], text: str, tmp_path: Path) -> None:
    good = {"path": str(tmp_path), "capacity": "16MiB"}
    make_store("disk", good, b"f").close()
    with pytest.raises(ConfigError, match=text):
        make_store("disk", good | settings, b"f")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "00000001.seg").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="holds other files"):
        make_store("disk", {"path": str(tmp_path), "capacity": "16MiB"}, b"f")
    assert (tmp_path / "0" / "00000001.seg").read_bytes() == b"precious"


# Bounds -----------------------------------------------------------------------------------------


def test_a_segment_that_is_used_outlives_others(opened: Open) -> None:
    store = opened()
    put(store, names("a", 38), 100_000)  # a segment
    put(store, names("b", 76), 100_000)  # two more
    assert get(store, names("a", 1), 100_000) == [OK]
    put(store, names("c", 60), 100_000)
    assert OK in get(store, names("a", 38), 100_000)
    assert ABSENT in get(store, names("b", 76), 100_000)
    assert counted(store)["store_evicted_blocks"] > 20


def test_blocks_get_too_old(opened: Open, clock: Clock, tmp_path: Path) -> None:
    store = opened(ttl_s=100)
    put(store, names("old", 50), 100_000)
    clock.now += 60
    put(store, names("new", 50), 100_000)
    assert get(store, names("old", 50), 100_000) == [OK] * 50
    clock.now += 40
    assert get(store, names("old", 50), 100_000) == [ABSENT] * 50
    assert store.exists(names("old", 1)) == [0]
    assert get(store, names("new", 50), 100_000) == [OK] * 50
    files_before = len(segments(tmp_path))
    put(store, names("newer", 50), 100_000)
    assert len(segments(tmp_path)) <= files_before  # a segment was dropped for its age
    store.close()
    clock.now += 1000
    store = opened(ttl_s=100)
    assert store.exists(names("new", 50)) == [0] * 50


def test_a_clock_that_is_set_right_leaves_nothing_from_the_future(
    opened: Open, clock: Clock
) -> None:
    store = opened(ttl_s=100)
    put(store, names("now", 3))
    for wrong in (-5.0, 0.0, 2.0**31 + 1e9, 2.0**32 + 5):
        clock.now = wrong
        assert put(store, names(f"{wrong}", 3)) == [OK] * 3
    clock.now = Clock().now + 50
    assert get(store, names("now", 3)) == [OK] * 3
    for wrong in (-5.0, 0.0, 2.0**31 + 1e9, 2.0**32 + 5):
        assert store.exists(names(f"{wrong}", 3)) == [0] * 3


def test_writes_keep_to_the_budget(opened: Open, clock: Clock) -> None:
    store = opened(daily_write_bytes=24 * 100_000)
    outcomes = [put(store, [key], 10_000)[0] for key in names("k", 20)]
    assert outcomes == [OK] * 10 + [BlockOutcome.LIMITED] * 10
    assert get(store, names("k", 1), 10_000) == [OK]
    assert counted(store)["store_failed_blocks_limited"] == 10
    clock.now += 1800
    assert [put(store, [key], 10_000)[0] for key in names("l", 10)].count(OK) == 5


def test_some_of_the_disk_stays_free(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [100 * MIB]
    store = opened(min_free=50 * MIB)
    monkeypatch.setattr(store._folder, "free_bytes", lambda: free[0])
    put(store, names("a", 200), 100_000)
    assert store.usage().nbytes > 12 * MIB
    free[0] = 51 * MIB  # somebody else fills the disk
    assert put(store, names("b", 80), 100_000) == [OK] * 80  # in place of older ones
    assert store.usage().nbytes > 12 * MIB
    free[0] = 49 * MIB
    assert BlockOutcome.FULL in put(store, names("c", 80), 100_000)
    assert store.usage().nbytes <= 4 * MIB  # it shrank
    assert len(segments(tmp_path)) <= 1
    free[0] = 100 * MIB
    store._guards.writes.succeeded()
    assert put(store, names("d", 80), 100_000) == [OK] * 80


def test_readers_writers_and_eviction_at_the_same_time(opened: Open) -> None:
    store = opened()
    stored: list[BlockOutcome] = []
    found: list[BlockOutcome] = []
    wrong: list[AssertionError] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(80):
                keys = [b"%d" % rng.randrange(300) for _ in range(3)]
                stored.extend(put(store, keys, 60_000))
                wanted = [b"%d" % rng.randrange(300) for _ in range(4)]
                found.extend(get(store, wanted, 60_000))
                if rng.random() < 0.2:
                    store.remove(wanted[:1])
                store.exists(wanted)
        except AssertionError as error:  # other bytes
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert set(found) == {OK, ABSENT}
    # Of four segments, all may be in use at some moment: no room for that moment.
    assert set(stored) <= {OK, BlockOutcome.FULL}
    assert len(stored) == 6 * 80 * 3
    assert stored.count(OK) > 0.5 * len(stored)
    assert store.usage().nbytes <= 16 * MIB
    assert counted(store)["store_evicted_blocks"] > 100
    before = store.exists([b"%d" % n for n in range(300)])
    abandon(store)
    store = opened()
    after = store.exists([b"%d" % n for n in range(300)])
    assert after == before
    assert get(store, [b"%d" % n for n in range(300)], 60_000).count(OK) == 300 - after.count(0)


def test_a_file_that_is_used_again_holds_nothing_of_before(opened: Open, tmp_path: Path) -> None:
    store = opened()
    old, new = names("old", 150), names("new", 45)
    put(store, old, 100_000)
    inodes = {path.stat().st_ino for path in segments(tmp_path)}
    put(store, new, 100_000)
    assert {path.stat().st_ino for path in segments(tmp_path)} == inodes
    before = store.exists([*old, *new])
    assert 0 < before.count(0) < 150
    for crashed in (False, True):
        abandon(store) if crashed else store.close()
        for index in segments(tmp_path, ".idx"):
            index.unlink()
        store = opened()
        assert store.exists([*old, *new]) == before
        assert set(get(store, new, 100_000)) == {OK}


def test_a_block_larger_than_a_segment_is_refused(opened: Open) -> None:
    store = opened()
    most = 4 * MIB - 2 * 4096 - 4096
    assert put(store, [b"fits"], most) == [OK]
    assert put(store, [b"a", b"large", b"b"], most + 8192) == [BlockOutcome.SIZE] * 3
    views = [memoryview(bytes(10)), memoryview(bytes(5 * MIB)), memoryview(bytes(10))]
    assert store.put([b"a", b"large", b"b"], views) == [OK, BlockOutcome.SIZE, OK]


# Disks that fail --------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 10 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_smaller_than_the_capacity(opened: Open, small: Path) -> None:
    store = opened(path=str(small))
    outcomes = [put(store, [key], 100_000)[0] for key in names("k", 300)]
    assert set(outcomes) <= {OK, BlockOutcome.FULL, BlockOutcome.UNAVAILABLE}
    assert outcomes.count(OK) == 300  # older blocks made room
    assert get(store, names("k", 300), 100_000)[-30:] == [OK] * 30


def test_a_disk_that_others_fill(opened: Open, small: Path, clock: Clock) -> None:
    store = opened(path=str(small))
    (small / "other").write_bytes(bytes(9 * MIB))
    assert put(store, [b"a"]) == [BlockOutcome.FULL]
    assert put(store, [b"a"]) == [BlockOutcome.UNAVAILABLE]  # left alone for a while
    assert not store.usage().available
    clock.now += 1
    assert put(store, [b"a"]) == [BlockOutcome.FULL]  # a probe
    (small / "other").unlink()
    clock.now += 1
    assert put(store, [b"a"]) == [BlockOutcome.UNAVAILABLE]
    clock.now += 1
    assert put(store, [b"a"]) == [OK]
    assert get(store, [b"a"]) == [OK]
    assert counted(store)["store_failed_blocks_full"] == 2


def test_a_disk_that_turns_read_only(opened: Open, small: Path, clock: Clock) -> None:
    store = opened(path=str(small))
    put(store, names("k", 3))
    store.close()
    store = opened(path=str(small))
    abandon(store)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(ConfigError, match="Read-only file system: name a folder"):
        opened(path=str(small))


class Faulty:
    """Lets calls of a kind fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
        self.code = code
        self.wrong: Callable[[int], bool] = lambda offset: True
        self.calls = 0
        real = getattr(files.os, name)

        def call(fd: int, views: Sequence[memoryview], offset: int) -> int:
            self.calls += 1
            if self.code and any(map(self.wrong, self.span(views, offset))):
                raise OSError(self.code, os.strerror(self.code))
            return int(real(fd, views, offset))

        monkeypatch.setattr(files.os, name, call)

    @staticmethod
    def span(views: Sequence[memoryview], offset: int) -> range:
        return range(offset, offset + sum(view.nbytes for view in views), 4096)


def test_writes_that_fail_are_counted_and_reads_go_on(
    opened: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    assert put(store, names("k", 3)) == [OK] * 3
    faulty = Faulty(monkeypatch, "pwritev", errno.EIO)
    assert put(store, names("l", 3)) == [BlockOutcome.FAILED] * 3
    assert put(store, names("l", 3)) == [BlockOutcome.UNAVAILABLE] * 3
    assert get(store, names("k", 3) + names("l", 3)) == [OK] * 3 + [ABSENT] * 3
    assert counted(store)["store_failed_blocks_failed"] == 3
    faulty.code = 0
    clock.now += 1
    assert put(store, names("l", 3)) == [OK] * 3
    assert get(store, names("k", 3) + names("l", 3)) == [OK] * 6


def test_a_bad_spot_costs_one_block(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    keys = names("k", 10)
    put(store, keys)
    faulty = Faulty(monkeypatch, "preadv", errno.EIO)
    bad = store._table.find([keys[4]], 0.0)[0]
    assert bad is not None
    store._table.release([bad])
    faulty.wrong = lambda offset: offset == bad.page * 4096 + 4096
    assert get(store, keys) == [OK] * 4 + [BlockOutcome.FAILED] + [OK] * 5
    faulty.code = 0
    assert get(store, keys) == [OK] * 4 + [ABSENT] + [OK] * 5  # never tried again
    store.close()
    assert get(opened(), keys) == [OK] * 4 + [ABSENT] + [OK] * 5


def test_a_disk_that_cannot_be_read_is_left_alone(
    opened: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    keys = names("k", 10)
    put(store, keys)
    faulty = Faulty(monkeypatch, "preadv", errno.EIO)
    for key in keys[:3]:
        assert get(store, [key]) == [BlockOutcome.FAILED]
    calls = faulty.calls
    assert get(store, keys[3:]) == [BlockOutcome.UNAVAILABLE] * 7
    assert store.exists(keys) == [0] * 10
    assert (faulty.calls, store.usage().available) == (calls, False)
    faulty.code = 0
    clock.now += 1
    assert store.exists(keys) == [0, 0, 0] + [5000] * 7
    assert get(store, keys[3:]) == [OK] * 7
    assert store.usage().available


def test_a_file_that_ends_early_is_a_failed_read(opened: Open, tmp_path: Path) -> None:
    store = opened()
    keys = names("k", 3)
    put(store, keys)
    os.truncate(segments(tmp_path)[0], 4096 + 2 * 4096)
    assert get(store, keys) == [BlockOutcome.FAILED] * 3
    assert put(store, names("l", 3)) == [OK] * 3


def test_bit_rot_costs_one_block_and_is_remembered(opened: Open, tmp_path: Path) -> None:
    store = opened()
    keys = names("k", 10)
    put(store, keys)
    store.close()
    assert spoil_files(tmp_path, payload_of(keys[7], 5000)) == 1
    store = opened()
    assert get(store, keys) == [OK] * 7 + [CORRUPT] + [OK] * 2
    assert counted(store)["store_failed_blocks_corrupt"] == 1
    abandon(store)
    assert opened().exists(keys) == [5000] * 7 + [0] + [5000] * 2


def test_a_record_of_another_key_is_not_taken_for_it(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, [b"one", b"two"], 4096)
    with segments(tmp_path)[0].open("r+b") as file:
        data = file.read(4096 * 5)
        file.seek(4096)
        file.write(data[3 * 4096 : 5 * 4096])  # a write that went astray
    assert get(store, [b"one", b"two"], 4096) == [CORRUPT, OK]


# The way to the disk ----------------------------------------------------------------------------


def buffered(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Make file systems refuse O_DIRECT, when a file is opened or when it is used."""
    real_open, real_write = os.open, os.pwritev

    def no_open(path: str, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode, dir_fd=dir_fd)

    def no_write(fd: int, views: Sequence[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, views, offset)

    if at == "open":
        monkeypatch.setattr(files.os, "open", no_open)
    else:
        monkeypatch.setattr(files.os, "pwritev", no_write)


@pytest.mark.parametrize("at", ["open", "write"])
def test_without_o_direct(opened: Open, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    buffered(monkeypatch, at)
    store = opened()
    keys = names("k", 1500)
    outcomes = put(store, keys)
    assert not any(segment.file.direct for segment in store._table.segments.values())
    assert outcomes == [OK] * 1500
    assert get(store, keys)[-500:] == [OK] * 500
    store.close()
    assert get(opened(), keys)[-500:] == [OK] * 500


def test_blocks_that_lie_side_by_side_are_moved_at_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Faulty(monkeypatch, "pwritev", 0)
    reads = Faulty(monkeypatch, "preadv", 0)
    store = opened()
    put(store, [b"first"])  # makes a segment
    before = writes.calls
    keys = names("k", 100)
    assert put(store, keys, 20_000) == [OK] * 100
    assert writes.calls - before == 1
    reads.calls = 0
    assert get(store, random.Random(0).sample(keys, 100), 20_000) == [OK] * 100
    assert reads.calls == 1
    assert get(store, keys[::2], 20_000) == [OK] * 50
    assert reads.calls == 51


def test_whole_pages_move_straight_between_caller_and_disk(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = mmap.mmap(-1, 3 * 8192)
    seen: list[object] = []
    real = os.preadv

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        seen.extend(view.obj for view in views)
        return real(fd, views, offset)

    monkeypatch.setattr(files.os, "preadv", preadv)
    store = opened()
    views = [memoryview(memory)[at * 8192 : (at + 1) * 8192 - 100] for at in range(3)]
    for number, view in enumerate(views):
        view[:] = payload_of(b"%d" % number, len(view))
    assert store.put([b"0", b"1", b"2"], views) == [OK] * 3
    memory[:] = bytes(len(memory))
    assert store.get([b"0", b"1", b"2"], views) == [OK] * 3
    assert seen.count(memory) == 3
    assert [bytes(v) for v in views] == [payload_of(b"%d" % n, 8092) for n in range(3)]
    assert all(memory[at * 8192 - 100 : at * 8192] == bytes(100) for at in (1, 2, 3))


def test_nothing_but_records_gets_to_the_disk(opened: Open, tmp_path: Path) -> None:
    store = opened()
    memory = store._pool.acquire(1)
    memory[:] = b"\xa5" * len(memory)  # what another call left there
    store._pool.release(memory)
    assert store.put([b"k"], [memoryview(b"x" * 5000)]) == [OK]
    written = segments(tmp_path)[0].read_bytes()
    assert b"x" * 5000 in written
    assert written.count(b"\xa5\xa5") == 0


def test_transfers_are_recorded_by_direction(opened: Open) -> None:
    store = opened()
    put(store, names("k", 3))
    get(store, [*names("k", 2), b"absent"])
    figures = counted(store)
    assert figures["CPU_to_DISK_total_bytes"] == 15_000
    assert figures["DISK_to_CPU_total_bytes"] == 10_000
    assert figures["CPU_to_DISK_operations"] == figures["DISK_to_CPU_operations"] == 1
    assert figures["CPU_to_DISK_total_time"] > 0
    assert not any(name.startswith("store_failed") for name in figures)
    assert store.take_stats() is None


def test_a_call_under_way_ends_before_the_files_are_closed(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = os.pwritev

    def slow(fd: int, views: Sequence[memoryview], offset: int) -> int:
        inside.set()
        assert go_on.wait(30)
        return real(fd, views, offset)

    store = opened()
    put(store, [b"first"])
    monkeypatch.setattr(files.os, "pwritev", slow)
    outcomes: list[BlockOutcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(put(store, [b"k"])))
    writer.start()
    assert inside.wait(30)
    closer = threading.Thread(target=store.close)
    closer.start()
    while not store._in_flight.closed:
        pass
    assert get(store, [b"first"]) == [BlockOutcome.UNAVAILABLE]
    assert closer.is_alive()
    go_on.set()
    writer.join(30)
    closer.join(30)
    assert outcomes == [OK]
    assert repr(store).endswith("blocks, closed)")
    assert get(opened(), [b"first", b"k"]) == [OK, OK]
