"""Records per unit of heads, which engines with any number of tensor-parallel ranks can share.

A contiguous unit is stored from where it lies. Other units are copied by the C loop that copies
blocks, without the GIL, in one call per unit. On one core it moves 10 GB/s from slots of 8 heads
(256 runs of 8 KiB, or 4096 of 512 bytes); one contiguous memcpy reaches 14 GB/s. Slices of
memoryviews reach 11 GB/s on the long runs and 2 on the short ones, numpy 8 and 1, with the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

from kvconnect import _native
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.errors import Misuse
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends.base import (
    MAX_KEY_BYTES,
    BlockOutcome,
    PagePool,
    Store,
    Usage,
    check_buffers,
    check_keys,
)

T = TypeVar("T")

_MAX_BYTES = 16 << 20  # of blocks in one call of the inner store; bounds the memory for copies
_MAX_NAMES = 4096  # in one call that moves no bytes
_SUFFIX_BYTES = 2  # of a unit's number after the key
_DIGEST_BYTES = 64

_WORST_FIRST = (
    *(BlockOutcome.ABSENT, BlockOutcome.UNAVAILABLE, BlockOutcome.FAILED, BlockOutcome.CORRUPT),
    *(BlockOutcome.SIZE, BlockOutcome.FULL, BlockOutcome.LIMITED, BlockOutcome.OK),
)

_Copy = Callable[
    [tuple[int, int], tuple[int, int], int, "array[int]", "array[int]", "array[int]"], None
]


class HeadShardedStore(Store):
    """Keeps a rank's blocks as units of heads (``cache/head_shards.py``) in another store.

    A block exists if all units of this rank exist, whoever put them. Where each question costs a
    request to a server, :meth:`exists` asks for its first unit only: a get needs all. The outcome
    is the worst of its units: ABSENT if one is absent. A block whose put failed in part is removed.
    Buffers must have the length of their group's layout; others are SIZE without a call.

    Within one object, no get returns a mixture of two puts. Ranks and engines put their units
    independently, so a block may have units of several engines. Each unit is complete, and all are
    of the same tokens.

    ``usage`` has only the availability of the inner store, which others use too. Statistics are
    those of the inner store and count units.
    """

    def __init__(
        self, inner: Store, layouts: Sequence[Sequence[HeadUnit]], group_of: Callable[[bytes], int]
    ) -> None:
        """Wrap a store, which is closed with this one.

        Args:
            inner: store with a fingerprint of the whole block format.
            layouts: the units of a block, per group. A group that cannot be cut has one unit with
                one run.
            group_of: returns the group of a key. Called from any thread.

        Raises:
            Misuse: a layout is empty, has a unit number twice, or has runs outside the block.
        """
        self._inner = inner
        self._layouts = [_unit_layout(layout) for layout in layouts]
        self._group_of = group_of
        self._pool = PagePool()
        self._locks = _KeyLocks()

    def __repr__(self) -> str:
        return f"HeadShardedStore({self._inner!r}, {[len(it.parts) for it in self._layouts]} units)"

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, payloads, writable=False)
        return self._each(keys, payloads, self._put)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        return self._each(keys, buffers, self._get)

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        return self._lengths(keys, 1 if self.asks_one_by_one else None)

    def exists_whole(self, keys: Sequence[bytes]) -> list[int]:
        return self._lengths(keys, None)

    @property
    def asks_one_by_one(self) -> bool:
        return self._inner.asks_one_by_one

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        check_keys(keys)
        layouts = self._layouts_of(keys)
        names = [
            name for key, layout in zip(keys, layouts, strict=True) for name in layout.names(key)
        ]
        with self._locks.locked(keys, exclusive=True):
            units = [o for part in _batches(names) for o in self._inner.remove(part)]
        return [_worst(outcomes) for outcomes in _by_block(units, layouts)]

    def usage(self) -> Usage:
        return Usage(-1, 0, 0, self._inner.usage().available)

    def take_stats(self) -> OffloadingConnectorStats | None:
        return self._inner.take_stats()

    def close(self) -> None:
        self._inner.close()

    def _lengths(self, keys: Sequence[bytes], units: int | None) -> list[int]:
        """Return the length of each block whose first ``units`` units are there (None: all), 0 for
        others."""
        check_keys(keys)
        layouts = self._layouts_of(keys)
        asked = [layout.parts[:units] for layout in layouts]
        names = [
            name
            for key, layout in zip(keys, layouts, strict=True)
            for name in layout.names(key)[:units]
        ]
        sizes = iter([n for part in _batches(names) for n in self._inner.exists(part)])
        return [
            layout.nbytes if [next(sizes) for _ in parts] == [p.nbytes for p in parts] else 0
            for layout, parts in zip(layouts, asked, strict=True)
        ]

    def _each(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        move: Callable[[_UnitLayout, Sequence[bytes], Sequence[memoryview]], list[BlockOutcome]],
    ) -> list[BlockOutcome]:
        """Move blocks in batches of one group; return the outcome of each."""
        fitting: defaultdict[_UnitLayout, list[int]] = defaultdict(list)
        for number, layout in enumerate(self._layouts_of(keys)):
            if buffers[number].nbytes == layout.nbytes:
                fitting[layout].append(number)
        outcomes = [BlockOutcome.SIZE] * len(keys)
        for layout, numbers in fitting.items():
            step = max(_MAX_BYTES // max(layout.nbytes, layout.memory_bytes(1)), 1)
            for start in range(0, len(numbers), step):
                some = numbers[start : start + step]
                moved = move(layout, [keys[n] for n in some], [buffers[n] for n in some])
                for number, outcome in zip(some, moved, strict=True):
                    outcomes[number] = outcome
        return outcomes

    def _put(
        self, layout: _UnitLayout, keys: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[BlockOutcome]:
        # Python does not give the address of read-only memory.
        sources = [memoryview(bytearray(p)) if p.readonly else p for p in payloads]
        names = [name for key in keys for name in layout.names(key)]
        with (
            self._locks.locked(keys, exclusive=True),
            self._pool.borrow(layout.memory_bytes(len(keys))) as memory,
        ):
            layout.copy(_native.gather, memory, list(enumerate(sources)))
            units = _by_block(
                self._inner.put(names, layout.records(memory, sources)), [layout] * len(keys)
            )
            torn = [key for key, found in zip(keys, units, strict=True) if _is_torn(found)]
            if torn:
                self._inner.remove([name for key in torn for name in layout.names(key)])
        return [_worst(found) for found in units]

    def _get(
        self, layout: _UnitLayout, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[BlockOutcome]:
        names = [name for key in keys for name in layout.names(key)]
        with self._pool.borrow(layout.memory_bytes(len(keys))) as memory:
            with self._locks.locked(keys, exclusive=False):
                units = self._inner.get(names, layout.records(memory, buffers))
            outcomes = [_worst(found) for found in _by_block(units, [layout] * len(keys))]
            good = [n for n, outcome in enumerate(outcomes) if outcome is BlockOutcome.OK]
            layout.copy(_native.scatter, memory, [(n, buffers[n]) for n in good])
        return outcomes

    def _layouts_of(self, keys: Sequence[bytes]) -> list[_UnitLayout]:
        """Return the layout of each key's group; raise :class:`Misuse` where there is none."""
        groups = [self._group_of(key) for key in keys]
        for group in set(groups):
            if not 0 <= group < len(self._layouts):
                raise Misuse(f"a key of group {group}, there are {len(self._layouts)}")
        return [self._layouts[group] for group in groups]


