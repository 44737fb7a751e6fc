"""The index of cached prefixes: what was stored is found, and no more."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.policy.fleet_view import (
    Target,
)
from kvconnect.router.policy.prefixes import CacheHit, CacheTier, PrefixIndex, StoredBlocks


def stored(
    tokens: list[int], first: int = 1, parent: int | None = None, **more: Any
) -> StoredBlocks:
    hashes = list(range(first, first + len(tokens) // 4))
    return StoredBlocks(hashes, parent, tokens, 4, more.get("tier", CacheTier.DEVICE))


A, B = Target(0), Target(1, 2)
TOKENS = list(range(16))


def test_the_longest_cached_prefix_of_each_target() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(B, stored(TOKENS[:8], first=70))
    assert index.match(TOKENS) == {A: CacheHit(16, 16.0, 16), B: CacheHit(8, 8.0, 8)}
    assert index.match(TOKENS[:15]) == {A: CacheHit(12, 12.0, 12), B: CacheHit(8, 8.0, 8)}
    assert index.match([9, *TOKENS]) == {}
    index.stored(B, stored([50, 51, 52, 53], first=80, parent=71))
    assert index.match([*TOKENS[:8], 50, 51, 52, 53])[B] == CacheHit(12, 12.0, 12)
    index.stored(B, stored([1, 2, 3, 4], first=90, parent=999))
    assert index.match([1, 2, 3, 4]) == {}, "its beginning is unknown"


def test_removal_ends_a_prefix_and_tiers_weigh() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(A, StoredBlocks([2], None, [], 4, CacheTier.HOST))
    index.removed(A, [2], CacheTier.DEVICE)
    assert index.match(TOKENS) == {A: CacheHit(16, 4 + 4 * 0.9 + 8, 16)}
    index.removed(A, [2, 2, 99], CacheTier.HOST)
    assert index.match(TOKENS) == {A: CacheHit(4, 4.0, 4)}
    index.cleared(A)
    assert (index.match(TOKENS), len(index), index.whole) == ({}, 0, set())


def test_what_is_only_on_a_disk_is_not_read_by_others() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(A, StoredBlocks([3], None, [], 4, CacheTier.DISK))
    assert index.match(TOKENS)[A].readable == 16
    index.removed(A, [3], CacheTier.DEVICE)
    assert index.match(TOKENS)[A] == CacheHit(16, 12 + 4 * 0.6, 8)
    index.stored(A, StoredBlocks([3], None, [], 4, CacheTier.HOST))
    assert index.match(TOKENS)[A].readable == 16


def test_the_index_has_one_limit_for_all_targets() -> None:
    index = PrefixIndex(most=8, most_of_all=8)

    def held(target: Target) -> int:
        return index.held(target, list(range(64))).tokens // 4

    index.stored(A, stored(list(range(64))))
    assert held(A) == 8, "the limit of one target"
    index.stored(B, stored(list(range(64)), first=70))
    assert (held(A), held(B)) == (8, 4), "a full index has a share for a target that had none"
    index.cleared(A)
    index.stored(B, stored(list(range(64)), first=70))
    assert (held(A), held(B)) == (0, 8)
    index.removed(B, range(70, 86), CacheTier.DEVICE)
    index.stored(A, stored(list(range(64))))
    assert (held(A), held(B)) == (8, 0), "what was removed makes room"
    # Control: without a limit for all, both have what one may have.
    index = PrefixIndex(most=8)
    for first, target in ((1, A), (70, B)):
        index.stored(target, stored(list(range(64)), first=first))
        assert held(target) == 8


def test_blocks_of_different_sizes_do_not_meet() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(B, StoredBlocks([1, 2], None, TOKENS, 8, CacheTier.DEVICE))
    assert index.match(TOKENS[:13]) == {A: CacheHit(12, 12.0, 12), B: CacheHit(8, 8.0, 8)}
    index.stored(A, StoredBlocks([5], None, [1, 2, 3], 4, CacheTier.DEVICE))
    assert index.match([1, 2, 3]) == {}, "the tokens do not fill its blocks"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.sampled_from(["store", "move", "remove", "clear"]),
            st.lists(st.integers(0, 3), min_size=0, max_size=12),
            st.sampled_from(list(CacheTier)),
        ),
        max_size=30,
    )
)
def test_an_index_says_what_was_stored_and_no_more(events: list[Any]) -> None:
    index, model, names = PrefixIndex(), Model(), {}  # type: ignore[var-annotated]
    for target, what, drawn, tier in events:
        tokens = drawn[: len(drawn) // 4 * 4]
        chain = [tuple(tokens[: end + 4]) for end in range(0, len(tokens), 4)]
        hashes = [names.setdefault(prefix, len(names)) for prefix in chain]
        getattr(model, what)(target, chain, tier)
        if what == "remove":
            index.removed(target, hashes, tier)
        elif what == "clear":
            index.cleared(target)
        else:
            index.stored(
                target, StoredBlocks(hashes, None, tokens if what == "store" else [], 4, tier)
            )
    for prompt in names:
        for target in (A, B):
            assert index.match(prompt).get(target, CacheHit()).tokens == model.longest(
                target, prompt
            )
    for target in (A, B):
        index.cleared(target)
    assert len(index) == 0


class Model:
    """What an index stands for: the prefixes that each target holds, and in which tiers."""

    def __init__(self) -> None:
        self.held: dict[Target, dict[Any, set[CacheTier]]] = {A: {}, B: {}}

    def store(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        for prefix in chain:
            self.held[target].setdefault(prefix, set()).add(tier)

    def move(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        self.store(target, [prefix for prefix in chain if prefix in self.held[target]], tier)

    def remove(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        for prefix in chain:
            self.held[target].get(prefix, set()).discard(tier)
            if self.held[target].get(prefix) == set():
                del self.held[target][prefix]

    def clear(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        self.held[target].clear()

    def longest(self, target: Target, prompt: tuple[int, ...]) -> int:
        end = 0
        while end < len(prompt) and prompt[: end + 4] in self.held[target]:
            end += 4
        return end
