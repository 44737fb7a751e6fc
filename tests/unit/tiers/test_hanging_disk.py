"""The disk tier in a file system that stops answering: its calls hang in the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconnect.cache.keys import block_key
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.offload.host_arena import HostArena
from kvconnect.tiers import SHARED
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore
from kvconnect.tiers.messages import LookupBlocks, PrefetchBlocks, TierAnswer, WriteBackBlocks
from kvconnect.tiers.worker import TierWorker
from kvconnect.types import JobId, Tier

pytest.importorskip("xxhash")

ROOT = Path(__file__).resolve().parents[3]
SIZE = 5000  # bytes of a block
WAIT_S = 60.0
LATE_S = 5.0


def until(fact: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Mount:
    """A folder on a disk that can be made to hang."""

    def __init__(self, place: Path) -> None:
        self.path, self._signs, below = place / "mount", place / "signs", place / "below"
        for folder in (self.path, self._signs, below):
            folder.mkdir()
        command = [sys.executable, "-m", "tests.fakes.hanging_disk", below, self.path, self._signs]
        self._process = subprocess.Popen(command, cwd=ROOT)
        until(lambda: self.path.is_mount() or self._process.poll() is not None, "no mount")
        assert self._process.poll() is None, "see its output"

    @property
    def waiting(self) -> int:
        """How many calls it has not answered."""
        return sum(each.name != "hang" for each in self._signs.iterdir())

    @property
    def hangs(self) -> bool:
        """Whether nobody has had to make it answer."""
        return (self._signs / "hang").exists()

    def hang(self) -> None:
        (self._signs / "hang").touch()

    def answer(self) -> None:
        (self._signs / "hang").unlink(missing_ok=True)

    def kill(self) -> None:
        """Have every call fail from now on."""
        self._process.kill()

    def end(self) -> None:
        self.kill()
        subprocess.run(["umount", "-l", self.path], check=True)
        self._process.wait(WAIT_S)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mount]:
    probe = ["mount", "-t", "tmpfs", "none", str(tmp_path)]
    allowed = os.geteuid() == 0 and Path("/dev/fuse").exists()
    if not allowed or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        mount = Mount(tmp_path)
        # Whatever waits for the disk by mistake goes on some time, and the test fails.
        rescue = threading.Timer(WAIT_S, mount.answer)
        rescue.start()
        yield mount
        rescue.cancel()
        mount.end()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


class Bench:
    """A worker's tiers, of which the only one is on that disk. Its clock is the test's."""

    def __init__(self, disk: Mount) -> None:
        geometry = Geometry((GroupGeometry((ByteRun(0, SIZE, SIZE),), 4),))
        self.host = HostArena(8, geometry.slot_bytes, "full")
        options = DiskOptions(path=str(disk.path / "kv"), capacity=16 << 20, min_free=0)
        self.now = 0.0
        self.store = DiskStore(options, b"f", steady=lambda: self.now)
        stores = {Tier.DISK: self.store}
        self.tiers = TierWorker(stores, self.host, geometry, True, LATE_S, lambda: self.now)
        for slot in range(8):
            self.host.view(slot, SIZE)[:] = content(slot)
            self.host.seal(slot, SIZE)

    def submit(
        self,
        number: int,
        task: Any,  # the class of an instruction
        slot: int,
    ) -> None:
        """Begin to look up, read or write block ``number``."""
        keys, slots = (key(number),), array("q", [slot])
        job = JobId(number)
        self.tiers.submit(
            [LookupBlocks(job, keys) if task is LookupBlocks else task(job, keys, slots, 30.0)]
        )

    def found(self) -> bytes:
        """Wait for an answer."""
        answers: list[TierAnswer] = []
        until(lambda: answers.extend(self.tiers.poll()) or answers, "no answer")
        (answer,) = answers
        return answer.found

    def available(self) -> object:
        stats = self.tiers.take_stats()
        assert stats is not None
        return stats.data["gauges"]["tier_available"]["disk"]


def key(number: int) -> bytes:
    return block_key(SHARED, 0, bytes([number]) * 32)


def content(slot: int) -> bytes:
    return bytes((slot * 7 + i) % 251 for i in range(SIZE))


def hung(disk: Mount) -> Bench:
    """The disk has blocks 0 to 3; it hangs, and a call that reads and one that writes are late."""
    bench = Bench(disk)
    for number in range(4):
        bench.submit(number, WriteBackBlocks, number)
        assert bench.found() == b"\1"
    bench.submit(0, PrefetchBlocks, 7)
    assert bench.found() == b"\1"
    assert bench.host.view(7, SIZE) == content(0)
    assert bench.available()
    disk.hang()
    bench.submit(1, PrefetchBlocks, 6)
    bench.submit(4, WriteBackBlocks, 4)
    until(lambda: disk.waiting >= 2, "no call hangs")
    assert bench.tiers.poll() == []
    bench.now += LATE_S
    return bench


def test_a_disk_that_hangs_is_left_alone_and_used_again_when_it_answers(disk: Mount) -> None:
    bench = hung(disk)
    for task in (LookupBlocks, PrefetchBlocks, WriteBackBlocks):
        bench.submit(2, task, 2)
        assert bench.found() == b"\0"
    assert not bench.available()
    assert disk.hangs
    disk.answer()
    answers: list[TierAnswer] = []
    until(lambda: answers.extend(bench.tiers.poll()) or len(answers) == 2, "they do not end")
    assert {answer.found for answer in answers} == {b"\1"}
    assert bench.host.view(6, SIZE) == content(1)
    bench.now += LATE_S
    for task in (PrefetchBlocks, LookupBlocks, WriteBackBlocks):
        bench.submit(2, task, 5)
        assert bench.found() == b"\1"
    assert bench.host.view(5, SIZE) == content(2)
    assert bench.available()
    bench.tiers.close()


def test_closing_does_not_wait_for_a_disk_that_hangs(disk: Mount) -> None:
    bench = hung(disk)
    bench.tiers.close()
    assert disk.hangs
    assert bench.store.usage().available  # not closed, as calls still use it
    disk.answer()
    bench.store.close()


def test_a_disk_that_is_gone_for_good_finds_nothing_and_is_closed(disk: Mount) -> None:
    bench = hung(disk)
    disk.kill()
    answers: list[TierAnswer] = []
    until(lambda: answers.extend(bench.tiers.poll()) or len(answers) == 2, "they do not end")
    assert {answer.found for answer in answers} == {b"\0"}
    bench.now += LATE_S
    for task in (PrefetchBlocks, WriteBackBlocks):
        bench.submit(2, task, 5)
        assert bench.found() == b"\0"
    assert not bench.available()
    bench.tiers.close()
