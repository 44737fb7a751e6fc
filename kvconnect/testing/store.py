"""Conformance checks for stores, through their public contract.

``check_store(make, folder)`` raises :class:`AssertionError` with the check's name and the error.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvconnect.errors import Misuse
from kvconnect.testing.buffers import GuardedBuffer, get, payload_of, put, require, spoil_files
from kvconnect.tiers.backends.base import MAX_KEY_BYTES, BlockOutcome, Store

Make = Callable[[Path], Store]
"""Returns a store that keeps its blocks in a folder, or under a name made from the folder's. The
store has room for 8 to 64 MiB and for a block of 1 MiB. An unused folder gives an empty store."""

Spoil = Callable[[Store, bytes], None]
"""Changes one byte of a block's stored payload, without a call to the store."""

_MIB = 1 << 20
_PATIENCE_S = 60.0
_SIZES = (1, 511, 512, 513, 4095, 4096, 4097, 12_288, 65_536, 100_000, _MIB - 1, _MIB)


def check_store(
    make: Make, folder: Path, persistent: bool = False, spoil: Spoil | None = None
) -> None:
    """Run every check, each with a store of its own in ``folder``.

    Args:
        make: see :data:`Make`; a check that restarts the store calls it again for the same folder.
        folder: an empty folder, on the file system to check.
        persistent: whether blocks must survive ``close``.
        spoil: damages a stored block. Without it, a persistent store's files are searched for the
            payload, and another store skips that check.

    Raises:
        AssertionError: a check failed; the text begins with the check's name.
    """
    for check in CHECKS:
        subject = Subject(make, folder / check.__name__, persistent, spoil)
        subject.folder.mkdir()
        try:
            check(subject)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error


@dataclass(frozen=True)
class Subject:
    """Store factory, folder and options of one check."""

    make: Make
    folder: Path
    persistent: bool = False
    spoil: Spoil | None = None

    @contextmanager
    def open(self) -> Iterator[Store]:
        """Open a store in the folder and close it at the end."""
        store = self.make(self.folder)
        try:
            yield store
        finally:
            store.close()


Check = Callable[[Subject], None]


def _all_ok(outcomes: Sequence[BlockOutcome], what: str) -> None:
    require(all(outcome is BlockOutcome.OK for outcome in outcomes), f"{what}: {outcomes}")


def _blocks(sizes: Sequence[int], prefix: bytes = b"block") -> dict[bytes, bytes]:
    keys = [b"%s-%d" % (prefix, number) for number in range(len(sizes))]
    return {key: payload_of(key, size) for key, size in zip(keys, sizes, strict=True)}


def _sizes(blocks: dict[bytes, bytes]) -> dict[bytes, int]:
    return {key: len(payload) for key, payload in blocks.items()}


def _counts(store: Store, blocks: int) -> bool:
    return store.usage().blocks in (blocks, -1)


def check_round_trip(subject: Subject) -> None:
    """Blocks of odd sizes are read back unchanged, at any buffer alignment."""
    blocks = _blocks(_SIZES)
    with subject.open() as store:
        _all_ok(put(store, blocks), "put")
        require(store.exists(list(blocks)) == list(_SIZES), "exists gives other lengths")
        for shift in (0, 1, 512, 4095):
            found = get(store, _sizes(blocks), shift)
            require(found == list(blocks.values()), f"other bytes at {shift} past a page")
        for key, payload in blocks.items():
            require(get(store, {key: len(payload)}) == [payload], "one by one differs")


def check_keys(subject: Subject) -> None:
    """Keys are 1 to ``MAX_KEY_BYTES`` of any bytes; payloads may be read-only."""
    keys = [b"\x00", b"\xff", b"\x00\x00", b"/../x", bytes(MAX_KEY_BYTES), b"a" * MAX_KEY_BYTES]
    with subject.open() as store:
        payloads = [payload_of(key, 1000) for key in keys]
        _all_ok(store.put(keys, [memoryview(payload) for payload in payloads]), "put")
        require(get(store, dict.fromkeys(keys, 1000)) == payloads, "keys were mixed up")


