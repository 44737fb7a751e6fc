"""Copies for KV caches in CPU memory: one C call per request, without the GIL."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from kvconnect import _native
from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier, Runs, check_request, check_sizes
from kvconnect.errors import Misuse

_Memory = tuple[int, int]  # address, bytes
_Request = tuple[_Memory, _Memory, int, "array[int]", "array[int]", "array[int]"]


class NativeCopier(Copier):
    """Copies with the C extension, with the same bytes as the reference. Contiguous CPU areas only.

    A copy cannot fail half-way, so no method raises :class:`TransferFailed`.
    """

    def __init__(self, area: torch.Tensor, arena: torch.Tensor, geometry: Geometry) -> None:
        self._num_slots = check_sizes(geometry, area.nbytes, arena.nbytes)
        for name, tensor in (("area", area), ("arena", arena)):
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise Misuse(f"native copy needs a contiguous {name} in CPU memory")
        self._owners = (area, arena)  # keeps the addresses below valid
        self._area = (area.data_ptr(), area.nbytes)
        self._arena = (arena.data_ptr(), arena.nbytes)
        self._geometry = geometry
        self._segments = [
            array("q", [n for s in g.segments for n in (s.offset, s.stride, s.length)])
            for g in geometry.groups
        ]

    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        _native.gather(*self._request(group, block_ids, slots))

    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        _native.scatter(*self._request(group, block_ids, slots))

    def enqueue_runs(
        self, group: int, block_ids: Sequence[int], slots: Sequence[int], runs: Runs
    ) -> None:
        first, end = runs
        place = sum(s.length for s in self._geometry.groups[group].segments[:first])
        request = self._request(group, block_ids, slots)
        area, arena, slot_bytes, segments, blocks, targets = request
        # Each slot starts ``place`` bytes later; no run goes beyond the end of its slot.
        shifted = (arena[0] + place, arena[1])
        _native.scatter(area, shifted, slot_bytes, segments[3 * first : 3 * end], blocks, targets)

    def _request(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> _Request:
        check_request(self._geometry, self._num_slots, group, block_ids, slots)
        return (
            self._area,
            self._arena,
            self._geometry.slot_bytes,
            self._segments[group],
            array("q", block_ids),
            array("q", slots),
        )
