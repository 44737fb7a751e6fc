"""CUDA sources (``*.cu``), their tables, and their reference in Python (``reference``).

A kernel takes a table of byte runs and knows no layers or heads. A row is four int64: offset,
stride per block, length, and place in the block's contiguous copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

SOURCES = ("pages", "blocks", "digest")
"""Kernel families: ``<name>.cu`` in :func:`folder`."""

KERNELS = {
    "gather_pages": "pages",
    "scatter_pages": "pages",
    "pack_blocks": "blocks",
    "unpack_blocks": "blocks",
    "hash_blocks": "digest",
    "gather_staged": "digest",
    "scatter_staged": "digest",
}
"""Kernel -> its family."""

PIECE_BYTES = 8 << 10
"""Longest row of a table. A warp has 4 KiB in flight at a time; many warps share a long run."""

IN_FLIGHT = 8
"""Loads of a thread on their way at a time, as in ``runs.cuh``."""

ROW = 4
"""Numbers per row of a table."""

DIGEST_OVER = 240
"""Digests need blocks of more bytes than this; XXH3 hashes shorter input differently."""

DIGEST_STEP_BYTES, DIGEST_LANES = 1024, 8
"""``hash_blocks`` makes this many sums of 64 bits out of this many bytes of a block."""


def folder() -> Path:
    """Return the folder of the sources: in the installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def page_table(
    triples: Iterable[tuple[int, int, int]], piece_bytes: int = PIECE_BYTES
) -> array[int]:
    """Return the table for (offset, stride, length) ``triples``, which are in slot order.

    Runs are cut into rows of at most ``piece_bytes``.
    """
    table = array("q")
    place = 0
    for offset, stride, length in triples:
        for start in range(0, length, piece_bytes):
            piece = min(piece_bytes, length - start)
            table.extend((offset + start, stride, piece, place))
            place += piece
    return table


def unit_table(
    segments: Sequence[int], phases: int, piece_bytes: int = PIECE_BYTES
) -> tuple[array[int], int]:
    """Return (table, rows per phase) for segments of :func:`~kvconnect.cache.pages.unit_segments`.

    Phases may be cut into different numbers of rows, so shorter ones are padded with empty rows.
    """
    count = len(segments) // (3 * phases)
    triples = list(zip(segments[::3], segments[1::3], segments[2::3], strict=True))
    parts = [page_table(triples[p * count : (p + 1) * count], piece_bytes) for p in range(phases)]
    longest = max(map(len, parts))
    table = array("q")
    for part in parts:
        table += part
        table += array("q", bytes(8 * (longest - len(part))))
    return table, longest // ROW


def lanes_for(table: Sequence[int]) -> int:
    """Return the threads per row: a power of two up to 32. Each has ``IN_FLIGHT`` words of 16 bytes
    of the median row, since with more threads each would have fewer loads on their way."""
    lengths = sorted(table[2::ROW])
    words = lengths[len(lengths) // 2] // 16
    return 1 << max(0, min(5, (words // IN_FLIGHT).bit_length() - 1))