def check_overwrite(subject: Subject) -> None:
    """A put replaces the older block, also one of another length, also after a restart."""
    with subject.open() as store:
        for version, nbytes in enumerate((5000, 5000, 200_000, 64)):
            newest = payload_of(b"key", nbytes, version)
            _all_ok(put(store, {b"key": newest}), "put")
            require(get(store, {b"key": nbytes}) == [newest], f"version {version} is not there")
        older, newer = (memoryview(payload_of(b"twin", 100, n)) for n in (0, 1))
        _all_ok(store.put([b"twin", b"twin"], [older, newer]), "put")
        require(get(store, {b"twin": 100}) == [bytes(newer)], "the last of two is not there")
        require(_counts(store, 2), "a block that was replaced is counted")
    if subject.persistent:
        with subject.open() as store:
            require(get(store, {b"key": 64}) == [newest], "an old version came back")


def check_absent(subject: Subject) -> None:
    """A block that was never put is absent and does not affect the rest of its batch."""
    blocks = _blocks([3000] * 40)
    stored = {key: payload for number, (key, payload) in enumerate(blocks.items()) if number % 3}
    with subject.open() as store:
        require(get(store, {b"nothing": 10}) == [BlockOutcome.ABSENT], "an empty store has a block")
        require(put(store, {}) == [] and get(store, {}) == [], "an empty batch must be fine")
        _all_ok(put(store, stored), "put")
        order = random.Random(1).sample(list(blocks), len(blocks))
        expected = [stored.get(key, BlockOutcome.ABSENT) for key in order]
        require(get(store, dict.fromkeys(order, 3000)) == expected, "a mixed batch went wrong")
        lengths = [3000 if key in stored else 0 for key in order]
        require(store.exists(order) == lengths, "exists is wrong")
        twice = [GuardedBuffer(3000), GuardedBuffer(3000)]
        key = next(iter(stored))
        _all_ok(store.get([key, key], [place.view for place in twice]), "get of a key twice")
        require({place.content() for place in twice} == {stored[key]}, "a key twice differs")


def check_sizes(subject: Subject) -> None:
    """A buffer of another length gets ``SIZE``; invalid arguments raise :class:`Misuse`."""
    with subject.open() as store:
        _all_ok(put(store, _blocks([10_000])), "put")
        for nbytes in (9_999, 10_001, 1, 4096, 20_000):
            found = get(store, {b"block-0": nbytes})
            require(found == [BlockOutcome.SIZE], f"10,000 bytes into {nbytes}: {found}")
        require(get(store, {b"block-0": 10_000}) == list(_blocks([10_000]).values()), "lost")
        good = memoryview(bytearray(8))
        wrong: list[tuple[list[bytes], list[memoryview]]] = [
            ([b""], [good]),
            ([b"k" * (MAX_KEY_BYTES + 1)], [good]),
            ([b"a", b"b"], [good]),
            ([b"a"], [memoryview(bytearray())]),
            ([b"a"], [good.cast("Q")]),
            ([b"a"], [good[::2]]),
        ]
        for keys, views in wrong:
            for call in (store.put, store.get):
                require(_refused(call, keys, views), f"{call} took {keys} and {views}")
        require(_refused(store.get, [b"a"], [memoryview(b"ro")]), "get took a read-only buffer")


def _refused(
    call: Callable[[list[bytes], list[memoryview]], object],
    keys: list[bytes],
    views: list[memoryview],
) -> bool:
    try:
        call(keys, views)
    except Misuse:
        return True
    return False


