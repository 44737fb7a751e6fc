"""The longest restorable prefix, against trying every length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.groups import CacheGroup, alignment, longest_prefix
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex

FULL, WINDOW, CHUNK = CacheGroup(2), CacheGroup(2, window=5), CacheGroup(2, chunk=8)
STATES = CacheGroup(2, states="some")
Finder = Callable[[HostIndex, Sequence[CacheGroup], list[list[bytes]], int, int], int]


@dataclass
class Case:
    """A tier that has some of a request's blocks."""

    groups: list[CacheGroup]
    hashes: list[list[bytes]]
    ready: set[tuple[int, int]]
    local_tokens: int
    max_tokens: int

    def find(self, finder: Finder = longest_prefix) -> int:
        index = HostIndex(100, len(self.groups), make_policy("lru", 100))
        for group, block in sorted(self.ready):
            slot = index.reserve(group, self.hashes[group][block])
            assert slot is not None
            index.commit([slot])
        return finder(index, self.groups, self.hashes, self.local_tokens, self.max_tokens)

    def is_restorable(self, total: int) -> bool:
        """Whether each token that position ``total`` sees is local or in a ready block."""
        for number, group in enumerate(self.groups):
            for token in range(self.local_tokens, total):
                seen = (group.window is None or token > total - group.window) and (
                    group.chunk is None or token >= total // group.chunk * group.chunk
                )
                seen = seen and (group.states is None or token == total - 1)
                if seen and (number, token // group.block_tokens) not in self.ready:
                    return False
        return True

    def brute_force(self) -> int:
        unit = alignment(self.groups)
        sizes = zip(self.groups, self.hashes, strict=True)
        known = min(group.block_tokens * len(row) for group, row in sizes)
        lengths = range(self.local_tokens, min(self.max_tokens, known) + 1, unit)
        return max((n for n in lengths if self.is_restorable(n)), default=self.local_tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = st.sampled_from([1, 2, 4])
    far = st.integers(1, 12)
    groups = draw(
        st.lists(
            st.one_of(
                sizes.map(CacheGroup),
                st.builds(lambda size, window: CacheGroup(size, window=window), sizes, far),
                st.builds(lambda size, chunk: CacheGroup(size, chunk=chunk), sizes, far),
                st.builds(lambda size: CacheGroup(size, states="some"), sizes),
            ),
            min_size=1,
            max_size=3,
        )
    )
    known = draw(st.integers(0, 24))
    hashes = [[b"%d" % block for block in range(known // group.block_tokens)] for group in groups]
    every = [(number, block) for number, row in enumerate(hashes) for block in range(len(row))]
    lost = draw(st.sets(st.sampled_from(every), max_size=4)) if every else set()
    unit = alignment(groups)
    local = draw(st.integers(0, known // unit)) * unit
    return Case(groups, hashes, set(every) - lost, local, draw(st.integers(0, 28)))


@settings(max_examples=400)
@given(cases())
def test_longest_prefix_is_the_longest(case: Case) -> None:
    assert case.find() == case.brute_force()


def without_windows(
    index: HostIndex,
    groups: Sequence[CacheGroup],
    hashes: list[list[bytes]],
    local_tokens: int,
    max_tokens: int,
) -> int:
    """A broken search: takes every group for full attention."""
    full = [CacheGroup(group.block_tokens) for group in groups]
    return longest_prefix(index, full, hashes, local_tokens, max_tokens)


def test_the_brute_force_tells_a_broken_search() -> None:
    case = Case([WINDOW], [[b"0", b"1", b"2", b"3"]], {(0, 2), (0, 3)}, 0, 8)
    assert case.find() == case.brute_force() == 8
    assert case.find(without_windows) != case.brute_force()


BLOCKS = [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize(
    ("groups", "lost", "local", "limit", "expected"),
    [
        ([FULL], set(), 0, 12, 12),
        ([FULL], set(), 0, 11, 10),
        ([FULL], {(0, 3)}, 0, 12, 6),
        ([FULL], {(0, 0)}, 0, 12, 0),
        ([FULL], {(0, 0)}, 4, 12, 12),  # the device has what the tier lost
        ([FULL], set(), 8, 4, 8),  # nothing to add
        ([FULL], set(), 0, 99, 12),  # no more than there are full blocks
        ([WINDOW], {(0, 0), (0, 1)}, 0, 12, 12),  # position 12 sees tokens 8 to 11
        ([WINDOW], {(0, 4)}, 0, 12, 8),
        ([CHUNK], {(0, 0)}, 0, 12, 12),  # position 12 sees tokens from 8 on
        ([CHUNK], {(0, 4)}, 0, 12, 8),  # and position 8 none before itself
        ([CHUNK], {(0, 0), (0, 4)}, 0, 7, 0),
        ([FULL, STATES], {(1, 0), (1, 2), (1, 4)}, 0, 12, 12),  # the last state is enough
        ([FULL, STATES], {(1, 5), (1, 4)}, 0, 12, 8),
        ([FULL, STATES], {(0, 3)}, 0, 12, 6),  # a state without the tokens before it
        ([STATES], {(0, 0), (0, 1), (0, 2)}, 0, 11, 10),
        ([FULL, WINDOW], {(1, 0)}, 0, 12, 12),
        ([FULL, WINDOW], {(0, 4), (1, 3)}, 0, 12, 6),
        ([FULL, CacheGroup(1)], {(1, 3)}, 0, 12, 2),  # aligned to both groups' blocks
    ],
)
def test_known_cases(
    groups: list[CacheGroup], lost: set[tuple[int, int]], local: int, limit: int, expected: int
) -> None:
    size = {2: BLOCKS, 1: [b"%d" % n for n in range(12)]}
    hashes = [size[group.block_tokens] for group in groups]
    every = {(g, block) for g, row in enumerate(hashes) for block in range(len(row))}
    case = Case(groups, hashes, every - lost, local, limit)
    assert case.find() == expected
    assert case.brute_force() == expected


def test_first_block_and_alignment() -> None:
    assert [FULL.first_block(n) for n in (0, 100)] == [0, 0]
    assert [WINDOW.first_block(n) for n in (0, 4, 5, 6, 12)] == [0, 0, 0, 1, 4]
    assert [CHUNK.first_block(n) for n in (0, 7, 8, 15, 16)] == [0, 0, 4, 4, 8]
    assert [STATES.first_block(n) for n in (0, 1, 2, 3, 12)] == [0, 0, 0, 1, 5]
    assert [g.is_full for g in (FULL, WINDOW, CHUNK, STATES)] == [True, False, False, False]
    assert alignment([CacheGroup(4), CacheGroup(6)]) == 12
