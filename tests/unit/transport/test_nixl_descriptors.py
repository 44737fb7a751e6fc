"""Which bytes go where when two sides keep the same wire blocks differently."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy")

from kvconnect.errors import ProtocolError
from kvconnect.testing.page_memory import PageMemory, phased_unit, plain_unit, split_unit
from kvconnect.transport.base import MemoryRegion, Unit
from kvconnect.transport.nixl.descriptors import LocatedUnit, check_unit, paired, runs_of

PAGES = 16
LAYOUTS = [  # all of 48 bytes per wire block
    plain_unit(48),
    plain_unit(48, 5),
    split_unit(16, 3, PAGES),
    split_unit(24, 2, PAGES, 100),
    phased_unit(24, 2, 2, 8),
    phased_unit(8, 6, 4),
]
layouts = st.sampled_from(LAYOUTS)


@given(layouts, layouts, st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1))
def test_pieces_copy_what_a_copy_in_wire_order_would(
    here: Unit, there: Unit, pairs: list[tuple[int, int]]
) -> None:
    pairs = list({target: (source, target) for source, target in pairs}.values())
    sources, targets = (array("q", ids) for ids in zip(*pairs, strict=True))
    source, found, wanted = PageMemory(2048, seed=1), PageMemory(2048), PageMemory(2048)
    wanted.write(there, targets, source.read(here, sources))
    pieces = paired(
        runs_of(LocatedUnit(here, MemoryRegion(0, 2048)), sources),
        runs_of(LocatedUnit(there, MemoryRegion(0, 2048)), targets),
    )
    for ours, theirs, length in zip(*(array("q", part) for part in pieces), strict=True):
        found.data[theirs : theirs + length] = source.data[ours : ours + length]
    assert found.data == wanted.data
    assert any(wanted.data)


def test_pieces_that_follow_one_another_are_one() -> None:
    whole = LocatedUnit(plain_unit(48), MemoryRegion(1000, 2048))
    ids = array("q", [3, 4, 5, 9])
    ours, theirs, lengths = paired(runs_of(whole, ids), runs_of(whole, array("q", [0, 1, 2, 3])))
    assert (list(ours), list(theirs), list(lengths)) == ([1144, 1432], [1000, 1144], [144, 48])


@pytest.mark.parametrize("ids", [[-1], [43], [1 << 39], [0, 42, 43]])
def test_wire_blocks_outside_the_area_are_refused(ids: list[int]) -> None:
    place = LocatedUnit(plain_unit(48), MemoryRegion(1000, 43 * 48))
    assert len(runs_of(place, array("q", [0, 42])).lengths) == 2
    with pytest.raises(ProtocolError, match="outside 2064 bytes"):
        runs_of(place, array("q", ids))


@pytest.mark.parametrize(
    ("segments", "phases", "nbytes"),
    [
        ([0, 48, 48], 2, 48),  # no segment for the second phase
        ([0, 48, 47], 1, 48),  # too short
        ([0, -48, 48], 1, 48),
        ([-1, 48, 48], 1, 48),
        ([0, 48, 48, 0, 48, 40], 2, 48),  # one phase too short
    ],
)
def test_a_unit_that_makes_no_sense_is_refused(
    segments: list[int], phases: int, nbytes: int
) -> None:
    check_unit(LocatedUnit(plain_unit(48), MemoryRegion(0, 4096)))
    with pytest.raises(ProtocolError):
        check_unit(LocatedUnit(Unit(array("q", segments), phases, nbytes), MemoryRegion(0, 4096)))
