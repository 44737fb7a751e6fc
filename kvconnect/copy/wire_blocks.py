"""Wire blocks of a hand-off between a KV cache on a device and page-locked memory, by kernel.

This is where another head split, block size or order of heads and tokens is packed and unpacked:
runs are then as short as one row, far too many for a copy each.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from kvconnect.copy.driver import Driver
from kvconnect.copy.kernels import lanes_for, unit_table

GRID, THREADS = 16, 512


@dataclass(frozen=True)
class _Table:
    rows: torch.Tensor
    count: int
    lanes: int


class BlockCopier:
    """Starts copies on the calling thread's current stream; any thread.

    ``area`` is the whole cache. Ids are those of wire blocks, and the caller has checked them.
    Everything raises :class:`TransferFailed` if the device refuses.
    """

    def __init__(self, area: torch.Tensor, driver: Driver) -> None:
        self._owner = area  # keeps the address below valid
        self._area = area.data_ptr()
        self._driver = driver
        # By content: peers come and go, what they agree on hardly ever differs.
        self._tables: dict[tuple[bytes, int], _Table] = {}

    def pack(self, segments: array[int], phases: int, ids: array[int], staged: int) -> None:
        """Copy wire blocks to address ``staged``, back to back.

        ``segments`` holds ``phases`` times n triples, as a unit of a transport has them.
        """
        self._move("pack_blocks", (segments, phases), ids, staged)

    def unpack(self, segments: array[int], phases: int, ids: array[int], staged: int) -> None:
        """Copy wire blocks that lie back to back at ``staged`` to where they belong."""
        self._move("unpack_blocks", (segments, phases), ids, staged)

    def _move(
        self, kernel: str, unit: tuple[array[int], int], ids: array[int], staged: int
    ) -> None:
        if not ids:
            return
        segments, phases = unit
        table = self._tables.get((segments.tobytes(), phases)) or self._made(segments, phases)
        block_bytes = sum(segments[2 : len(segments) // phases : 3])
        numbers = self._driver.upload(ids)
        arguments = (
            *(self._area, staged, table.rows.data_ptr(), table.count, phases),
            *(numbers.data_ptr(), len(ids), block_bytes, table.lanes),
        )
        self._driver.launch(kernel, GRID, THREADS, arguments)

    def _made(self, segments: array[int], phases: int) -> _Table:
        rows, count = unit_table(segments, phases)
        table = _Table(self._driver.upload(rows), count, lanes_for(rows))
        self._driver.synchronize()  # other streams read it too
        self._tables[segments.tobytes(), phases] = table
        return table