def check_remove(subject: Subject) -> None:
    """A removed block is absent, also after a restart, and can be put again."""
    blocks = _blocks([2000] * 12)
    keys = list(blocks)
    gone, kept = keys[:6], keys[6:]
    with subject.open() as store:
        _all_ok(put(store, blocks), "put")
        _all_ok(store.remove(gone), "remove")
        require(store.remove([*gone, b"?"]) == [BlockOutcome.ABSENT] * 7, "removed twice")
        expected = [BlockOutcome.ABSENT] * 6 + [blocks[key] for key in kept]
        require(get(store, _sizes(blocks)) == expected, "remove took the wrong blocks")
        require(_counts(store, 6), "usage still counts what was removed")
    with subject.open() as store:
        if subject.persistent:
            require(get(store, _sizes(blocks)) == expected, "a restart brought blocks back")
        _all_ok(put(store, blocks), "put after remove")
        require(get(store, _sizes(blocks)) == list(blocks.values()), "put again differs")


def check_corruption(subject: Subject) -> None:
    """Damaged bytes are never returned; other blocks stay, and the key can be put again."""
    blocks = _blocks([5000] * 3)
    bad, good = b"block-1", {key: len(p) for key, p in blocks.items() if key != b"block-1"}
    if subject.spoil is None and not subject.persistent:
        return
    with subject.open() as store:
        _all_ok(put(store, blocks), "put")
        if subject.spoil is not None:
            subject.spoil(store, bad)
            _check_damage(store, blocks, bad, good)
            return
    spoiled = spoil_files(subject.folder, blocks[bad])
    require(spoiled, "no payload was found in the files, so none could be spoiled")
    with subject.open() as store:
        _check_damage(store, blocks, bad, good)
    with subject.open() as store:
        require(get(store, {bad: 5000}) == [blocks[bad]], "the block put in its place is lost")


def _check_damage(
    store: Store, blocks: dict[bytes, bytes], bad: bytes, good: dict[bytes, int]
) -> None:
    first, again = (get(store, {bad: 5000})[0] for _ in range(2))
    require(
        first in (BlockOutcome.CORRUPT, BlockOutcome.ABSENT),
        "changed bytes were handed out as good",
    )
    require(again is BlockOutcome.ABSENT, "a spoiled block was found again")
    require(store.exists([bad]) == [0], "a spoiled block still exists")
    require(get(store, good) == [blocks[key] for key in good], "other blocks were lost")
    _all_ok(put(store, {bad: blocks[bad]}), "put in place of a spoiled block")
    require(get(store, {bad: 5000}) == [blocks[bad]], "the block put in its place differs")


def check_threads(subject: Subject) -> None:
    """Concurrent gets and puts, of the same and of other keys, never return a mixture."""
    shared = [b"shared-%d" % number for number in range(4)]
    versions = {key: [payload_of(key, 20_000, n) for n in range(4)] for key in shared}
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(30):
                own = {b"own-%d-%d" % (number, turn % 5): payload_of(b"%d" % turn, 7000, number)}
                _all_ok(put(store, own), "put")
                require(get(store, {next(iter(own)): 7000}) == list(own.values()), "own block")
                keys = rng.sample(shared, 2)
                _all_ok(put(store, {key: rng.choice(versions[key]) for key in keys}), "put")
                for key, found in zip(keys, get(store, dict.fromkeys(keys, 20_000)), strict=True):
                    require(found in versions[key], f"a mixture: {found!r:.40}")
        except AssertionError as error:
            wrong.append(str(error))

    with subject.open() as store:
        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
            require(not thread.is_alive(), f"a thread was not done after {_PATIENCE_S} s")
        require(not wrong, "; ".join(wrong))
        require(_counts(store, 6 * 5 + 4), "blocks were lost or counted twice")


