"""Stores for tests: disk stores with a manual clock, and puts and gets that check the bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvconnect.testing.buffers import payload_of
from kvconnect.tiers.backends import BlockOutcome, Store
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore
from kvconnect.tiers.backends.remote import RemoteStore

Open = Callable[..., DiskStore]


class Clock:
    """Seconds since 1970; only the test advances them."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def opening(path: Path, clock: Clock) -> Iterator[Open]:
    """Yield a function that opens stores of 16 MiB with segments of 4 MiB and closes them."""
    with contextlib.ExitStack() as ends:

        def make(fingerprint: bytes = b"format", **options: object) -> DiskStore:
            settings = {"path": str(path), "capacity": 16 << 20, "min_free": 0} | options
            store = DiskStore(DiskOptions(**settings), fingerprint, clock, clock)  # type: ignore[arg-type]
            ends.callback(store.close)
            return store

        yield make


def put(store: Store, keys: Sequence[bytes], nbytes: int = 5000) -> list[BlockOutcome]:
    """Put blocks that follow from their keys."""
    return store.put(keys, [memoryview(payload_of(key, nbytes)) for key in keys])


def get(store: Store, keys: Sequence[bytes], nbytes: int = 5000) -> list[BlockOutcome]:
    """Get blocks; OK is given only for the right bytes."""
    buffers = [memoryview(bytearray(nbytes)) for _ in keys]
    outcomes = store.get(keys, buffers)
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        assert outcome is not BlockOutcome.OK or buffer == payload_of(key, nbytes), "other bytes"
    return outcomes


def spoil(store: Store, key: bytes) -> None:
    """Change a byte of a value on the server."""
    assert isinstance(store, RemoteStore)
    [name] = store._names([key])
    [value] = store._server.load([name], 1 << 20)
    assert value is not None
    changed = bytearray(value)
    changed[-1] ^= 1
    assert store._server.store([name], [memoryview(changed)]) == [BlockOutcome.OK]
