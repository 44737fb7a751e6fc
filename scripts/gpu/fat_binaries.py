"""Leaves code for one GPU architecture in a library that was compiled by nvcc for many.

A fat binary is a container of entries: machine code (cubin) and PTX, each for one architecture. The
driver picks one entry per container, so the bytes of the others may be zero, which compresses to
nothing. Offsets stay as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN = 1, 2
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
ARCHITECTURE_AT, SMALLEST_HEADER, LARGEST_HEADER = 28, 32, 4096


class Entry(NamedTuple):
    """Code of one kind for one architecture; ``start`` and ``size`` of its bytes in the file."""

    kind: int
    architecture: int
    start: int
    size: int


def containers(content: bytes) -> Iterator[list[Entry]]:
    """Yield the entries of each container."""
    at = content.find(MAGIC)
    while at >= 0:
        end = at + 4
        if at + CONTAINER.size <= len(content):
            _, version, header, size = CONTAINER.unpack_from(content, at)
            if version == 1 and header == CONTAINER.size and size <= len(content) - at:
                end = at + header + size
                yield list(_entries(content, at + header, end))
        at = content.find(MAGIC, end)


def _entries(content: bytes, at: int, end: int) -> Iterator[Entry]:
    while at + SMALLEST_HEADER <= end:
        kind, _, header, size = ENTRY.unpack_from(content, at)
        fits = SMALLEST_HEADER <= header <= LARGEST_HEADER and at + header + size <= end
        if kind not in (PTX, CUBIN) or not fits:
            return
        (architecture,) = struct.unpack_from("<I", content, at + ARCHITECTURE_AT)
        yield Entry(kind, architecture, at + header, size)
        at += header + size


def kept(entries: list[Entry], architecture: int) -> list[Entry]:
    """Return what a GPU of this architecture runs: machine code of the same major version that is
    not newer, else the newest PTX that is not newer. All that ties is kept."""
    cubins = [
        entry
        for entry in entries
        if entry.kind == CUBIN
        and entry.architecture // 10 == architecture // 10
        and entry.architecture <= architecture
    ]
    ptx = [entry for entry in entries if entry.kind == PTX and entry.architecture <= architecture]
    usable = cubins or ptx
    newest = max((entry.architecture for entry in usable), default=0)
    return [entry for entry in usable if entry.architecture == newest]


def strip(content: bytes, architecture: int) -> bytes:
    """Return the library with the code for other architectures zeroed."""
    stripped = bytearray(content)
    for entries in containers(content):
        wanted = kept(entries, architecture)
        for entry in entries:
            if entry not in wanted:
                stripped[entry.start : entry.start + entry.size] = bytes(entry.size)
    return bytes(stripped)
