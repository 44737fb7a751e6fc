"""Byte loops in C. Every function releases the GIL for the whole of its work."""

from array import array

def gather(
    area: tuple[int, int],
    arena: tuple[int, int],
    slot_bytes: int,
    segments: array[int],
    block_ids: array[int],
    slots: array[int],
) -> None:
    """Copy blocks of an area into slots of an arena.

    ``area`` and ``arena`` are (address, bytes). The rest are contiguous int64 buffers:
    ``segments`` is n x (offset, stride, length); ``block_ids[i]`` goes to ``slots[i]``.
    ValueError for malformed arguments, IndexError for a block, slot or segment that reaches
    outside its memory; nothing has been copied then.
    """

def scatter(
    area: tuple[int, int],
    arena: tuple[int, int],
    slot_bytes: int,
    segments: array[int],
    block_ids: array[int],
    slots: array[int],
) -> None:
    """Copy slots of an arena back into blocks of an area. Arguments and errors as ``gather``."""

def populate(address: int, nbytes: int) -> None:
    """Have every page of writable memory backed by real memory; contents stay.

    ``address`` must be page-aligned. OSError if the kernel cannot provide the pages.
    """
