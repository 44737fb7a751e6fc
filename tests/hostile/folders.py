"""Damaged and planted folders of the disk tier: what a start, a look and every block make of them.

Each case damages a copy of one good folder, as crashes, bad disks and whoever can write there do.
A start either says in one line why it does not (which only some cases may), or serves: a block is
missed or has the right bytes, and new ones are kept. No file outside is touched.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvconnect.errors import ConfigError
from kvconnect.tiers.backends.base import BlockOutcome as Stored
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore, inspect
from tests.hostile import Outcome

PAGE = 4096
BLOCKS = {b"key-%03d" % n: (1, 4095, 4096, 5000, 70_000, 300_000)[n % 6] for n in range(144)}
OUTSIDE = b"not the tier's\n" * 300
DEADLINE_S = 60.0
_INDEX_NUMBERS = (28, 32, 36, 40)  # where an index says how many pages, rows and bytes it has
_NUMBERS = (0, 1, 2, 71, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
_HEAD = struct.calcsize("<8s16sIIQB65p256p")  # of a record, up to its digest


class Case(NamedTuple):
    """What is done to a folder: ``outside`` is a file that is none of the tier's. ``may_refuse``:
    the start may end with one line."""

    name: str
    harm: Callable[[random.Random, Path, Path], None]
    may_refuse: bool = False


def payload_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCKS[key])


def _pick(rng: random.Random, folder: Path, ending: str = "") -> Path:
    """Return a segment or an index."""
    return rng.choice(sorted(p for e in (".seg", ".idx") for p in folder.glob(f"*{ending or e}")))


def _flip(rng: random.Random, folder: Path, outside: Path) -> None:
    for _ in range(rng.randint(1, 5)):
        path = _pick(rng, folder)
        data = bytearray(path.read_bytes())
        data[rng.randrange(min(len(data), rng.choice((64, PAGE, len(data)))))] ^= (
            1 << rng.randrange(8)
        )
        path.write_bytes(data)


def _cut(rng: random.Random, folder: Path, outside: Path) -> None:
    path = _pick(rng, folder)
    os.truncate(path, rng.choice((0, 1, 40, PAGE, rng.randrange(path.stat().st_size))))


def _extend(rng: random.Random, folder: Path, outside: Path) -> None:
    with _pick(rng, folder).open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, PAGE, 100_000))))


def _zero(rng: random.Random, folder: Path, outside: Path) -> None:
    path = _pick(rng, folder, ".seg")
    with path.open("r+b") as file:
        file.seek(rng.randrange(path.stat().st_size // PAGE) * PAGE)
        file.write(bytes(PAGE * rng.randint(1, 8)))


def _sealed(path: Path, data: bytearray) -> None:
    data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:-8])))
    path.write_bytes(data)


def _index_numbers(rng: random.Random, folder: Path, outside: Path) -> None:
    for path in folder.glob("*.idx"):
        data = bytearray(path.read_bytes())
        at, number = rng.choice(_INDEX_NUMBERS), rng.choice(_NUMBERS)
        data[at : at + 2] = (number & 0xFFFF).to_bytes(2, "little")
        if at < 40:
            data[at : at + 4] = number.to_bytes(4, "little")
        _sealed(path, data)


def _index_rows(rng: random.Random, folder: Path, outside: Path) -> None:
    for path in folder.glob("*.idx"):
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(42, len(data) - 8)] = rng.choice((0, 1, 0x7F, 0xFF))
        _sealed(path, data)


def _record_heads(rng: random.Random, folder: Path, outside: Path) -> None:
    """Also without indexes, so that heads are what counts."""
    for path in folder.glob("*.idx"):
        path.unlink()
    for path in folder.glob("*.seg"):
        data = bytearray(path.read_bytes())
        heads = [o for o in range(0, len(data), PAGE) if data[o : o + 8] == b"KVC-rec\n"]
        for at in rng.sample(heads, min(len(heads), 3)):
            struct.pack_into("<I", data, at + 24, rng.choice((*_NUMBERS, 1 << 30, PAGE)))
            digest = xxhash.xxh3_64_intdigest(bytes(data[at : at + _HEAD]))
            struct.pack_into("<Q", data, at + _HEAD, digest)
        path.write_bytes(data)


def _lose(rng: random.Random, folder: Path, outside: Path) -> None:
    for path in rng.sample(sorted(folder.glob("*.*")), rng.randint(1, 3)):
        path.unlink()


def _swap(rng: random.Random, folder: Path, outside: Path) -> None:
    one, two = rng.sample(sorted(folder.glob(rng.choice(("*.seg", "*.idx")))), 2)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def _twice(rng: random.Random, folder: Path, outside: Path) -> None:
    """A segment, with its index or not, under a second number."""
    one = _pick(rng, folder, ".seg")
    number = rng.choice(("00000000", "00000050", "99999998"))
    shutil.copy(one, folder / f"{number}.seg")
    if rng.random() < 0.5 and one.with_suffix(".idx").exists():
        shutil.copy(one.with_suffix(".idx"), folder / f"{number}.idx")


def _foreign(rng: random.Random, folder: Path, outside: Path) -> None:
    for name in ("00000099.seg", "00000099.idx", "00000100.seg", "x.seg", "1.idx", "formats.seg"):
        (folder / name).write_bytes(rng.randbytes(rng.choice((0, 1, PAGE, 3 * PAGE))))


def _plant(rng: random.Random, folder: Path, outside: Path) -> None:
    """A link, a second name, a pipe or a folder where a file is expected."""
    own = _pick(rng, folder)
    new = folder / rng.choice(
        ("00000001.idx.new", "00000007.idx.new", "00000055.seg", "00000056.seg")
    )
    path = rng.choice((own, new))
    path.unlink(missing_ok=True)
    kind = rng.choice((path.symlink_to, path.hardlink_to, os.mkfifo, os.mkdir))
    kind(path if kind in (os.mkfifo, os.mkdir) else outside)


def _formats(rng: random.Random, folder: Path, outside: Path) -> None:
    path = folder / "formats"
    for file in path.iterdir():
        file.unlink()
        file.with_suffix(".json.new").symlink_to(outside)
        rng.choice((file.symlink_to, file.hardlink_to))(outside)
    if rng.random() < 0.5:
        shutil.rmtree(path)
        rng.choice((path.symlink_to, path.hardlink_to))(outside)


def _lock(rng: random.Random, folder: Path, outside: Path) -> None:
    path = folder / "LOCK"
    if rng.random() < 0.3:
        path.write_bytes(rng.randbytes(50))
        return
    path.unlink()
    rng.choice((path.symlink_to, path.hardlink_to))(outside)


def _open_to_all(rng: random.Random, folder: Path, outside: Path) -> None:
    folder.chmod(rng.choice((0o777, 0o702, 0o722, 0o770, 0o720)))


def _elsewhere(rng: random.Random, folder: Path, outside: Path) -> None:
    """The worker's folder is a link to one with the same files."""
    folder.rename(outside.parent / "moved")
    folder.symlink_to(outside.parent / "moved")


