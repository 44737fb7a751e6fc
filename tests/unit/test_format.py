"""Blocks that one engine wrote and another one reads, on plain tensors in both engines' layouts."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import Literal

import pytest
import torch

from kvconnect import _native
from kvconnect.errors import Misuse
from kvconnect.format import (
    CANONICAL_ORDER,
    CHAIN_TOKENS,
    PLANES,
    PageFormat,
    chain,
    common_parts,
    obstacle,
    page_keys,
    parts,
    root,
)
from kvconnect.pages import LayerPages, Order, layer_pages, unit_segments

LAYERS, HEADS, WIDTH, TOKENS = 2, 4, 32, 128
ITEM = 4
"""Bytes of a float32."""


# --- keys -------------------------------------------------------------------------------------


def test_a_chain_is_the_same_however_it_is_cut() -> None:
    tokens = random.Random(1).sample(range(1 << 17), 100)
    start = root("m", "float32")
    keys = chain(tokens, start)
    assert len(keys) == 6 and len(set(keys)) == 6
    assert chain(tokens[:48], start) + chain(tokens[48:], keys[2]) == keys
    assert chain(tokens[:15], start) == []


def test_keys_follow_from_the_documented_recipe() -> None:
    """Other programs may compute them: the recipe must not change without its version."""
    start = blake2b(
        b'[16, "m", "float32", "", ""]', digest_size=32, person=b"kvconnect.root.1"
    ).digest()
    assert root("m", "float32") == start
    words = b"".join(n.to_bytes(4, "little") for n in range(16))
    link = blake2b(start + words, digest_size=32, person=b"kvconnect.link.1").digest()
    assert chain(range(16), start) == [link]


def test_blocks_and_pages_of_all_sizes_find_one_another() -> None:
    keys = chain(range(TOKENS), root("m", "float32"))
    assert page_keys(keys, 16) == keys
    blocks, pages = page_keys(keys, 32), page_keys(keys, 64)
    assert (len(blocks), len(pages)) == (4, 2)
    # The first 64 tokens are two blocks and one page; both end with the same key.
    assert blocks[1::2] == pages
    assert set(blocks[::2]).isdisjoint(pages)
    for page_tokens in (0, 1, 24):
        with pytest.raises(Misuse, match=f"pages of {page_tokens} tokens"):
            page_keys(keys, page_tokens)


def test_whatever_changes_the_values_changes_every_key() -> None:
    tokens = list(range(64))
    roots = [
        root("m", "float32"),
        root("n", "float32"),
        root("m", "bfloat16"),
        root("m", "float32", adapter="a"),
        root("m", "float32", salt="a"),
        root("m", "float32", adapter='a", "'),
    ]
    chains = [chain(tokens, start) for start in roots]
    other = chain([1, *tokens[1:]], roots[0])
    assert len({key for keys in (*chains, other) for key in keys}) == 7 * 4
    # A later token leaves the keys before it alone.
    late = chain([*tokens[:-1], 99], roots[0])
    assert late[:3] == chains[0][:3] and late[3] != chains[0][3]


def test_what_is_no_key_or_no_token_is_a_bug_of_the_caller() -> None:
    start = root("m", "float32")
    for tokens in ([-1] * 16, [1 << 32] * 16):
        with pytest.raises(Misuse, match="token ids from 0"):
            chain(tokens, start)
    with pytest.raises(Misuse, match="parent key"):
        chain(range(16), b"")
    assert chain([(1 << 32) - 1] * 16, start)


# --- formats ----------------------------------------------------------------------------------

GQA = PageFormat("m", "bfloat16", (128, 128), (0, 32), (0, 8), 16)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"tokens": 64}, ""),
        ({"tokens": 1}, ""),
        ({"heads": (4, 8)}, ""),
        ({"heads": (4, 16), "tokens": 32}, ""),
        ({"model": "n"}, "model is 'm' here and 'n' there"),
        ({"dtype": "fp8_e4m3"}, "dtype is 'bfloat16' here and 'fp8_e4m3' there"),
        ({"parts": (256,)}, "parts are (128, 128) here and (256,) there"),
        ({"parts": (2,) * 64 + (128,), "packing": PLANES}, ""),
        ({"parts": (2,) * 128, "packing": PLANES}, ""),
        ({"parts": (192, 64), "packing": PLANES}, "parts are"),
        ({"parts": (128, 128, 2), "packing": PLANES}, "parts are"),
        ({"layers": (16, 32)}, "layers is"),
        ({"tokens": 24}, "pages of 16 tokens here and 24 there"),
        ({"heads": (8, 16)}, "heads (0, 8) here and (8, 16) there have none in common"),
        ({"packing": "CPU_ATTN:amx"}, "packing is 'rows' here and 'CPU_ATTN:amx' there"),
    ],
)
def test_an_obstacle_is_named(changes: dict[str, object], why: str) -> None:
    theirs = replace(GQA, **changes)  # type: ignore[arg-type]
    found = obstacle(GQA, theirs)
    assert found.startswith(why) and bool(found) == bool(why)
    assert bool(obstacle(theirs, GQA)) == bool(why), "it is mutual"
    if not why:
        assert common_parts(GQA, theirs) == common_parts(theirs, GQA) == theirs.parts


def test_a_page_packed_as_a_whole_is_of_use_to_its_kernel_only() -> None:
    packed = replace(GQA, packing="CPU_ATTN:amx")
    assert obstacle(packed, packed) == ""
    assert "packs pages as a whole" in obstacle(packed, replace(packed, tokens=32))
    assert "packs pages as a whole" in obstacle(packed, replace(packed, heads=(0, 4)))


# --- bytes ------------------------------------------------------------------------------------


class Side:
    """A worker's cache with its pages; ``table`` says which hold the sequence, in order."""

    def __init__(self, page_tokens: int, heads: tuple[int, int], seed: int) -> None:
        self.page_tokens, self.heads = page_tokens, heads
        self.count = TOKENS // page_tokens + 3
        self.table = random.Random(seed).sample(range(1, self.count), TOKENS // page_tokens)
        self.area = torch.empty(0)
        self.pages: list[LayerPages] = []
        self.views: list[torch.Tensor] = []
        """Of every part of every layer: [pages, heads, tokens, width]."""

    def hold(self, views: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Register views [B, H, N, C], each a layer; a row has parts of these sizes."""
        for view in views:
            offset = view.data_ptr() - self.area.data_ptr()
            place = (view.shape, view.stride(), ITEM)
            page = layer_pages("layer", offset, place, self.count, self.page_tokens)
            self.pages += parts(page, rows)
            self.views += view.split([size // ITEM for size in rows], dim=-1)

    def put(self, model: torch.Tensor) -> None:
        for i, view in enumerate(self.views):
            for n, page in enumerate(self.table):
                tokens = slice(n * self.page_tokens, (n + 1) * self.page_tokens)
                view[page] = model[i, slice(*self.heads), tokens, : view.shape[-1]]

    def holds(self, model: torch.Tensor) -> bool:
        return all(
            torch.equal(
                view[page],
                model[i, slice(*self.heads), n * self.page_tokens :, : view.shape[-1]][
                    :, : self.page_tokens
                ],
            )
            for i, view in enumerate(self.views)
            for n, page in enumerate(self.table)
        )

    def untouched(self) -> bool:
        """Whether pages that hold nothing of the sequence are as they were made."""
        spare = [page for page in range(self.count) if page not in self.table]
        return all(bool((view[spare] == -1).all()) for view in self.views)

    def move(
        self,
        loop: Literal["gather", "scatter"],
        arena: torch.Tensor,
        heads: tuple[int, int],
        tokens: int,
        order: Order = CANONICAL_ORDER,
    ) -> None:
        """Move the sequence between the cache and wire blocks that lie in ``arena`` in order."""
        local = (heads[0] - self.heads[0], heads[1] - self.heads[0])
        segments, phases, size = unit_segments(self.pages, local, tokens, order)
        assert size * (TOKENS // tokens) == arena.nbytes
        per_phase = len(segments) // phases
        for phase in range(phases):
            getattr(_native, loop)(
                (self.area.data_ptr(), self.area.nbytes),
                (arena.data_ptr(), arena.nbytes),
                size,
                segments[phase * per_phase : (phase + 1) * per_phase],
                array("q", self.table),
                array("q", range(phase, TOKENS // tokens, phases)),
            )


def vllm(axes: str, page_tokens: int, heads: tuple[int, int] = (0, HEADS)) -> Side:
    """vLLM's cache: one allocation [L, B, H, N, C] with K and V of a token in one row; ``axes``
    are its layout's first four, outermost first."""
    side = Side(page_tokens, heads, seed=3)
    sizes = {"L": LAYERS, "B": side.count, "H": heads[1] - heads[0], "N": page_tokens}
    side.area = torch.full((*(sizes[axis] for axis in axes), 2 * WIDTH), -1.0)
    side.hold(list(side.area.permute(*(axes.index(a) for a in "LBHN"), 4)), [WIDTH * ITEM] * 2)
    return side


def sglang(page_tokens: int, heads: tuple[int, int] = (0, HEADS), hnd: bool = False) -> Side:
    """SGLang's cache: per layer, K and V are halves of one allocation [2, slots, H, C], slots
    of a page side by side; or [2, pages, H, N, C] in its HND layout."""
    side = Side(page_tokens, heads, seed=4)
    count = heads[1] - heads[0]
    inner = (count, page_tokens) if hnd else (page_tokens, count)
    side.area = torch.full((LAYERS, 2, side.count, *inner, WIDTH), -1.0)
    pages = side.area.view(LAYERS * 2, side.count, *inner, WIDTH)
    side.hold(list(pages if hnd else pages.transpose(2, 3)), [WIDTH * ITEM])
    return side


def sequence(heads: int = HEADS, width: int = WIDTH) -> torch.Tensor:
    """What the model computed: [layer and part, head, token, value]."""
    shape = (LAYERS * 2, heads, TOKENS, width)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def arena_for(heads: int, row: int = 2 * WIDTH) -> torch.Tensor:
    return torch.zeros(LAYERS * heads * TOKENS * row)


def vllm_cpu(page_tokens: int) -> Side:
    """vLLM's CPU cache: a page has, head by head, K as [C, N] and then V as [N, C]."""
    side = Side(page_tokens, (0, HEADS), seed=3)
    side.area = torch.full((LAYERS, side.count, HEADS, page_tokens, 2 * WIDTH), -1.0)
    for layer in side.area:
        place = (layer.shape, layer.stride(), ITEM)
        offset = layer.data_ptr() - side.area.data_ptr()
        page = layer_pages("layer", offset, place, side.count, page_tokens)
        side.pages += parts(page, PLANE_PARTS, PLANES)
        k, v = layer.reshape(side.count, HEADS, -1).split(page_tokens * WIDTH, dim=-1)
        side.views.append(k.unflatten(-1, (WIDTH, page_tokens)).transpose(2, 3))
        side.views.append(v.unflatten(-1, (page_tokens, WIDTH)))
    return side


def cut_for_planes(side: Side) -> None:
    """Cut K and V of an SGLang cache where the planes of vLLM's CPU cache end."""
    cuts = (PLANE_PARTS[:-1], PLANE_PARTS[-1:])
    side.pages = [p for i, page in enumerate(side.pages) for p in parts(page, cuts[i % 2])]


PLANE_PARTS = (ITEM,) * WIDTH + (WIDTH * ITEM,)

VLLM_LAYOUTS = ("LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN")


@pytest.mark.parametrize("axes", VLLM_LAYOUTS)
@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("hnd", [False, True])
def test_a_block_of_vllm_is_the_right_page_of_sglang_and_back(
    axes: str, block_tokens: int, page_tokens: int, hnd: bool
) -> None:
    model = sequence()
    tokens = min(block_tokens, page_tokens)
    theirs, ours = vllm(axes, block_tokens), sglang(page_tokens, hnd=hnd)
    theirs.put(model)
    arena = arena_for(HEADS)
    theirs.move("gather", arena, (0, HEADS), tokens)
    ours.move("scatter", arena, (0, HEADS), tokens)
    assert ours.holds(model) and ours.untouched()

    again, back = arena_for(HEADS), vllm(axes, block_tokens)
    ours.move("gather", again, (0, HEADS), tokens)
    back.move("scatter", again, (0, HEADS), tokens)
    assert back.holds(model) and back.untouched() and torch.equal(back.area, theirs.area)

    # Controls: heads and tokens in the other order, K and V swapped.
    ours.move("scatter", arena, (0, HEADS), tokens, order="NHC")
    assert not ours.holds(model)
    ours.move("scatter", arena, (0, HEADS), tokens)
    assert ours.holds(model)
    ours.pages = [page for k, v in list(pairwise(ours.pages))[::2] for page in (v, k)]
    ours.move("scatter", arena, (0, HEADS), tokens)
    assert not ours.holds(model)


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("heads", [(0, HEADS), (1, 3)])
def test_planes_of_vllms_cpu_kernels_become_rows_and_back(
    page_tokens: int, heads: tuple[int, int]
) -> None:
    model, tokens = sequence(), min(32, page_tokens)
    theirs, ours = vllm_cpu(32), sglang(page_tokens, heads)
    whole = ours.pages
    cut_for_planes(ours)
    theirs.put(model)
    arena = arena_for(heads[1] - heads[0])
    theirs.move("gather", arena, heads, tokens)
    ours.move("scatter", arena, heads, tokens)
    assert ours.holds(model) and ours.untouched()

    back = vllm_cpu(32)
    back.put(model * 0)
    ours.move("gather", arena.zero_(), heads, tokens)
    back.move("scatter", arena, heads, tokens)
    assert back.untouched()
    assert back.holds(model) == (heads == (0, HEADS))
    back.put(model)
    theirs.move("scatter", arena, heads, tokens)
    assert theirs.holds(model)
    # Control: without the cut, K's values land in the wrong tokens.
    ours.pages = whole
    ours.move("scatter", arena, heads, tokens)
    assert not ours.holds(model)


def test_canonical_bytes_are_the_same_whoever_wrote_them() -> None:
    """So a digest, or a copy in a shared store, is the same, too."""
    model = sequence()
    found = []
    for side in (vllm("LBHN", 32), vllm("BLNH", 16), sglang(64), sglang(16, hnd=True)):
        side.put(model)
        arena = arena_for(HEADS)
        side.move("gather", arena, (0, HEADS), CHAIN_TOKENS)
        found.append(arena)
    assert all(torch.equal(arena, found[0]) for arena in found)
    # The first wire block: layer 0's K of head 0, tokens in order.
    first = found[0].view(TOKENS // CHAIN_TOKENS, LAYERS * 2, HEADS, CHAIN_TOKENS, WIDTH)
    assert torch.equal(first[0], model[:, :, :CHAIN_TOKENS])
    assert not torch.equal(first[1], model[:, :, :CHAIN_TOKENS])


def test_ranks_with_fewer_heads_take_theirs() -> None:
    model = sequence()
    whole = vllm("LBNH", 32)
    whole.put(model)
    for heads in ((0, 2), (2, 4)):
        rank, arena = sglang(16, heads), arena_for(2)
        whole.move("gather", arena, heads, 16)
        rank.move("scatter", arena, heads, 16)
        assert rank.holds(model)
        # Control: the other rank's heads.
        whole.move("gather", arena, (2 - heads[0], 4 - heads[0]), 16)
        rank.move("scatter", arena, heads, 16)
        assert not rank.holds(model)


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_mla_keeps_one_row_for_all_heads(block_tokens: int, page_tokens: int) -> None:
    model = sequence(heads=1, width=WIDTH)[::2]
    theirs, ours = Side(block_tokens, (0, 1), seed=3), Side(page_tokens, (0, 1), seed=4)
    for side in (theirs, ours):
        side.area = torch.full((LAYERS, side.count, 1, side.page_tokens, WIDTH), -1.0)
        side.hold(list(side.area), [WIDTH * ITEM])
    theirs.put(model)
    arena, tokens = arena_for(1, WIDTH), min(block_tokens, page_tokens)
    theirs.move("gather", arena, (0, 1), tokens)
    ours.move("scatter", arena, (0, 1), tokens)
    assert ours.holds(model) and ours.untouched()
    # Control: another page in one place of the table.
    ours.table[0], ours.table[1] = ours.table[1], ours.table[0]
    assert not ours.holds(model)


def test_parts_make_up_a_row() -> None:
    page = LayerPages("a", 100, 1024, 512, 32, 2, 16, 32)
    k, v = parts(page, (24, 8))
    assert (k.offset, k.row_bytes, v.offset, v.row_bytes) == (100, 24, 124, 8)
    assert replace(v, offset=100, row_bytes=32) == page
    for sizes in ((16, 8), (32, 0), (), (40, -8)):
        with pytest.raises(Misuse, match="rows of 32 bytes"):
            parts(page, sizes)
