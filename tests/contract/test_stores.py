"""Every store passes the conformance checks, and the checks notice one that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvconnect.errors import ConfigError, Misuse
from kvconnect.testing import store as checks
from kvconnect.testing.buffers import payload_of, spoil_files
from kvconnect.testing.store import Subject, check_store
from kvconnect.tiers import backends as registry
from kvconnect.tiers.backends import BlockOutcome, Store, Usage, make_store
from kvconnect.tiers.backends.base import check_fingerprint
from kvconnect.tiers.backends.memory import MemoryStore, NullStore

ROOM = 16 << 20


def spoil(store: Store, key: bytes) -> None:
    assert isinstance(store, MemoryStore)
    kept = store._blocks[key]
    changed = bytes([kept.payload[0] ^ 1]) + kept.payload[1:]
    store._blocks[key] = kept._replace(payload=changed)


def test_memory(tmp_path: Path) -> None:
    settings = {"capacity": "16MiB"}
    check_store(lambda _: make_store("memory", settings, b"f"), tmp_path, spoil=spoil)


def test_disk(tmp_path: Path) -> None:
    check_store(
        lambda folder: make_store("disk", {"path": str(folder), "capacity": "32MiB"}, b"f"),
        tmp_path,
        persistent=True,
    )


def test_null_forgets_and_refuses_what_makes_no_sense() -> None:
    store = make_store("null", {}, b"f")
    assert store.put([b"key"], [memoryview(b"bytes")]) == [BlockOutcome.OK]
    assert store.get([b"key"], [memoryview(bytearray(5))]) == [BlockOutcome.ABSENT]
    assert (store.exists([b"key"]), store.remove([b"key"])) == ([0], [BlockOutcome.ABSENT])
    assert (store.usage(), store.take_stats()) == (Usage(0, 0, 0, True), None)
    with pytest.raises(Misuse, match="2 keys but 1 buffers"):
        store.put([b"a", b"b"], [memoryview(b"x")])


# The registry -----------------------------------------------------------------------------------


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"store='tape'.*use disk, valkey, object, mooncake"):
        make_store("tape", {}, b"f")


def test_a_store_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "kvconnect.stores"
        entries = [
            EntryPoint("theirs", "kvconnect.tiers.backends.memory:NullStore", group),
            EntryPoint("lost", "kvconnect.no_such_module:Store", group),
        ]
        return [entry for entry in entries if name in (None, entry.name)]

    def make(settings: object, fingerprint: bytes) -> Store:
        made.append((settings, fingerprint))
        return MemoryStore(1)

    made: list[tuple[object, bytes]] = []
    monkeypatch.setattr(registry, "entry_points", found)
    monkeypatch.setattr("kvconnect.tiers.backends.memory.NullStore", make)
    assert isinstance(make_store("theirs", {"a": 1}, b"f"), MemoryStore)
    assert made == [({"a": 1}, b"f")]
    with pytest.raises(ConfigError, match="its package cannot be loaded"):
        make_store("lost", {}, b"f")
    with pytest.raises(ConfigError, match="memory, null, lost, theirs"):
        make_store("tape", {}, b"f")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"capacity": "1GiB", "capcity": 1}, "capcity=1.*did you mean 'capacity'"),
        ({"capacity": "many"}, "capacity='many'"),
        ({}, "capacity=None.*missing"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_store("memory", settings, b"f")


def test_a_store_without_settings_takes_none() -> None:
    with pytest.raises(ConfigError, match="path='/x'"):
        make_store("null", {"path": "/x"}, b"f")


@pytest.mark.parametrize("fingerprint", [b"", b"x" * 65])
def test_a_fingerprint_has_bounds(fingerprint: bytes) -> None:
    with pytest.raises(Misuse, match="1 to 64 bytes"):
        check_fingerprint(fingerprint)
    assert check_fingerprint(b"x" * 64) == b"x" * 64


# Negative controls: stores that are wrong in one way ---------------------------------------------


class Memory(MemoryStore):
    def __init__(self) -> None:
        super().__init__(ROOM)


class Flipping(Memory):
    """Hands out other bytes."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        outcomes = super().get(keys, buffers)
        for buffer in buffers:
            buffer[-1] ^= 1
        return outcomes


class Spilling(Memory):
    """Reads whole pages."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        outcomes = super().get(keys, buffers)
        for buffer in buffers:
            whole = memoryview(buffer.obj)  # type: ignore[arg-type]
            whole[-1] = 0
        return outcomes


class Short(Memory):
    """Knows only the first bytes of a key."""

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        return super().put([key[:1] or key for key in keys], payloads)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        return super().get([key[:1] or key for key in keys], buffers)


class Stubborn(Memory):
    """Keeps the first block of a key."""

    def _put(self, key: bytes, payload: memoryview) -> BlockOutcome:
        return BlockOutcome.OK if key in self._blocks else super()._put(key, payload)


class Hopeful(Memory):
    """Says that it has what it has not."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        super().get(keys, buffers)
        return [BlockOutcome.OK] * len(keys)


