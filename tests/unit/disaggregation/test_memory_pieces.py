"""Caches in several pieces: one space of offsets, and only the pieces' own bytes."""

from __future__ import annotations

from array import array

import pytest
import torch

from kvconnect.disaggregation.piecewise_memory import (
    PiecewiseMemory,
    spanning_view,
    tensor_region,
    view_over,
)
from kvconnect.errors import Misuse
from kvconnect.transport.base import MemoryRegion, Unit


def tensors(count: int = 3, nbytes: int = 1 << 20) -> list[torch.Tensor]:
    made = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
    return sorted(made, key=lambda tensor: tensor.data_ptr())


def test_a_span_shows_every_byte_of_its_tensors() -> None:
    made = tensors()
    whole = spanning_view(made)
    for number, tensor in enumerate(made):
        tensor.fill_(number + 1)
        at = tensor.data_ptr() - whole.data_ptr()
        assert 0 <= at <= whole.nbytes - tensor.nbytes
        assert bool((whole[at : at + tensor.nbytes] == number + 1).all())
        whole[at] = 77
        assert tensor[0] == 77
    assert whole.data_ptr() == made[0].data_ptr()
    assert whole.data_ptr() + whole.nbytes == made[-1].data_ptr() + made[-1].nbytes


def test_what_is_no_span_is_refused() -> None:
    with pytest.raises(Misuse, match="no view over 0"):
        spanning_view([])
    with pytest.raises(Misuse, match="is not contiguous"):
        tensor_region(torch.zeros(4, 4)[:, :2])
    with pytest.raises(Misuse, match=r"\[-1, 0\]"):
        view_over([MemoryRegion(4096, 1), MemoryRegion(8192, 1, 0)])
    with pytest.raises(Misuse, match="without memory"):
        PiecewiseMemory([])


def test_regions_know_where_their_areas_are_and_no_others() -> None:
    made = tensors()
    areas = [tensor_region(tensor) for tensor in made]
    regions = PiecewiseMemory(areas)
    assert [regions.offset(area) for area in areas] == [
        area.address - areas[0].address for area in areas
    ]
    assert regions.device == torch.device("cpu")
    inside = made[1].data_ptr() + 1
    assert regions.offset(MemoryRegion(inside, 8)) == inside - areas[0].address
    for other in (
        MemoryRegion(areas[0].address - 1, 1),
        MemoryRegion(areas[-1].address, areas[-1].nbytes + 1),
    ):
        with pytest.raises(Misuse, match="not part of this cache"):
            regions.offset(other)
    with pytest.raises(Misuse, match="not part of this cache"):
        regions.offset(areas[0]._replace(device=0))


def test_regions_register_each_byte_once() -> None:
    whole = torch.zeros(4096, dtype=torch.uint8)
    start = whole.data_ptr()
    touching = [
        MemoryRegion(start, 1024),
        MemoryRegion(start + 1024, 1024),
        MemoryRegion(start + 3072, 1024),
    ]
    found = PiecewiseMemory([*touching, touching[0], MemoryRegion(start + 512, 256)]).regions()
    assert found == (MemoryRegion(start, 2048), MemoryRegion(start + 3072, 1024))


def test_pages_of_all_pieces_are_found() -> None:
    made = tensors(2)
    regions = PiecewiseMemory([tensor_region(tensor) for tensor in made])
    for number, tensor in enumerate(made):
        tensor[512 * 3 : 512 * 4] = number + 5
        unit = Unit(array("q", [regions.offset(tensor_region(tensor)), 512, 512]), 1, 512)
        (piece,) = regions.outgoing(unit, array("q", [3]))
        offset, stride, length = piece.unit.segments
        first = piece.address + offset + piece.ids[0] * stride
        assert first == tensor.data_ptr() + 3 * 512
        assert length == 512
        assert regions.region_of(unit).address <= first
