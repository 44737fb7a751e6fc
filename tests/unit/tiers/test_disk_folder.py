"""Who may have a folder of the disk tier, and what others cannot make of it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.buffers import payload_of
from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore, folder
from kvconnect.tiers.backends.disk.files import Directory, PageFile

OK = BlockOutcome.OK
PRECIOUS = b"precious\n" * 1000


def make(path: Path, **options: object) -> DiskStore:
    settings = {"path": str(path), "capacity": 16 << 20, "min_free": 0} | options
    return DiskStore(DiskOptions(**settings), b"f")  # type: ignore[arg-type]


def put(store: DiskStore, key: bytes) -> list[BlockOutcome]:
    return store.put([key], [memoryview(payload_of(key, 5000))])


def get(store: DiskStore, key: bytes) -> list[BlockOutcome]:
    buffer = memoryview(bytearray(5000))
    outcomes = store.get([key], [buffer])
    assert outcomes != [OK] or buffer == payload_of(key, 5000)
    return outcomes


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside of the tier, which must stay as it is."""
    path = tmp_path / "victim"
    path.write_bytes(PRECIOUS)
    yield path
    assert path.read_bytes() == PRECIOUS


# Links ------------------------------------------------------------------------------------------


def a_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def a_second_name(place: Path, victim: Path) -> None:
    place.hardlink_to(victim)


@pytest.mark.parametrize("plant", [a_link, a_second_name])
def test_nothing_is_written_through_a_link(
    tmp_path: Path, victim: Path, plant: Callable[[Path, Path], None]
) -> None:
    top = tmp_path / "kv"
    store = make(top, about={"model": "m"})
    put(store, b"k")
    store.close()
    [name] = [path.name for path in (top / "0").glob("*.seg")]
    for place in ("LOCK", "formats/66.json.new", "00000001.idx.new", name):
        path = top / "0" / place
        path.unlink(missing_ok=True)
        plant(path, victim)
        try:
            store = make(top, about={"model": "m"})
        except ConfigError as error:  # it cannot be locked
            assert place == "LOCK"
            assert "name a folder" in str(error)
            path.unlink()
            path.touch()
        else:
            assert put(store, b"new") == [OK]
            assert get(store, b"new") == [OK]
            store.close()


def test_the_control_a_file_of_the_folder_is_opened(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(bytes(4096))
    PageFile(Directory(str(tmp_path)), "own", os.O_RDWR).close()


@pytest.mark.parametrize("name", ["link", "second", "pipe", "folder"])
def test_what_is_no_file_of_the_folder_is_not_opened(
    tmp_path: Path, victim: Path, name: str
) -> None:
    place = tmp_path / "in"
    place.mkdir()
    (place / "link").symlink_to(victim)
    (place / "second").hardlink_to(victim)
    (place / "folder").mkdir()
    os.mkfifo(place / "pipe")
    for flags in (os.O_RDWR, os.O_RDONLY):
        with pytest.raises(OSError):
            Directory(str(place)).open(name, flags)


def test_a_file_of_another_user_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    opened = Directory(str(tmp_path))
    os.close(opened.open("file", os.O_RDONLY))  # the control
    opened.user += 1
    with pytest.raises(OSError, match="owner"):
        opened.open("file", os.O_RDONLY)


def test_what_root_puts_into_a_users_folder_is_the_users(tmp_path: Path) -> None:
    """Such as an index, after it removed damaged blocks; else neither could open it."""
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    held = Directory(str(tmp_path))
    held.put("index", b"whole")
    assert held.read("index", 99) == b"whole"
    assert os.listdir(tmp_path) == ["index"]
    assert (tmp_path / "index").stat().st_uid == held.user
    held.close()


def test_what_a_crash_left_of_a_small_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file.new").write_bytes(b"half")
    Directory(str(tmp_path)).put("file", b"whole")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]


def test_a_workers_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="path="):
        make(tmp_path / "kv")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "way").symlink_to(tmp_path / "elsewhere")
    make(tmp_path / "way").close()  # where the operator's own path leads is the operator's affair


def test_a_folder_that_is_moved_away_stays_the_one_that_is_used(tmp_path: Path) -> None:
    store = make(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "moved")
    (tmp_path / "kv" / "0").mkdir(parents=True)
    assert put(store, b"k") == [OK]
    assert get(store, b"k") == [OK]
    store.close()
    assert list((tmp_path / "kv" / "0").iterdir()) == []
    assert get(make(tmp_path / "moved"), b"k") == [OK]


# Owner and mode ---------------------------------------------------------------------------------


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path).close()
    me = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "geteuid", lambda: me + 1)
        with pytest.raises(ConfigError, match=f"belongs to user {me}.*user {me + 1}"):
            make(tmp_path)
    make(tmp_path).close()


def test_a_folder_that_anybody_can_write_is_refused(tmp_path: Path) -> None:
    make(tmp_path).close()
    (tmp_path / "0").chmod(0o707)
    with pytest.raises(ConfigError, match=r"anybody can write.*chmod o-w"):
        make(tmp_path)
    (tmp_path / "0").chmod(0o2770)  # as a volume's group gets it
    make(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "0").stat().st_mode) & 0o777 == 0o750


# The lock ---------------------------------------------------------------------------------------


@contextmanager
def child() -> Iterator[None]:
    """A child of this process that was forked, for as long as the block lasts."""
    until, end = os.pipe()
    forked = os.fork()
    if not forked:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(end)
        os.close(until)
        assert os.waitpid(forked, 0) == (forked, 0)


def test_a_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    store = make(tmp_path)
    with child():
        store.close()
        make(tmp_path).close()


def test_a_child_of_a_process_that_died_does_not_keep_the_folder(tmp_path: Path) -> None:
    """A process has the folder and a child, and ends without a word."""
    until, end = os.pipe()
    ready, tell = os.pipe()
    parent = os.fork()
    if not parent:
        os.close(end)
        make(tmp_path)
        if not os.fork():
            os.write(tell, b".")
            os.read(until, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"."
        assert os.waitpid(parent, 0) == (parent, 0)
        make(tmp_path).close()
    finally:
        for handle in (until, end, ready, tell):
            os.close(handle)


def test_the_control_a_lock_that_a_child_inherits_stays(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with child(), open(tmp_path / "file") as again:
        os.close(handle)
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