class Generous(Memory):
    """Fills a buffer as far as the block goes."""

    def _get(self, key: bytes, buffer: memoryview) -> BlockOutcome:
        kept = self._blocks.get(key)
        size = min(buffer.nbytes, len(kept.payload)) if kept else 0
        buffer[:size] = kept.payload[:size] if kept else b""
        return BlockOutcome.OK if kept else BlockOutcome.ABSENT


class Lasting(Memory):
    """Forgets nothing."""

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        return [BlockOutcome.OK if key in self._blocks else BlockOutcome.ABSENT for key in keys]


class Trusting(Memory):
    """Does not look at the digest."""

    def _get(self, key: bytes, buffer: memoryview) -> BlockOutcome:
        buffer[:] = self._blocks[key].payload
        return BlockOutcome.OK


class Boundless(Memory):
    """Does not make room."""

    def _put(self, key: bytes, payload: memoryview) -> BlockOutcome:
        capacity, self._capacity = self._capacity, 1 << 40
        outcome = super()._put(key, payload)
        self._capacity = capacity
        return outcome


class Tearing(Memory):
    """Stores a block in two steps that others can come between."""

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        outcomes = super().put(keys, payloads)
        for key, payload in zip(keys, payloads, strict=True):
            other = self._blocks.get(key)
            if other is not None and key.startswith(b"shared"):
                mixed = bytes(payload)[: payload.nbytes // 2] + bytes(payload.nbytes // 2)
                self._blocks[key] = other._replace(payload=mixed, digest=self._hash(mixed))
        return outcomes


class Open(Memory):
    """Takes blocks when it is closed."""

    def close(self) -> None:
        pass


class Swallowing(Memory):
    """Says that it keeps a block that is too large, and does not."""

    def _put(self, key: bytes, payload: memoryview) -> BlockOutcome:
        outcome = super()._put(key, payload)
        return BlockOutcome.OK if outcome is BlockOutcome.SIZE else outcome


class Boasting(Memory):
    """Refuses a block that is too large, and lists it."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: set[bytes] = set()

    def _put(self, key: bytes, payload: memoryview) -> BlockOutcome:
        outcome = super()._put(key, payload)
        if outcome is not BlockOutcome.SIZE:
            return outcome
        self._refused.add(key)
        return BlockOutcome.FULL

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        sizes = zip(keys, super().exists(keys), strict=True)
        return [size or int(key in self._refused) for key, size in sizes]


class Counting(Memory):
    """Counts every block twice."""

    def usage(self) -> Usage:
        usage = super().usage()
        return usage._replace(blocks=2 * usage.blocks)


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (Flipping, checks.check_round_trip),
        (Spilling, checks.check_round_trip),
        (NullStore, checks.check_round_trip),
        (Short, checks.check_keys),
        (Stubborn, checks.check_overwrite),
        (Hopeful, checks.check_absent),
        (Generous, checks.check_sizes),
        (Lasting, checks.check_remove),
        (Trusting, checks.check_corruption),
        (Tearing, checks.check_threads),
        (Boundless, checks.check_full),
        (Counting, checks.check_usage),
        (Memory, checks.check_restart),  # it is not persistent
        (Open, checks.check_close),
    ],
)
def test_a_wrong_store_is_noticed(
    make: type[Store],
    check: checks.Check,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_PATIENCE_S", 0.2)
    persistent = check is checks.check_restart
    hook = None if persistent else spoil
    with pytest.raises(AssertionError):
        check(Subject(lambda _: make(), tmp_path, persistent, hook))


@pytest.mark.parametrize(
    ("make", "why"), [(Swallowing, "over capacity"), (Boasting, "refused block exists")]
)
def test_a_store_that_is_wrong_about_a_block_over_its_capacity_is_noticed(
    make: type[Store], why: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=why):
        checks.check_full(Subject(lambda _: make(), tmp_path))


def test_a_failed_check_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="check_round_trip: other bytes at 0 past a page"):
        check_store(lambda _: Flipping(), tmp_path)


def test_files_are_spoiled_wherever_the_payload_is(tmp_path: Path) -> None:
    payload = payload_of(b"key", 100)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(b"head" + payload + b"tail" + payload)
    assert spoil_files(tmp_path, payload) == 2
    assert payload not in (tmp_path / "sub" / "file").read_bytes()
    assert spoil_files(tmp_path, payload) == 0
