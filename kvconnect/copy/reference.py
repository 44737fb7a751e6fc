"""The reference copy: plain torch on any device, one byte run at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier, check_request, check_sizes
from kvconnect.errors import TransferFailed

_Pair = tuple[torch.Tensor, torch.Tensor]


class ReferenceCopier(Copier):
    """Copies run by run through views, because ``tensor[ids]`` would first build another copy.

    ``area`` is uint8 ``[bytes]`` on CPU or CUDA, ``arena`` uint8 ``[num_slots * slot_bytes]`` on
    the CPU. With a CUDA area and a page-locked arena, copies queue on the current stream, and the
    call waits once at the end.
    """

    def __init__(self, area: torch.Tensor, arena: torch.Tensor, geometry: Geometry) -> None:
        self._num_slots = check_sizes(geometry, area.nbytes, arena.nbytes)
        self._area = area
        self._arena = arena
        self._geometry = geometry

    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._copy((page, run) for run, page in self._pairs(group, block_ids, slots))

    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(self._pairs(group, block_ids, slots))

    def _pairs(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> Iterator[_Pair]:
        """Yield (run in the area, run in the slot) for all runs of a request."""
        found = check_request(self._geometry, self._num_slots, group, block_ids, slots)
        for block, slot in zip(block_ids, slots, strict=True):
            at = slot * self._geometry.slot_bytes
            for s in found.segments:
                run = self._area.narrow(0, s.offset + block * s.stride, s.length)
                yield run, self._arena.narrow(0, at, s.length)
                at += s.length

    def _copy(self, pairs: Iterator[_Pair]) -> None:
        on_cuda = self._area.is_cuda
        queue = on_cuda and self._arena.is_pinned()
        try:
            for target, source in pairs:
                target.copy_(source, non_blocking=queue)
            if on_cuda:
                torch.cuda.current_stream(self._area.device).synchronize()
        except RuntimeError as error:
            raise TransferFailed(f"copy between {self._area.device} and host failed") from error
