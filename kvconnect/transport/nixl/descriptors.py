"""Pairs the byte runs of this side's pages with those of the other side. Does no I/O.

Both sides keep the same wire blocks in the same order but divide them into different runs. NIXL
takes two lists of pieces of equal lengths, so both lists are cut wherever a run of either side
ends. Pieces that follow one another on both sides are joined again.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvconnect.errors import ProtocolError
from kvconnect.transport.base import MemoryRegion, Unit

Ints = npt.NDArray[np.int64]


class LocatedUnit(NamedTuple):
    """A unit and the memory region that its offsets count from."""

    unit: Unit
    area: MemoryRegion


class Runs(NamedTuple):
    """Byte runs in wire order: addresses and lengths in bytes, int64 ``[n]``."""

    addresses: Ints
    lengths: Ints


def check_unit(place: LocatedUnit) -> None:
    """Raise :class:`ProtocolError` if a unit that the other side described is invalid."""
    unit = place.unit
    per_phase, rest = divmod(len(unit.segments), 3 * unit.phases)
    if rest or not per_phase:
        raise ProtocolError(f"{len(unit.segments)} segment numbers, {unit.phases} phases")
    table = _table(unit)
    lengths = table[..., 2]
    too_long = lengths.max() > unit.block_bytes  # checked before the sum, which might overflow
    if (
        table.min() < 0
        or lengths.min() < 1
        or too_long
        or (lengths.sum(axis=1) != unit.block_bytes).any()
    ):
        raise ProtocolError(f"segments that do not make {unit.block_bytes} bytes")


def runs_of(place: LocatedUnit, ids: array[int]) -> Runs:
    """Return the byte runs of wire blocks.

    Raises:
        ProtocolError: a wire block lies outside the region.
    """
    table = _table(place.unit)
    pages, phases = np.divmod(np.frombuffer(ids, np.int64), place.unit.phases)
    chosen = table[phases]
    limit = place.area.nbytes
    strides, lengths = chosen[..., 1], chosen[..., 2]
    # Checked before the int64 product below, which might overflow.
    if ids and (pages.min() < 0 or int(pages.max()) * int(strides.max()) > limit):
        raise ProtocolError(f"wire blocks outside {limit} bytes")
    offsets = chosen[..., 0] + pages[:, None] * strides
    ends = offsets + lengths
    if ids and (int(ends.max()) > limit or min(offsets.min(), ends.min()) < 0):
        raise ProtocolError(f"wire blocks outside {limit} bytes")
    return Runs((offsets + place.area.address).ravel(), np.ascontiguousarray(lengths).ravel())


class PairedRuns(NamedTuple):
    """Pieces of both sides' memory in wire order, int64 ``[n]``: addresses and bytes."""

    here: Ints
    there: Ints
    lengths: Ints


def paired(here: Runs, there: Runs) -> PairedRuns:
    """Return the pieces that both sides' runs are cut into.

    Both sides must have the same number of bytes.
    """
    if np.array_equal(here.lengths, there.lengths):
        lengths, ours, theirs = here.lengths, here.addresses, there.addresses
    else:
        ends_here, ends_there = here.lengths.cumsum(), there.lengths.cumsum()
        ends = np.union1d(ends_here, ends_there)
        starts = np.concatenate(([0], ends[:-1]))
        lengths = ends - starts
        ours = _addresses(here, ends_here, starts)
        theirs = _addresses(there, ends_there, starts)
    return _joined(ours, theirs, lengths)


def _table(unit: Unit) -> Ints:
    """Return the segments as ``[phases, runs, 3]``."""
    return np.frombuffer(unit.segments, np.int64).reshape(unit.phases, -1, 3)


def _addresses(runs: Runs, ends: Ints, starts: Ints) -> Ints:
    """Return the addresses of the bytes at positions ``starts`` of the wire order."""
    index = np.searchsorted(ends, starts, side="right")
    return runs.addresses[index] + starts - (ends[index] - runs.lengths[index])


def _joined(ours: Ints, theirs: Ints, lengths: Ints) -> PairedRuns:
    """Join pieces that follow one another on both sides."""
    follows = (ours[:-1] + lengths[:-1] == ours[1:]) & (theirs[:-1] + lengths[:-1] == theirs[1:])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return PairedRuns(ours[first], theirs[first], np.add.reduceat(lengths, first))
