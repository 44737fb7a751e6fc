"""Guarded buffers, block payloads and a KV cache in CPU memory, for conformance checks."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

from kvconnect.tiers.backends.base import BlockOutcome, Store

_PAGE = mmap.PAGESIZE
_GUARD = 0x5A


def require(condition: object, text: str) -> None:
    """Raise :class:`AssertionError` with ``text`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(text)


class GuardedBuffer:
    """A buffer between guard bytes. ``shift``: offset of its start within a page, in bytes."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        self._map = mmap.mmap(-1, _PAGE + shift + nbytes + _PAGE)
        self._map[:] = bytes([_GUARD]) * len(self._map)
        self._start = _PAGE + shift
        self.view = memoryview(self._map)[self._start : self._start + nbytes]

    def content(self) -> bytes:
        """Return the buffer's bytes; raise :class:`AssertionError` if a guard byte was written."""
        end = self._start + self.view.nbytes
        around = self._map[: self._start] + self._map[end:]
        if around.count(_GUARD) != len(around):
            raise AssertionError("bytes beside the buffer were written")
        return bytes(self.view)


def payload_of(key: bytes, nbytes: int, version: int = 0) -> bytes:
    """Return pseudorandom bytes, the same for the same arguments."""
    return random.Random(f"{key.hex()}/{version}").randbytes(nbytes)


def put(store: Store, blocks: dict[bytes, bytes]) -> list[BlockOutcome]:
    """Put blocks from buffers of different alignment; check that the buffers do not change."""
    places = []
    for number, payload in enumerate(blocks.values()):
        place = GuardedBuffer(len(payload), (0, 1, 512)[number % 3])
        place.view[:] = payload
        places.append(place)
    outcomes = store.put(list(blocks), [place.view for place in places])
    for place, payload in zip(places, blocks.values(), strict=True):
        if place.content() != payload:
            raise AssertionError("put changed its source")
    return outcomes


def get(store: Store, sizes: dict[bytes, int], shift: int = 0) -> list[bytes | BlockOutcome]:
    """Get blocks; for each return its bytes, or its outcome if that is not OK."""
    places = [GuardedBuffer(nbytes, shift) for nbytes in sizes.values()]
    outcomes = store.get(list(sizes), [place.view for place in places])
    if len(outcomes) != len(sizes):
        raise AssertionError("one outcome per key is needed")
    contents = [place.content() for place in places]
    return [
        content if outcome is BlockOutcome.OK else outcome
        for content, outcome in zip(contents, outcomes, strict=True)
    ]


def spoil_files(folder: Path, payload: bytes) -> int:
    """Flip a bit in every copy of a payload in a folder's files; return the number of copies."""
    found = 0
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        data = bytearray(path.read_bytes())
        at = data.find(payload)
        while at >= 0:
            found += 1
            data[at + len(payload) // 2] ^= 1
            path.write_bytes(data)
            at = data.find(payload)
    return found