@dataclass(frozen=True, slots=True)
class _UnitPart:
    """One unit of a layout."""

    suffix: bytes
    nbytes: int
    start: int
    """Offset in a block of a contiguous unit, which needs no copy; otherwise -1."""
    segments: array[int]
    """Arguments of the copy loop, with a stride of 1, so that block numbers are addresses."""


@dataclass(frozen=True, slots=True, eq=False)
class _UnitLayout:
    """A group's layout. During a transfer, each unit that is not contiguous has ``place_bytes``
    bytes, whole pages, of temporary memory."""

    nbytes: int
    parts: tuple[_UnitPart, ...]
    copied: tuple[_UnitPart, ...]
    place_bytes: int

    def names(self, key: bytes) -> list[bytes]:
        """Return the keys of a block's records, which are different for all blocks."""
        room = MAX_KEY_BYTES - _SUFFIX_BYTES
        if len(key) >= room:  # shorter keys are used unchanged, and have other lengths
            digest = blake2b(key, digest_size=_DIGEST_BYTES).digest()
            key = key[: room - _DIGEST_BYTES] + digest
        return [key + part.suffix for part in self.parts]

    def memory_bytes(self, blocks: int) -> int:
        """Return the bytes of temporary memory for ``blocks`` blocks."""
        return blocks * len(self.copied) * self.place_bytes

    def records(self, memory: memoryview, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Return the buffers of the units by block: in the block itself or in the memory."""
        found, at = [], 0
        for buffer in buffers:
            for part in self.parts:
                if part.start >= 0:
                    found.append(buffer[part.start : part.start + part.nbytes])
                else:
                    found.append(memory[at : at + part.nbytes])
                    at += self.place_bytes
        return found

    def copy(
        self, move: _Copy, memory: memoryview, blocks: Sequence[tuple[int, memoryview]]
    ) -> None:
        """Gather blocks into the memory or scatter it into blocks, given as (number, buffer)."""
        if not blocks or not self.copied:
            return
        addresses = [_address(buffer) for _, buffer in blocks]
        base = min(addresses)
        area = (base, max(addresses) + self.nbytes - base)
        arena = (_address(memory), memory.nbytes)
        ids = array("q", [address - base for address in addresses])
        for place, part in enumerate(self.copied):
            places = array("q", [n * len(self.copied) + place for n, _ in blocks])
            move(area, arena, self.place_bytes, part.segments, ids, places)


def _unit_layout(layout: Sequence[HeadUnit]) -> _UnitLayout:
    """Return a layout prepared for transfers."""
    nbytes = sum(unit.nbytes for unit in layout)
    if not layout or len({unit.number for unit in layout}) < len(layout):
        numbers = [unit.number for unit in layout]
        raise Misuse(f"a layout of units {numbers} is empty or repeats a unit")
    if any(offset + length > nbytes for unit in layout for offset, length in unit.runs):
        raise Misuse(f"a layout of {nbytes} bytes has runs beyond its end")
    parts = tuple(
        _UnitPart(
            suffix=unit.number.to_bytes(_SUFFIX_BYTES, "big"),
            nbytes=unit.nbytes,
            start=unit.runs[0][0] if len(unit.runs) == 1 else -1,
            segments=array("q", [n for offset, length in unit.runs for n in (offset, 1, length)]),
        )
        for unit in layout
    )
    largest = max(part.nbytes for part in parts)
    return _UnitLayout(
        nbytes=nbytes,
        parts=parts,
        copied=tuple(part for part in parts if part.start < 0),
        place_bytes=-(-largest // mmap.PAGESIZE) * mmap.PAGESIZE,
    )


class _KeyLocks:
    """Read-write locks of keys. Thread-safe. A wait lasts no longer than the calls before it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[bytes, int] = {}  # readers, or -1 for a writer

    @contextlib.contextmanager
    def locked(self, keys: Sequence[bytes], exclusive: bool) -> Iterator[None]:
        """Lock all keys during the context, ``exclusive`` for writing."""
        wanted = set(keys)

        def free() -> bool:
            held = (self._held.get(key, 0) for key in wanted)
            return not any(n != 0 if exclusive else n < 0 for n in held)

        with self._changed:
            self._changed.wait_for(free)
            for key in wanted:
                self._held[key] = -1 if exclusive else self._held.get(key, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                for key in wanted:
                    self._held[key] += 1 if exclusive else -1
                    if not self._held[key]:
                        del self._held[key]
                self._changed.notify_all()


def _worst(outcomes: Sequence[BlockOutcome]) -> BlockOutcome:
    return min(outcomes, key=_WORST_FIRST.index)


def _is_torn(outcomes: Sequence[BlockOutcome]) -> bool:
    """Return whether units of a new block may be mixed with those of an old one. A unit that
    FAILED may have been written."""
    return _worst(outcomes) is not BlockOutcome.OK and not {
        BlockOutcome.OK,
        BlockOutcome.FAILED,
    }.isdisjoint(outcomes)


def _by_block(found: Sequence[T], layouts: Sequence[_UnitLayout]) -> list[list[T]]:
    """Split a list with one item per unit into one list per block."""
    units = iter(found)
    return [list(islice(units, len(layout.parts))) for layout in layouts]


def _batches(names: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(names), _MAX_NAMES):
        yield names[start : start + _MAX_NAMES]


def _address(view: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