def check_full(subject: Subject) -> None:
    """A full store evicts or refuses, stays within its capacity and returns correct bytes."""
    with subject.open() as store:
        capacity = store.usage().capacity_bytes
        if not capacity:
            return
        require(8 * _MIB <= capacity <= 64 * _MIB, f"give the check 8 to 64 MiB, not {capacity}")
        nbytes = capacity // 64
        blocks = _blocks([nbytes] * 160)
        outcomes = [put(store, {key: payload})[0] for key, payload in blocks.items()]
        require(set(outcomes) <= {BlockOutcome.OK, BlockOutcome.FULL}, f"outcomes: {set(outcomes)}")
        usage = store.usage()
        require(usage.nbytes <= capacity, f"{usage.nbytes} bytes in a store of {capacity}")
        found = dict(zip(blocks, get(store, _sizes(blocks)), strict=True))
        kept = {key: content for key, content in found.items() if content != BlockOutcome.ABSENT}
        require(len(kept) == usage.blocks, f"{len(kept)} blocks found, {usage.blocks} counted")
        require(len(kept) >= 16, f"only {len(kept)} of 64 blocks that fit were kept")
        require(all(blocks[key] == content for key, content in kept.items()), "other bytes")
        last = [key for key, outcome in zip(blocks, outcomes, strict=True) if outcome == "ok"][-1]
        require(last in kept, "the block that was put last is gone")
        giant = memoryview(bytes(capacity + 1))
        refused = store.put([b"giant"], [giant])[0]
        require(
            refused in (BlockOutcome.SIZE, BlockOutcome.FULL), f"a block over capacity: {refused}"
        )
        require(store.exists([b"giant"]) == [0], "a refused block exists")


def check_usage(subject: Subject) -> None:
    """Usage counts the stored blocks."""
    blocks = _blocks([10_000] * 5)
    with subject.open() as store:
        empty = store.usage()
        require(_counts(store, 0) and empty.available, f"a new store: {empty}")
        _all_ok(put(store, blocks), "put")
        used = store.usage()
        require(_counts(store, 5), f"5 blocks were put: {used}")
        require(used.nbytes >= empty.nbytes, f"5 blocks weigh nothing: {used}")


def check_restart(subject: Subject) -> None:
    """Blocks of a persistent store survive several restarts."""
    if not subject.persistent:
        return
    held: dict[bytes, bytes] = {}
    for turn in range(4):
        with subject.open() as store:
            sizes = _sizes(held)
            require(get(store, sizes) == list(held.values()), f"lost at restart {turn}")
            require(store.exists(list(held)) == list(sizes.values()), "exists is wrong")
            require(_counts(store, len(held)), "usage is wrong after a restart")
            new = _blocks([1, 5000, 70_000], b"turn-%d" % turn)
            _all_ok(put(store, new), "put")
            held |= new


def check_close(subject: Subject) -> None:
    """A closed store answers ``UNAVAILABLE``; it may be closed twice, and while it is used."""
    blocks = _blocks([50_000] * 4)
    answers: list[BlockOutcome] = []
    given_up = threading.Event()
    with ExitStack() as stack:
        store = stack.enter_context(subject.open())
        stack.callback(given_up.set)
        _all_ok(put(store, blocks), "put")

        def work() -> None:
            while BlockOutcome.UNAVAILABLE not in answers and not given_up.is_set():
                answers.extend(put(store, blocks))
                answers.extend(x for x in get(store, _sizes(blocks)) if isinstance(x, BlockOutcome))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        store.close()
        store.close()
        thread.join(_PATIENCE_S)
        require(not thread.is_alive(), "a closed store still takes blocks")
        require(
            set(answers) <= {BlockOutcome.OK, BlockOutcome.UNAVAILABLE, BlockOutcome.ABSENT},
            f"{answers}",
        )
        require(put(store, blocks) == [BlockOutcome.UNAVAILABLE] * 4, "put after close")
        require(get(store, _sizes(blocks)) == [BlockOutcome.UNAVAILABLE] * 4, "get after close")
        require(store.remove(list(blocks)) == [BlockOutcome.UNAVAILABLE] * 4, "remove after close")
        require(store.exists(list(blocks)) == [0] * 4, "exists after close")
        require(not store.usage().available, "usage after close")


CHECKS: tuple[Check, ...] = (
    check_round_trip,
    check_keys,
    check_overwrite,
    check_absent,
    check_sizes,
    check_remove,
    check_corruption,
    check_threads,
    check_full,
    check_usage,
    check_restart,
    check_close,
)
