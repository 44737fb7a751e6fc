"""CUDA sources (``*.cu``), the tables they read, and what they must do (``reference``).

A kernel knows nothing of layers or heads: it takes a table of byte runs. Rows are int64
(offset, stride per block, length, place in the block's contiguous copy).
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
    "digest_pages": "digest",
}
"""Kernel -> the family it is in."""

PIECE_BYTES = 8 << 10
"""Longest row of a table: a warp has 4 KiB on its way at a time, and many share a long run."""

ROW = 4
"""Numbers per row of a table."""

DIGEST_OVER = 240
"""``digest_pages`` serves blocks of more bytes than this; XXH3 has other formulas below."""


def folder() -> Path:
    """Return where the sources are: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def page_table(
    triples: Iterable[tuple[int, int, int]], piece_bytes: int = PIECE_BYTES
) -> array[int]:
    """Return the rows of blocks made of (offset, stride, length) ``triples``, in slot order.

    No row is longer than ``piece_bytes``.
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
    """Return (rows, rows per phase) of a unit's ``phases`` times n triples.

    Phases have the same total, but may be cut differently; so the rows are padded with empty ones.
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
    """Return how many threads serve a row: as many 16-byte words as rows usually have, up to 32."""
    lengths = sorted(table[2::ROW])
    words = lengths[len(lengths) // 2] // 16
    return 1 << max(0, min(5, words.bit_length() - 1))
