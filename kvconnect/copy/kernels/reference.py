"""The result of every kernel, in plain Python. Slow: for tests and readers only.

Arguments are those of the kernels; memories are writable byte buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvconnect.copy.kernels import ROW

Memory = memoryview
_Place = tuple[slice, slice]


def gather_pages(
    area: Memory, arena: Memory, table: Sequence[int], pairs: Sequence[int], slot_bytes: int
) -> None:
    """Copy blocks into slots."""
    for page, slot in _page_runs(table, pairs, slot_bytes):
        arena[slot] = area[page]


def scatter_pages(
    area: Memory, arena: Memory, table: Sequence[int], pairs: Sequence[int], slot_bytes: int
) -> None:
    """Copy slots into blocks."""
    for page, slot in _page_runs(table, pairs, slot_bytes):
        area[page] = arena[slot]


def pack_blocks(
    area: Memory, staged: Memory, table: Sequence[int], phases: int, ids: Sequence[int]
) -> None:
    """Copy wire blocks out of pages, back to back."""
    for page, wire in _wire_runs(table, phases, ids):
        staged[wire] = area[page]


def unpack_blocks(
    area: Memory, staged: Memory, table: Sequence[int], phases: int, ids: Sequence[int]
) -> None:
    """Copy wire blocks, which are back to back, into pages."""
    for page, wire in _wire_runs(table, phases, ids):
        area[page] = staged[wire]


def digest_blocks(area: Memory, table: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Return the XXH3-64 of each block, in the byte order of a slot.

    ``hash_blocks`` works out the sums of all steps first, and folds them then.
    """
    import xxhash

    digests = []
    for number in ids:
        state = xxhash.xxh3_64()
        for page, _ in _page_runs(table, (number, 0), 0):
            state.update(area[page])
        digests.append(state.intdigest())
    return digests


def gather_staged(
    area: Memory, staged: Memory, table: Sequence[int], ids: Sequence[int], stride: int
) -> list[int]:
    """Copy blocks to ``staged``, ``stride`` bytes apart; return their digests."""
    for position, number in enumerate(ids):
        for page, place in _page_runs(table, (number, position), stride):
            staged[place] = area[page]
    return digest_blocks(area, table, ids)


def scatter_staged(
    area: Memory, staged: Memory, table: Sequence[int], ids: Sequence[int], stride: int
) -> list[int]:
    """Copy blocks from ``staged``, ``stride`` bytes apart; return their digests."""
    for position, number in enumerate(ids):
        for page, place in _page_runs(table, (number, position), stride):
            area[page] = staged[place]
    return digest_blocks(area, table, ids)


def _rows(table: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    for i in range(0, len(table), ROW):
        offset, stride, length, place = table[i : i + ROW]
        yield offset, stride, length, place


def _page_runs(table: Sequence[int], pairs: Sequence[int], slot_bytes: int) -> Iterator[_Place]:
    for i in range(0, len(pairs), 2):
        for offset, stride, length, place in _rows(table):
            page, slot = offset + pairs[i] * stride, pairs[i + 1] * slot_bytes + place
            yield slice(page, page + length), slice(slot, slot + length)


def _wire_runs(table: Sequence[int], phases: int, ids: Sequence[int]) -> Iterator[_Place]:
    numbers = len(table) // phases
    block_bytes = sum(table[2:numbers:ROW])
    for position, number in enumerate(ids):
        part, phase = divmod(number, phases)
        for offset, stride, length, place in _rows(table[phase * numbers : (phase + 1) * numbers]):
            page, wire = offset + part * stride, position * block_bytes + place
            yield slice(page, page + length), slice(wire, wire + length)
