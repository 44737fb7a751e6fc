"""Packs and unpacks wire blocks of a KV cache on a CUDA device, with a kernel."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from kvconnect.copy.cuda import GRID, THREADS
from kvconnect.copy.driver import Driver
from kvconnect.copy.kernels import lanes_for, unit_table
from kvconnect.errors import Incompatible


@dataclass(frozen=True)
class _UnitTable:
    rows: torch.Tensor
    count: int
    lanes: int


class BlockCopier:
    """Packs and unpacks wire blocks of a KV cache, on the calling thread's current stream.

    ``area`` is the whole KV cache. The caller checks the ids of the wire blocks. Any thread may
    call any method. A call returns when its copy is launched, or raises :class:`TransferFailed`.

    The constructor raises :class:`Incompatible` if the driver has no kernels.
    """

    def __init__(self, area: torch.Tensor, driver: Driver) -> None:
        if driver.kernels_unavailable_reason is not None:
            raise Incompatible(driver.kernels_unavailable_reason)
        self._owner = area  # keeps the address below valid
        self._area = area.data_ptr()
        self._driver = driver
        # Keyed by content: peers come and go, but nearly all agree on the same segments.
        self._tables: dict[tuple[bytes, int], _UnitTable] = {}

    def pack(self, segments: array[int], phases: int, ids: array[int], staged: int) -> None:
        """Copy wire blocks to address ``staged``, back to back.

        ``segments`` and ``phases`` are those of :func:`~kvconnect.cache.pages.unit_segments`.
        """
        self._move("pack_blocks", segments, phases, ids, staged)

    def unpack(self, segments: array[int], phases: int, ids: array[int], staged: int) -> None:
        """Copy wire blocks from address ``staged``, back to back, into the KV cache."""
        self._move("unpack_blocks", segments, phases, ids, staged)

    def _move(
        self, kernel: str, segments: array[int], phases: int, ids: array[int], staged: int
    ) -> None:
        if not ids:
            return
        table = self._tables.get((segments.tobytes(), phases)) or self._made(segments, phases)
        block_bytes = sum(segments[2 : len(segments) // phases : 3])
        with self._driver.lend(ids) as numbers:
            arguments = (
                self._area,
                staged,
                table.rows.data_ptr(),
                table.count,
                phases,
                numbers,
                len(ids),
                block_bytes,
                table.lanes,
            )
            self._driver.launch(kernel, GRID, THREADS, arguments)

    def _made(self, segments: array[int], phases: int) -> _UnitTable:
        rows, count = unit_table(segments, phases)
        table = _UnitTable(self._driver.upload(rows), count, lanes_for(rows))
        self._driver.synchronize()  # other streams read the table
        self._tables[segments.tobytes(), phases] = table
        return table
