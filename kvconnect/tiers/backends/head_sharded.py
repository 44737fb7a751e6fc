"""Records that engines with any number of tensor-parallel ranks write and read: one per unit.

Units in one piece are handed on where they lie. The others are copied by the loop in C that also
copies blocks, without the GIL and in one call per unit, not per block. On one core that moves
10 GB/s from slots of 8 heads (256 runs of 8 KiB, or 4096 of 512 bytes), where memcpy of as much in
one piece reaches 14. Slices of memoryviews reach 11 on the long runs and 2 on the short ones, those
of numpy 8 and 1; both with the GIL.
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

_MOST_BYTES = 16 << 20  # of blocks in one call of the inner store: bounds what is copied at a time
_MOST_NAMES = 4096  # in one call that moves no bytes
_SUFFIX_BYTES = 2  # of a unit's number behind the key
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

    A block is there if all units of this rank are, whoever put them. Its outcome is the worst of
    its units': ABSENT if one is absent. A block whose put failed half-way is removed. Buffers
    must be as long as the layout of their group says: others are SIZE, and nothing is asked.

    The seam's promise that no get finds a mixture of two puts holds for the calls of one object.
    Ranks and engines put their units each on its own, so a block may have units of several: any
    unit is whole, and they are all of the same tokens.

    ``usage`` knows whether the inner store is available and nothing else: others have units in it.
    The statistics are the inner store's, and count units.
    """

    def __init__(
        self, inner: Store, layouts: Sequence[Sequence[HeadUnit]], group_of: Callable[[bytes], int]
    ) -> None:
        """Wrap a store, which is closed with this one.

        Args:
            inner: made with a fingerprint that says all that ``cache/head_shards.py`` leaves open.
            layouts: the units of a block, per group. Of a group that cannot be cut, one unit with
                one run.
            group_of: returns the group of a key. Called from any thread.

        Raises:
            Misuse: a layout that is empty, in which a number occurs twice, or with runs that are
                not of a block.
        """
        self._inner = inner
        self._cuts = [_unit_layout(layout) for layout in layouts]
        self._group_of = group_of
        self._pool = PagePool()
        self._turns = _KeyLocks()

    def __repr__(self) -> str:
        return f"SlicedStore({self._inner!r}, {[len(cut.parts) for cut in self._cuts]} units)"

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, payloads, writable=False)
        return self._each(keys, payloads, self._put)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        check_buffers(keys, buffers, writable=True)
        return self._each(keys, buffers, self._get)

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        check_keys(keys)
        cuts = self._cuts_of(keys)
        names = [name for key, cut in zip(keys, cuts, strict=True) for name in cut.names(key)]
        sizes = [n for part in _batches(names) for n in self._inner.exists(part)]
        found = zip(cuts, _by_block(sizes, cuts), strict=True)
        return [cut.nbytes if units == [p.nbytes for p in cut.parts] else 0 for cut, units in found]

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        check_keys(keys)
        cuts = self._cuts_of(keys)
        names = [name for key, cut in zip(keys, cuts, strict=True) for name in cut.names(key)]
        with self._turns.taken(keys, alone=True):
            units = [o for part in _batches(names) for o in self._inner.remove(part)]
        return [_worst(outcomes) for outcomes in _by_block(units, cuts)]

    def usage(self) -> Usage:
        return Usage(-1, 0, 0, self._inner.usage().available)

    def take_stats(self) -> OffloadingConnectorStats | None:
        return self._inner.take_stats()

    def close(self) -> None:
        self._inner.close()

    def _each(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        move: Callable[[_UnitLayout, Sequence[bytes], Sequence[memoryview]], list[BlockOutcome]],
    ) -> list[BlockOutcome]:
        """Move blocks, some at a time, all of one group; return what became of each."""
        fitting: defaultdict[_UnitLayout, list[int]] = defaultdict(list)
        for number, cut in enumerate(self._cuts_of(keys)):
            if buffers[number].nbytes == cut.nbytes:
                fitting[cut].append(number)
        outcomes = [BlockOutcome.SIZE] * len(keys)
        for cut, numbers in fitting.items():
            step = max(_MOST_BYTES // max(cut.nbytes, cut.room(1)), 1)
            for start in range(0, len(numbers), step):
                some = numbers[start : start + step]
                moved = move(cut, [keys[n] for n in some], [buffers[n] for n in some])
                for number, outcome in zip(some, moved, strict=True):
                    outcomes[number] = outcome
        return outcomes

    def _put(
        self, cut: _UnitLayout, keys: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[BlockOutcome]:
        # Python gives no address of read-only memory.
        sources = [memoryview(bytearray(p)) if p.readonly else p for p in payloads]
        names = [name for key in keys for name in cut.names(key)]
        with self._turns.taken(keys, alone=True), self._pool.borrow(cut.room(len(keys))) as memory:
            cut.copy(_native.gather, memory, list(enumerate(sources)))
            units = _by_block(
                self._inner.put(names, cut.records(memory, sources)), [cut] * len(keys)
            )
            torn = [key for key, found in zip(keys, units, strict=True) if _is_torn(found)]
            if torn:
                self._inner.remove([name for key in torn for name in cut.names(key)])
        return [_worst(found) for found in units]

    def _get(
        self, cut: _UnitLayout, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[BlockOutcome]:
        names = [name for key in keys for name in cut.names(key)]
        with self._pool.borrow(cut.room(len(keys))) as memory:
            with self._turns.taken(keys, alone=False):
                units = self._inner.get(names, cut.records(memory, buffers))
            outcomes = [_worst(found) for found in _by_block(units, [cut] * len(keys))]
            good = [n for n, outcome in enumerate(outcomes) if outcome is BlockOutcome.OK]
            cut.copy(_native.scatter, memory, [(n, buffers[n]) for n in good])
        return outcomes

    def _cuts_of(self, keys: Sequence[bytes]) -> list[_UnitLayout]:
        """Return the layout of each key's group; raise :class:`Misuse` where there is none."""
        groups = [self._group_of(key) for key in keys]
        for group in set(groups):
            if not 0 <= group < len(self._cuts):
                raise Misuse(f"a key of group {group}, there are {len(self._cuts)}")
        return [self._cuts[group] for group in groups]


@dataclass(frozen=True, slots=True)
class _UnitPart:
    """One unit of a layout."""

    suffix: bytes
    nbytes: int
    start: int
    """Where it lies in a block if it is in one piece there and needs no copy; else -1."""
    segments: array[int]
    """As the copying loop takes them. A stride of 1, so that its block numbers are addresses."""


@dataclass(frozen=True, slots=True, eq=False)
class _UnitLayout:
    """A group's layout. While blocks move, memory has a place of ``place_bytes``, whole pages, for
    each unit that is not in one piece, block by block."""

    nbytes: int
    parts: tuple[_UnitPart, ...]
    copied: tuple[_UnitPart, ...]
    place_bytes: int

    def names(self, key: bytes) -> list[bytes]:
        """Return the keys of a block's records. Two blocks never have one in common."""
        room = MAX_KEY_BYTES - _SUFFIX_BYTES
        if len(key) >= room:  # shorter keys stand for themselves, and have other lengths
            digest = blake2b(key, digest_size=_DIGEST_BYTES).digest()
            key = key[: room - _DIGEST_BYTES] + digest
        return [key + part.suffix for part in self.parts]

    def room(self, blocks: int) -> int:
        """Return the memory that so many blocks need."""
        return blocks * len(self.copied) * self.place_bytes

    def records(self, memory: memoryview, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Return where the units are, block by block: in the block itself or in the memory."""
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
        """Gather blocks into the memory, or scatter it into them. Blocks are (number, buffer)."""
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
    """Return what is needed to move blocks of a layout."""
    nbytes = sum(unit.nbytes for unit in layout)
    if not layout or len({unit.number for unit in layout}) < len(layout):
        raise Misuse(f"a layout of units {[unit.number for unit in layout]}")
    if any(offset + length > nbytes for unit in layout for offset, length in unit.runs):
        raise Misuse(f"a layout of {nbytes} bytes has runs past its end")
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
    """Keys that calls are at work on: many may read one, or one may write it. Threads: any.

    A wait lasts no longer than the calls that are ahead.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[bytes, int] = {}  # readers, or -1 for a writer

    @contextlib.contextmanager
    def taken(self, keys: Sequence[bytes], alone: bool) -> Iterator[None]:
        """Hold all of the keys at once during the context."""
        wanted = set(keys)

        def free() -> bool:
            held = (self._held.get(key, 0) for key in wanted)
            return not any(n != 0 if alone else n < 0 for n in held)

        with self._changed:
            self._changed.wait_for(free)
            for key in wanted:
                self._held[key] = -1 if alone else self._held.get(key, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                for key in wanted:
                    self._held[key] += 1 if alone else -1
                    if not self._held[key]:
                        del self._held[key]
                self._changed.notify_all()


def _worst(outcomes: Sequence[BlockOutcome]) -> BlockOutcome:
    return min(outcomes, key=_WORST_FIRST.index)


def _is_torn(outcomes: Sequence[BlockOutcome]) -> bool:
    """Whether units of a new block may lie beside those of an old one; a put that FAILED may have
    done its work."""
    return _worst(outcomes) is not BlockOutcome.OK and not {
        BlockOutcome.OK,
        BlockOutcome.FAILED,
    }.isdisjoint(outcomes)


def _by_block(found: Sequence[T], cuts: Sequence[_UnitLayout]) -> list[list[T]]:
    """Cut a list of one thing per unit into one list per block."""
    units = iter(found)
    return [list(islice(units, len(cut.parts))) for cut in cuts]


def _batches(names: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(names), _MOST_NAMES):
        yield names[start : start + _MOST_NAMES]


def _address(view: memoryview) -> int:
    """Return where writable memory is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
