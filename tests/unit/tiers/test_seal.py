"""Records on shared servers: whose bytes are used, with a key and without."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvconnect.settings import Settings
from kvconnect.tiers.backends import BlockOutcome, make_store
from kvconnect.tiers.backends.record_seals import RecordKeys
from kvconnect.tiers.backends.remote import RemoteStore, Server
from kvconnect.transport.security import ALSO, record_keys

pytest.importorskip("xxhash")

OK, ABSENT, CORRUPT = BlockOutcome.OK, BlockOutcome.ABSENT, BlockOutcome.CORRUPT
OLD, NEW, FOREIGN = b"o" * 32, b"n" * 32, b"f" * 32


class Shared(Server):
    """A server that whoever has it can write to."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def store(self, names: Sequence[str], values: Sequence[memoryview]) -> list[BlockOutcome]:
        self.values.update(zip(names, map(bytes, values), strict=True))
        return [OK] * len(names)

    def load(self, names: Sequence[str], most: int) -> list[memoryview | None]:
        found = [self.values.get(name) for name in names]
        return [None if value is None else memoryview(value)[:most] for value in found]

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [len(self.values.get(name, b"")) for name in names]

    def delete(self, names: Sequence[str]) -> list[bool]:
        return [self.values.pop(name, None) is not None for name in names]

    def close(self) -> None:
        pass


def keys(current: bytes, *others: bytes) -> RecordKeys:
    return lambda: (current, others)


def make(
    server: Shared, found: RecordKeys | None, prefix: str = "p", form: bytes = b"f"
) -> RemoteStore:
    return RemoteStore(server, prefix, form, keys=found)


def put(store: RemoteStore, key: bytes, payload: bytes) -> None:
    assert store.put([key], [memoryview(bytearray(payload))]) == [OK]


def get(store: RemoteStore, key: bytes, nbytes: int = 100) -> bytes | BlockOutcome:
    buffer = bytearray(nbytes)
    [outcome] = store.get([key], [memoryview(buffer)])
    return bytes(buffer) if outcome is OK else outcome


def forged(server: Shared, how: RecordKeys | None, payload: bytes) -> None:
    """Write a record in the place of the only one, as whoever has no key of the victim's can."""
    [name] = server.values
    other = Shared()
    put(make(other, how), b"k", payload)
    [value] = other.values.values()
    server.values[name] = value


@pytest.mark.parametrize(
    "how", [None, keys(FOREIGN), keys(FOREIGN, OLD)], ids=["digest", "foreign", "accepts"]
)
def test_a_record_that_no_key_of_ours_sealed_is_a_miss_and_removed(how: RecordKeys | None) -> None:
    server = Shared()
    victim = make(server, keys(NEW, OLD))
    put(victim, b"k", b"x" * 100)
    forged(server, how, b"evil" * 25)
    assert get(victim, b"k") is CORRUPT
    assert get(victim, b"k") is ABSENT
    stats = victim.take_stats()
    assert stats is not None
    assert stats.reduce()["store_failed_blocks_corrupt"] == 1
    put(victim, b"k", b"x" * 100)
    assert get(victim, b"k") == b"x" * 100


def test_the_control_without_a_key_it_is_used() -> None:
    """And with the key of the victim's, which is what a key is for."""
    for mine in (None, keys(NEW)):
        server = Shared()
        victim = make(server, mine)
        put(victim, b"k", b"x" * 100)
        forged(server, mine, b"evil" * 25)
        assert get(victim, b"k") == b"evil" * 25


def test_a_sealed_record_is_good_for_its_name_and_format_alone() -> None:
    server = Shared()
    mine = keys(NEW)
    one = make(server, mine)
    put(one, b"k", b"x" * 100)
    [(name, value)] = server.values.items()
    for store, key in (
        (one, b"other"),
        (make(server, mine, prefix="q"), b"k"),
        (make(server, mine, form=b"g"), b"k"),
    ):
        put(store, key, b"y" * 100)
        [there] = server.values.keys() - {name}
        server.values[there] = value
        assert get(store, key) is CORRUPT
    assert get(one, b"k") == b"x" * 100


def test_every_byte_of_a_sealed_record_counts() -> None:
    server = Shared()
    store = make(server, keys(NEW))
    put(store, b"k", os.urandom(20))
    [(name, value)] = server.values.items()
    for at in range(len(value)):
        server.values[name] = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        assert get(store, b"k", 20) is CORRUPT, at
    for nbytes in range(len(value)):
        server.values[name] = value[:nbytes]
        assert get(store, b"k", 20) is CORRUPT, nbytes
    server.values[name] = value
    assert not isinstance(get(store, b"k", 20), BlockOutcome)
    assert store.exists([b"k"]) == [20]


def test_who_has_a_key_and_who_has_none_do_not_see_one_another() -> None:
    server = Shared()
    sealed, plain = make(server, keys(NEW)), make(server, None)
    put(sealed, b"k", b"x" * 100)
    assert (get(plain, b"k"), plain.exists([b"k"])) == (ABSENT, [0])
    put(plain, b"k", b"y" * 100)
    assert get(sealed, b"k") == b"x" * 100
    assert get(plain, b"k") == b"y" * 100


def test_keys_change_while_records_stay() -> None:
    server = Shared()
    now: list[tuple[bytes, tuple[bytes, ...]]] = [(OLD, ())]
    store = make(server, lambda: now[0])
    put(store, b"old", b"x" * 100)
    now[0] = (OLD, (NEW,))  # everywhere, before anybody seals with the new one
    put(make(server, keys(NEW, OLD)), b"new", b"y" * 100)
    assert (get(store, b"old"), get(store, b"new")) == (b"x" * 100, b"y" * 100)
    now[0] = (NEW, (OLD,))
    assert (get(store, b"old"), get(store, b"new")) == (b"x" * 100, b"y" * 100)
    now[0] = (NEW, ())
    assert (get(store, b"old"), get(store, b"new")) == (CORRUPT, b"y" * 100)


def test_keys_come_from_the_key_file_and_from_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(16).hex().encode())
    Path(f"{path}{ALSO}").write_bytes(os.urandom(16).hex().encode())
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    found = record_keys(Settings(key_file=str(path)))
    assert found is not None
    assert found() == (path.read_bytes(), (Path(f"{path}{ALSO}").read_bytes(),))
    assert record_keys(Settings()) is None  # other machines do not have this user's own key


def test_stores_seal_with_the_keys_they_are_given(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    settings = {"url": f"file://{tmp_path}"}
    first, second = (make_store("object", settings, b"f", keys(NEW)) for _ in range(2))
    assert first.put([b"k"], [memoryview(b"x" * 100)]) == [OK]
    assert second.exists([b"k"]) == [100]
    [path] = (tmp_path / "kvconnect" / "sealed").rglob("*.kv")
    path.write_bytes(path.read_bytes()[:-1] + b"y")
    assert second.get([b"k"], [memoryview(bytearray(100))]) == [CORRUPT]
    assert not path.exists()
    first.close(), second.close()
