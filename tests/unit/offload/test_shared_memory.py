"""Host memory that several processes share: who gets it, and that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconnect.errors import Corrupt
from kvconnect.offload.host_arena import HostArena, arena_bytes
from kvconnect.offload.shared_memory import MemoryOffer, SharedMemory

PAGE = mmap.PAGESIZE
SLOTS = 8
NBYTES = arena_bytes(SLOTS, PAGE)

MAKER = """
import sys
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.shared_memory import SharedMemory
memory = SharedMemory.make(int(sys.argv[1]), 2)
store = HostArena(int(sys.argv[2]), int(sys.argv[3]), "full", shared=memory)
store.view(3)[:] = b"x" * len(store.view(3))
store.seal(3, len(store.view(3)))
print(*memory.offer(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory.make(NBYTES, 2)
    yield memory
    memory.close()


@pytest.fixture
def maker() -> Iterator[tuple[subprocess.Popen[str], MemoryOffer]]:
    """A process with an arena, of which slot 3 is stored."""
    command = [sys.executable, "-c", MAKER, str(NBYTES), str(SLOTS), str(PAGE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, MemoryOffer(*map(int, process.stdout.readline().split()))
        process.kill()


def test_another_process_reads_what_was_stored_and_its_digest(
    maker: tuple[subprocess.Popen[str], MemoryOffer],
) -> None:
    memory = SharedMemory.open(maker[1], NBYTES, 1, 2)
    memory.close()
    store = HostArena(SLOTS, PAGE, "full", shared=memory)
    assert bytes(store.view(3)) == b"x" * PAGE
    store.verify(3, PAGE)
    store.view(3)[5] ^= 1
    with pytest.raises(Corrupt):
        store.verify(3, PAGE)


def test_memory_outlives_the_process_that_made_it_and_nothing_else_does(
    maker: tuple[subprocess.Popen[str], MemoryOffer],
) -> None:
    process, offer = maker
    found = SharedMemory.open(offer, NBYTES, 1, 2)
    found.close()
    process.kill()
    process.wait()
    assert bytes(found.mapping[3 * PAGE : 4 * PAGE]) == b"x" * PAGE
    with pytest.raises(OSError, match=r"No such file|no such process|none is offered"):
        SharedMemory.open(offer, NBYTES, 1, 2)
    assert not list(Path("/dev/shm").glob("*kvconnect-host-tier*"))


def test_an_offer_ends_and_the_mapping_stays(memory: SharedMemory) -> None:
    offer = memory.offer()
    memory.mapping[:3] = b"abc"
    assert ways_in() == 2, "mmap has a duplicate"
    memory.close()
    memory.close()
    assert ways_in() == 0
    with pytest.raises(OSError):
        SharedMemory.open(offer, NBYTES, 1, 2)
    assert memory.mapping[:3] == b"abc"


def ways_in() -> int:
    """Return by how many descriptors of this process others could open the memory."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found += "kvconnect-host-tier" in os.readlink(f"/proc/self/fd/{name}")
    return found


def test_nobody_changes_the_size(memory: SharedMemory) -> None:
    """Else any process of this user could end those that read it, by SIGBUS."""
    for nbytes in (0, NBYTES + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory._descriptor, nbytes)


def test_a_python_without_memfd_create_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory.make(NBYTES, 2)
    assert len(memory.mapping) == NBYTES
    memory.close()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(OSError, match="this system has no memfd_create"):
        SharedMemory.make(NBYTES, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": 7}, "it belongs to others"),
        ({"pid": 0, "descriptor": 0, "nbytes": 0, "key": 0}, "none is offered"),
        ({"descriptor": 1}, "none is offered"),  # something else is open there
        ({"descriptor": 10**6}, "No such file"),
    ],
)
def test_what_is_not_offered_is_not_mapped(
    memory: SharedMemory, change: dict[str, int], message: str
) -> None:
    offer = memory.offer()._replace(**change)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=message):
        SharedMemory.open(offer, NBYTES, 1, 2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_another_size_is_not_mapped(memory: SharedMemory) -> None:
    with pytest.raises(OSError, match=f"it has {NBYTES} bytes, not {NBYTES + 1}"):
        SharedMemory.open(memory.offer(), NBYTES + 1, 1, 2)


@pytest.mark.parametrize("places", [1, 2, 3, 8, 100])
def test_the_parts_of_all_processes_are_the_whole(places: int) -> None:
    memory = SharedMemory.make(NBYTES, places)
    parts = [memory.part(SLOTS * PAGE, place) for place in range(places)]
    memory.close()
    assert parts[0][0] == 0
    assert parts[-1][1] == SLOTS * PAGE
    assert [end for _, end in parts[:-1]] == [start for start, _ in parts[1:]]
    assert all(edge % PAGE == 0 for part in parts for edge in part)


def test_a_process_allocates_its_part_only() -> None:
    memory = SharedMemory.make(NBYTES, 4)
    before = os.fstat(memory._descriptor).st_blocks
    HostArena(SLOTS, PAGE, "off", shared=memory)
    after = os.fstat(memory._descriptor).st_blocks
    memory.close()
    assert (after - before) * 512 == SLOTS * PAGE // 4


def test_memory_is_preferred_where_each_device_is(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "kvconnect.offload.shared_memory.prefer_node", lambda *args: asked.append(args)
    )
    memory.prefer([1, 0], SLOTS * PAGE)
    memory.prefer([-1, -1], SLOTS * PAGE)
    (first, half, node), (second, rest, other) = asked
    assert (node, other) == (1, 0)
    assert (half, rest) == (SLOTS * PAGE // 2, SLOTS * PAGE // 2)
    assert second - first == half
