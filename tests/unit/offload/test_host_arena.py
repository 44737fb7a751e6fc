"""The host arena: whose memory it is, when it goes, and whether changed bytes are noticed."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnect.errors import ConfigError, Corrupt, Misuse
from kvconnect.offload import host_arena
from kvconnect.offload.host_arena import DigestMode, HostArena

PAGE = mmap.PAGESIZE


@pytest.fixture
def store() -> Iterator[HostArena]:
    store = HostArena(num_slots=8, slot_bytes=2 * PAGE, digest_mode="full")
    yield store
    store.close()


def mapping_at(address: int) -> str:
    """Return the kernel's description of the mapping that holds an address, '' if there is none."""
    entries = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    for entry in entries:
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            return entry
    return ""


def present_pages(address: int, nbytes: int) -> int:
    """Return how many pages of a range are in memory, as the kernel's page map has it."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = array("Q", pagemap.read(nbytes // PAGE * 8))
    return sum(entry >> 63 for entry in entries)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def test_views_address_the_slots(store: HostArena) -> None:
    assert store.nbytes == 16 * PAGE
    assert len(store.view(3)) == 2 * PAGE
    store.view(3)[:4] = b"kvkv"
    assert bytes(store.view(3, 4)) == b"kvkv"
    assert bytes(store.view(2)) == bytes(2 * PAGE)
    assert bytes(store.view(4)) == bytes(2 * PAGE)
    for slot, nbytes in ((8, 1), (-1, 1), (0, 2 * PAGE + 1), (0, -1)):
        with pytest.raises(Misuse, match="do not exist"):
            store.view(slot, nbytes)


def test_tensor_shares_the_memory(store: HostArena) -> None:
    torch = pytest.importorskip("torch")
    tensor = store.tensor()
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (store.nbytes,))
    assert tensor.data_ptr() == store.address
    tensor[2 * PAGE] = 7
    assert store.view(1)[0] == 7


def test_mapping_is_anonymous_private_and_kept_from_children(store: HostArena) -> None:
    def leaves_nothing_behind(entry: str) -> bool:
        head, flags = entry.splitlines()[0], re.search(r"^VmFlags: (.*)$", entry, re.M)[1].split()
        anonymous = len(head.split()) == 5 or "[anon" in head
        return " rw-p " in head and anonymous and {"dc", "dd"} <= set(flags)

    assert leaves_nothing_behind(mapping_at(store.address))
    # Negative control: shared memory, which the check must tell apart.
    shared = mmap.mmap(-1, PAGE)
    assert not leaves_nothing_behind(mapping_at(address_of(shared)))


def test_tensor_outlives_close(store: HostArena) -> None:
    pytest.importorskip("torch")
    tensor = store.tensor()
    tensor[0] = 5
    store.close()
    assert present_pages(store.address, store.nbytes) == 16
    assert tensor[0] == 5


@pytest.mark.parametrize("native", [True, False])
def test_every_page_is_there_from_the_start(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native:
        pytest.importorskip("kvconnect._native")
    else:
        import kvconnect

        monkeypatch.delattr(kvconnect, "_native", raising=False)
        monkeypatch.setitem(sys.modules, "kvconnect._native", None)
    monkeypatch.setattr(host_arena, "_POPULATE_PIECE_BYTES", 3 * PAGE)  # the last piece is smaller
    store = HostArena(1000, PAGE, "off")
    assert present_pages(store.address, store.nbytes) == 1000
    store.close()


def test_check_for_present_pages_sees_absent_ones() -> None:
    """Negative control of the test above."""
    bare = host_arena._map_private(1000 * PAGE)
    assert present_pages(address_of(bare), len(bare)) == 0


def test_populate_reports_the_kernels_refusal() -> None:
    native = pytest.importorskip("kvconnect._native")
    address = PAGE  # never mapped
    assert mapping_at(address) == ""
    with pytest.raises(OSError):
        native.populate(address, PAGE)
    with pytest.raises(OSError):
        native.populate(address + 1, PAGE)
    with pytest.raises(ValueError):
        native.populate(address, -1)


def test_progress_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(host_arena, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(host_arena, "_POPULATE_PIECE_BYTES", PAGE)
    caplog.set_level("INFO", logger="kvconnect.offload.host_arena")
    HostArena(4, PAGE, "off").close()
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 3  # every second piece, as 4 s are under the interval, and the end
    assert "ready in 24.0 s" in lines[-1]


def test_close_frees_once_the_last_view_is_gone() -> None:
    store = HostArena(num_slots=64, slot_bytes=1 << 20, digest_mode="full")
    view, full = store.view(1), resident_bytes()
    store.close()
    store.close()
    assert repr(store) == "HostArena(64 x 1048576 bytes, closed)"
    view[0] = 1  # still mapped: no crash
    assert resident_bytes() > full - store.nbytes // 2
    del view
    assert resident_bytes() < full - store.nbytes // 2
    for call in (store.tensor, lambda: store.view(0), lambda: store.seal(0, 1)):
        with pytest.raises(Misuse, match="closed"):
            call()


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes"), [(0, PAGE), (-1, PAGE), (1, 0), (1, PAGE + 1)]
)
def test_impossible_sizes_are_refused(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(Misuse):
        HostArena(num_slots, slot_bytes, "off")


def test_digest_mode_is_checked_before_the_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "_map_private", lambda nbytes: pytest.fail("mapped"))
    with pytest.raises(ConfigError, match=r"digest='crc'.*off, sampled, full"):
        HostArena(1, PAGE, "crc")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match="install xxhash"):
        HostArena(1, PAGE, "full")


def test_full_finds_every_flipped_bit(store: HostArena) -> None:
    store.view(2)[:100] = bytes(range(100))
    store.seal(2, 100)
    store.verify(2, 100)
    for position in (0, 50, 99):
        store.view(2)[position] ^= 0x10
        with pytest.raises(Corrupt, match="slot 2"):
            store.verify(2, 100)
        store.view(2)[position] ^= 0x10
    store.verify(2, 100)
    store.view(2)[100] = 1  # not part of the block
    store.verify(2, 100)
    with pytest.raises(Corrupt):  # sealed as a block of another size
        store.verify(2, 99)


def test_full_refuses_a_slot_never_sealed(store: HostArena) -> None:
    with pytest.raises(Misuse, match="never sealed"):
        store.verify(1, 10)


def catches(store: HostArena, slot: int) -> bool:
    store.view(slot)[0] ^= 1
    try:
        store.verify(slot, PAGE)
    except Corrupt:
        return True
    else:
        return False
    finally:
        store.view(slot)[0] ^= 1


@pytest.mark.parametrize(("mode", "caught"), [("off", 0), ("sampled", 2), ("full", 32)])
def test_share_of_slots_covered(mode: DigestMode, caught: int) -> None:
    store = HostArena(32, PAGE, mode)
    seen: list[int] = []
    for _ in range(16):
        for slot in range(32):
            store.seal(slot, PAGE)
        found = [slot for slot in range(32) if catches(store, slot)]
        assert len(found) == caught
        seen += found
    # Sampling comes round to each slot once in 16 uses.
    assert sorted(seen) == sorted(list(range(32)) * (caught // 2))
    store.close()


def test_sampled_forgets_a_digest_when_the_slot_is_used_again() -> None:
    store = HostArena(1, PAGE, "sampled")
    for use in range(40):
        store.view(0)[0] = use
        store.seal(0, PAGE)
        store.verify(0, PAGE)  # never compared with what an earlier use left
    store.close()