def _of_another(rng: random.Random, folder: Path, outside: Path) -> None:
    """Files, or the folder, of another user; as far as this one may give them away."""
    paths = [folder] if rng.random() < 0.5 else rng.sample(sorted(folder.iterdir()), 2)
    for path in paths:
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
        elif path.is_file():
            path.chmod(0o000)


CASES = (
    *(Case("flipped bits", _flip),) * 3,
    *(Case("cut", _cut),) * 2,
    *(Case("index numbers, sealed", _index_numbers),) * 3,
    *(Case("index rows, sealed", _index_rows),) * 2,
    *(Case("record heads, sealed", _record_heads),) * 2,
    *(Case("planted", _plant),) * 3,
    Case("longer", _extend),
    Case("zeroed", _zero),
    Case("files missing", _lose),
    Case("files swapped", _swap),
    Case("a segment twice", _twice),
    Case("foreign files", _foreign),
    Case("formats", _formats),
    Case("lock", _lock, may_refuse=True),
    Case("open to all", _open_to_all, may_refuse=True),
    Case("a link to a folder", _elsewhere, may_refuse=True),
    Case("of another user", _of_another, may_refuse=True),
)
ROUNDS = 8  # of all cases, with other bytes each


def options(path: Path) -> DiskOptions:
    return DiskOptions(path=str(path), capacity=16 << 20, min_free=0, about={"model": "m"})


def make_good(path: Path) -> None:
    """Make the folder that is damaged: three segments with an index, and one without."""
    store = DiskStore(options(path), b"f")
    for key in BLOCKS:
        assert store.put([key], [memoryview(bytearray(payload_of(key)))]) == [Stored.OK]
    store.close()
    sorted((path / "0").glob("*.idx"))[-1].unlink()


def serve(path: Path, outcome: Outcome, what: str) -> None:
    """Start on a folder, and ask for all that should be there."""
    store = DiskStore(options(path), b"f")
    try:
        for key, nbytes in BLOCKS.items():
            buffer = bytearray(nbytes)
            found = store.get([key], [memoryview(buffer)])
            if found == [Stored.OK] and buffer != payload_of(key):
                outcome.wrong += 1
                outcome.notes.append(f"{what}: other bytes")
        new = memoryview(bytearray(5000))
        if store.put([b"new"], [new]) != [Stored.OK] or store.get([b"new"], [new]) != [Stored.OK]:
            outcome.wrong += 1
            outcome.notes.append(f"{what}: a new block is not kept")
        store.usage()
    finally:
        store.close()


def play(case: Case, path: Path, outcome: Outcome, what: str) -> None:
    """Start twice and look in from outside; whatever is raised leaves."""
    try:
        for _ in range(2):
            serve(path, outcome, what)
        inspect.verify(str(path), lambda done, of: None)
        inspect.stats(str(path))
    except ConfigError as error:
        if not case.may_refuse:
            outcome.wrong += 1
            outcome.notes.append(f"{what}: {error}")


def run(limit: int | None = None, kinds: Sequence[Case] = CASES) -> Outcome:
    """Play ``limit`` cases, each kind in turn."""
    outcome = Outcome()
    cases = [(turn, case) for turn in range(ROUNDS) for case in kinds]
    with tempfile.TemporaryDirectory() as top:
        good, folder, outside = Path(top, "good"), Path(top, "tier"), Path(top, "outside")
        make_good(good)
        for number, (turn, case) in enumerate(cases[:limit]):
            outside.write_bytes(OUTSIDE)
            shutil.copytree(good, folder)
            rng = random.Random(number)
            case.harm(rng, folder / "0", outside)
            what = f"{case.name}, {turn}, case {number}"
            _bounded(lambda case=case, what=what: play(case, folder, outcome, what), outcome, what)
            if outside.read_bytes() != OUTSIDE:
                outcome.smuggled += 1
                outcome.notes.append(f"{what}: a file outside was written")
            for path in (folder, Path(top, "moved")):
                shutil.rmtree(path, ignore_errors=True)
            outside.unlink()
            outcome.cases += 1
    return outcome


def _bounded(work: Callable[[], None], outcome: Outcome, what: str) -> None:
    """Do it on a thread that may hang or raise, and take note."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is reported
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        outcome.hangs += 1
        outcome.notes.append(f"{what}: no end")
    elif failed:
        outcome.crashes += 1
        outcome.notes.append(f"{what}: {type(failed[0]).__name__}: {failed[0]}")
